"""The executor: runs pure tensor functions eagerly, as CUDA graphs, or on a CPU as recordings.

A function given to an `Executor` takes and returns tensors (nested in dicts and tuples), may write to tensors in place,
and has no other effect. It is captured as a CUDA graph (`cuda_graph.py`) or recorded (`record.py`), once for every
combination of input shapes, and later calls are replays.

Users' code runs inside these functions and may break the rule, so replays are judged by their results: in some calls a
function runs as it is, its replay runs too, and both must give the same. The first replay of a recording is always such
a comparison. Canter's own functions are compared in calls 1, 2, 4, 8, ..., and functions into which a user's code
enters in the first call of every period, which is an iteration, or 20 gradient steps. A replay that differs is recorded
anew. A function whose recordings do not last runs eagerly.
"""

import functools
import importlib.util
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from canter.execution.cuda_graph import Graph, describe

T = TypeVar("T")

EXECUTIONS = ("auto", "eager", "graph", "compile")
PRECISIONS = ("tf32", "fp32", "bf16")
WARM_UP_CALLS = 2  # before a GPU's first capture, so that libraries and compilers finish their warm-up
COMPILE_FROM = 1000  # iteration in which "auto" begins to compile: shorter runs do not wait for the compiler
MAX_GRAPHS = 32  # per function; if its shapes change more often than this, capture costs more than it saves
FEW_CALLS = 30  # of a recording, which costs about what so many replays save
MAX_SHORT_LIVED = 3  # recordings in a row that were used for fewer calls; then the function runs eagerly
MANY_RECORDINGS = 4  # of a function whose recordings last; it is worth a message


