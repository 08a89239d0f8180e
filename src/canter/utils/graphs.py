"""Making pure tensor functions fast, in one place.

A function handed to an `Executor` takes and returns tensors (nested in dicts and tuples), may write to tensors in
place, and does nothing else. On a GPU it is run eagerly at first, for real, and then replayed as a CUDA graph: capture
executes nothing, so parameters, statistics and random streams are what they would have been without it.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from canter.utils.tape import TOO_LONG, Tape
from canter.utils.tree import describe, rebuild

T = TypeVar("T")

EXECUTIONS = ("auto", "eager", "graph", "compile")
PRECISIONS = ("tf32", "fp32", "bf16")
EAGER_CALLS = 2  # libraries and compilers settle in these before a graph is captured
MAX_GRAPHS = 32  # of one function; beyond it shapes change too often for capture to pay


class Executor:
    """Runs functions eagerly, as CUDA graphs with compilation inside, or on a CPU as recordings.

    Args:
        device: Where the tensors are.
        execution: "eager", "graph" (capture or record), "compile" (compile too), or "auto": the fastest here.
        precision: Of matrix products on a GPU: "tf32", "fp32" or "bf16"; weights and everything else stay float32.
    """

    def __init__(self, device: torch.device, execution: str = "auto", precision: str = "tf32") -> None:
        for name, value, known in (("execution", execution, EXECUTIONS), ("precision", precision, PRECISIONS)):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        self.device, self.execution, self.precision = device, execution, precision
        is_cuda = device.type == "cuda"
        self.uses_graphs = is_cuda and execution != "eager"
        self.records = device.type == "cpu" and execution != "eager"
        self.compiles = execution == "compile" or (is_cuda and execution == "auto" and has_triton())
        self.generators: list[torch.Generator] = []
        """Streams that captured functions draw from."""
        self.known_constants: dict[Any, int] = {}
        self.constants = ()
        self.graphs: dict[Any, Graph | Tape] = {}
        self.calls: dict[Any, int] = {}
        self.captured: dict[str, int] = {}
        self.eager_only: set[str] = set()
        self.results: dict[int, Graph] = {}
        self.owned: set[int] = set()

    @property
    def constants(self) -> Any:
        """Numbers that functions read from elsewhere; a graph serves only those it was captured with."""
        return self._constants

    @constants.setter
    def constants(self, constants: Any) -> None:
        self._constants = constants
        self.era = self.known_constants.setdefault(constants, len(self.known_constants))  # a number is hashed faster

    def compile(self, fn: Callable[..., T]) -> Callable[..., T]:
        """The function compiled, where that is on; a recording is compiled as a whole instead."""
        return Compiled(fn) if self.compiles and not self.records else fn

    def run(self, name: str, fn: Callable[..., T], *args: Any) -> T:
        """`fn(*args)`. What a graph returns is overwritten by the next run of the same function."""
        if not (self.uses_graphs or self.records) or name in self.eager_only:
            with self.precisely():
                return fn(*args)
        leaves: list[Tensor] = []
        signature = (name, self._describe(args, leaves), self.era, torch.is_inference_mode_enabled())
        graph = self.graphs.get(signature)
        if graph is not None:
            return graph.replay(leaves)
        self.calls[signature] = self.calls.get(signature, 0) + 1
        if self.calls[signature] > EAGER_CALLS:
            if self.records:
                return self._record(signature, fn, args, leaves)
            if self._capture(signature, fn, args, leaves):
                return self.graphs[signature].replay(leaves)
        with self.precisely():
            return fn(*args)

    def forget(self) -> None:
        """Drop every graph, because tensors they hold were replaced."""
        for known in (self.graphs, self.calls, self.captured, self.results, self.owned):
            known.clear()

    def _describe(self, args: Sequence[Any], leaves: list[Tensor]) -> Any:
        """`describe`, which for the results of a graph was done when it was captured."""
        parts = []
        for arg in args:
            known = self.results.get(id(arg))
            if known is None:
                parts.append(describe(arg, leaves))
            else:
                leaves.extend(known.output_leaves)
                parts.append(known.description)
        return tuple(parts)

    def bucket(self, count: int, unit: int) -> int:
        """A count that varies, rounded up where every value would need a graph of its own.

        Eager runs on a GPU round too: libraries choose other kernels for other sizes, which differ in the last bit.
        """
        coarse = max(1, unit // 8)
        return -(-count // coarse) * coarse if self.device.type == "cuda" else count

    def _capture(self, signature: Any, fn: Callable[..., Any], args: Any, leaves: Sequence[Tensor]) -> bool:
        name = signature[0]
        self.captured[name] = self.captured.get(name, 0) + 1
        if self.captured[name] > MAX_GRAPHS:
            return self._give_up(name, f"its shapes changed more than {MAX_GRAPHS} times")
        try:
            with self.precisely():
                graph = Graph(fn, args, leaves, self.generators, self.owned)
        except Exception as error:
            torch.cuda.synchronize(self.device)
            return self._give_up(name, str(error).splitlines()[0] if str(error) else repr(error))
        self.graphs[signature] = graph
        self.results[id(graph.outputs)] = graph
        self.owned |= {leaf.data_ptr() for leaf in (*graph.inputs, *graph.output_leaves)}
        return True

    def _record(self, signature: Any, fn: Callable[..., T], args: Any, leaves: Sequence[Tensor]) -> T:
        """Run the function, and keep how, unless it cannot be repeated or its shapes change too often."""
        name = signature[0]
        self.captured[name] = self.captured.get(name, 0) + 1
        if self.captured[name] > MAX_GRAPHS:
            self.eager_only.add(name)
            return fn(*args)
        tape = Tape(fn, args, leaves, self.compiles)
        if tape.unfit and (self.execution == "auto" or tape.unfit == TOO_LONG):  # eager is fine too, if not as fast
            self.eager_only.add(name)
        elif tape.unfit:
            self._give_up(name, tape.unfit)
        else:
            self.graphs[signature] = tape
        return tape.take_result()

    def _give_up(self, name: str, reason: str) -> bool:
        self.eager_only.add(name)
        kind = "recorded" if self.records else "captured as a CUDA graph"
        warnings.warn(f"{name!r} cannot be {kind} ({reason}); it runs eagerly, slower", stacklevel=5)
        return False

    @contextmanager
    def precisely(self) -> Iterator[None]:
        """Matrix products in the chosen precision here, and in the user's elsewhere."""
        if self.device.type != "cuda":
            yield
            return
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest" if self.precision == "fp32" else "high")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    def autocast(self) -> Any:
        """Half-precision matrix products, where asked for."""
        if self.precision != "bf16" or self.device.type != "cuda":
            return nullcontext()
        return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)  # a cached cast would be frozen in a graph


