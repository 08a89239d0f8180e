"""Operations of a tape that are said otherwise, so that a compiler can make loops of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from canter.utils.tape_graph import Memory, Notes
from canter.utils.tape_parts import split

aten = torch.ops.aten
LONG = 1024  # numbers; a loop over fewer ends before it is worth preparing
ADAMS = {aten._fused_adam_.tensor_lr, aten._fused_adamw_.tensor_lr}
LISTS = {
    aten._foreach_add_.Scalar: aten.add.Tensor, aten._foreach_add_.List: aten.add.Tensor,
    aten._foreach_sub_.Scalar: aten.sub.Tensor, aten._foreach_sub_.List: aten.sub.Tensor,
    aten._foreach_mul_.Scalar: aten.mul.Tensor, aten._foreach_mul_.List: aten.mul.Tensor,
}  # fmt: skip


def rewrite(notes: Notes) -> None:
    """Spell out what compilers know only as a call into a library, where they get to see it."""
    join_copies(notes)
    for node in list(notes.graph.nodes):
        if node.target in LISTS and not node.kwargs:
            with notes.graph.inserting_before(node):
                spell_out_list(notes.graph, node)
    for node in [node for node in notes.graph.nodes if node.target in ADAMS]:
        is_plain = not node.kwargs["amsgrad"] and node.kwargs.get("grad_scale") is None
        if is_plain and comes_early(notes, node):
            with notes.graph.inserting_before(node):
                spell_out_adam(notes, node)


def comes_early(notes: Notes, node: fx.Node) -> bool:
    """Whether nothing that an operation reads waits for what is not compiled."""
    parts, base = split(notes)[0], Memory(notes).base
    read = {base[source] for source in node.all_input_nodes}
    before = itertools.takewhile(lambda other: other is not node, notes.graph.nodes)
    return not any(
        parts.get(other) == 2 and (base[other] in read or read & {base[source] for source in other.all_input_nodes})
        for other in before
    )


def spell_out_list(graph: fx.Graph, node: fx.Node) -> None:
    """One operation on many tensors as many operations."""
    func: Any = node.target
    pieces: Any = node.args[0]
    others: Any = node.args[1] if isinstance(node.args[1], tuple | list) else [node.args[1]] * len(pieces)
    for piece, other in zip(pieces, others, strict=True):
        graph.call_function(aten.copy_.default, (piece, graph.call_function(LISTS[func], (piece, other))))
    graph.erase_node(node)


def spell_out_adam(notes: Notes, node: fx.Node) -> None:
    """A fused step of Adam or AdamW as arithmetic."""

    def call(func: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return notes.graph.call_function(func, args, kwargs)

    options: Any = node.kwargs
    rate, beta1, beta2, decay = (options[name] for name in ("lr", "beta1", "beta2", "weight_decay"))
    found_inf = options.get("found_inf")
    params, grads, means, squares, _, steps = (list[Any](part) for part in node.args)  # pyright: ignore[reportArgumentType]
    for param, grad, mean, square, step in zip(params, grads, means, squares, steps, strict=True):
        slope = call(aten.neg.default, grad) if options["maximize"] else grad
        before, dtype = param, notes.held[param].dtype
        if decay and node.target is aten._fused_adamw_.tensor_lr:
            before = call(aten.mul.Tensor, param, call(aten.rsub.Scalar, call(aten.mul.Tensor, rate, decay), 1.0))
        elif decay:
            slope = call(aten.add.Tensor, slope, call(aten.mul.Tensor, param, decay))
        to_slope = call(aten.sub.Tensor, slope, mean)
        new_mean = call(aten.add.Tensor, mean, call(aten.mul.Tensor, to_slope, 1 - beta1))
        energy = call(aten.mul.Tensor, call(aten.mul.Tensor, slope, slope), 1 - beta2)
        new_square = call(aten.add.Tensor, call(aten.mul.Tensor, square, beta2), energy)
        # One minus a power of 0.999 has few digits left in single precision.
        count = call(aten._to_copy.default, step, dtype=torch.float64)
        first, second = (call(aten.rsub.Scalar, call(aten.pow.Scalar, beta, count), 1.0) for beta in (beta1, beta2))
        stride = call(aten._to_copy.default, call(aten.div.Tensor, rate, first), dtype=dtype)
        root = call(aten._to_copy.default, call(aten.sqrt.default, second), dtype=dtype)
        spread = call(aten.add.Tensor, call(aten.div.Tensor, call(aten.sqrt.default, new_square), root), options["eps"])
        move = call(aten.mul.Tensor, call(aten.div.Tensor, new_mean, spread), stride)
        changes = [(param, call(aten.sub.Tensor, before, move)), (mean, new_mean), (square, new_square)]
        for target, value in changes:
            if found_inf is not None:
                value = call(aten.where.self, call(aten.eq.Scalar, found_inf, 1.0), target, value)
            call(aten.copy_.default, target, value)
    notes.graph.erase_node(node)


def join_copies(notes: Notes) -> None:
    """Make one copy of many that fill a vector piece by piece, as gradients do, so that it can be compiled."""
    graph, places = notes.graph, notes.held.items()
    for node in [node for node in graph.nodes if node.target is aten._foreach_copy_.default]:
        pieces: Any = [notes.held.get(target) for target in node.args[0]]
        if not all(isinstance(piece, Tensor) for piece in pieces):
            continue
        whole = next((place for place, value in places if isinstance(value, Tensor) and tile(pieces, value)), None)
        if whole is not None:
            with graph.inserting_before(node):
                rows = [graph.call_function(aten.reshape.default, (source, [-1])) for source in node.args[1]]
                graph.call_function(aten.copy_.default, (whole, graph.call_function(aten.cat.default, (rows,))))
            graph.erase_node(node)


def tile(pieces: Sequence[Tensor], whole: Tensor) -> bool:
    """Whether tensors lie one after the other in a vector and fill it."""
    at = whole.storage_offset()
    for piece in pieces:
        if piece.storage_offset() != at or not piece.is_contiguous() or piece.dtype != whole.dtype:
            return False
        at += piece.numel()
    is_vector = whole.dim() == 1 and whole.is_contiguous() and at == whole.storage_offset() + whole.numel()
    return is_vector and pieces[0].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def last_pass() -> Callable[[fx.Graph], None]:
    """What the compiler is to change at the end of its own passes, which would undo it earlier."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class LastPass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            add_afterwards(graph)
            shorten_tanh(graph)
            keep_numbers(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,))

    return LastPass()


