"""Compile a recording: its arithmetic becomes a few kernels, made by torch's compiler (Inductor).

It is done in a thread beside the run, and only if the rest of the run is long enough to pay for it. Inductor does not
know torch's generators, and guards against every alias of memory that is written to. The graph is therefore rewritten,
library calls becoming elementwise operations, which can be fused into loops, and split into three parts, which run one
after the other: random draws and other operations that come first, arithmetic, which is compiled, and the rest, which
is split again. SAC's step becomes the critics' arithmetic, the write to their weights, the actor's arithmetic, and the
write to its weights.
"""

import itertools
import operator
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, fx

from canter.execution.record import LARGE, first_line, to_function
from canter.execution.recorded_graph import Memory, RecordedGraph, is_random, is_view, written_arguments
from canter.execution.torch_private import inductor, inductor_pass

aten = torch.ops.aten
BEFORE, ARITHMETIC, REST = range(3)
FEWEST = 8  # operations of arithmetic after the first that are worth a compilation of their own
LONG_LOOP = 1024  # elements; in shorter loops a scalar computed beforehand saves nothing
ADAMS = {aten._fused_adam_.tensor_lr, aten._fused_adamw_.tensor_lr}
FOREACH = {
    aten._foreach_add_.Scalar: aten.add.Tensor,
    aten._foreach_add_.List: aten.add.Tensor,
    aten._foreach_sub_.Scalar: aten.sub.Tensor,
    aten._foreach_sub_.List: aten.sub.Tensor,
    aten._foreach_mul_.Scalar: aten.mul.Tensor,
    aten._foreach_mul_.List: aten.mul.Tensor,
}
COMPILED_WRITES = {
    aten.copy_.default,
    aten.index_copy_.default,
    aten.add_.Tensor,
    aten.mul_.Tensor,
    aten.__ior__.Tensor,
}
# The executor compares shapes and strides already, so no asserts; a C++ wrapper, because between small kernels even the
# generated Python takes time; one thread, because a pool of compilers takes longer to start than these graphs need.
INDUCTOR_OPTIONS = {"size_asserts": False, "alignment_asserts": False, "cpp_wrapper": True, "compile_threads": 1}


LOCK = threading.Lock()  # the compiler's settings are global


class Compilation:
    """A recorded graph that is compiled in a thread; `run` is the compiled function once it is done."""

    def __init__(self, recorded: RecordedGraph, args: Sequence[Any]) -> None:
        self.run: Callable[..., Any] | None = None
        self.recorded, self.args = recorded, [private_copy(arg) for arg in args]
        self.thread = threading.Thread(target=self._compile, name="canter compiler", daemon=True)
        self.thread.start()

    def _compile(self) -> None:
        with LOCK, torch.no_grad():
            try:
                self.run = compile_recording(self.recorded, self.args)
            except Exception as error:
                warn_uncompiled(error)
        self.args = []


def private_copy(value: Any) -> Any:
    """A copy of an argument that a thread may write to; of large buffers only the shape, because copies take memory."""
    if isinstance(value, Generator):
        made = Generator(value.device)
        made.set_state(value.get_state())
        return made
    if not isinstance(value, Tensor):
        return value
    with torch.inference_mode(False):
        return value.new_zeros(value.shape) if value.numel() >= LARGE else example(value)


def compile_recording(recorded: RecordedGraph, args: Sequence[Any], fewest: int = 1) -> Callable[..., Any]:
    """Turn a recorded graph into a function of the same arguments with compiled arithmetic; `args` are examples.

    Arithmetic of less than `fewest` operations stays uncompiled.
    """
    decompose(recorded)
    parts, results = split(recorded)
    if sum(part == ARITHMETIC for part in parts.values()) < fewest:
        return to_function(recorded.graph)
    base = Memory(recorded).base
    is_alias_free = all(base[node] is node for node in results if parts[node] == ARITHMETIC)
    graphs = [take_part(recorded.graph, parts, results, part) for part in (BEFORE, ARITHMETIC, REST)]
    rest = later_graph(recorded, base, graphs[REST], [node for node in results if parts[node] != REST])
    before, arithmetic = to_function(graphs[BEFORE]), graphs[ARITHMETIC]
    arguments = arithmetic.find_nodes(op="placeholder")
    used = [i for i, node in enumerate(arguments) if node.users]
    for node in [node for node in arguments if not node.users]:
        arithmetic.erase_node(node)
    known = (*args, *before(*args))
    kernels = compiled_or_not(arithmetic, [known[i] for i in used], is_alias_free)
    finish = compile_recording(rest, (*known, *kernels([known[i] for i in used])), FEWEST)

    def run(*args: Any) -> Any:
        known = (*args, *before(*args))
        return finish(*known, *kernels([known[i] for i in used]))

    return run


