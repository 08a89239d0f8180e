"""Recording a tensor function on a CPU: the operations it dispatches, without Python and autograd between them.

A small network spends its time on the way to the kernels, not in them. The function is run once, for real, and every
operation below autograd is noted (a backward pass is operations like any other). What was noted is shortened
(`tape_graph.py`) and becomes straight code, whose kernels and numbers are those of the eager function, or, where asked
for, a few compiled kernels (`tape_compile.py`).
"""

from __future__ import annotations

import operator
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from canter.utils.tape_compile import compiled
from canter.utils.tape_graph import Notes, simplify, straight
from canter.utils.tree import describe, rebuild

aten = torch.ops.aten
TOO_LONG = "it is too long"
LONGEST = 3000  # operations; of more, recording and compiling the code cost more than they save
WORTH_COMPILING = 800  # operations; a scan over the steps of a rollout is longer, and compilers take minutes for it
COMPILED_AFTER = 20  # replays; the step in which all episodes end is rare, and not worth the seconds
BUILT_IN = (types.BuiltinFunctionType, types.MethodDescriptorType)  # torch wraps some of its functions in Python
PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
UNFIT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# What these return depends on the shape of their argument alone.
SHAPED = {
    aten.ones_like.default, aten.zeros_like.default, aten.full_like.default, aten.new_zeros.default,
    aten.new_ones.default, aten.new_full.default,
}  # fmt: skip


class Tape:
    """One function recorded for one set of shapes.

    A function that cannot be repeated from a recording has run all the same; `unfit` says why, and there is no replay.

    Args:
        fn: The function.
        args: Its arguments.
        leaves: The tensors in them, in the order of `describe`.
        compiles: Whether to compile the recording's arithmetic into a few kernels, once it turns out to be used.
    """

    def __init__(self, fn: Callable[..., Any], args: Any, leaves: Sequence[Tensor], compiles: bool = False) -> None:
        inputs = [leaf.detach() for leaf in leaves]  # names of their own: two inputs may be one tensor today only
        recorder, self.grad_mode = Recorder(inputs), torch.is_grad_enabled()
        with recorder:
            self.result = fn(*rebuild(args, iter(inputs)))
        self.unfit = recorder.unfit
        if self.unfit:
            return
        outputs: list[Tensor] = []
        describe(self.result, outputs)
        notes = recorder.notes
        notes.graph.output(tuple(recorder.place(leaf) for leaf in outputs))
        self.template = rebuild(self.result, iter([torch.empty(0)] * len(outputs)))
        self.held = simplify(notes)
        self.length = sum(node.op == "call_function" for node in notes.graph.nodes)
        self.run = self.plain = straight(notes.graph)
        self.notes = notes if compiles and self.length <= WORTH_COMPILING else None
        self.replays = 0
        self.strides: list[Any] | None = None
        """How the inputs must lie in memory for compiled kernels, which take that for granted."""

    def _compile(self, notes: Notes, leaves: Sequence[Tensor]) -> None:
        self.notes = None
        try:
            self.run = compiled(notes, [*self.held, *leaves])
            self.strides = [leaf.stride() for leaf in leaves]
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else repr(error)
            warnings.warn(f"a recording cannot be compiled ({reason}); it is replayed uncompiled", stacklevel=6)

    def take_result(self) -> Any:
        """The result of the call that was recorded, which is not kept."""
        result, self.result = self.result, None
        return result

    def replay(self, leaves: Sequence[Tensor]) -> Any:
        """The function's result for these inputs."""
        if self.notes is not None:
            self.replays += 1
            if self.replays > COMPILED_AFTER:
                self._compile(self.notes, leaves)
        is_laid_out = self.strides is None or [leaf.stride() for leaf in leaves] == self.strides
        run = self.run if is_laid_out else self.plain
        # No tensor here needs a gradient; but an LSTM keeps what its backward pass reads only where gradients are on.
        if torch.is_grad_enabled() == self.grad_mode:
            return rebuild(self.template, iter(run(*self.held, *leaves)))
        with torch.set_grad_enabled(self.grad_mode):
            return rebuild(self.template, iter(run(*self.held, *leaves)))


