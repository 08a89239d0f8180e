"""The executor: runs pure tensor functions eagerly, as CUDA graphs, or on a CPU as recordings.

A function given to an `Executor` takes and returns tensors (nested in dicts and tuples), may write to tensors in place,
and has no other effect. Its first calls run eagerly, two of them traced (`trace.py`). If both did the same, it is
captured as a CUDA graph (`cuda_graph.py`) or recorded (`recording.py`), once for every combination of input shapes, and
later calls are replays. Users' code runs inside these functions and may break the rule, so a function is traced again
in iterations 2, 4, 8, ... and whenever Python objects have changed; if it does something else, it runs eagerly.
"""

import functools
import importlib.util
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from canter.execution.cuda_graph import Graph, describe
from canter.execution.python_state import Walk, is_user_file

T = TypeVar("T")

EXECUTIONS = ("auto", "eager", "graph", "compile")
PRECISIONS = ("tf32", "fp32", "bf16")
WARM_UP_CALLS = 2  # before a GPU's traces, so that libraries and compilers finish their warm-up
MAX_RENEWALS = 3  # a function that differs because Python objects have changed is recorded anew so many times
COMPILE_FROM = 1000  # iteration in which "auto" begins to compile: shorter runs do not wait for the compiler
MAX_GRAPHS = 32  # per function; if its shapes change more often than this, capture costs more than it saves


