"""Recordings: a tensor function as a graph, made by running it once, for real, and replayed without its Python code.

With a small network most time is spent on the way to the kernels, not in them. A recording removes that overhead:

1. `Recorder`, a dispatch mode, sees every operation after autograd, those of a backward pass included, and adds each to
   an fx graph. Tensors and generators from outside the function become arguments, so a replay reads their values.
2. `recorded_graph.simplify` removes what a replay does not need.
3. `to_function` hands the graph to torch's C++ interpreter: the same kernels in the same order, hence the same numbers.

Python does not run in a replay. A function that reads tensor values, draws random numbers on the host or changes what
`host_state` tells cannot be replayed; whether another one may is decided by `Recording.compare`.
"""

import itertools
import operator
import random
import sysconfig
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor, fx
from torch.autograd.graph import increment_version
from torch.overrides import TorchFunctionMode

from canter.execution.cuda_graph import describe, rebuild
from canter.execution.recorded_graph import (
    SHAPE_ONLY,
    Memory,
    RecordedGraph,
    is_random,
    simplify,
    written_arguments,
)
from canter.execution.torch_private import TorchDispatchMode, address, no_function_modes, views_as_outside

aten = torch.ops.aten
MAX_OPERATIONS = 3000  # beyond this, making the recording costs more than it saves
MAX_COMPILED_OPERATIONS = 800  # a scan over the steps of a rollout is longer; compilers take minutes for it
PAYING_SECONDS = 100.0  # of replays that remain; compiling takes up to 40 s of processor time and saves a third of them
TOLERANCE = 1e-3  # of compiled kernels: the error of a tensor's norm
LARGE = 2**20  # elements; a larger buffer that is written by rows is not copied for a comparison
PLAIN = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
# Reads of values that dispatch no operation if the tensor is on a CPU.
READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__format__, Tensor.__repr__}
READS |= {Tensor.data_ptr, Tensor.__dlpack__}
READ_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Operations without such a tag whose result's shape, or whose error, depends on values.
UNTAGGED_READS = {
    "aten::is_nonzero",
    "aten::where",
    "aten::nonzero_numpy",
    "aten::repeat_interleave.self_Tensor",
    "aten::tensor_split.tensor_indices_or_sections",
    "aten::_nested_tensor_from_mask_left_aligned",
    "aten::_linalg_check_errors",
    "aten::linalg_cholesky",
    "aten::linalg_inv",
    "aten::linalg_solve",
    "aten::linalg_eig",
    "aten::inverse",
}
LIBRARY_FOLDERS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), "<frozen", "<string")
STANDARD_FOLDER = sysconfig.get_paths()["stdlib"]


class Operation(NamedTuple):
    """An operation of a recorded run: its arguments without the values of tensors, and the line that called it."""

    func: Any
    args: tuple[Any, ...]
    line: str


