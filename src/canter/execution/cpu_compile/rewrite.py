"""Graph rewrites for Inductor: library calls become elementwise operations, which it can fuse into loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from canter.execution.simplify import RecordedGraph

aten = torch.ops.aten
LONG_LOOP = 1024  # elements; in shorter loops a scalar computed beforehand saves nothing
ADAMS = {aten._fused_adam_.tensor_lr, aten._fused_adamw_.tensor_lr}
FOREACH = {
    aten._foreach_add_.Scalar: aten.add.Tensor, aten._foreach_add_.List: aten.add.Tensor,
    aten._foreach_sub_.Scalar: aten.sub.Tensor, aten._foreach_sub_.List: aten.sub.Tensor,
    aten._foreach_mul_.Scalar: aten.mul.Tensor, aten._foreach_mul_.List: aten.mul.Tensor,
}  # fmt: skip


def merge_copies(recorded: RecordedGraph) -> None:
    """Replace a list of copies that together fill a vector, such as gradients, by one copy, which can be compiled."""
    graph, outside = recorded.graph, recorded.outside
    vectors = [(node, value) for node, value in outside.items() if isinstance(value, Tensor) and value.dim() == 1]
    for node in [node for node in graph.nodes if node.target is aten._foreach_copy_.default]:
        pieces: Any = [outside.get(target) for target in node.args[0]]
        if not all(isinstance(piece, Tensor) for piece in pieces):
            continue
        whole = next((place for place, vector in vectors if fills(pieces, vector)), None)
        if whole is not None:
            with graph.inserting_before(node):
                rows = [graph.call_function(aten.reshape.default, (source, [-1])) for source in node.args[1]]
                graph.call_function(aten.copy_.default, (whole, graph.call_function(aten.cat.default, (rows,))))
            graph.erase_node(node)


def fills(pieces: Sequence[Tensor], whole: Tensor) -> bool:
    """Whether tensors lie one after the other in a contiguous vector and fill it."""
    at = whole.storage_offset()
    for piece in pieces:
        if piece.storage_offset() != at or not piece.is_contiguous() or piece.dtype != whole.dtype:
            return False
        at += piece.numel()
    is_vector = whole.dim() == 1 and whole.is_contiguous() and at == whole.storage_offset() + whole.numel()
    return is_vector and pieces[0].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


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
    found_inf = options.get("found_inf")
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
                if found_inf is not None:
                    value = call(aten.where.self, call(aten.eq.Scalar, found_inf, 1.0), target, value)
                call(aten.copy_.default, target, value)
    recorded.graph.erase_node(node)


def final_pass() -> Callable[[fx.Graph], None]:
    """The three rewrites below as Inductor's last graph pass; its own passes would undo them if they came earlier."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class FinalPass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            split_addmm(graph)
            tanh_as_sigmoid(graph)
            hoist_scalars(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,))

    return FinalPass()


def split_addmm(graph: fx.Graph) -> None:
    """Take the addition out of matrix products, so that it becomes part of the next loop.

    The library copies the summand first, which for a small layer takes as long as the product.
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


def tanh_as_sigmoid(graph: fx.Graph) -> None:
    """Compute a tanh that feeds a matrix product as 2 sigmoid(2x) - 1: half the time, and an error of at most 2e-7.

    Any other tanh is left alone, as the last digits of a tiny value could matter (in a quotient, for example).
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


def hoist_scalars(graph: fx.Graph) -> None:
    """Compute a scalar that a long loop reads before the loop; Inductor would compute it in every round."""
    for node in list(graph.nodes):
        if count(node) != 1 or torch.Tag.pointwise not in getattr(node.target, "tags", ()):
            continue
        loops = [user for user in node.users if count(user) >= LONG_LOOP]
        if loops:
            value = node.meta["val"]
            args = (node, list(value.shape), list(value.stride()))
            with graph.inserting_after(node):  # as_strided makes Inductor store its argument
                hoisted = graph.call_function(aten.as_strided.default, args)
            hoisted.meta.update(node.meta)
            for user in loops:
                user.replace_input_with(node, hoisted)


def count(node: fx.Node) -> int:
    """Number of elements of a node's result; 0 if it is no tensor."""
    value = node.meta.get("val")
    return value.numel() if isinstance(value, Tensor) else 0