class Compiled:
    """A pure function compiled at its first call; one that cannot be compiled runs as it is, with one message."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.compiled: Callable[..., Any] | None = torch.compile(fn, dynamic=False)

    def __call__(self, *args: Any) -> Any:
        """`fn(*args)`."""
        if self.compiled is not None:
            try:
                return self.compiled(*args)
            except Exception as error:
                result = self.fn(*args)  # an error of the function itself shows here, as itself
                self.compiled = None
                reason = str(error).splitlines()[0] if str(error) else repr(error)
                warnings.warn(f"{self.fn.__name__!r} cannot be compiled ({reason}); it runs uncompiled", stacklevel=3)
                return result
        return self.fn(*args)


class Graph:
    """One function captured for one set of shapes; inputs are copied into buffers of its own."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Any,
        leaves: Sequence[Tensor],
        generators: Sequence[torch.Generator],
        owned: set[int],
    ) -> None:
        with torch.inference_mode(False):  # what another graph returns is fixed already and needs no copy
            self.inputs = [leaf if leaf.data_ptr() in owned else leaf.detach().clone() for leaf in leaves]
        self.graph = torch.cuda.CUDAGraph()
        for generator in generators:
            self.graph.register_generator_state(generator)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self.outputs = fn(*rebuild(args, iter(self.inputs)))
        self.output_leaves: list[Tensor] = []
        self.description = describe(self.outputs, self.output_leaves)

    def replay(self, leaves: Sequence[Tensor]) -> Any:
        """Run the graph on these inputs."""
        for target, leaf in zip(self.inputs, leaves, strict=True):
            if target.data_ptr() != leaf.data_ptr():
                target.copy_(leaf)
        self.graph.replay()
        return self.outputs


def has_triton() -> bool:
    """Whether GPU kernels can be compiled here."""
    return importlib.util.find_spec("triton") is not None
