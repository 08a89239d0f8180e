"""CUDA graphs of functions, and the flattening of nested arguments that graphs and recordings share."""

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Generator, Tensor


class Graph:
    """One function captured as a CUDA graph, for one set of input shapes.

    `prepare` runs the function and notes what it writes; `capture` executes no kernel, so it changes no parameter,
    statistic or random stream.
    """

    is_captured = False

    def __init__(self, written: Sequence[Tensor]) -> None:
        self.written = list(written)
        self.calls = self.agreed_at = 0
        self.next_comparison = 0.0

    @classmethod
    def prepare(cls, fn: Callable[..., Any], args: Any, leaves: Sequence[Tensor]) -> tuple[Any, "Graph | str"]:
        """Run a function; its result, and a graph to capture or the reason why there is none."""
        from canter.execution.record import Writes, memory, run_noting

        result, noted = run_noting(Writes(), fn, args)
        if isinstance(noted, str):
            return result, noted
        given = {memory(leaf) for leaf in leaves}
        if any(memory(tensor) in given for tensor in noted.written):  # a graph would write to its copy
            return result, "it writes to an argument"
        return result, cls(noted.written)

    def capture(
        self, fn: Callable[..., Any], args: Any, leaves: list[Tensor], generators: list[Generator], owned: set[int]
    ) -> None:
        """Capture the function.

        Inputs (`leaves`, the tensors in `args`) are copied into buffers of this graph, except those whose address is in
        `owned`: other graphs own them, and they never move. `generators` are those that `fn` may draw from.
        """
        with torch.inference_mode(False):
            self.inputs = [leaf if leaf.data_ptr() in owned else leaf.detach().clone() for leaf in leaves]
        self.generators = generators
        self.graph = torch.cuda.CUDAGraph()
        for generator in generators:
            self.graph.register_generator_state(generator)
        gc.collect()  # an autograd graph of an eager call that waits for the collector would break the capture
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self.outputs = fn(*rebuild(args, iter(self.inputs)))
        # When a capture begins, torch zeroes the offsets of random streams in the stream of the capture. On a busy GPU
        # this can come after the first replay has set them.
        torch.cuda.synchronize()
        self.output_leaves: list[Tensor] = []
        self.description = describe(self.outputs, self.output_leaves)
        self.is_captured = True

    def replay(self, leaves: Sequence[Tensor]) -> Any:
        """Run the graph on these inputs; the outputs are the same tensors in every replay."""
        for target, leaf in zip(self.inputs, leaves, strict=True):
            if target.data_ptr() != leaf.data_ptr():
                target.copy_(leaf)
        self.graph.replay()
        return self.outputs

    def compare(self, fn: Callable[[], Any], leaves: Sequence[Tensor]) -> tuple[Any, str]:
        """Replay, put everything back, and run the function: its result, and what the replay did differently.

        The result is in the tensors of the graph, which other graphs read without a copy.
        """
        from canter.execution.record import TOLERANCE, run_both

        result, difference = run_both(lambda: self.replay(leaves), fn, self.written, self.generators, list, TOLERANCE)
        found: list[Tensor] = []
        if describe(result, found) != self.description:
            return result, difference
        for target, value in zip(self.output_leaves, found, strict=True):
            target.copy_(value)
        return self.outputs, difference

    def change_since(self, old: "Graph") -> str:
        """What differs from another graph of the function: a graph on a GPU does not tell."""
        return "its results differ from those of its graph"


def describe(tree: Any, leaves: list[Tensor]) -> Any:
    """Hashable structure, shapes, types and strides of nested containers; appends their tensors to `leaves`."""
    if isinstance(tree, Tensor):
        leaves.append(tree)
        return tree.shape, tree.dtype, tree.stride()
    if tree is None:
        return None
    if isinstance(tree, dict):
        return tuple([(name, describe(part, leaves)) for name, part in tree.items()])
    if isinstance(tree, (tuple, list)):  # faster than a union, which is built anew in every call
        return (type(tree), *[describe(part, leaves) for part in tree])
    return tree


def rebuild(tree: Any, leaves: Iterator[Tensor]) -> Any:
    """The same containers with other tensors, taken in the order of `describe`."""
    if isinstance(tree, Tensor):
        return next(leaves)
    if isinstance(tree, dict):
        return {name: rebuild(part, leaves) for name, part in tree.items()}
    if isinstance(tree, (tuple, list)):
        parts = [rebuild(part, leaves) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree
