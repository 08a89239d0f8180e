"""Traces: what a function did in one run, to compare with other runs before and while replays stand for it.

A replay repeats tensor operations and runs no Python. It gives what the function gives only if every run performs the
same operations with the same numbers on the same outside tensors, and changes nothing but tensors.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor
from torch.utils.weak import WeakIdKeyDictionary

from canter.execution import ACTIVE_TRACERS, python_state
from canter.execution.guard import OWN_FOLDER, HostReadMode, calling_frame

STREAMS = ("random", "np.random")  # global random streams, as calls to them are written


class Operation(NamedTuple):
    """One operation of a run: its arguments with tensors replaced by their origin, and the line that called it."""

    func: Any
    args: Any
    code: CodeType
    line: int

    def __str__(self) -> str:
        return f"{self.func} at {self.code.co_filename}:{self.line}"


class Trace:
    """The operations of one run, the outside tensors they used, and the result."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.outside: list[tuple[Any, ...]] = []  # what tells an outside tensor from another
        self.tensors: list[Tensor] = []  # the outside tensors: while they live, no other gets their address
        self.result: Any = None

    def difference(self, other: Trace) -> str:
        """What another run of the function did differently; "" if nothing."""
        for old, new in zip(self.operations, other.operations, strict=False):
            if old.func is not new.func:
                return f"{new} ran where {old} ran before"
            if old.args != new.args:
                return f"the arguments of {new} changed{changed_number(old.args, new.args)}"
        if len(self.operations) != len(other.operations):
            longer = max(self.operations, other.operations, key=len)
            return f"{longer[min(len(self.operations), len(other.operations))]} ran in one of two calls only"
        for number, (old, new) in enumerate(zip(self.outside, other.outside, strict=True)):
            if old != new:
                origin = ("outside", number)
                reader = next((str(o) for o in other.operations if mentions(o.args, origin)), "the result")
                return f"{reader} uses another tensor than before"
        return "" if self.result == other.result else "it returned something else than before"


class Tracer(HostReadMode):
    """Dispatch mode that notes every operation of a function, and why the function cannot be replayed.

    Args:
        inputs: Tensors among the function's arguments.
        max_operations: A function with more is not replayed.
    """

    supports_higher_order_operators = True  # torch.cond and the like are seen and refused

    def __init__(self, inputs: Sequence[Tensor], max_operations: int | None = None) -> None:
        super().__init__()
        self.trace, self.max_operations = Trace(), max_operations
        self.origins: Any = WeakIdKeyDictionary()  # of tensors; results are not kept alive
        for number, leaf in enumerate(inputs):
            self.origins[leaf] = ("input", number)
        self.not_replayable = ""
        self.is_user_code = False
        """Whether `not_replayable` is about code outside canter."""

    def refuse(self, reason: str, is_user_code: bool = False) -> None:
        """Note why the function cannot be replayed; the first reason counts."""
        if not self.not_replayable:
            self.not_replayable, self.is_user_code = reason, is_user_code

    def on_host_read(self, name: str) -> None:
        """Note a host read."""
        code, line = calling_frame()
        is_user_code = not code.co_filename.startswith(OWN_FOLDER)
        self.refuse(f"{name} reads values on the host at {code.co_filename}:{line}", is_user_code)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not hasattr(func, "_schema"):  # an operator that takes functions
            self.on_host_read(f"torch.{func}")
            return func(*args, **(kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        operations = self.trace.operations
        if self.not_replayable or func.namespace == "profiler":
            return result
        if len(operations) == self.max_operations:
            self.refuse("it is too long")
            return result
        if func is torch.ops.aten.detach.default:  # torch adds some by itself where a result is referred to twice
            self.origins[result] = self.note(args[0])
        else:
            operations.append(Operation(func, (self.note(args), self.note(kwargs or {})), *calling_frame()))
        for number, part in enumerate(result if isinstance(result, tuple | list) else (result,)):
            if isinstance(part, Tensor) and part not in self.origins:  # in-place operations return an argument
                self.origins[part] = (len(operations), number)
        self.on_operation(func, args, kwargs or {}, result)
        return result

    def on_operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """React to an operation that was noted."""

    def note(self, value: Any) -> Any:
        """A value that can be compared: the origin of a tensor, a number with its type."""
        if isinstance(value, Tensor):
            origin = self.origins.get(value)
            if origin is None:
                origin = self.origins[value] = ("outside", len(self.trace.outside))
                self.trace.outside.append(identity(value))
                self.trace.tensors.append(value)
            return origin
        if isinstance(value, dict):
            return tuple([(name, self.note(part)) for name, part in value.items()])
        if isinstance(value, tuple | list):
            return tuple([self.note(part) for part in value])
        if isinstance(value, Generator):
            return getattr(value, "_cdata", id(value))  # each dispatch wraps the generator in a new object
        if isinstance(value, torch.UntypedStorage):
            return ("storage", value.nbytes())
        return (type(value), repr(value))  # 1, 1.0 and True are equal, and so are 0.0 and -0.0


def run_traced(tracer: Tracer, fn: Callable[..., Any], args: Any, roots: Mapping[str, Any]) -> Any:
    """Return `fn(*args)`, traced.

    A function that changes Python objects reached from `roots`, or draws Python's or NumPy's global random numbers,
    cannot be replayed.
    """
    before, streams = python_state.snapshot(roots), global_streams()
    ACTIVE_TRACERS.append(tracer)
    try:
        with tracer:
            result = fn(*args)
    finally:
        ACTIVE_TRACERS.remove(tracer)
    tracer.trace.result = tracer.note(result)
    change = python_state.first_change(before, python_state.snapshot(roots), roots)
    if change:
        tracer.refuse(f"it changes {change}; a replay would not", is_user_code=True)
    for name, old, new in zip(STREAMS, streams, global_streams(), strict=True):
        if old != new:
            place = python_state.find_line(roots, rf"\b{name}[.]")
            tracer.refuse(f"it draws from {name}{place}; a replay would not", is_user_code=True)
    return result


def global_streams() -> tuple[Any, Any]:
    """States of Python's and of NumPy's global random streams."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (kind, np.asarray(keys).tobytes(), *rest)


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """What tells an outside tensor from another."""
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def mentions(args: Any, origin: Any) -> bool:
    """Whether noted arguments contain a tensor's origin."""
    return args == origin or (isinstance(args, tuple) and any(mentions(part, origin) for part in args))


def changed_number(old: Any, new: Any) -> str:
    """ " from 1.0 to 2.0" for the first number that differs; "" if the first difference is another."""
    if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        if len(old) == 2 and isinstance(old[0], type) and isinstance(new[0], type):
            return f" from {old[1]} to {new[1]}"
        return next((changed_number(a, b) for a, b in zip(old, new, strict=True) if a != b), "")
    return ""
