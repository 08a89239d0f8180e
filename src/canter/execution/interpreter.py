"""Runs a recorded graph in torch's C++ interpreter, that of TorchScript, with no Python between its operations."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from canter.execution.recorded_graph import is_random
from canter.execution.torch_private import script, script_runner

MEMORY_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
# Their results have the type of their first argument, so 0 and 1 can stand for False and True, which no Scalar can be.
FILLS = {
    f"aten::{name}"
    for name in ("fill", "fill_", "full_like", "index_fill", "index_fill_", "masked_fill", "masked_fill_")
}
NUMBERS = {("TensorType", "IntType"), ("TensorType", "FloatType")}  # numbers where an operation takes a tensor
# Of the number `other` they make a tensor in every call; that takes longer than a small operation itself.
WITH_TENSORS = {f"aten::{name}" for name in ("add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "div", "div_")}
EXACT = (torch.float32, torch.float64, torch.int64)  # half precision computes with a number that is not rounded


def to_interpreter(graph: fx.Graph) -> Callable[..., Any]:
    """Convert a graph to a function of its arguments."""
    num_results = len(graph.output_node().args[0])  # pyright: ignore[reportArgumentType]
    return script_runner(Translation(graph).made, num_results)


class Translation:
    """A TorchScript graph, `made`, with the operations of an fx graph; it returns one tuple.

    Results of random draws are returned too, after the others: an unused draw would be left out.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.made: Any = script.Graph()
        self.values: dict[fx.Node, Any] = {}  # of one result, or the list of several
        self.newest: Any = None  # operation
        drawn: list[Any] = []
        for node in graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self.made.addInput(node.name)
                if not node.users:
                    self.values[node].setType(script.AnyType.get())
            elif node.target is operator.getitem:
                self.values[node] = self.item(*node.args)
            elif node.op == "call_function":
                self.values[node] = found = self.call(node)
                if is_random(node.target):
                    drawn += found if isinstance(found, list) else [found]
        results: Any = graph.output_node().args[0]
        returned = [*(self.values[node] for node in results), *drawn]
        kind = script.TupleType([value.type() for value in returned])
        self.made.registerOutput(self.add("prim::TupleConstruct", returned, [kind]))

    def call(self, node: fx.Node) -> Any:
        """The results of an operation; TypeError if TorchScript would choose another overload of it."""
        schema: Any = node.target._schema  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
        inputs = [self.argument(node, place, part) for place, part in enumerate(schema.arguments)]
        found = self.add(schema.name, inputs, [part.type for part in schema.returns])
        parts = zip(schema.arguments, inputs, strict=True)
        kinds = [(part.type.kind(), value.type().kind()) for part, value in parts]
        # TorchScript takes add.Scalar for add.Tensor(x, 1), and mul.Tensor for mul.Scalar(x, tensor)
        has_numbers = not {*NUMBERS, ("NumberType", "TensorType")}.isdisjoint(kinds)
        if self.newest.schema() != str(schema) and not has_numbers:
            raise TypeError(f"TorchScript would run {self.newest.schema()} for {schema}")
        return found

    def item(self, node: fx.Node, index: int) -> Any:
        """One of several results, or of a list of tensors."""
        source = self.values[node]
        if isinstance(source, list):
            return source[index]
        source.setType(script.ListType(script.TensorType.get()))
        return self.add("aten::__getitem__", [source, self.made.insertConstant(index)], [script.TensorType.get()])

    def add(self, name: str, inputs: list[Any], types: list[Any]) -> Any:
        """Append an operation; returns its result, or the list of its results unless there is one."""
        node = self.newest = self.made.appendNode(self.made.create(name, inputs, len(types)))
        if node.schema() == "(no schema)" and not name.startswith("prim::"):
            raise TypeError(f"TorchScript has no operation for {node}")
        outputs = list(node.outputs())
        for value, kind in zip(outputs, types, strict=True):
            value.setType(kind)
        return outputs[0] if len(outputs) == 1 else outputs

    def argument(self, node: fx.Node, place: int, part: Any) -> Any:
        """The value of an operation's argument, which its schema describes by `part`."""
        default = part.default_value if part.has_default_value() else None
        given = node.args[place] if place < len(node.args) else node.kwargs.get(part.name, default)
        kind = part.type.getElementType() if part.type.kind() == "OptionalType" else part.type
        if isinstance(given, fx.Node):
            if given.op == "placeholder" and kind.kind() == "GeneratorType":
                self.values[given].setType(kind)
            return self.values[given]
        if isinstance(given, list | tuple):
            if given and not any(isinstance(item, fx.Node) for item in given):
                return self.made.insertConstant([plain(item, kind.getElementType()) for item in given])
            items = [self.values[i] if isinstance(i, fx.Node) else self.made.insertConstant(i) for i in given]
            return self.add("prim::ListConstruct", items, [kind])
        dtype, name = node.meta.get("kind", (None,))[0], node.target._schema.name  # pyright: ignore
        is_number = type(given) in (int, float) and given != 0  # torch may take 0.0 and -0.0 for the same constant
        if is_number and part.name == "other" and name in WITH_TENSORS and dtype in EXACT:
            return self.made.insertConstant(torch.tensor(given, dtype=dtype))
        if isinstance(given, bool) and kind.kind() == "NumberType" and name in FILLS:
            given = int(given)
        return self.made.insertConstant(plain(given, kind))


def plain(value: Any, kind: Any) -> Any:
    """A Python value as TorchScript wants it: a float where an integer was given for one, memory formats as numbers."""
    if isinstance(value, torch.memory_format):
        return MEMORY_FORMATS.index(value)
    return float(value) if kind.kind() == "FloatType" and value is not None else value
