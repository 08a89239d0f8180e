"""A tape's operations as a few compiled kernels, with what compilers do not know kept around them."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from canter.utils.tape_graph import Memory, Notes, is_random, is_view, straight, targets
from canter.utils.tape_rewrite import last_pass, rewrite

aten = torch.ops.aten
# A signature has been compared already; between small kernels even the generated Python takes its time; and a pool of
# compilers, begun when their module is imported, takes longer to start than these graphs to compile.
LEAN = {"size_asserts": False, "alignment_asserts": False, "cpp_wrapper": True, "compile_threads": 1}
COMPILED_WRITES = {
    aten.copy_.default, aten.index_copy_.default, aten.add_.Tensor, aten.mul_.Tensor, aten.__ior__.Tensor,
}  # fmt: skip


def compiled(notes: Notes, args: Sequence[Any]) -> Callable[..., Any]:
    """The graph in three parts: random draws, arithmetic as compiled kernels, and what is left.

    Compilers do not know torch's generators, and guard against every alias of what is written: writes to memory that
    goes by several names are left to the end. Of the rest they make a few loops.
    """
    rewrite(notes)
    parts, results = split(notes)
    base = Memory(notes).base
    is_apart = all(base[node] is node for node in results if parts[node] == 1)
    graphs = [take_part(notes.graph, parts, results, part) for part in range(3)]
    draw, write = straight(graphs[0]), straight(graphs[2])
    with torch.inference_mode(False), torch.no_grad():
        like = [example(value) if isinstance(value, Tensor) and value.is_inference() else value for value in args]
        states = [(value, value.get_state()) for value in args if isinstance(value, torch.Generator)]
        used = drop_unused(graphs[1])
        examples = [*like, *draw(*like)]
        kernels = compile_graph(graphs[1], [examples[i] for i in used], is_apart)
        for generator, before in states:  # these draws were examples
            generator.set_state(before)

    def run(*args: Any) -> Any:
        known = (*args, *draw(*args))
        return write(*known, *kernels([known[i] for i in used]))

    return run


def example(value: Tensor) -> Tensor:
    """A copy that lies in memory as the tensor does; one that goes over the same memory twice is only like it."""
    copy = value.clone()
    if copy.stride() == value.stride():
        return copy
    extent = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.new_zeros(extent).as_strided(value.shape, value.stride())


def compile_graph(graph: fx.Graph, examples: list[Any], is_apart: bool) -> Callable[[list[Any]], Any]:
    """Kernels for a graph, which take a list of its arguments.

    They are called directly where the compiler has left nothing to do around them (no argument or result was added,
    and every result has memory of its own): for small networks its wrappers take longer than the kernels.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    with config.patch(LEAN):
        from torch._inductor import compile_fx  # a second to import, for those who compile alone

    found: list[tuple[bool, Any]] = []
    shape = count_ends(graph)

    def inner(module: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        is_whole = count_ends(module.graph) == shape
        made = compile_fx.compile_fx_inner(module, inputs, **options)
        found.append((is_whole, getattr(made, "current_callable", None)))
        return made

    module = fx.GraphModule(torch.nn.Module(), graph)
    options = {**LEAN, "post_grad_custom_post_pass": last_pass()}
    with functorch_config.patch(enable_autograd_cache=False):  # which would not call `inner`
        wrapped: Any = compile_fx.compile_fx(module, examples, inner_compile=inner, config_patches=options)
    if is_apart and len(found) == 1 and found[0][0] and found[0][1] is not None:
        return found[0][1]
    return lambda args: wrapped(*args)


def count_ends(graph: fx.Graph) -> tuple[int, int]:
    """How many arguments a graph takes and how many results it has."""
    nodes = list(graph.nodes)
    results: Any = nodes[-1].args[0]
    return sum(node.op == "placeholder" for node in nodes), len(results)


def drop_unused(graph: fx.Graph) -> list[int]:
    """Take away the arguments that no operation reads; the places of those that stay."""
    given = [node for node in graph.nodes if node.op == "placeholder"]
    used = [i for i, node in enumerate(given) if node.users]
    for node in given:
        if not node.users:
            graph.erase_node(node)
    return used


def split(notes: Notes) -> tuple[dict[fx.Node, int], list[fx.Node]]:
    """Part 0, 1 or 2 (see `compiled`) of every operation, and the results that a later part reads."""
    memory = Memory(notes)
    names = Counter(memory.base[node] for node in notes.graph.nodes if node.op == "placeholder" and node.users)
    parts: dict[fx.Node, int] = {}
    written: set[Any] = set()  # memory from outside that has been written to so far
    last: set[Any] = set()  # memory from outside, and random streams, that the last part has to do with
    for node in notes.graph.nodes:
        if node.op != "call_function":
            continue
        least = max([parts[source] for source in node.all_input_nodes if source in parts], default=0)
        goes_out = {memory.base[target] for target in targets(node) if not isinstance(memory.base[target], fx.Node)}
        touched = {memory.base[source] for source in node.all_input_nodes}
        is_simple = node.target in COMPILED_WRITES and all(names[base] == 1 for base in goes_out)
        if least == 2 or last & touched or (goes_out and not is_simple):
            parts[node] = 2
            last |= {base for base in touched if not isinstance(base, fx.Node)}
        elif is_random(node.target):
            parts[node] = 0 if least == 0 and not written & touched else 2
        elif node.target is aten.empty.memory_format:
            parts[node] = 0  # to be filled by a draw
        else:
            parts[node] = least if node.target is operator.getitem else max(least, 1)
        written |= goes_out
        if parts[node] == 2 and is_random(node.target):  # streams are drawn from in the order of the function
            last |= {source for source in node.all_input_nodes if source in notes.held}
    # What only the last part looks at from another side is turned there: kernels that return views are slow to call.
    for node in reversed(list(parts)):
        if parts[node] == 1 and is_view(node) and not memory.is_written(node):
            parts[node] = min([parts.get(user, 2) for user in node.users], default=1)
    later = {node: [2 if user.op == "output" else parts[user] for user in node.users] for node in parts}
    return parts, [node for node, users in later.items() if users and max(users) > parts[node]]


def take_part(graph: fx.Graph, parts: dict[fx.Node, int], results: Sequence[fx.Node], part: int) -> fx.Graph:
    """One part as a graph of its own: it takes the arguments of all and the results of the parts before."""
    made = fx.Graph()
    before = [node for earlier in range(part) for node in results if parts[node] == earlier]
    given = [node for node in graph.nodes if node.op == "placeholder"] + before
    copies = {node: made.placeholder(node.name) for node in given}
    for node in graph.nodes:
        if parts.get(node) == part or (node.op == "output" and part == 2):
            copies[node] = made.node_copy(node, copies.__getitem__)
    if part < 2:
        made.output(tuple(copies[node] for node in results if parts[node] == part))
    return made
