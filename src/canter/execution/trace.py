"""Traces: what a function did in one run, to compare with other runs before and while replays stand for it.

A replay repeats tensor operations and runs no Python. It gives what the function gives only if every run performs the
same operations with the same numbers on the same outside tensors, changes nothing but tensors, and calls nothing that
gives another result each time.
"""

from __future__ import annotations

import builtins
import datetime
import functools
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor
from torch.utils.weak import WeakIdKeyDictionary

from canter.execution import ACTIVE_TRACERS, python_state, runs_own_code
from canter.execution.cuda_graph import rebuild
from canter.execution.guard import (
    EXECUTION_FOLDER,
    HOST_READ_FUNCTIONS,
    HostReadMode,
    calling_frame,
)
from canter.execution.python_state import OWN_FOLDER, TORCH_FOLDER, address, is_plain, is_user_file

# Built-in functions whose calls a replay would leave out, or repeat with the result of the first.
CHANGING_CALLS = {
    time.time,
    time.time_ns,
    time.monotonic,
    time.monotonic_ns,
    time.perf_counter,
    time.perf_counter_ns,
    time.process_time,
    time.localtime,
    datetime.datetime.now,
    datetime.datetime.utcnow,
    datetime.datetime.today,
    datetime.date.today,
    builtins.print,
    builtins.input,
    builtins.open,
    os.stat,
    os.urandom,
}
# They compute their values in another way while a mode is active.
CHANGED_BY_MODES = {"linalg_svdvals", "linalg_eigvalsh", "linalg_eigvals", "linalg_matrix_norm", "linalg_cond"}
HOST_READ_METHODS = {function.__name__ for function in HOST_READ_FUNCTIONS}
RANDOM_STATE_CALLS = {"manual_seed", "seed", "get_state", "set_state", "graphsafe_set_state", "set_offset"}
HIGHER_ORDER_FOLDER = str(Path(TORCH_FOLDER, "_higher_order_ops"))  # torch.cond and the like


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
        self.roots: Mapping[str, Any] = {}  # Python objects of the function

    def difference(self, other: Trace) -> str:
        """What another run of the function did differently, and where; "" if nothing."""
        found = self._difference(other)
        return found if " at " in found or not found else found + python_state.find_line(self.roots, ())

    def _difference(self, other: Trace) -> str:
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
        leaves: Tensors among the function's arguments; the function gets `inputs`, which share their memory.
        max_operations: A function with more is not replayed.
        reference: Trace of an earlier run, for a faster look at whether the function still does the same.
    """

    supports_higher_order_operators = True  # otherwise torch.cond raises before it can be refused

    def __init__(
        self, leaves: Sequence[Tensor], max_operations: int | None = None, reference: Trace | None = None
    ) -> None:
        super().__init__()
        self.reference = None if reference is None else reference.operations
        self.trace, self.max_operations, self.leaves = Trace(), max_operations, leaves
        # Distinct objects: two arguments may be one tensor in this call only.
        self.inputs = [leaf.detach() for leaf in leaves]
        self.origins: Any = WeakIdKeyDictionary()  # of tensors; results are not kept alive
        for number, leaf in enumerate(self.inputs):
            self.origins[leaf] = (("input", number), address(leaf))
        self.not_replayable = ""
        self.is_user_code = False
        """Whether `not_replayable` is about code outside canter."""
        self.is_entered = False
        self.has_iterators = False
        """Whether an attribute of the user's objects is an iterator."""

    def refuse(self, reason: str, is_user_code: bool = True) -> None:
        """Note why the function cannot be replayed; the first reason counts."""
        if not self.not_replayable:
            self.not_replayable, self.is_user_code = reason, is_user_code

    def refuse_line(self, problem: str) -> None:
        """Refuse with the line that runs."""
        code, line = calling_frame()
        is_known = not code.co_filename.startswith(EXECUTION_FOLDER)  # a compiler has no frame of the user's
        place = f" at {code.co_filename}:{line}" if is_known else python_state.find_line(self.trace.roots, ())
        self.refuse(problem + place, not is_known or not code.co_filename.startswith(OWN_FOLDER))

    def on_host_read(self, name: str) -> None:
        """Note a host read."""
        self.refuse_line(f"{name} reads values on the host")

    def function_mode(self) -> Any:
        """None if calls are watched, or were before: torch's transformers take another path in a function mode."""
        return nullcontext() if sys.getprofile() is None or self.reference else super().function_mode()

    def __enter__(self) -> Any:
        self.is_entered = True
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        if self.is_entered:
            self.is_entered = False
            super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not hasattr(func, "_schema"):  # an operator that takes functions
            self.on_host_read(f"torch.{func}")
            return func(*args, **(kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        operations = self.trace.operations
        if self.not_replayable or func.namespace == "profiler":
            return result
        results = list(tensors_in(result))
        if not all(map(is_plain, results)):
            self.refuse_line(f"{func} makes a sparse or nested tensor")
        elif len(operations) == self.max_operations:
            self.refuse("it is too long", is_user_code=False)
        else:
            noted = (self.note(args), self.note(kwargs or {}))
            if func is torch.ops.aten.detach.default:  # torch adds some by itself where a result is referred to twice
                self.origins[result] = (noted[0][0], address(result))
            else:
                operations.append(self.known_operation(func, noted) or Operation(func, noted, *calling_frame()))
            for number, part in enumerate(results):
                known = self.origins.get(part)  # in-place operations return an argument
                self.origins[part] = ((len(operations), number) if known is None else known[0], address(part))
            if not self.not_replayable:
                self.on_operation(func, args, kwargs or {}, result)
        return result

    def known_operation(self, func: Any, noted: Any) -> Operation | None:
        """The operation at this place of the reference, if it is the same."""
        number = len(self.trace.operations)
        if self.reference is None or number >= len(self.reference):
            return None
        known = self.reference[number]
        return known if known.func is func and known.args == noted else None

    def on_operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """React to an operation that was noted."""

    def on_call(self, frame: FrameType, event: str, arg: Any) -> None:
        """React to a call of a Python or built-in function, as a profiler does."""
        if event == "call":
            if frame.f_code.co_filename.startswith(HIGHER_ORDER_FOLDER):  # some cannot run in a mode
                self.stop("an operator that takes functions is called")
        elif event == "c_call" and not self.not_replayable:
            name, owner = arg.__name__, getattr(arg, "__self__", None)
            if name in CHANGED_BY_MODES:
                self.stop(f"{name}() is called")
            elif isinstance(owner, Tensor):
                if name in HOST_READ_METHODS:
                    self.on_host_read(f"Tensor.{name}")
            elif (
                arg in CHANGING_CALLS
                or isinstance(owner, random.Random)
                or (isinstance(owner, Generator) and name in RANDOM_STATE_CALLS)
                or (arg is builtins.next and self.has_iterators and is_user_file(frame.f_code.co_filename))
            ):
                self.refuse_line(f"{name}() is called")

    def stop(self, problem: str) -> None:
        """Refuse the function, and let the rest of it run outside the mode."""
        self.refuse_line(problem)
        self.__exit__(None, None, None)

    def note(self, value: Any) -> Any:
        """A value that can be compared: the origin of a tensor, a number with its type."""
        if isinstance(value, Tensor):
            if value not in self.origins:
                self.origins[value] = (("outside", len(self.trace.outside)), address(value))
                self.trace.outside.append(identity(value))
                self.trace.tensors.append(value)
            origin, memory = self.origins[value]
            if value.device.type == "cpu" and memory != address(value):  # a graph on a GPU follows the memory
                self.refuse_line("the data of a tensor was assigned")
            return origin
        if isinstance(value, dict):
            return tuple([(name, self.note(part)) for name, part in value.items()])
        if isinstance(value, tuple | list):
            return tuple([self.note(part) for part in value])
        if isinstance(value, Generator):
            return getattr(value, "_cdata", id(value))  # each dispatch wraps the generator in a new object
        if isinstance(value, torch.UntypedStorage):  # on a GPU, LSTM kernels share the memory of their weights
            if value.device.type == "cpu":
                self.refuse_line("a tensor takes the memory of another")
            return ("storage", value.nbytes())
        return (type(value), repr(value))  # 1, 1.0 and True are equal, and so are 0.0 and -0.0

    def refuse_writes(self) -> None:
        """Refuse a function that writes to an argument."""
        written = next((o for o in self.trace.operations if o.func._schema.is_mutable), "")
        self.refuse(f"it writes to an argument: {written}")


def run_traced(
    tracer: Tracer, fn: Callable[..., Any], args: Any, roots: Mapping[str, Any], counters: Iterable[Any] = ()
) -> Any:
    """Return `fn(*args)`, traced, with `tracer.inputs` as the tensors in `args`.

    A function cannot be replayed if it changes Python objects reached from `roots`, or if a user's code in it reads one
    of the counters (object, names of attributes), asks for the time, draws random numbers on the host, or prints.
    """
    warm_up()
    if python_state.is_users(fn):
        roots = {**roots, fn.__name__: fn}
    walk, numpy_before = python_state.Walk(roots), python_state.stream_state(np.random.mtrand._rand)
    tracer.trace.roots, tracer.has_iterators = roots, walk.has_iterators
    watches_calls = sys.getprofile() is None and tracer.reference is None  # else a profiler runs
    ACTIVE_TRACERS.append(tracer)
    collects = gc.isenabled()
    gc.disable()  # a collection may run code that is not the function's
    try:
        with watched(counters), tracer:
            if watches_calls:
                sys.setprofile(tracer.on_call)
            try:
                result = fn(*rebuild(args, iter(tracer.inputs)))
            finally:
                if watches_calls:
                    sys.setprofile(None)
    finally:
        if collects:
            gc.enable()
        ACTIVE_TRACERS.remove(tracer)
    if not all(map(is_plain, tensors_in(result))):
        tracer.refuse("it returns a sparse or nested tensor")
    tracer.trace.result = tracer.note(result)
    change = python_state.first_change(walk.values, python_state.Walk(roots).values, roots)
    if change:
        tracer.refuse(f"it changes {change}; a replay would not")
    if numpy_before != python_state.stream_state(np.random.mtrand._rand):
        tracer.refuse(f"it draws from np.random{python_state.find_line(roots, ['random'])}; a replay would not")
    for leaf, used in zip(tracer.leaves, tracer.inputs, strict=True):
        if address(leaf) != address(used):
            tracer.refuse(f"it assigns the data of an argument{python_state.find_line(roots, ['data'])}")
            leaf.data = used
    return result


@functools.cache
def warm_up() -> None:
    """Run a first operation in a mode: it imports much of torch, whose calls are not the function's."""
    with Tracer([]):
        torch.zeros(())


@contextmanager
def watched(counters: Iterable[tuple[Any, ...]]) -> Iterator[None]:
    """Note when a user's code reads one of the counters: by the third entry, or by refusing the function."""
    changed = [(owner, type(owner)) for owner, *_ in counters]
    for owner, names, *note in counters:
        cls = type(owner)
        body = {name: Counter(name, *note) for name in names if name in owner.__dict__}
        owner.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__, **body})
    try:
        yield
    finally:
        for owner, cls in changed:
            owner.__class__ = cls


class Counter:
    """Attribute that the run changes: a user's function that reads it cannot be replayed, unless `note` is given."""

    def __init__(self, name: str, note: Callable[[str], None] | None = None) -> None:
        self.name, self.note = name, note

    def __get__(self, instance: Any, owner: type) -> Any:
        if not runs_own_code(sys._getframe(1)):
            (self.note or ACTIVE_TRACERS[-1].on_host_read)(self.name)
        return instance.__dict__[self.name]

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self.name] = value


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested containers."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict | tuple | list):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(part)


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """What tells an outside tensor from another."""
    if not is_plain(tensor):
        return (id(tensor),)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def mentions(args: Any, origin: Any) -> bool:
    """Whether noted arguments contain a tensor's origin."""
    return args == origin or (isinstance(args, tuple) and any(mentions(part, origin) for part in args))


def changed_number(old: Any, new: Any) -> str:
    """The first number that differs: " from 1.0 to 2.0"; "" if the first difference is another."""
    if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        if len(old) == 2 and isinstance(old[0], type) and isinstance(new[0], type):
            return f" from {old[1]} to {new[1]}"
        return next((changed_number(a, b) for a, b in zip(old, new, strict=True) if a != b), "")
    return ""