def compiled_or_not(graph: fx.Graph, values: list[Any], is_alias_free: bool) -> Callable[[list[Any]], Any]:
    """Compile a graph, with `values` as examples; if it cannot be compiled, it runs uncompiled, with one warning."""
    plain = to_function(graph)
    try:
        with torch.inference_mode(False), torch.no_grad():
            return compile_graph(graph, values, is_alias_free)
    except Exception as error:
        warn_uncompiled(error)
        return lambda values: plain(*values)


def warn_uncompiled(error: Exception) -> None:
    """Warn that a recording, or a part of it, is replayed uncompiled."""
    warnings.warn(f"a recording cannot be compiled ({first_line(error)}); it is replayed uncompiled", stacklevel=2)


def later_graph(
    recorded: RecordedGraph, base: Mapping[fx.Node, Any], graph: fx.Graph, results: Sequence[fx.Node]
) -> RecordedGraph:
    """The graph of the last part, whose arguments are those of the whole and the results of the earlier parts."""
    made = RecordedGraph([])
    made.graph = graph
    before = (*recorded.graph.find_nodes(op="placeholder"), *results)
    for node, argument in zip(before, graph.find_nodes(op="placeholder"), strict=True):
        made.storages[argument] = ("memory", base[node])  # no node: it is outside of this graph
        if node in recorded.outside:
            made.outside[argument] = recorded.outside[node]
        else:
            made.inputs.append(argument)
    return made


def decompose(recorded: RecordedGraph) -> None:
    """Replace library calls, which Inductor cannot fuse, by elementwise operations."""
    merge_copies(recorded)
    decompose_foreach(recorded.graph)
    for node in [node for node in recorded.graph.nodes if node.target in ADAMS]:
        # The part that is not compiled must not touch memory that the step reads, before the step.
        parts, base = split(recorded)[0], Memory(recorded).base
        before = itertools.takewhile(lambda other, node=node: other is not node, recorded.graph.nodes)
        rest = [other for other in before if parts.get(other) == REST]
        touched = {base[source] for other in rest for source in (other, *other.all_input_nodes)}
        needs_rest = not touched.isdisjoint(base[source] for source in node.all_input_nodes)
        if not (needs_rest or node.kwargs["amsgrad"] or node.kwargs.get("grad_scale")):
            decompose_adam(recorded, node)


def split(recorded: RecordedGraph) -> tuple[dict[fx.Node, int], list[fx.Node]]:
    """Assign every operation to a part; also returns the results that a later part reads."""
    memory = Memory(recorded)
    names = Counter(memory.base[node] for node in recorded.graph.nodes if node.op == "placeholder" and node.users)
    parts: dict[fx.Node, int] = {}
    used_later: set[Any] = set()  # memory and generators that arithmetic or the rest have used so far
    used_by_rest: set[Any] = set()  # outside memory and generators that the rest has used so far
    for node in [node for node in recorded.graph.nodes if node.op == "call_function"]:
        earliest = max([parts[source] for source in node.all_input_nodes if source in parts], default=BEFORE)
        bases = [memory.base[target] for target in written_arguments(node)]
        writes = {base for base in bases if not isinstance(base, fx.Node)}
        touched = {memory.base[source] for source in node.all_input_nodes}
        is_simple = node.target in COMPILED_WRITES and all(names[base] == 1 for base in writes)
        cannot_compile = is_random(node.target) or bool(writes and not is_simple)
        is_apart = cannot_compile or node.target is aten.empty.memory_format  # which a draw fills
        if is_apart and earliest == BEFORE and not used_later & touched:
            parts[node] = BEFORE
        elif cannot_compile or earliest == REST or used_by_rest & touched:
            parts[node] = REST
        else:
            parts[node] = earliest if node.target is operator.getitem else max(earliest, ARITHMETIC)
        if parts[node] != BEFORE:
            used_later |= touched
        if parts[node] == REST:
            used_by_rest |= {base for base in touched if not isinstance(base, fx.Node) or base in recorded.outside}
    # A view that only the rest reads is taken there: compiled kernels that return views are slow to call.
    for node in reversed(list(parts)):
        if parts[node] == ARITHMETIC and is_view(node) and not memory.is_written(node):
            parts[node] = min([parts.get(user, REST) for user in node.users], default=ARITHMETIC)
    readers = {node: [REST if user.op == "output" else parts[user] for user in node.users] for node in parts}
    return parts, [node for node, users in readers.items() if users and max(users) > parts[node]]


