"""A tape's operations as a few compiled kernels, with what compilers do not know kept around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from canter.utils.tape_graph import Memory, Notes, straight
from canter.utils.tape_parts import drop_unused, split, take_part
from canter.utils.tape_rewrite import last_pass, rewrite

# A signature has been compared already; between small kernels even the generated Python takes its time; and a pool of
# compilers, begun when their module is imported, takes longer to start than these graphs to compile.
LEAN = {"size_asserts": False, "alignment_asserts": False, "cpp_wrapper": True, "compile_threads": 1}


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
