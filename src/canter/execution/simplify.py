"""The fx graph of a recording, the analysis of its memory, its simplification, and its conversion to Python code."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
IDENTITY = {aten.detach.default, aten.alias.default}  # without autograd the result is the argument
TIMES_ONE = {aten.mul.Tensor, aten.mul.Scalar, aten.pow.Tensor_Scalar}  # the gradient of a square has a power of one


class RecordedGraph:
    """A graph of operations. Its arguments are values from outside the function, then the function's inputs."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.graph = fx.Graph()
        self.inputs = [self.graph.placeholder(f"input_{i}") for i in range(len(inputs))]
        self.outside: dict[fx.Node, Any] = {}  # parameters, buffers, generators and constants by their argument
        addresses = [leaf.untyped_storage().data_ptr() for leaf in inputs]
        self.storages = dict(zip(self.inputs, addresses, strict=True))  # addresses of the arguments' memory

    def add_outside(self, value: Any) -> fx.Node:
        """Add an argument for a value from outside the function."""
        with self.graph.inserting_before(self.inputs[0]) if self.inputs else self.graph.inserting_after():
            node = self.graph.placeholder(f"outside_{len(self.outside)}")
        self.outside[node] = value
        if isinstance(value, Tensor):
            self.storages[node] = value.untyped_storage().data_ptr()
        return node


class Memory:
    """Which memory each node's result lies in, and which memory is written to.

    Memory of arguments is identified by its address, memory allocated in the graph by the node that allocates it.
    """

    def __init__(self, recorded: RecordedGraph) -> None:
        self.base: dict[fx.Node, Any] = {}
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
    if func is operator.getitem:
        return []
    found: list[Any] = []
    for index, part in enumerate(func._schema.arguments):
        if part.alias_info is not None and part.alias_info.is_write:
            value = node.args[index] if index < len(node.args) else node.kwargs.get(part.name)
            found += value if isinstance(value, tuple | list) else [value]
    return [target for target in found if isinstance(target, fx.Node)]


def may_alias(func: Any) -> bool:
    """Whether an operation's result may lie in the memory of its first argument."""
    return any(part.alias_info is not None for part in func._schema.returns)


def is_pure(func: Any) -> bool:
    """Whether an operation writes to no argument and draws no random numbers."""
    return func is operator.getitem or not (func._schema.is_mutable or is_random(func))


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
    """Finds replacements for nodes that change no number.

    Views of outside tensors and constant subexpressions are evaluated once, and become outside values. An operation
    that repeats an earlier one is replaced by it. Memory that is written to is left alone.
    """

    def __init__(self, recorded: RecordedGraph) -> None:
        self.recorded, self.memory = recorded, Memory(recorded)
        self.known: dict[Any, fx.Node] = {}
        self.constants: set[fx.Node] = set()

    def replacement(self, node: fx.Node) -> Any:
        """A simpler node with the same result, or the node itself."""
        func, memory, sources = node.target, self.memory, node.all_input_nodes
        if func in IDENTITY or (func in TIMES_ONE and self._is_times_one(node)):
            return node.args[0]
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

    def _is_times_one(self, node: fx.Node) -> bool:
        source, factor = node.args
        is_one = factor == 1.0 and isinstance(source, fx.Node) and source.meta.get("kind") == node.meta["kind"]
        return is_one and not self.memory.is_written(node, *node.all_input_nodes)

    def _evaluate(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: self.recorded.outside[source].detach())
        func: Any = node.target
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
    for node in reversed(list(graph.nodes)):
        if not node.users and (node in recorded.outside or (node.op == "call_function" and is_pure(node.target))):
            recorded.outside.pop(node, None)
            graph.erase_node(node)
    outside = [recorded.outside[node] for node in graph.nodes if node in recorded.outside]
    return [value.detach() if isinstance(value, Tensor) else value for value in outside]


def to_python(graph: fx.Graph) -> Callable[..., Any]:
    """Convert the graph to a Python function with one line per operation."""
    made, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        copies[node] = made.node_copy(node, copies.__getitem__)
        copies[node].target = node.meta.get("call", node.target)
    return fx.GraphModule(torch.nn.Module(), made).forward