def take_part(graph: fx.Graph, parts: dict[fx.Node, int], results: Sequence[fx.Node], part: int) -> fx.Graph:
    """Copy one part into a graph whose arguments are those of the whole and the results of the earlier parts."""
    made = fx.Graph()
    before = [node for earlier in range(part) for node in results if parts[node] == earlier]
    copies = {node: made.placeholder(node.name) for node in (*graph.find_nodes(op="placeholder"), *before)}
    for node in graph.nodes:
        if parts.get(node) == part or (node.op == "output" and part == REST):
            copies[node] = made.node_copy(node, copies.__getitem__)
    if part != REST:
        made.output(tuple(copies[node] for node in results if parts[node] == part))
    return made


def example(value: Tensor) -> Tensor:
    """A copy with the same strides; of a tensor with overlapping memory only the layout is copied."""
    copy = value.clone()
    if copy.stride() == value.stride():
        return copy
    extent = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.new_zeros(extent).as_strided(value.shape, value.stride())


def compile_graph(graph: fx.Graph, examples: list[Any], is_alias_free: bool) -> Callable[[list[Any]], Any]:
    """Compile a graph into a function that takes a list of its arguments."""
    found: list[tuple[bool, Any]] = []

    def sizes(graph: fx.Graph) -> tuple[int, int]:
        results: Any = graph.output_node().args[0]
        return len(graph.find_nodes(op="placeholder")), len(results)

    def inner(module: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        is_whole = sizes(module.graph) == expected
        made = compiler.compile_fx_inner(module, inputs, **options)
        found.append((is_whole, getattr(made, "current_callable", None)))
        return made

    expected, module = sizes(graph), fx.GraphModule(torch.nn.Module(), graph)
    options = {**INDUCTOR_OPTIONS, "post_grad_custom_post_pass": inductor_pass(final_pass, __file__)}
    with inductor(**INDUCTOR_OPTIONS) as compiler:
        wrapped: Any = compiler.compile_fx(module, examples, inner_compile=inner, config_patches=options)
    # Without Inductor's wrappers, which take longer than small kernels, if no argument, result or alias needs them.
    if is_alias_free and len(found) == 1 and found[0][0] and found[0][1] is not None:
        return found[0][1]
    return lambda args: wrapped(*args)


def merge_copies(recorded: RecordedGraph) -> None:
    """Replace a list of copies that together fill a vector, such as gradients, by one copy, which can be compiled."""
    graph, outside = recorded.graph, recorded.outside
    vectors = [(node, value) for node, value in outside.items() if isinstance(value, Tensor) and value.dim() == 1]
    for node in [node for node in graph.nodes if node.target is aten._foreach_copy_.default]:
        pieces: Any = [outside.get(target) for target in node.args[0]]
        are_outside = all(isinstance(piece, Tensor) for piece in pieces)
        whole = next((place for place, vector in vectors if are_outside and fills(pieces, vector)), None)
        if whole is not None:
            with graph.inserting_before(node):
                rows = [graph.call_function(aten.reshape.default, (source, [-1])) for source in node.args[1]]
                graph.call_function(aten.copy_.default, (whole, graph.call_function(aten.cat.default, (rows,))))
            graph.erase_node(node)


def fills(pieces: Sequence[Tensor], whole: Tensor) -> bool:
    """Whether tensors lie one after the other in a contiguous vector and fill it."""
    *starts, end = itertools.accumulate([piece.numel() for piece in pieces], initial=whole.storage_offset())
    fits = [p.storage_offset() == at and p.is_contiguous() for p, at in zip(pieces, starts, strict=True)]
    kinds = {(p.dtype, p.untyped_storage().data_ptr()) for p in (whole, *pieces)}
    is_vector = whole.dim() == 1 and whole.is_contiguous() and end == whole.storage_offset() + whole.numel()
    return is_vector and all(fits) and len(kinds) == 1


def decompose_foreach(graph: fx.Graph) -> None:
    """Replace operations on lists of tensors by one operation per tensor."""
    for node in list(graph.nodes):
        if node.target not in FOREACH or node.kwargs:
            continue
        pieces: Any = node.args[0]
        others: Any = node.args[1] if isinstance(node.args[1], tuple | list) else [node.args[1]] * len(pieces)
        with graph.inserting_before(node):
            for piece, other in zip(pieces, others, strict=True):
                result = graph.call_function(FOREACH[node.target], (piece, other))
                graph.call_function(aten.copy_.default, (piece, result))
        graph.erase_node(node)


def decompose_adam(recorded: RecordedGraph, node: fx.Node) -> None:
    """Replace a fused step of Adam or AdamW, without amsgrad and grad_scale, by its arithmetic."""

    def call(func: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return recorded.graph.call_function(func, args, kwargs)

    options: Any = node.kwargs
    rate, beta1, beta2, decay = (options[name] for name in ("lr", "beta1", "beta2", "weight_decay"))
    params, grads, means, squares, _, steps = (list[Any](part) for part in node.args)  # pyright: ignore[reportArgumentType]
    with recorded.graph.inserting_before(node):
        for param, grad, mean, square, step in zip(params, grads, means, squares, steps, strict=True):
            slope = call(aten.neg.default, grad) if options["maximize"] else grad
            before, dtype = param, recorded.outside[param].dtype
            if decay and node.target is aten._fused_adamw_.tensor_lr:
                before = call(aten.mul.Tensor, param, call(aten.rsub.Scalar, call(aten.mul.Tensor, rate, decay), 1.0))
            elif decay:
                slope = call(aten.add.Tensor, slope, call(aten.mul.Tensor, param, decay))
            to_slope = call(aten.sub.Tensor, slope, mean)
            new_mean = call(aten.add.Tensor, mean, call(aten.mul.Tensor, to_slope, 1 - beta1))
            energy = call(aten.mul.Tensor, call(aten.mul.Tensor, slope, slope), 1 - beta2)
            new_square = call(aten.add.Tensor, call(aten.mul.Tensor, square, beta2), energy)
            # In float64, because 1 - 0.999 ** step has few digits left in float32.
            count = call(aten._to_copy.default, step, dtype=torch.float64)
            first, second = (call(aten.rsub.Scalar, call(aten.pow.Scalar, beta, count), 1.0) for beta in (beta1, beta2))
            stride = call(aten._to_copy.default, call(aten.div.Tensor, rate, first), dtype=dtype)
            root = call(aten._to_copy.default, call(aten.sqrt.default, second), dtype=dtype)
            spread = call(aten.div.Tensor, call(aten.sqrt.default, new_square), root)
            direction = call(aten.div.Tensor, new_mean, call(aten.add.Tensor, spread, options["eps"]))
            new_param = call(aten.sub.Tensor, before, call(aten.mul.Tensor, direction, stride))
            for target, value in ((param, new_param), (mean, new_mean), (square, new_square)):
                if (found_inf := options.get("found_inf")) is not None:
                    value = call(aten.where.self, call(aten.eq.Scalar, found_inf, 1.0), target, value)
                call(aten.copy_.default, target, value)
    recorded.graph.erase_node(node)


def final_pass(graph: fx.Graph) -> None:
    """The rewrites below, as Inductor's last pass; its own passes would undo earlier rewrites."""
    split_addmm(graph)
    tanh_as_sigmoid(graph)
    hoist_scalars(graph)


def split_addmm(graph: fx.Graph) -> None:
    """Move the addition of matrix products into the next loop; the library copies the summand first, which is slow."""
    for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
        if not node.kwargs:
            summand, left, right = node.args
            replace(node, left, (aten.mm.default, right), (aten.add.Tensor, summand))


def tanh_as_sigmoid(graph: fx.Graph) -> None:
    """Compute a tanh that feeds a matrix product as 2 sigmoid(2x) - 1: half the time, and an error of at most 2e-7."""
    for node in graph.find_nodes(op="call_function", target=aten.tanh.default):
        # Elsewhere the last digits of a tiny value could matter (in a quotient, for example).
        if any(user.target is aten.mm.default for user in node.users):
            double, minus_one = (aten.mul.Tensor, 2.0), (aten.sub.Tensor, 1.0)
            replace(node, node.args[0], double, (aten.sigmoid.default,), double, minus_one)


def replace(node: fx.Node, start: Any, *steps: tuple[Any, ...]) -> None:
    """Replace a node by a chain of operations, each given with the arguments after the result of the one before."""
    with node.graph.inserting_before(node):
        for func, *others in steps:
            start = node.graph.call_function(func, (start, *others))
            start.meta.update(node.meta)
    node.replace_all_uses_with(start)
    node.graph.erase_node(node)


def hoist_scalars(graph: fx.Graph) -> None:
    """Compute a scalar that a long loop reads before the loop; Inductor would compute it in every round."""
    for node in list(graph.nodes):
        if count(node) != 1 or torch.Tag.pointwise not in getattr(node.target, "tags", ()):
            continue
        if loops := [user for user in node.users if count(user) >= LONG_LOOP]:
            args = (node, list(node.meta["val"].shape), list(node.meta["val"].stride()))
            with graph.inserting_after(node):  # as_strided makes Inductor store its argument
                hoisted = graph.call_function(aten.as_strided.default, args)
            hoisted.meta.update(node.meta)
            for user in loops:
                user.replace_input_with(node, hoisted)


def count(node: fx.Node) -> int:
    """Number of elements of a node's result; 0 if it is no tensor."""
    value = node.meta.get("val")
    return value.numel() if isinstance(value, Tensor) else 0