class Executor:
    """Runs functions eagerly, as CUDA graphs with compiled parts, or on a CPU as recordings.

    Args:
        device: Device of the tensors.
        execution: "eager", "graph" (capture or record), "compile" (also compile), or "auto", the fastest available: a
            GPU's functions are captured at once and compiled in iteration 1000.
        precision: Precision of matrix products: "tf32" and "fp32" (on a CPU both are float32) or "bf16" (on a CPU only
            if it has instructions for it); weights and all else stay float32.
    """

    def __init__(self, device: torch.device, execution: str = "auto", precision: str = "tf32") -> None:
        for name, value, known in (("execution", execution, EXECUTIONS), ("precision", precision, PRECISIONS)):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        self.device, self.execution, self.precision = device, execution, precision
        self.is_cuda = device.type == "cuda"
        self.uses_graphs = self.is_cuda and execution != "eager"
        self.records = device.type == "cpu" and execution != "eager"
        self.replays = self.uses_graphs or self.records
        has_triton = importlib.util.find_spec("triton") is not None  # which compiles kernels for a GPU
        self.compiles = execution == "compile" or (self.is_cuda and execution == "auto" and has_triton)
        self.compile_from = COMPILE_FROM if execution == "auto" else 0
        self.generators: list[torch.Generator] = []  # that captured functions draw from
        self.constants_numbers: dict[Any, int] = {}  # of all values of `constants` so far
        self.set_constants(())
        self.autocast: Callable[[], Any] = nullcontext  # for matrix products
        if precision == "bf16" and (self.is_cuda or (device.type == "cpu" and cpu_has_bf16())):
            # Without its cache, whose casts of weights would be frozen in a graph.
            self.autocast = functools.partial(torch.autocast, device.type, torch.bfloat16, cache_enabled=False)
        self.eager_only: dict[str, str] = {}  # names of functions that cannot be replayed, with the reason
        self.graphs: dict[Any, Any] = {}  # Graph or Recording by signature
        self.calls: dict[Any, int] = {}  # by signature
        self.traces: dict[Any, Any] = {}  # of the last traced run and the state number then, by signature
        self.verified: set[Any] = set()  # signatures whose two traces agree, to be captured in the next call
        self.counters: dict[str, tuple[Any, ...]] = {}  # objects with attributes that the run changes; see `watched`
        self.roots: Mapping[str, Any] = {}  # Python objects that functions read, by name
        self.state: Walk | None = None  # of these objects when they were last watched
        self.state_number = 0  # counts the changes of these objects
        self.iteration = 0
        self.past_iterations = 0  # before this run was continued from a checkpoint
        self.look = 0  # graphs that were last looked at before this number are looked at again
        self.renewals: dict[str, int] = {}  # by name
        self.results: dict[int, Graph] = {}  # by the id of the outputs that a graph returns
        self.owned: set[int] = set()  # addresses of the tensors of all graphs

    def compile(self, fn: Callable[..., T]) -> Callable[..., T]:
        """Compile a pure function when it is time; if it cannot be compiled, it runs uncompiled, with one warning."""
        if not self.compiles or self.records:  # recordings are compiled as a whole
            return fn
        run: Callable[..., Any] | None = None

        def call(*args: Any) -> T:
            nonlocal run
            if not self.is_compiled:
                return fn(*args)
            if run is None:
                run = torch.compile(fn, dynamic=False)
            try:
                return run(*args)
            except Exception as error:
                if run is fn:
                    raise
                result = fn(*args)  # raises the function's own errors unchanged
                run = fn
                reason = (str(error) or repr(error)).splitlines()[0]
                warnings.warn(f"{fn.__name__!r} cannot be compiled ({reason}); it runs uncompiled", stacklevel=2)
                return result

        return call

    def run(self, name: str, fn: Callable[..., T], *args: Any) -> T:
        """Return `fn(*args)`; the next run of the same function overwrites the tensors that a CUDA graph returned."""
        if not self.replays or name in self.eager_only:
            return self._run_in_precision(fn, *args) if self.is_cuda else fn(*args)
        leaves: list[Tensor] = []
        parts = []
        for arg in args:
            source = self.results.get(id(arg))  # results of a graph were described when it was captured
            if source is not None:
                leaves.extend(source.output_leaves)
            parts.append(describe(arg, leaves) if source is None else source.description)
        signature = (name, tuple(parts), self.constants_number, torch.is_inference_mode_enabled())
        graph = self.graphs.get(signature)
        if graph is not None and graph.last_look == self.look:
            return graph.replay(leaves)
        return self._run_traced(signature, fn, args, leaves)

    def set_constants(self, constants: Any) -> None:
        """Set the hashable values that functions read from attributes; with other values they need other graphs."""
        self.constants = constants
        # A number stands for them in signatures: they are many, so that hashing them in every call would be slow.
        self.constants_number = self.constants_numbers.setdefault(constants, len(self.constants_numbers))

    @property
    def is_compiled(self) -> bool:
        """Whether functions given to `compile` run compiled."""
        return self.compiles and self.past_iterations + self.iteration >= self.compile_from

    def begin_iteration(self) -> None:
        """Count an iteration; in iterations 2, 4, 8, ... every function is looked at again."""
        self.iteration += 1
        if self.uses_graphs and self.compiles and self.past_iterations + self.iteration == self.compile_from:
            self.forget()
        if self.iteration & (self.iteration - 1) == 0:
            self.look += 1

    def watch(self, roots: Mapping[str, Any]) -> None:
        """Look at every function again if Python objects have changed since the last call."""
        if self.state is not None and self.state.is_current(roots):
            return
        now, self.roots = Walk(roots), roots
        if self.state is not None and now.values != self.state.values:
            self.look += 1
            self.state_number += 1
        self.state = now

    def forget(self) -> None:
        """Drop every graph; needed when tensors that they refer to were replaced."""
        for known in (self.graphs, self.calls, self.traces, self.verified, self.results, self.owned):
            known.clear()

    def bucket(self, count: int, unit: int) -> int:
        """Round a varying count up on a GPU, so that fewer graphs are needed; in eager runs too, for equal numbers."""
        coarse = max(1, unit // 8)
        return -(-count // coarse) * coarse if self.is_cuda else count

    def _run_in_precision(self, fn: Callable[..., T], *args: Any) -> T:
        """Return `fn(*args)` with matrix products in `precision`; the user's setting is restored afterwards."""
        wanted = "highest" if self.precision == "fp32" else "high"
        try:
            before = torch.get_float32_matmul_precision()
        except RuntimeError:  # the user, or a simulator, has used the newer setting, which the older cannot express
            with restored_fp32_precision():
                torch.set_float32_matmul_precision(wanted)
                return fn(*args)
        torch.set_float32_matmul_precision(wanted)
        try:
            return fn(*args)
        finally:
            torch.set_float32_matmul_precision(before)

    def _run_eagerly(self, fn: Callable[..., T], *args: Any) -> T:
        return self._run_in_precision(fn, *args) if self.is_cuda else fn(*args)

    def _run_traced(self, signature: Any, fn: Callable[..., T], args: Any, leaves: list[Tensor]) -> T:
        """Run a function that has no graph yet, or one to be looked at again; its traces decide what follows."""
        name, graph = signature[0], self.graphs.get(signature)
        calls = self.calls[signature] = self.calls.get(signature, 0) + 1
        if graph is None and calls <= (WARM_UP_CALLS if self.uses_graphs else 1):
            return self._run_eagerly(fn, *args)
        if graph is None and sum(known[0] == name for known in self.graphs) == MAX_GRAPHS:
            self._give_up(name, f"its shapes or settings changed more than {MAX_GRAPHS} times")
            return self._run_eagerly(fn, *args)
        if graph is None and self.uses_graphs and signature in self.verified:
            captured = self._capture(signature, fn, args, leaves)
            return self._run_eagerly(fn, *args) if captured is None else captured.replay(leaves)
        try:
            from canter.execution.recording import MAX_OPERATIONS, Recording
            from canter.execution.trace import Tracer, run_traced
        except (ImportError, AttributeError) as error:
            self.records = self.uses_graphs = self.replays = False
            lacking = f"torch {torch.__version__} lacks a private name that traces need"
            warnings.warn(f"{lacking} ({error}); functions run eagerly, slower", stacklevel=4)
            return self._run_eagerly(fn, *args)
        if self.records and graph is None and signature in self.traces:
            traced = Recording(fn, args, leaves, self.compiles, self.roots, self.counters.values())
            result, traced.result = traced.result, None  # releases the tensors
        else:
            reference = None if graph is None else self.traces[signature][0]
            traced = Tracer(leaves, MAX_OPERATIONS if self.records else None, reference)
            given = [leaf.clone() for leaf in leaves] if self.uses_graphs else []
            # A compiled part hides its operations; in a traced run it is not compiled.
            with torch.compiler.set_stance("force_eager") if self.is_cuda and self.is_compiled else nullcontext():
                result: Any = self._run_eagerly(run_traced, traced, fn, args, self.roots, self.counters.values())
            if not all(map(same_values, given, leaves)):  # a graph would write to its copy
                traced.refuse_writes()
        self._decide(signature, traced)
        return result

    def _decide(self, signature: Any, traced: Any) -> None:
        """Replay the function from the next call on, trace it once more, or run it eagerly for good."""
        name, graph = signature[0], self.graphs.get(signature)
        before, state_number = self.traces.get(signature, (None, None))
        self.traces[signature] = (traced.trace, self.state_number)
        difference = "" if before is None or traced.not_replayable else before.difference(traced.trace)
        if traced.not_replayable:
            self._give_up(name, traced.not_replayable, traced.is_user_code)
        elif difference and state_number != self.state_number and self.renewals.get(name, 0) < MAX_RENEWALS:
            self.renewals[name] = self.renewals.get(name, 0) + 1
            self._drop(name, kept=signature)
        elif difference:
            self._give_up(name, difference, is_user_code=True)
        elif graph is not None:
            graph.last_look = self.look
        elif before is not None and self.uses_graphs:  # its results can be inputs of other graphs from the start
            self.verified.add(signature)
        elif before is not None:
            self.graphs[signature] = traced
            traced.last_look = self.look

    def _capture(self, signature: Any, fn: Callable[..., Any], args: Any, leaves: list[Tensor]) -> Graph | None:
        """Capture the function; None if it cannot be captured."""
        states = [generator.get_state() for generator in self.generators]
        try:
            graph = self._run_in_precision(Graph, fn, args, leaves, self.generators, self.owned)
        except Exception as error:
            torch.cuda.synchronize(self.device)
            for generator, state in zip(self.generators, states, strict=True):  # a failed capture leaves them unusable
                fresh = torch.Generator(self.device)
                fresh.set_state(state)
                generator.graphsafe_set_state(fresh.graphsafe_get_state())
            self._give_up(signature[0], (str(error) or repr(error)).splitlines()[0] + failing_line(error))
            return None
        self.graphs[signature], graph.last_look = graph, self.look
        self.results[id(graph.outputs)] = graph
        self.owned |= {leaf.data_ptr() for leaf in (*graph.inputs, *graph.output_leaves)}
        return graph

    def _drop(self, name: str, kept: Any = None) -> None:
        """Drop a function's graphs, and its traces but one; everything if there are CUDA graphs: they share memory."""
        if self.uses_graphs:
            self.forget()
        for signature in [known for known in self.traces if known[0] == name]:
            self.graphs.pop(signature, None)
            if signature != kept:
                del self.traces[signature]

    def _give_up(self, name: str, reason: str, is_user_code: bool = False) -> None:
        """Run a function eagerly from now on."""
        self._drop(name)
        self.eager_only[name] = reason
        if is_user_code or not (self.records and self.execution == "auto"):  # "auto" promises no recordings
            kind = "recorded" if self.records else "captured as a CUDA graph"
            warnings.warn(f"{name!r} cannot be {kind} ({reason}); it runs eagerly, slower", stacklevel=6)


@functools.cache
def cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 matrices itself; others compute them slower than float32."""
    found: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any("bf16" in name and bool(value) for name, value in found.items())


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same values; NaN equals NaN."""
    return torch.equal(a.nan_to_num(), b.nan_to_num())


def failing_line(error: BaseException) -> str:
    """The innermost line outside torch and canter that an exception went through: " at FILE:LINE", or ""."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_user_file(f.filename)]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


@contextmanager
def restored_fp32_precision() -> Iterator[None]:
    """Restore the settings `fp32_precision` of torch's backends for matrix products at the end."""
    whole: Any = torch.backends
    parts = (whole.cuda.matmul, whole.mkldnn.matmul)
    common = whole.fp32_precision
    before = [part.fp32_precision for part in parts]
    try:
        yield
    finally:
        whole.fp32_precision = common
        for part, value in zip(parts, before, strict=True):
            part.fp32_precision = "none" if value == common else value  # "none" follows the common setting