class Executor:
    """Runs functions eagerly, as CUDA graphs with compiled parts, or on a CPU as recordings.

    Args:
        device: Device of the tensors.
        execution: "eager", "graph" (capture or record, and compare the first replay only), "compile" (also compile), or
            "auto", the fastest available: a GPU's functions are captured at once and compiled in iteration 1000.
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
        self.is_trusted = execution == "graph"
        """Whether only the first replay of a recording is compared with the function."""
        self.has_user_code = not self.is_trusted
        """Whether functions are compared in every period, because a user's code enters them or runs between them."""
        self.error_of_ranks: Callable[[], Exception | None] | None = None
        """The error of a collective, where several ranks run the functions; None in a single process."""
        self.attributes: Callable[[], Mapping[tuple[str, int], Any]] = dict
        """Python values of the objects that functions read; a function that changes them cannot be replayed."""
        self.period_length = 1  # iterations
        self.progress = 0.0
        """Share of the run that is done; what is compiled must pay in the rest."""
        self.eager_only: dict[str, str] = {}  # names of functions that cannot be replayed, with the reason
        self.graphs: dict[Any, Any] = {}  # Graph or Recording by signature
        self.calls: Counter[Any] = Counter()  # without a graph, by signature
        self.compared_in: dict[str, int] = {}  # period of the last comparison, by name
        self.called_in: dict[str, int] = {}  # period of the last call that ran the function itself, by name
        self.recordings: Counter[str] = Counter()  # number of recordings, by name
        self.short_lived: Counter[str] = Counter()  # of these in a row, by name
        self.dropped: dict[str, Any] = {}  # the last recording that differed, by name
        self.reasons: dict[str, str] = {}  # what the last new recording did differently, by name
        self.period = self.iteration = 0
        self.past_iterations = 0  # before this run was continued from a checkpoint
        self.last_attributes: Mapping[tuple[str, int], Any] = {}
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
        if not self.replays or name in self.eager_only or (self.has_user_code and self.error_of_ranks):
            return self._run_in_precision(fn, *args) if self.is_cuda else fn(*args)
        leaves: list[Tensor] = []
        parts = []
        for arg in args:
            source = self.results.get(id(arg))  # results of a graph were described when it was captured
            if source is not None:
                leaves.extend(source.output_leaves)
            parts.append(describe(arg, leaves) if source is None else source.description)
        signature = (
            name,
            tuple(parts),
            self.constants_number,
            torch.is_inference_mode_enabled(),
            torch.is_grad_enabled(),
        )
        graph = self.graphs.get(signature)
        if graph is None:
            return self._run_without_graph(signature, fn, args, leaves)
        graph.calls += 1
        is_new_period = self.has_user_code and self.compared_in.get(name) != self.period
        if is_new_period or graph.calls >= graph.next_comparison:
            return self._compare(signature, graph, fn, args, leaves)
        return self._replay(graph, leaves)

    def _replay(self, graph: Any, leaves: list[Tensor]) -> Any:
        try:
            if self.records and self.compiles:
                return graph.replay_timed(leaves, self.progress)
            return graph.replay(leaves)
        except RuntimeError as error:  # what an operator of ours raises comes out of the interpreter as another error
            found = self.error_of_ranks and self.error_of_ranks()
            if found is None:
                raise
            raise found from error

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
        """Count an iteration; functions into which a user's code enters are compared anew in every period."""
        self.iteration += 1
        if self.uses_graphs and self.compiles and self.past_iterations + self.iteration == self.compile_from:
            self.forget()
        if self.replays and self.iteration % self.period_length == 0:
            self.period += 1
            self.notice_changes()

    def notice_changes(self) -> None:
        """Compare every function at once if the Python values that functions read have changed since the last call."""
        found = self.attributes() if self.replays else self.last_attributes
        if found != self.last_attributes:
            self.last_attributes = found
            for graph in self.graphs.values() if not self.is_trusted else ():
                graph.next_comparison = 0

    def expect_user_code(self, expected: bool) -> None:
        """Set whether a user's code enters the functions or runs between them."""
        self.has_user_code = expected and not self.is_trusted
        if self.has_user_code and self.error_of_ranks and self.replays:
            reason = "replays cannot be compared on several ranks"
            way_out = "if it changes nothing but tensors, set execution='graph'"
            warnings.warn(f"your own code runs eagerly, slower, because {reason}; {way_out}", stacklevel=3)

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

    def _run_without_graph(self, signature: Any, fn: Callable[..., T], args: Any, leaves: list[Tensor]) -> T:
        """Run a function that has no graph for these inputs yet, and make one if it is time."""
        name, period = signature[0], self.period
        self.calls[signature] += 1
        is_first = self.calls[signature] <= (WARM_UP_CALLS if self.uses_graphs else 1)  # what is made lazily is made
        if self.has_user_code and self.called_in.get(name) != period:
            is_first = True  # a function that runs once in a period would only be compared
        self.called_in[name] = period
        if is_first:
            return self._run_eagerly(fn, *args)
        if sum(known[0] == name for known in self.graphs) == MAX_GRAPHS:
            self._give_up(name, f"its shapes or settings changed more than {MAX_GRAPHS} times")
            return self._run_eagerly(fn, *args)
        try:
            from canter.execution import record
        except (ImportError, AttributeError) as error:
            self.records = self.uses_graphs = self.replays = False
            lacking = f"torch {torch.__version__} lacks a private name that recordings need"
            warnings.warn(f"{lacking} ({error}); functions run eagerly, slower", stacklevel=3)
            return self._run_eagerly(fn, *args)
        before, dropped = self.attributes(), self.dropped.pop(name, None)
        if self.uses_graphs:
            with torch.compiler.set_stance("force_eager") if self.is_compiled else nullcontext():
                result, made = self._run_in_precision(Graph.prepare, fn, args, leaves)
        else:
            result, made = record.record(fn, args, leaves, self.execution == "compile", dropped is not None)
        if reason := made if isinstance(made, str) else self._changed(before):
            self._give_up(name, reason)
            return result
        self.graphs[signature] = made
        self.recordings[name] += 1
        if dropped is not None:
            self._explain(name, dropped, made)
        return result

    def _compare(self, signature: Any, graph: Any, fn: Callable[..., Any], args: Any, leaves: list[Tensor]) -> Any:
        """Return `fn(*args)`; the graph is dropped unless its replay gives the same."""
        name = signature[0]
        self.compared_in[name] = self.called_in[name] = self.period
        if isinstance(graph, Graph) and not self._capture(signature, graph, fn, args, leaves):
            return self._run_eagerly(fn, *args)
        if self.error_of_ranks:  # a comparison would repeat collectives that other ranks do not
            graph.next_comparison = math.inf
            return self._replay(graph, leaves)
        before = self.attributes()
        result, difference = graph.compare(functools.partial(self._run_eagerly, fn, *args), leaves)
        if changed := self._changed(before):
            self._give_up(name, changed)
        elif difference and not isinstance(graph, Graph) and graph.discard_compiled():
            warnings.warn(f"{name!r} is replayed uncompiled, because {difference} when it is compiled", stacklevel=3)
        elif difference:
            self._drop(name, graph, difference)
        else:
            graph.agreed_at = graph.calls
            graph.next_comparison = math.inf if self.is_trusted else 2 * graph.calls
        return result

    def _changed(self, before: Mapping[tuple[str, int], Any]) -> str:
        """Why a function cannot be replayed that changed Python values; "" if it did not."""
        after = self.attributes()
        if after == before:
            return ""
        name = next(name for name in (*before, *after) if before.get(name, self) != after.get(name, self))
        return f"it changes {name[0]}; a replay would not"

    def _drop(self, name: str, graph: Any, difference: str) -> None:
        """Drop the graphs of a function whose replay differs; it is recorded anew, or runs eagerly for good."""
        self.dropped[name] = graph
        self.short_lived[name] = self.short_lived[name] + 1 if graph.calls < FEW_CALLS else 0
        self._remove(name)
        if self.short_lived[name] == MAX_SHORT_LIVED:
            self._give_up(name, f"{self.reasons.get(name, difference)}{self._stale(graph)}")

    def _explain(self, name: str, old: Any, new: Any) -> None:
        """Find out why a function was recorded anew; say it if stale values may have been used, or if it goes on."""
        reason = self.reasons[name] = new.change_since(old)
        is_stale = self.period_length > 1 and graph_calls(old) > 0
        if is_stale or self.recordings[name] == MANY_RECORDINGS:
            how = f"was recorded anew, {self.recordings[name]} times by now," if not is_stale else "was recorded anew"
            warnings.warn(f"{name!r} {how} because {reason}{self._stale(old)}", stacklevel=4)

    def _stale(self, graph: Any) -> str:
        count = graph_calls(graph)
        return f"; up to {count} calls since the last comparison may have used what it was before" if count else ""

    def _capture(self, signature: Any, graph: Graph, fn: Callable[..., Any], args: Any, leaves: list[Tensor]) -> bool:
        """Capture a function at its first replay; False if it cannot be captured."""
        if graph.is_captured:
            return True
        states = [generator.get_state() for generator in self.generators]
        try:
            self._run_in_precision(graph.capture, fn, args, leaves, self.generators, self.owned)
        except Exception as error:
            from canter.execution.record import failing_line, first_line

            torch.cuda.synchronize(self.device)
            for generator, state in zip(self.generators, states, strict=True):  # a failed capture leaves them unusable
                fresh = torch.Generator(self.device)
                fresh.set_state(state)
                generator.graphsafe_set_state(fresh.graphsafe_get_state())
            self._give_up(signature[0], first_line(error) + failing_line(error))
            return False
        self.results[id(graph.outputs)] = graph
        self.owned |= {leaf.data_ptr() for leaf in (*graph.inputs, *graph.output_leaves)}
        return True

    def _remove(self, name: str) -> None:
        """Remove a function's graphs; everything if there are CUDA graphs: they share memory."""
        if self.uses_graphs:
            self.forget()
        for signature in [known for known in self.graphs if known[0] == name]:
            del self.graphs[signature]

    def _give_up(self, name: str, reason: str) -> None:
        """Run a function eagerly from now on."""
        self._remove(name)
        self.eager_only[name] = reason
        kind = "recorded" if self.records else "captured as a CUDA graph"
        warnings.warn(f"{name!r} cannot be {kind} ({reason}); it runs eagerly, slower", stacklevel=4)


def graph_calls(graph: Any) -> int:
    """Replays of a graph since its last comparison that agreed."""
    return graph.calls - graph.agreed_at - 1


@functools.cache
def cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 matrices itself; others compute them slower than float32."""
    found: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any("bf16" in name and bool(value) for name, value in found.items())


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