def add_afterwards(graph: fx.Graph) -> None:
    """Take the addition out of matrix products: it becomes part of the loop that comes next.

    A library copies the summand first, which for a small layer takes as long as the product.
    """
    for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
        if not node.kwargs:
            summand, left, right = node.args
            with graph.inserting_before(node):
                product = graph.call_function(aten.mm.default, (left, right))
                total = graph.call_function(aten.add.Tensor, (product, summand))
            product.meta.update(node.meta)
            total.meta.update(node.meta)
            node.replace_all_uses_with(total)
            graph.erase_node(node)


def shorten_tanh(graph: fx.Graph) -> None:
    """Compute the tanh that goes into a matrix product by a sigmoid: half the time, and 2e-7 at most beside it.

    Where its last digits matter, as those of a tiny number in a quotient would, it is left alone.
    """
    for node in graph.find_nodes(op="call_function", target=aten.tanh.default):
        if any(user.target is aten.mm.default for user in node.users):
            with graph.inserting_before(node):
                last = node.args[0]
                for func, *others in ((aten.mul.Tensor, 2.0), (aten.sigmoid.default,), (aten.mul.Tensor, 2.0),
                                      (aten.sub.Tensor, 1.0)):  # fmt: skip
                    last = graph.call_function(func, (last, *others))
                    last.meta.update(node.meta)
            node.replace_all_uses_with(last)
            graph.erase_node(node)


def keep_numbers(graph: fx.Graph) -> None:
    """Have a single number that a long loop reads computed before it, where compilers compute it in every round."""
    for node in list(graph.nodes):
        if count(node) != 1 or torch.Tag.pointwise not in getattr(node.target, "tags", ()):
            continue
        loops = [user for user in node.users if count(user) >= LONG]
        if loops:
            with graph.inserting_after(node):
                kept = graph.call_function(aten.as_strided.default, (node, *shape_of(node)))
            kept.meta.update(node.meta)
            for user in loops:
                user.replace_input_with(node, kept)


def count(node: fx.Node) -> int:
    """How many numbers a node's result has; 0 if it is no tensor."""
    value = node.meta.get("val")
    return value.numel() if isinstance(value, Tensor) else 0


def shape_of(node: fx.Node) -> tuple[list[int], list[int]]:
    """Sizes and strides of a node's result."""
    value = node.meta["val"]
    return list(value.shape), list(value.stride())