class Writes(TorchDispatchMode):
    """Dispatch mode that keeps what a function overwrites, so that it can be undone, and the generators it draws from.

    A graph of the function on a GPU is compared in `written`; nothing is kept of tensors made inside the function.
    """

    supports_higher_order_operators = True  # otherwise torch.cond raises before it can be refused

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[Any, tuple[Tensor, Tensor]] = {}  # written tensors and their values before, by place
        self.made: set[int] = set()  # addresses of memory that the function allocated
        self.generators: dict[int, Generator] = {0: torch.default_generator}
        self.states = {0: torch.default_generator.get_state()}
        self.host = host_streams()
        self.not_replayable = ""

    @property
    def written(self) -> list[Tensor]:
        """Tensors from outside that the function wrote to."""
        return [tensor for tensor, _ in self.kept.values()]

    def refuse(self, reason: str) -> None:
        """Note why the function cannot be replayed; the first reason counts."""
        if not self.not_replayable:
            self.not_replayable = reason + calling_line()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not hasattr(func, "_schema"):  # an operator that takes functions
            self.refuse(f"torch.{func} is called")
            torch.compiler.reset()  # it compiles itself, in this mode another way than outside
            return func(*args, **kwargs)
        with no_function_modes():
            self.keep(func, args, kwargs)
            with views_as_outside(func):
                result = func(*args, **kwargs)
            self.note(func, args, kwargs, result)
        return result

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note the memory that an operation allocated."""
        given = {memory(tensor) for tensor in tensors_in((args, kwargs))}
        self.made |= {memory(tensor) for tensor in tensors_in(result)} - given

    def keep(self, func: Any, args: Any, kwargs: Any) -> None:
        """Keep what an operation overwrites, and the states of its generators."""
        for index, part in enumerate(func._schema.arguments):
            if part.alias_info is not None and part.alias_info.is_write:
                for tensor in tensors_in(args[index] if index < len(args) else kwargs.get(part.name)):
                    self.keep_tensor(tensor)
        if "batch_norm" in func.name():
            for tensor in tensors_in(args[3:5]):
                self.keep_tensor(tensor)
        for value in (*args, *kwargs.values()) if is_random(func) else ():
            name = getattr(value, "_cdata", 0)  # each dispatch wraps a generator anew
            if isinstance(value, Generator) and name not in self.generators:
                self.generators[name], self.states[name] = value, value.get_state()

    def keep_tensor(self, tensor: Tensor) -> None:
        """Keep a tensor's values, unless they are kept or the function made it."""
        if is_plain(tensor) and memory(tensor) not in self.made:
            place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if place not in self.kept:
                self.kept[place] = (tensor.detach(), tensor.detach().clone())

    def undo(self) -> None:
        """Put back what was overwritten and drawn."""
        pairs = [*self.kept.values()]
        put_values([tensor for tensor, _ in pairs], [value for _, value in pairs])
        for name, state in self.states.items():
            self.generators[name].set_state(state)
        set_host_streams(self.host)


class Reads(TorchFunctionMode):
    """Function mode that notes reads of values that dispatch no operation."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            self.note(f"Tensor.{func.__name__} reads values on the host")
        return func(*args, **(kwargs or {}))


class Recorder(Writes):
    """Dispatch mode that adds every operation to a graph.

    Args:
        leaves: Tensors among the function's arguments; the function gets `inputs`, which share their memory.
        has_lines: Whether to note the line that called each operation, which takes time.
    """

    def __init__(self, leaves: Sequence[Tensor], has_lines: bool = False) -> None:
        super().__init__()
        # Distinct objects: two arguments may be one tensor in this call only.
        self.inputs = [leaf.detach() for leaf in leaves]
        self.recorded, self.has_lines = RecordedGraph(self.inputs), has_lines
        self.operations: list[Operation] = []
        self.places: list[tuple[Tensor, int]] = [(leaf, address(leaf)) for leaf in self.inputs]
        """Tensors from outside, and their addresses when they were first used."""
        # Nodes by the id of the value that they stand for; `values` keeps these alive, so that no id is used twice.
        self.nodes: dict[int, fx.Node] = dict(zip(map(id, self.inputs), self.recorded.inputs, strict=True))
        self.values: list[Any] = list(self.inputs)

    def keep(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note an operation that reads values, before its error can be caught."""
        super().keep(func, args, kwargs)
        if reads_values(func, args):
            self.refuse(f"{func.name()} reads values on the host")

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add an operation to the graph, or note why it cannot be replayed."""
        super().note(func, args, kwargs, result)
        if self.not_replayable or func.namespace == "profiler":
            return
        if not all(map(is_plain, tensors_in((args, kwargs, result)))):
            self.refuse(f"{func} has a sparse, nested or wrapped tensor")
        elif len(self.operations) == MAX_OPERATIONS:
            self.not_replayable = "it is too long"
        else:
            self.add(func, args, kwargs, result)

    def add(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add an operation and its results to the graph."""
        line = calling_line() if self.has_lines else ""
        is_literal = func is aten.lift_fresh.default  # torch.tensor(0.0): new in every call, and may be written to
        shown = result.reshape(-1)[:4].tolist() if is_literal else (args, *kwargs.items())
        self.operations.append(Operation(func, self.described(shown), line))
        if is_literal:
            func, args = aten.clone.default, (result.clone(),)
        options = {name: self.node_of(value) for name, value in kwargs.items()}
        node = self.recorded.graph.call_function(func, self.node_of(args), options)
        if isinstance(result, Tensor):
            node.meta["kind"] = (result.dtype, result.shape)
            if args and isinstance(args[0], Tensor):  # contiguous() and reshape() copy some arguments and not others
                node.meta["copies"] = memory(result) != memory(args[0])
                node.meta["keeps_shape"] = result.shape == args[0].shape
            if func in SHAPE_ONLY or is_literal:
                node.meta["value"] = result
            if id(result) not in self.nodes:  # an in-place operation returns a tensor that has a node already
                self.remember(result, node)
        elif isinstance(result, tuple | list):
            for i, part in enumerate(result):
                if isinstance(part, Tensor) and id(part) not in self.nodes:
                    self.remember(part, self.recorded.graph.call_function(operator.getitem, (node, i)))

    def node_of(self, value: Any) -> Any:
        """The node of a value; containers are mapped item by item, plain Python values are returned unchanged."""
        if isinstance(value, PLAIN):
            return value
        if isinstance(value, tuple | list):
            return type(value)([self.node_of(part) for part in value])
        if id(value) in self.nodes:
            return self.nodes[id(value)]
        if isinstance(value, Tensor):
            self.places.append((value, address(value)))
        return self.remember(value, self.recorded.add_outside(value))

    def remember(self, value: Any, node: fx.Node) -> fx.Node:
        """Note the node of a value."""
        self.nodes[id(value)] = node
        self.values.append(value)
        return node

    def described(self, value: Any) -> Any:
        """What tells an operation's arguments from those of another run: numbers, and tensors from outside."""
        if isinstance(value, tuple | list):
            return tuple([self.described(part) for part in value])
        if isinstance(value, Tensor):
            node = self.nodes.get(id(value))
            return ("outside", address(value)) if node is None or node in self.recorded.outside else "tensor"
        return "generator" if isinstance(value, Generator) else repr(value)  # 1, 1.0 and True are equal

    def check(self, result: Any) -> None:
        """Note what the function did on the host that a replay would not do again."""
        found = ""
        if any(address(tensor) != place for tensor, place in self.places):
            found = "the data of a tensor was assigned"
        elif not all(map(is_plain, tensors_in(result))):
            found = "it returns a sparse, nested or wrapped tensor"
        elif self.host != host_streams():
            found = "it draws random numbers of Python or NumPy"
        self.not_replayable = self.not_replayable or found


class Recording:
    """One function recorded for one set of input shapes.

    Args:
        recorder: The mode in which the function ran.
        result: The function's result.
        compiles: Whether to compile the graph later.
    """

    def __init__(self, recorder: Recorder, result: Any, compiles: bool = False) -> None:
        self.grad_mode, self.operations, recorded = torch.is_grad_enabled(), recorder.operations, recorder.recorded
        self.calls = self.agreed_at = 0
        self.next_comparison = 0.0
        outputs: list[Tensor] = []
        describe(result, outputs)
        self.num_outputs, inplace = len(outputs), Memory(recorded)
        rows, indices = rows_written(recorded, inplace), []
        for node in rows:
            with recorded.graph.inserting_before(node):  # the index may be written to afterwards
                indices.append(recorded.graph.call_function(aten.clone.default, (node.args[2],)))
        recorded.graph.output((*(recorder.node_of(leaf) for leaf in outputs), *indices))
        self.template = rebuild(result, iter([torch.empty(0)] * len(outputs)))
        buffers: list[Any] = [node.args[0] for node in rows]
        by_rows = {inplace.base[buffer] for buffer in buffers}
        self.rows: list[Any] = [(recorded.outside[b], node.args[1]) for b, node in zip(buffers, rows, strict=True)]
        """Large buffers of which the graph writes rows, and the dimension; it returns the indices after its outputs."""
        self.outside = simplify(recorded)  # values of the graph's arguments before the inputs
        in_memory, arguments = Memory(recorded), recorded.graph.find_nodes(op="placeholder")
        count, is_written = len(self.outside), in_memory.is_written
        outside = zip(arguments[:count], self.outside, strict=True)
        written = [(node, value) for node, value in outside if isinstance(value, Tensor) and is_written(node)]
        self.versioned = [value for _, value in written if not value.is_inference()]
        self.compared = without_views([value for node, value in written if in_memory.base[node] not in by_rows])
        self.written_inputs = [place for place, node in enumerate(arguments[count:]) if is_written(node)]
        self.generators = [torch.default_generator, *(v for v in self.outside if isinstance(v, Generator))]
        self.run = self.uncompiled = to_function(recorded.graph)
        self.to_compile = recorded if compiles and len(self.operations) <= MAX_COMPILED_OPERATIONS else None
        self.compilation: Any = None
        self.seconds = 0.0
        """Time of all replays, where the recording may be compiled."""
        self.strides: list[Any] | None = None  # of the inputs that the compiled kernels were made for

    def replay(self, leaves: Sequence[Tensor]) -> Any:
        """Return the function's result for these inputs."""
        return rebuild(self.template, iter(self._run(leaves)))

    def _run(self, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
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
        if self.versioned or inputs:
            increment_version([*self.versioned, *inputs])
        return results

    def replay_timed(self, leaves: Sequence[Tensor], progress: float) -> Any:
        """Replay, and compile the graph beside the run if that pays in the rest of it."""
        begin = time.perf_counter()
        result = self.replay(leaves)
        self.seconds += time.perf_counter() - begin
        if self.to_compile is not None and self.seconds * (1.0 - progress) > PAYING_SECONDS * progress:
            self.compilation, self.to_compile = start_compiling(self.to_compile, (*self.outside, *leaves)), None
            self.compiled_strides = [leaf.stride() for leaf in leaves]
        elif self.compilation is not None and self.compilation.run is not None:
            self.run, self.compilation, self.strides = self.compilation.run, None, self.compiled_strides
            self.next_comparison = 0
        return result

    def discard_compiled(self) -> bool:
        """Replay uncompiled from now on; False if the graph is not compiled."""
        is_compiled, self.run = self.run is not self.uncompiled, self.uncompiled
        return is_compiled

    def change_since(self, old: "Recording") -> str:
        """The first operation that differs from another recording of the function."""
        return change(old.operations, self.operations)

    def compare(self, fn: Callable[[], Any], leaves: Sequence[Tensor]) -> tuple[Any, str]:
        """Replay, put everything back, and run the function: its result, and what the replay did differently."""
        indices: list[Tensor] = []

        def replay() -> Any:
            results = self._run(leaves)
            indices[:] = copies(results[self.num_outputs :])
            return rebuild(self.template, iter(results))

        def rows() -> list[Tensor]:
            parts = zip(self.rows, indices, strict=True) if indices else ()
            return [buffer.index_select(dim, index) for (buffer, dim), index in parts]

        written = [*self.compared, *(leaves[place] for place in self.written_inputs)]
        return run_both(replay, fn, written, self.generators, rows, 0.0 if self.run is self.uncompiled else TOLERANCE)


def run_both(
    replay: Callable[[], Any],
    fn: Callable[[], Any],
    written: Sequence[Tensor],
    generators: Sequence[Generator],
    rows: Callable[[], list[Tensor]] = list,
    tolerance: float = 0.0,
) -> tuple[Any, str]:
    """Replay a function, put back what it wrote and drew, and run it: its result, and what the replay did differently.

    `rows()` gives what was written to large buffers; it is not put back, because the function writes there again.
    """
    before, states = copies(written), [generator.get_state() for generator in generators]
    failure, replayed, structure, drawn = "", [], None, states
    try:
        structure = describe(replay(), replayed)
        replayed = copies([*replayed, *written, *rows()])
        drawn = [generator.get_state() for generator in generators]
    except Exception as error:
        failure = f"its replay fails ({first_line(error)})"
    put_values(written, before)
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
    result = fn()
    found: list[Tensor] = []
    if not failure and describe(result, found) != structure:
        failure = "it returns something else"
    failure = failure or first_difference(replayed, [*found, *written, *rows()], tolerance)
    if not failure and not all(map(torch.equal, [generator.get_state() for generator in generators], drawn)):
        failure = "it draws another number of random values"
    return result, failure


def run_noting(mode: Writes, fn: Callable[..., Any], args: Any) -> tuple[Any, Any]:
    """Run a function in a mode: its result, and the mode; or, if it cannot run in one, the reason why not."""
    try:
        with mode, Reads(mode.refuse) if isinstance(mode, Recorder) else nullcontext():
            return fn(*args), mode
    except Exception as error:  # the function's own errors are raised again
        mode.undo()
        reason = mode.not_replayable or f"{first_line(error)}{failing_line(error)}"
        return fn(*args), reason


def record(
    fn: Callable[..., Any], args: Any, leaves: Sequence[Tensor], compiles: bool = False, has_lines: bool = False
) -> tuple[Any, Recording | str]:
    """Run a function, and return its result with its recording, or with the reason why it cannot be replayed."""
    recorder = Recorder(leaves, has_lines)
    result, made = run_noting(recorder, fn, rebuild(args, iter(recorder.inputs)))
    if not isinstance(made, str):
        recorder.check(result)
    for leaf, used in zip(leaves, recorder.inputs, strict=True):
        if address(leaf) != address(used):  # its data was assigned
            leaf.data = used
    if isinstance(made, str) or recorder.not_replayable:
        return result, recorder.not_replayable or made
    return result, Recording(recorder, result, compiles)


def start_compiling(recorded: RecordedGraph, args: Sequence[Any]) -> Any:
    """Compile a recorded graph in a thread; None if this torch cannot."""
    try:
        from canter.execution.compile import Compilation  # private names
    except (ImportError, AttributeError) as error:
        problem = f"recordings cannot be compiled ({first_line(error)})"
        warnings.warn(f"{problem}; they are replayed uncompiled", stacklevel=3)
        return None
    return Compilation(recorded, args)


def to_function(graph: fx.Graph) -> Callable[..., Any]:
    """Convert the graph to a function of its arguments, run by torch's interpreter, or by Python without it."""
    try:
        from canter.execution.interpreter import to_interpreter  # private names

        return to_interpreter(graph)
    except (ImportError, AttributeError, RuntimeError, TypeError):
        return fx.GraphModule(torch.nn.Module(), graph).forward


def rows_written(recorded: RecordedGraph, memory: Memory) -> list[fx.Node]:
    """Operations that write rows of large buffers to which the graph writes in no other way."""
    found: dict[Any, list[fx.Node]] = {}
    for node in recorded.graph.nodes:
        for target in written_arguments(node) if node.op == "call_function" else ():
            found.setdefault(memory.base[target], []).append(node)

    def writes_rows(node: fx.Node) -> bool:
        buffer: Any = recorded.outside.get(node.args[0])  # pyright: ignore[reportArgumentType]
        return node.target is aten.index_copy_.default and isinstance(buffer, Tensor) and buffer.numel() >= LARGE

    return [node for nodes in found.values() if all(map(writes_rows, nodes)) for node in nodes]


def reads_values(func: Any, args: Any) -> bool:
    """Whether the host, or the shape of the result, depends on values of an operation's arguments."""
    name = func.name()
    if name == "aten::index.Tensor":  # tagged, although only masks make its shape depend on values
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if name in ("aten::index_put_", "aten::index_put", "aten::_index_put_impl_"):
        return False
    return name in UNTAGGED_READS or not READ_TAGS.isdisjoint(func.tags)


def host_streams() -> Any:
    """The states of Python's and NumPy's random streams."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), (kind, keys.tobytes(), *rest)  # pyright: ignore[reportAttributeAccessIssue]


def set_host_streams(streams: Any) -> None:
    """Continue Python's and NumPy's random streams from their states."""
    kind, keys, *rest = streams[1]
    random.setstate(streams[0])
    np.random.set_state((kind, np.frombuffer(keys, np.uint32), *rest))


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested containers."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict | tuple | list):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(part)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is dense and strided, so that it has an address."""
    return tensor.layout is torch.strided and not tensor.is_nested


def memory(tensor: Tensor) -> int:
    """Address of the memory that a tensor lies in; 0 if it has none."""
    return tensor.untyped_storage().data_ptr() if is_plain(tensor) else 0


def without_views(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors without those that are views of the memory that another fills."""
    whole = {memory(t): t for t in tensors if t.is_contiguous() and t.nbytes == t.untyped_storage().nbytes()}
    return [tensor for tensor in tensors if whole.get(memory(tensor), tensor) is tensor]


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors."""
    return [tensor.detach().clone() for tensor in tensors]


def put_values(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write values to tensors; of two tensors in one memory, the first has the last word."""
    for tensor, value in reversed(list(zip(tensors, values, strict=True))):
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.detach().copy_(value)


def first_difference(one: Sequence[Tensor], other: Sequence[Tensor], tolerance: float) -> str:
    """How much the first tensors differ that do not have the same values; "" if all have."""
    for a, b in zip(one, other, strict=True):
        if not same_values(a, b, tolerance):
            return f"its results differ by up to {float((a.double() - b.double()).abs().nan_to_num().max()):.3g}"
    return ""


def same_values(a: Tensor, b: Tensor, tolerance: float = 0.0) -> bool:
    """Whether two tensors have the same values, bit for bit, or with a relative error of their norm."""
    if torch.equal(a, b):
        return True
    if tolerance and a.is_floating_point():
        error, size = (a - b).double().nan_to_num().norm(), b.double().nan_to_num().norm()
        return bool(error <= tolerance * size + 1e-6 * b.numel() ** 0.5)
    return bool(((a == b) | ((a != a) & (b != b))).all())  # NaN equals NaN


def change(old: Sequence[Operation], new: Sequence[Operation]) -> str:
    """The first operation that differs between two runs of a function, with the line that called it."""
    for before, after in zip(old, new, strict=False):
        if before.func is not after.func:
            return f"{after.func} runs where {before.func} ran before{after.line}"
        if before.args != after.args:
            return f"the arguments of {after.func} change{changed_number(before.args, after.args)}{after.line}"
    if len(old) != len(new):
        longer = max(old, new, key=len)
        return f"{longer[min(len(old), len(new))].func} runs in one of two calls{new[-1].line if new else ''}"
    return "its operations are the same, their results are not"


def changed_number(old: Any, new: Any) -> str:
    """The first number that differs, such as " from 1.0 to 2.0"; "" if the first difference is another."""
    if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        if old[:1] == ("outside",) and new[:1] == ("outside",):
            return " to another tensor"
        return next((changed_number(a, b) for a, b in zip(old, new, strict=True) if a != b), "")
    return f" from {old} to {new}"


def first_line(error: Exception | str) -> str:
    """The first line of an error's message."""
    return next(iter((str(error) or repr(error)).splitlines()), "")


def is_user_file(name: str) -> bool:
    """Whether a file belongs neither to canter, nor to torch, nor to Python's standard library."""
    is_standard = name.startswith(STANDARD_FOLDER) and "site-packages" not in name
    return not is_standard and not name.startswith(LIBRARY_FOLDERS)


def calling_line() -> str:
    """The innermost line of the user's in the function that is recorded, such as " at FILE:LINE", or ""."""
    frames = traceback.StackSummary.extract(traceback.walk_stack(None), lookup_lines=False)
    inside = itertools.takewhile(lambda frame: (frame.filename, frame.name) != (__file__, run_noting.__name__), frames)
    return innermost(inside)


def failing_line(error: BaseException) -> str:
    """The innermost line of the user's that an exception went through."""
    return innermost(reversed(traceback.extract_tb(error.__traceback__)))


def innermost(frames: Iterable[traceback.FrameSummary]) -> str:
    """The first line that is the user's."""
    return next((f" at {frame.filename}:{frame.lineno}" for frame in frames if is_user_file(frame.filename)), "")
