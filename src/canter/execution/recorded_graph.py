"""A recorded function as a graph: what its memory is, and what a replay of it does not need.

`simplify` removes detach(), constant subexpressions, views of tensors from outside, and repeated and unused operations,
without changing a number.
"""

import operator
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
IDENTITY = {aten.detach.default, aten.alias.default}  # without autograd the result is the argument
RESHAPES = {aten.view.default, aten.reshape.default}
TIMES_ONE = {aten.mul.Tensor, aten.mul.Scalar, aten.pow.Tensor_Scalar}  # the gradient of a square has a power of one
# Their results depend only on the shape of their argument.
SHAPE_ONLY = {
    aten.ones_like.default,
    aten.zeros_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}
# They write running statistics, though their schemas do not say so.
BATCH_NORMS = {aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.batch_norm.default}


class RecordedGraph:
    """A graph of operations. Its arguments are values from outside the function, then the function's inputs."""

    def __init__(self, inputs: list[Tensor]) -> None:
        self.graph = fx.Graph()
        self.inputs = [self.graph.placeholder(f"input_{i}") for i in range(len(inputs))]
        self.outside: dict[fx.Node, Any] = {}  # parameters, buffers, generators and constants by their argument
        addresses = [leaf.untyped_storage().data_ptr() for leaf in inputs]
        # What stands for the arguments' memory: its address, or where a part of a graph is cut off, a tuple.
        self.storages: dict[fx.Node, Any] = dict(zip(self.inputs, addresses, strict=True))

    def add_outside(self, value: Any) -> fx.Node:
        """Add an argument for a value from outside the function."""
        first = self.inputs[0] if self.inputs else next(iter(self.graph.nodes), None)
        with self.graph.inserting_before(first) if first is not None else self.graph.inserting_after():
            node = self.graph.placeholder(f"outside_{len(self.outside)}")
        self.outside[node] = value
        if isinstance(value, Tensor):
            self.storages[node] = value.untyped_storage().data_ptr()
        return node


class Memory:
    """Which memory each node's result lies in, and which memory is written to."""

    def __init__(self, recorded: RecordedGraph) -> None:
        self.base: dict[fx.Node, Any] = {}  # an argument's address, or the node that allocates the memory
        self.written: set[Any] = set()
        for node in recorded.graph.nodes:
            self.base[node] = recorded.storages.get(node, node)
            if node.op == "call_function":
                if node.target is operator.getitem or (node.args and may_alias(node.target)):
                    self.base[node] = self.base.get(node.args[0], node)  # pyright: ignore[reportArgumentType]
                self.written |= {self.base[target] for target in written_arguments(node)}

    def is_written(self, *nodes: fx.Node) -> bool:
        """Whether any operation of the graph writes to the memory of one of the nodes."""
        return any(self.base[node] in self.written for node in nodes)


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operation writes to."""
    func: Any = node.target
    found: list[Any] = []
    for index, part in enumerate(() if func is operator.getitem else func._schema.arguments):
        if part.alias_info is not None and part.alias_info.is_write:
            value = node.args[index] if index < len(node.args) else node.kwargs.get(part.name)
            found += value if isinstance(value, tuple | list) else [value]
    if func in BATCH_NORMS:
        found += node.args[3:5]
    return [target for target in found if isinstance(target, fx.Node)]


def may_alias(func: Any) -> bool:
    """Whether an operation's result may lie in the memory of its first argument."""
    return any(part.alias_info is not None for part in func._schema.returns)


def is_pure(func: Any) -> bool:
    """Whether an operation writes to no argument and draws no random numbers."""
    is_item = func is operator.getitem
    return is_item or not (func._schema.is_mutable or func in BATCH_NORMS or is_random(func))


def is_random(func: Any) -> bool:
    """Whether an operation draws random numbers."""
    return func is not operator.getitem and torch.Tag.nondeterministic_seeded in func.tags


def is_view(node: fx.Node) -> bool:
    """Whether an operation's result is a view of its first argument."""
    func: Any = node.target
    if func is operator.getitem or not is_pure(func) or node.meta.get("copies"):
        return False
    returns = func._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None and "[]" not in str(returns[0].type)


