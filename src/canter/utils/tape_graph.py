"""What becomes of the operations a tape has noted: they are shortened, and made into straight code."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
SAME = {aten.detach.default, aten.alias.default}  # another name for the same numbers, once there is no autograd
TIMES_ONE = {aten.mul.Tensor, aten.mul.Scalar, aten.pow.Tensor_Scalar}  # the last is in the gradient of a square


class Notes:
    """A graph of operations, and what it reads from outside: arguments that are held, then the inputs."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.inputs: list[fx.Node] = []
        self.held: dict[fx.Node, Any] = {}
        """Values by the argument of the graph that stands for them."""
        self.storages: dict[fx.Node, int] = {}
        """Where the tensors of arguments lie."""

    def add_input(self, leaf: Tensor) -> fx.Node:
        """An argument for an input, before there is any operation."""
        node = self.graph.placeholder(f"input_{len(self.inputs)}")
        self.inputs.append(node)
        self.storages[node] = leaf.untyped_storage().data_ptr()
        return node

    def hold(self, value: Any) -> fx.Node:
        """An argument for something from outside the function."""
        first = self.inputs[0] if self.inputs else next(iter(self.graph.nodes), None)
        with self.graph.inserting_before(first) if first is not None else self.graph.inserting_after():
            node = self.graph.placeholder(f"held_{len(self.held)}")
        self.held[node] = value
        if isinstance(value, Tensor):
            self.storages[node] = value.untyped_storage().data_ptr()
        return node


class Memory:
    """Which memory every node's result lies in, and which of it is written to.

    Memory from outside is known by its address, memory that the function makes by the node that makes it.
    """

    def __init__(self, notes: Notes) -> None:
        self.base: dict[fx.Node, Any] = {}
        self.written: set[Any] = set()
        for node in notes.graph.nodes:
            self.base[node] = notes.storages.get(node, node)
            if node.op == "call_function":
                if node.target is operator.getitem or (node.args and shares_memory(node.target)):
                    self.base[node] = self.base.get(node.args[0], node)  # pyright: ignore[reportArgumentType]
                self.written |= {self.base[target] for target in targets(node)}

    def is_written(self, *nodes: fx.Node) -> bool:
        """Whether any of the nodes' memory changes in the course of the function."""
        return any(self.base[node] in self.written for node in nodes)


def targets(node: fx.Node) -> list[fx.Node]:
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


def shares_memory(func: Any) -> bool:
    """Whether a result may lie in the memory of the first argument."""
    return any(part.alias_info is not None for part in func._schema.returns)


def is_pure(func: Any) -> bool:
    """Whether an operation writes to nothing and draws no random numbers."""
    if func is operator.getitem:
        return True
    return not func._schema.is_mutable and not is_random(func)


def is_random(func: Any) -> bool:
    """Whether an operation draws random numbers."""
    return func is not operator.getitem and torch.Tag.nondeterministic_seeded in func.tags


def is_view(node: fx.Node) -> bool:
    """Whether an operation gives one new name to the memory of its first argument."""
    func: Any = node.target
    if func is operator.getitem or not is_pure(func) or node.meta.get("copies"):
        return False
    returns = func._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None and "[]" not in str(returns[0].type)


class Simplifier:
    """Finds what can stand for a node, by rules that change no number.

    Views of tensors that stay where they are are taken once, numbers that depend on nothing are computed once, and so
    is what is computed twice in one run. Nothing is said of memory that is written to.
    """

    def __init__(self, notes: Notes) -> None:
        self.notes, self.memory = notes, Memory(notes)
        self.known: dict[Any, fx.Node] = {}
        self.fixed: set[fx.Node] = set()  # held numbers that depend on nothing

    def shorter(self, node: fx.Node) -> Any:
        """What can stand for the node: itself, if nothing shorter can."""
        func, memory = node.target, self.memory
        sources = node.all_input_nodes
        if func in SAME or self._is_times_one(node):
            return node.args[0]
        if func is aten.t.default and sources[0].target is aten.t.default:
            return sources[0].args[0]
        if "value" in node.meta and not memory.is_written(node):
            return self._hold(node.meta["value"], None)
        if is_view(node) and len(sources) == 1 and isinstance(self.notes.held.get(sources[0]), Tensor):
            return self._hold(self._evaluate(node), node)
        if self.fixed.issuperset(sources) and self._is_number(node):
            return self._hold(self._evaluate(node), None)
        if is_view(node) or (is_pure(func) and not memory.is_written(node, *sources)):
            return self.known.setdefault((func, str(node.args), str(node.kwargs)), node)
        return node

    def _is_times_one(self, node: fx.Node) -> bool:
        source = node.args[0] if node.args else None
        if node.target not in TIMES_ONE or node.args[1] != 1.0 or not isinstance(source, fx.Node):
            return False
        return source.meta.get("kind") == node.meta["kind"] and not self.memory.is_written(node, source)

    def _is_number(self, node: fx.Node) -> bool:
        """Whether an operation on numbers that depend on nothing makes one more of them."""
        is_tensor = "kind" in node.meta and not shares_memory(node.target)
        return is_tensor and is_pure(node.target) and not self.memory.is_written(node)

    def _evaluate(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: self.notes.held[source].detach())
        func: Any = node.target
        return func(*args, **kwargs)  # pyright: ignore[reportGeneralTypeIssues]

    def _hold(self, value: Any, view: fx.Node | None) -> fx.Node:
        """Hold a number that depends on nothing, or a view of something held."""
        made = self.notes.hold(value)
        self.memory.base[made] = made if view is None else self.memory.base[view]
        if view is None or self.fixed.issuperset(view.all_input_nodes):
            self.fixed.add(made)
        return made


def simplify(notes: Notes) -> list[Any]:
    """Shorten the graph; what its arguments before the inputs are to be, in order."""
    graph, simplifier = notes.graph, Simplifier(notes)
    for node in list(graph.nodes):
        if node.op == "call_function":
            replacement = simplifier.shorter(node)
            if replacement is not node:
                node.replace_all_uses_with(replacement)
                graph.erase_node(node)
    for node in reversed(list(graph.nodes)):  # what nobody reads
        is_held = node in notes.held
        if not node.users and (is_held or (node.op == "call_function" and is_pure(node.target))):
            notes.held.pop(node, None)
            graph.erase_node(node)
    held = [notes.held[node] for node in graph.nodes if node in notes.held]
    return [value.detach() if isinstance(value, Tensor) else value for value in held]


def straight(graph: fx.Graph) -> Callable[..., Any]:
    """The graph as Python code, one line per operation."""
    made, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        copies[node] = made.node_copy(node, copies.__getitem__)
        copies[node].target = node.meta.get("call", node.target)
    return fx.GraphModule(torch.nn.Module(), made).forward