class Recorder(TorchDispatchMode):
    """Notes every operation in a graph; tensors that were there before are arguments of the graph."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.notes = Notes(fx.Graph())
        self.places: dict[int, fx.Node] = {}
        self.kept: list[Any] = []  # so that no id is used twice
        self.count = 0
        self.unfit = ""
        for leaf in inputs:
            self._note(leaf, self.notes.add_input(leaf))

    def _note(self, value: Any, node: fx.Node) -> fx.Node:
        self.places[id(value)] = node
        self.kept.append(value)
        return node

    def place(self, value: Any) -> Any:
        """The node of a value; containers are walked, plain numbers are themselves."""
        if isinstance(value, PLAIN):
            return value
        if isinstance(value, tuple | list):
            return type(value)([self.place(part) for part in value])
        return self.places.get(id(value)) or self._note(value, self.notes.hold(value))

    def __torch_dispatch__(self, func: OpOverload, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and note it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.count += 1
        if depends_on_data(func, args):
            self.unfit = f"{func.name()} lets the numbers decide what comes next"
        elif self.count > LONGEST:
            self.unfit = self.unfit or TOO_LONG
        if not self.unfit and func.namespace != "profiler":
            self._add(func, args, kwargs, result)
        return result

    def _add(self, func: OpOverload, args: Any, kwargs: Any, result: Any) -> None:
        places = {name: self.place(value) for name, value in kwargs.items()}
        node = self.notes.graph.call_function(func, self.place(args), places)
        node.meta["call"] = quick_call(func, args, kwargs, result)
        if isinstance(result, Tensor):
            node.meta["kind"] = (result.dtype, result.shape)
            if args and isinstance(args[0], Tensor):  # contiguous() and reshape() are views of some arguments only
                node.meta["copies"] = result.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr()
            if func in SHAPED:
                node.meta["value"] = result
            if id(result) not in self.places:  # it is, where an operation returns what it wrote to
                self._note(result, node)
        elif isinstance(result, tuple | list):
            for i, part in enumerate(result):
                if isinstance(part, Tensor) and id(part) not in self.places:
                    self._note(part, self.notes.graph.call_function(operator.getitem, (node, i)))


def depends_on_data(func: OpOverload, args: Any) -> bool:
    """Whether the next run may take another way: a number read by the host, or a shape made by the data."""
    if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):  # only masks count their rows
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return bool(UNFIT & set(func.tags))


class Probe(TorchDispatchMode):
    """Looks which operation a call arrives at, and runs nothing."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result, self.seen = result, None

    def __torch_dispatch__(self, func: OpOverload, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the arrival, and give the known result."""
        if func is not aten.detach.default or self.seen is None:  # which follows what makes tensors from nothing
            self.seen = (func, args, kwargs or {})
        return self.result


def quick_call(func: OpOverload, args: Any, kwargs: Any, result: Any) -> Callable[..., Any]:
    """The function in torch's namespace, closer to the kernel than the operation's own object, if it comes out there.

    Whether it does for these arguments is tried, since names are overloaded.
    """
    name = func._schema.name.partition("::")[2]
    for home in (torch, Tensor):
        call = getattr(home, name, None)
        if not isinstance(call, BUILT_IN) or name.startswith("__"):  # which generated code cannot name
            continue
        try:
            with Probe(result) as probe:
                call(*args, **kwargs)
        except (TypeError, RuntimeError):
            continue
        if probe.seen is not None and same(probe.seen, (func, args, kwargs)):
            return call
    return func


def same(a: Any, b: Any) -> bool:
    """Whether arguments are the same tensors and equal numbers of the same kind."""
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, torch.Generator) and isinstance(b, torch.Generator):
        return getattr(a, "_cdata", a) == getattr(b, "_cdata", b)  # every arrival wraps the stream anew
    return a is b or (isinstance(a, PLAIN) and type(a) is type(b) and a == b)
