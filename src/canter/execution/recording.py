"""Recordings: a tensor function on a CPU, replayed without its Python code and without autograd.

With a small network most time is spent on the way to the kernels, not in them. A recording removes that overhead:

1. `Recorder`, a dispatch mode, runs the function once, for real. It sees every operation after autograd, those of a
   backward pass included, and adds each to an fx graph. Tensors from outside the function (parameters, buffers,
   generators) become arguments of the graph, so a replay reads their current values.
2. `simplify` removes what a replay does not need: detach(), constant subexpressions, repeated and unused operations.
3. `to_function` hands the graph to torch's C++ interpreter. A replay runs it there: the same kernels in the same order,
   hence the same numbers. With `compiles`, `cpu_compile` later turns the graph into a few compiled kernels.

Python does not run in a replay. A function that reads tensor values (`guard.py`) is therefore never replayed.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import increment_version

from canter.execution.cuda_graph import describe, rebuild
from canter.execution.trace import Tracer, run_traced
from canter.utils.runtime import interruptible

aten = torch.ops.aten
MAX_OPERATIONS = 3000  # beyond this, making the recording costs more than it saves
MAX_COMPILED_OPERATIONS = 800  # a scan over the steps of a rollout is longer; compilers take minutes for it
COMPILE_AFTER = 20  # replays; a rare signature (all episodes end in one step) is not worth seconds of compilation
PLAIN = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
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


class Recording:
    """One function recorded for one set of input shapes.

    The constructor runs `fn(*args)`; `leaves` are the tensors in `args`, in the order of `describe`. If
    `not_replayable` gives a reason, there is only that run's `result`, and no replay.
    """

    last_look: int
    """Number of the executor's last look at the function."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Any,
        leaves: Sequence[Tensor],
        compiles: bool = False,
        roots: Mapping[str, Any] | None = None,
        counters: Iterable[Any] = (),
    ) -> None:
        recorder, self.grad_mode = Recorder(leaves), torch.is_grad_enabled()
        self.result = run_traced(recorder, fn, args, roots or {}, counters)
        self.trace, self.not_replayable = recorder.trace, recorder.not_replayable
        self.is_user_code = recorder.is_user_code
        if self.not_replayable:
            return
        outputs: list[Tensor] = []
        describe(self.result, outputs)
        recorded = recorder.recorded
        recorded.graph.output(tuple(recorder.node_of(leaf) for leaf in outputs))
        self.template = rebuild(self.result, iter([torch.empty(0)] * len(outputs)))
        self.outside = simplify(recorded)  # values of the graph's arguments before the inputs
        memory, arguments = Memory(recorded), recorded.graph.find_nodes(op="placeholder")
        count, is_written = len(self.outside), memory.is_written
        outside = zip(arguments[:count], self.outside, strict=True)
        self.written = [value for node, value in outside if is_written(node) and not value.is_inference()]
        self.written_inputs = [place for place, node in enumerate(arguments[count:]) if is_written(node)]
        self.run = self.uncompiled = to_function(recorded.graph)
        length = sum(node.op == "call_function" for node in recorded.graph.nodes)
        self.to_compile = recorded if compiles and length <= MAX_COMPILED_OPERATIONS else None
        self.replays = 0
        self.strides: list[Any] | None = None  # of the inputs that the compiled kernels were made for

    def replay(self, leaves: Sequence[Tensor]) -> Any:
        """Return the function's result for these inputs."""
        if self.to_compile is not None:
            self.replays += 1
            if self.replays > COMPILE_AFTER:
                self._compile(self.to_compile, leaves)
        fits = self.strides is None or [leaf.stride() for leaf in leaves] == self.strides
        run = self.run if fits else self.uncompiled
        # No tensor here requires a gradient, but LSTM kernels save values for their backward pass only in grad mode.
        if torch.is_grad_enabled() == self.grad_mode:
            results = run(*self.outside, *leaves)
        else:
            with torch.set_grad_enabled(self.grad_mode):
                results = run(*self.outside, *leaves)
        # So that autograd notices the writes if a graph of the user's holds such a tensor.
        inputs = [leaves[place] for place in self.written_inputs if not leaves[place].is_inference()]
        if self.written or inputs:
            increment_version([*self.written, *inputs])
        return rebuild(self.template, iter(results))

    def _compile(self, recorded: RecordedGraph, leaves: Sequence[Tensor]) -> None:
        self.to_compile = None
        try:
            from canter.execution import cpu_compile  # imports the compiler, which takes seconds

            with interruptible():  # it takes minutes; without it the iteration ends soon
                self.run = cpu_compile.compile_recording(recorded)
            self.strides = [leaf.stride() for leaf in leaves]
        except Exception as error:
            warn_uncompiled(error, stacklevel=7)


def warn_uncompiled(error: Exception, stacklevel: int) -> None:
    """Warn that a recording, or a part of it, is replayed uncompiled."""
    reason = (str(error) or repr(error)).splitlines()[0]
    warnings.warn(f"a recording cannot be compiled ({reason}); it is replayed uncompiled", stacklevel=stacklevel)


class Recorder(Tracer):
    """Tracer that also adds every operation to a graph."""

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        super().__init__(leaves, MAX_OPERATIONS)
        inputs = self.inputs
        self.recorded = RecordedGraph(inputs)
        # Nodes by the id of the value that they stand for; `kept` keeps the values alive, so that no id is used twice.
        self.nodes: dict[int, fx.Node] = dict(zip(map(id, inputs), self.recorded.inputs, strict=True))
        self.kept: list[Any] = list(inputs)

    def node_of(self, value: Any) -> Any:
        """The node of a value; containers are mapped item by item, plain Python values are returned unchanged."""
        if isinstance(value, PLAIN):
            return value
        if isinstance(value, tuple | list):
            return type(value)([self.node_of(part) for part in value])
        return self.nodes.get(id(value)) or self._remember(value, self.recorded.add_outside(value))

    def on_operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add an operation and its results to the graph."""
        options = {name: self.node_of(value) for name, value in kwargs.items()}
        node = self.recorded.graph.call_function(func, self.node_of(args), options)
        if isinstance(result, Tensor):
            node.meta["kind"] = (result.dtype, result.shape)
            if args and isinstance(args[0], Tensor):  # contiguous() and reshape() copy some arguments and not others
                node.meta["copies"] = result.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr()
                node.meta["keeps_shape"] = result.shape == args[0].shape
            if func in SHAPE_ONLY:
                node.meta["value"] = result
            if id(result) not in self.nodes:  # an in-place operation returns a tensor that has a node already
                self._remember(result, node)
        elif isinstance(result, tuple | list):
            for i, part in enumerate(result):
                if isinstance(part, Tensor) and id(part) not in self.nodes:
                    self._remember(part, self.recorded.graph.call_function(operator.getitem, (node, i)))

    def _remember(self, value: Any, node: fx.Node) -> fx.Node:
        self.nodes[id(value)] = node
        self.kept.append(value)
        return node


class RecordedGraph:
    """A graph of operations. Its arguments are values from outside the function, then the function's inputs."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
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


def to_function(graph: fx.Graph) -> Callable[..., Any]:
    """Convert the graph to a function of its arguments, run by torch's interpreter, or by Python without it."""
    try:
        from canter.execution.interpreter import to_interpreter  # private names

        return to_interpreter(graph)
    except (ImportError, AttributeError, RuntimeError, TypeError):
        return fx.GraphModule(torch.nn.Module(), graph).forward