class Simplifier:
    """Finds nodes that can be replaced without changing a number: by an outside value, or by an equal earlier node."""

    def __init__(self, recorded: RecordedGraph) -> None:
        self.recorded, self.memory = recorded, Memory(recorded)
        self.known: dict[Any, fx.Node] = {}
        self.constants: set[fx.Node] = set()

    def replacement(self, node: fx.Node) -> Any:
        """A simpler node with the same result, or the node itself."""
        func, memory, sources = node.target, self.memory, node.all_input_nodes
        is_times_one = func in TIMES_ONE and node.args[1] == 1.0 and not memory.is_written(node, *sources)
        if func in IDENTITY or (func in RESHAPES and node.meta["keeps_shape"]):
            return node.args[0]
        if is_times_one and sources[0].meta.get("kind") == node.meta["kind"]:
            return node.args[0]
        if func is operator.getitem and sources[0] in self.recorded.outside:  # of views that were made once
            return self._add_outside(self.recorded.outside[sources[0]][node.args[1]], node)
        if func is aten.linear.default:
            return self._without_transposing(node)
        if func is aten.t.default and sources[0].target is aten.t.default:
            return sources[0].args[0]
        if "value" in node.meta and not memory.is_written(node):
            return self._add_outside(node.meta["value"], None)
        if is_view(node) and len(sources) == 1 and isinstance(self.recorded.outside.get(sources[0]), Tensor):
            return self._add_outside(self._evaluate(node), node)
        is_new = "kind" in node.meta and is_pure(func) and not may_alias(func) and not memory.is_written(node)
        if is_new and self.constants.issuperset(sources):
            return self._add_outside(self._evaluate(node), None)
        if is_view(node) or (is_pure(func) and not memory.is_written(node, *sources)):
            return self.known.setdefault((func, str(node.args), str(node.kwargs)), node)
        return node

    def _without_transposing(self, node: fx.Node) -> fx.Node:
        """The product that `linear` calls, if it is of a matrix: its weight is transposed once, not in every call."""
        weight: Any = node.args[1]
        if len(node.args) == 3 and weight in self.recorded.outside and len(node.meta["kind"][1]) == 2:
            with self.recorded.graph.inserting_before(node):
                transposed = self.recorded.graph.call_function(aten.t.default, (weight,))
            self.memory.base[transposed] = self.memory.base[weight]
            made = self._add_outside(self._evaluate(transposed), transposed)
            self.recorded.graph.erase_node(transposed)
            node.target, node.args = aten.addmm.default, (node.args[2], node.args[0], made)
        return node

    def copy_at_once(self, node: fx.Node) -> None:
        """Copy the parts of a stack, as they were before a conversion, to its rows: gradients of twin critics."""
        targets: list[fx.Node] = []
        sources: list[fx.Node] = []
        for target, source in zip(*node.args, strict=True):  # pyright: ignore[reportArgumentType]
            parts, places = [source], [target]
            if target in self.recorded.outside and self._is_stack_for(source, node):
                parts = list(source.args[0])
                places = [self._row(target, i) for i in range(len(parts))]
            dtype = getattr(self.recorded.outside.get(target), "dtype", None)
            sources += [part.args[0] if self._is_cast_for(part, dtype, node, source) else part for part in parts]
            targets += places
        node.args = (targets, sources)

    def _is_stack_for(self, node: fx.Node, *users: fx.Node) -> bool:
        """Whether a node stacks tensors along a first dimension for these users alone."""
        return node.target is aten.stack.default and len(node.args) == 1 and self._is_only_for(node, *users)

    def _is_cast_for(self, node: fx.Node, dtype: Any, *users: fx.Node) -> bool:
        """Whether a node converts a tensor to a type for these users alone."""
        is_cast = node.target is aten._to_copy.default and node.meta["kind"][0] == dtype
        return is_cast and self._is_only_for(node, *users)

    def _is_only_for(self, node: fx.Node, *users: fx.Node) -> bool:
        """Whether these users alone read a result, and its arguments are never written to."""
        return set(node.users) <= {*users} and not self.memory.is_written(node, *node.all_input_nodes)

    def _row(self, target: fx.Node, index: int) -> fx.Node:
        """An argument for one row of an outside tensor."""
        with self.recorded.graph.inserting_before(target):
            row = self.recorded.graph.call_function(aten.select.int, (target, 0, index))
        self.memory.base[row] = self.memory.base[target]
        made = self._add_outside(self._evaluate(row), row)
        self.recorded.graph.erase_node(row)
        return made

    def _evaluate(self, node: fx.Node) -> Any:
        sources = [self.recorded.outside[source] for source in node.all_input_nodes]
        func: Any = node.target
        # A view that is made in inference mode cannot be compiled once its base was written to outside that mode.
        is_inference = torch.is_inference_mode_enabled() and any(value.is_inference() for value in sources)
        with torch.inference_mode(is_inference), torch.no_grad():
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: self.recorded.outside[source].detach())
            return func(*args, **kwargs)  # pyright: ignore[reportGeneralTypeIssues]

    def _add_outside(self, value: Any, view: fx.Node | None) -> fx.Node:
        """Add a constant, or the value of `view`, a view of an outside tensor."""
        made = self.recorded.add_outside(value)
        self.memory.base[made] = made if view is None else self.memory.base[view]
        if view is None or self.constants.issuperset(view.all_input_nodes):
            self.constants.add(made)
        return made


def simplify(recorded: RecordedGraph) -> list[Any]:
    """Simplify the graph in place; returns the values of its outside arguments, in order."""
    graph, simplifier = recorded.graph, Simplifier(recorded)
    for node in list(graph.nodes):
        if node.op == "call_function" and (replacement := simplifier.replacement(node)) is not node:
            node.replace_all_uses_with(replacement)
            graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=aten._foreach_copy_.default):
        simplifier.copy_at_once(node)
    for node in reversed(list(graph.nodes)):
        if not node.users and (node in recorded.outside or (node.op == "call_function" and is_pure(node.target))):
            recorded.outside.pop(node, None)
            graph.erase_node(node)
    outside = [recorded.outside[node] for node in graph.nodes if node in recorded.outside]
    if torch.is_inference_mode_enabled():  # some kernels depend on requires_grad there, and none builds a graph
        return outside
    return [value.detach() if isinstance(value, Tensor) else value for value in outside]
