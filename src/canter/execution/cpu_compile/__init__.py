"""Compile a recording: its arithmetic becomes a few kernels, made by torch's compiler (Inductor).

Inductor does not know torch's generators, and guards against every alias of memory that is written to. The graph is
therefore rewritten (`rewrite.py`) and split into three parts, which run one after the other: random draws, arithmetic
(the only part that is compiled), and the rest.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from canter.execution.cpu_compile.rewrite import ADAMS, decompose_adam, decompose_foreach, final_pass, merge_copies
from canter.execution.simplify import Memory, RecordedGraph, is_random, is_view, to_python, written_arguments

aten = torch.ops.aten
DRAWS, ARITHMETIC, REST = range(3)
COMPILED_WRITES = {
    aten.copy_.default, aten.index_copy_.default, aten.add_.Tensor, aten.mul_.Tensor, aten.__ior__.Tensor,
}  # fmt: skip
# The executor compares shapes and strides already, so no asserts; a C++ wrapper, because between small kernels even the
# generated Python takes time; one thread, because a pool of compilers takes longer to start than these graphs need.
INDUCTOR_OPTIONS = {"size_asserts": False, "alignment_asserts": False, "cpp_wrapper": True, "compile_threads": 1}


def compile_recording(recorded: RecordedGraph, args: Sequence[Any]) -> Callable[..., Any]:
    """Compile a recorded graph, with `args` as examples, into a function of the same arguments."""
    decompose(recorded)
    parts, results = split(recorded)
    base = Memory(recorded).base
    is_alias_free = all(base[node] is node for node in results if parts[node] == ARITHMETIC)
    graphs = [take_part(recorded.graph, parts, results, part) for part in (DRAWS, ARITHMETIC, REST)]
    draw, finish = to_python(graphs[DRAWS]), to_python(graphs[REST])
    arguments = [node for node in graphs[ARITHMETIC].nodes if node.op == "placeholder"]
    used = [i for i, node in enumerate(arguments) if node.users]
    for node in arguments:
        if not node.users:
            graphs[ARITHMETIC].erase_node(node)
    with torch.inference_mode(False), torch.no_grad():
        like = [example(value) if isinstance(value, Tensor) and value.is_inference() else value for value in args]
        states = [(value, value.get_state()) for value in args if isinstance(value, torch.Generator)]
        examples = [*like, *draw(*like)]
        kernels = compile_graph(graphs[ARITHMETIC], [examples[i] for i in used], is_alias_free)
        for generator, before in states:  # undo the draws of the examples
            generator.set_state(before)

    def run(*args: Any) -> Any:
        known = (*args, *draw(*args))
        return finish(*known, *kernels([known[i] for i in used]))

    return run


def decompose(recorded: RecordedGraph) -> None:
    """Replace library calls, which Inductor cannot fuse, by elementwise operations."""
    merge_copies(recorded)
    decompose_foreach(recorded.graph)
    for node in [node for node in recorded.graph.nodes if node.target in ADAMS]:
        is_plain = not node.kwargs["amsgrad"] and node.kwargs.get("grad_scale") is None
        if is_plain and needs_only_compiled(recorded, node):
            decompose_adam(recorded, node)


def needs_only_compiled(recorded: RecordedGraph, node: fx.Node) -> bool:
    """Whether no memory that an operation reads is touched before it by the part that is not compiled."""
    parts, base = split(recorded)[0], Memory(recorded).base
    read = {base[source] for source in node.all_input_nodes}
    before = itertools.takewhile(lambda other: other is not node, recorded.graph.nodes)
    return not any(
        parts.get(other) == REST and (base[other] in read or read & {base[source] for source in other.all_input_nodes})
        for other in before
    )


def split(recorded: RecordedGraph) -> tuple[dict[fx.Node, int], list[fx.Node]]:
    """Assign every operation to a part; also returns the results that a later part reads."""
    memory = Memory(recorded)
    names = Counter(memory.base[node] for node in recorded.graph.nodes if node.op == "placeholder" and node.users)
    parts: dict[fx.Node, int] = {}
    written: set[Any] = set()  # outside memory that has been written to so far
    used_by_rest: set[Any] = set()  # outside memory and generators that the rest has used so far
    for node in recorded.graph.nodes:
        if node.op != "call_function":
            continue
        earliest = max([parts[source] for source in node.all_input_nodes if source in parts], default=DRAWS)
        bases = [memory.base[target] for target in written_arguments(node)]
        writes = {base for base in bases if not isinstance(base, fx.Node)}
        touched = {memory.base[source] for source in node.all_input_nodes}
        is_simple = node.target in COMPILED_WRITES and all(names[base] == 1 for base in writes)
        if earliest == REST or used_by_rest & touched or (writes and not is_simple):
            parts[node] = REST
            used_by_rest |= {base for base in touched if not isinstance(base, fx.Node)}
        elif is_random(node.target):
            parts[node] = DRAWS if earliest == DRAWS and not written & touched else REST
        elif node.target is aten.empty.memory_format:
            parts[node] = DRAWS  # a draw fills it
        else:
            parts[node] = earliest if node.target is operator.getitem else max(earliest, ARITHMETIC)
        written |= writes
        if parts[node] == REST and is_random(node.target):  # later draws from the same generator must follow this one
            used_by_rest |= {source for source in node.all_input_nodes if source in recorded.outside}
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
    given = [node for node in graph.nodes if node.op == "placeholder"] + before
    copies = {node: made.placeholder(node.name) for node in given}
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
    """Compile a graph into a function that takes a list of its arguments.

    For small networks Inductor's wrappers take longer than the kernels. If they have nothing to do (no argument or
    result was added, and every result has memory of its own), the kernels are called directly.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    with config.patch(INDUCTOR_OPTIONS):
        from torch._inductor import compile_fx

    found: list[tuple[bool, Any]] = []
    counts = count_arguments_and_results(graph)

    def inner(module: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        is_whole = count_arguments_and_results(module.graph) == counts
        made = compile_fx.compile_fx_inner(module, inputs, **options)
        found.append((is_whole, getattr(made, "current_callable", None)))
        return made

    module = fx.GraphModule(torch.nn.Module(), graph)
    options = {**INDUCTOR_OPTIONS, "post_grad_custom_post_pass": final_pass()}
    with functorch_config.patch(enable_autograd_cache=False):  # a cache hit would skip `inner`
        wrapped: Any = compile_fx.compile_fx(module, examples, inner_compile=inner, config_patches=options)
    if is_alias_free and len(found) == 1 and found[0][0] and found[0][1] is not None:
        return found[0][1]
    return lambda args: wrapped(*args)


def count_arguments_and_results(graph: fx.Graph) -> tuple[int, int]:
    """Numbers of a graph's arguments and results."""
    nodes = list(graph.nodes)
    results: Any = nodes[-1].args[0]
    return sum(node.op == "placeholder" for node in nodes), len(results)
