"""The executor: runs pure tensor functions eagerly, as CUDA graphs, or on a CPU as recordings.

A function given to an `Executor` takes and returns tensors (nested in dicts and tuples), may write to tensors in place,
and has no other effect. Its first calls run eagerly. Then it is captured as a CUDA graph (`cuda_graph.py`) or recorded
(`recording.py`), once for every combination of input shapes, and later calls are replays.
"""

import functools
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from canter.execution.cuda_graph import Graph, describe

T = TypeVar("T")

EXECUTIONS = ("auto", "eager", "graph", "compile")
PRECISIONS = ("tf32", "fp32", "bf16")
EAGER_CALLS = 2  # before capture, so that libraries and compilers finish their warm-up
MAX_GRAPHS = 32  # per function; if its shapes change more often than this, capture costs more than it saves


class Executor:
    """Runs functions eagerly, as CUDA graphs with compiled parts, or on a CPU as recordings.

    Args:
        device: Device of the tensors.
        execution: "eager", "graph" (capture or record), "compile" (also compile), or "auto", the fastest available.
        precision: Precision of matrix products on a GPU: "tf32", "fp32" or "bf16"; weights and all else stay float32.
    """

    def __init__(self, device: torch.device, execution: str = "auto", precision: str = "tf32") -> None:
        for name, value, known in (("execution", execution, EXECUTIONS), ("precision", precision, PRECISIONS)):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        self.device, self.execution, self.precision = device, execution, precision
        self.is_cuda = device.type == "cuda"
        self.uses_graphs = self.is_cuda and execution != "eager"
        self.records = device.type == "cpu" and execution != "eager"
        has_triton = importlib.util.find_spec("triton") is not None  # which compiles kernels for a GPU
        self.compiles = execution == "compile" or (self.is_cuda and execution == "auto" and has_triton)
        self.generators: list[torch.Generator] = []  # that captured functions draw from
        self.constants: Any = ()  # hashable, read by functions from attributes; other constants need another graph
        self.autocast: Callable[[], Any] = nullcontext  # for matrix products
        if self.is_cuda and precision == "bf16":  # without its cache, whose casts of weights would be frozen in a graph
            self.autocast = functools.partial(torch.autocast, "cuda", torch.bfloat16, cache_enabled=False)
        self.eager_only: set[str] = set()  # names of functions that cannot be captured or recorded
        self.graphs: dict[Any, Any] = {}  # Graph or Recording by signature
        self.calls: dict[Any, int] = {}  # by signature
        self.results: dict[int, Graph] = {}  # by the id of the outputs that a graph returns
        self.owned: set[int] = set()  # addresses of the tensors of all graphs
        self.constants_numbers: dict[Any, int] = {}
        self.numbered_constants: Any = None
        self.constants_number = 0

    def compile(self, fn: Callable[..., T]) -> Callable[..., T]:
        """Compile a pure function at its first call; if it cannot be compiled, it runs uncompiled, with one warning."""
        if not self.compiles or self.records:  # recordings are compiled as a whole
            return fn
        run: Callable[..., Any] = torch.compile(fn, dynamic=False)

        def call(*args: Any) -> T:
            nonlocal run
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
        if not (self.uses_graphs or self.records) or name in self.eager_only:
            return self._run_in_precision(fn, *args) if self.is_cuda else fn(*args)
        if self.constants is not self.numbered_constants:  # hashed once, because they are many
            self.numbered_constants, known = self.constants, self.constants_numbers
            self.constants_number = known.setdefault(self.constants, len(known))
        leaves: list[Tensor] = []
        parts = []
        for arg in args:
            source = self.results.get(id(arg))  # results of a graph were described when it was captured
            if source is not None:
                leaves.extend(source.output_leaves)
            parts.append(describe(arg, leaves) if source is None else source.description)
        signature = (name, tuple(parts), self.constants_number, torch.is_inference_mode_enabled())
        graph = self.graphs.get(signature)
        if graph is not None:
            return graph.replay(leaves)
        self.calls[signature] = self.calls.get(signature, 0) + 1
        if self.calls[signature] > EAGER_CALLS:
            if sum(known[0] == name for known in self.graphs) == MAX_GRAPHS:
                self._give_up(name, f"its shapes changed more than {MAX_GRAPHS} times")
            elif self.records:
                return self._record(signature, fn, args, leaves)
            elif self._capture(signature, fn, args, leaves):
                return self.graphs[signature].replay(leaves)
        return self._run_in_precision(fn, *args) if self.is_cuda else fn(*args)

    def forget(self) -> None:
        """Drop every graph; needed when tensors that they refer to were replaced."""
        for known in (self.graphs, self.calls, self.results, self.owned):
            known.clear()

    def bucket(self, count: int, unit: int) -> int:
        """Round a varying count up on a GPU, so that fewer graphs are needed; in eager runs too, for equal numbers."""
        coarse = max(1, unit // 8)
        return -(-count // coarse) * coarse if self.is_cuda else count

    def _run_in_precision(self, fn: Callable[..., T], *args: Any) -> T:
        """Return `fn(*args)` with matrix products in `precision`; the user's setting is restored afterwards."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest" if self.precision == "fp32" else "high")
        try:
            return fn(*args)
        finally:
            torch.set_float32_matmul_precision(before)

    def _capture(self, signature: Any, fn: Callable[..., Any], args: Any, leaves: list[Tensor]) -> bool:
        """Capture the function; False if it cannot be captured."""
        states = [generator.get_state() for generator in self.generators]
        try:
            graph = self._run_in_precision(Graph, fn, args, leaves, self.generators, self.owned)
        except Exception as error:
            torch.cuda.synchronize(self.device)
            self.forget()  # graphs hold the streams that are replaced here
            for generator, state in zip(self.generators, states, strict=True):  # a failed capture leaves them unusable
                fresh = torch.Generator(self.device)
                fresh.set_state(state)
                generator.graphsafe_set_state(fresh.graphsafe_get_state())
            self._give_up(signature[0], (str(error) or repr(error)).splitlines()[0])
            return False
        self.graphs[signature] = graph
        self.results[id(graph.outputs)] = graph
        self.owned |= {leaf.data_ptr() for leaf in (*graph.inputs, *graph.output_leaves)}
        return True

    def _record(self, signature: Any, fn: Callable[..., T], args: Any, leaves: Sequence[Tensor]) -> T:
        """Run the function and record it."""
        try:
            from canter.execution.recording import Recording
        except (ImportError, AttributeError) as error:
            self.records, lacking = False, f"torch {torch.__version__} lacks a private name that recording needs"
            warnings.warn(f"{lacking} ({error}); functions run eagerly, slower", stacklevel=4)
            return fn(*args)
        recording = Recording(fn, args, leaves, self.compiles)
        if recording.not_replayable:
            self._give_up(signature[0], recording.not_replayable)
        else:
            self.graphs[signature] = recording
        result, recording.result = recording.result, None  # releases the tensors
        return result

    def _give_up(self, name: str, reason: str) -> None:
        """Run a function eagerly from now on."""
        self.eager_only.add(name)
        if not (self.records and self.execution == "auto"):  # "auto" promises no recordings
            kind = "recorded" if self.records else "captured as a CUDA graph"
            warnings.warn(f"{name!r} cannot be {kind} ({reason}); it runs eagerly, slower", stacklevel=5)
