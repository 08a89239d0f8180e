"""ATen operators in C: one function for each, from a node of the graph to its value."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from canter.export.c_writer import NotInCError, Value, Writer, literal

UNARY = {
    "relu": "{0} > 0.0f ? {0} : 0.0f",
    "tanh": "tanhf({0})",
    "sigmoid": "1.0f / (1.0f + expf(-{0}))",
    "exp": "expf({0})",
    "expm1": "expm1f({0})",
    "log": "logf({0})",
    "log1p": "log1pf({0})",
    "neg": "-{0}",
    "abs": "fabsf({0})",
    "sqrt": "sqrtf({0})",
    "rsqrt": "1.0f / sqrtf({0})",
    "sin": "sinf({0})",
    "cos": "cosf({0})",
    "erf": "erff({0})",
    "reciprocal": "1.0f / {0}",
    "logical_not": "{0} == 0.0f ? 1.0f : 0.0f",
    "bitwise_not": "{0} == 0.0f ? 1.0f : 0.0f",
    "floor": "floorf({0})",
    "sign": "({0} > 0.0f) - ({0} < 0.0f)",
}
BINARY = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "pow": "powf({0}, {1})",
    "maximum": "{0} > {1} ? {0} : {1}",
    "minimum": "{0} < {1} ? {0} : {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "logical_and": "{0} != 0.0f && {1} != 0.0f",
    "logical_or": "{0} != 0.0f || {1} != 0.0f",
    "bitwise_and": "{0} != 0.0f && {1} != 0.0f",
    "bitwise_or": "{0} != 0.0f || {1} != 0.0f",
}


def squeezed(value: Value, dims: Sequence[int], keep: bool) -> Value:
    """The value without the dimensions, unless they are kept."""
    if keep:
        return value
    dims = [d % len(value.shape) for d in dims]
    left = [d for d in range(len(value.shape)) if d not in dims]
    return dataclasses.replace(
        value, shape=tuple(value.shape[d] for d in left), strides=tuple(value.strides[d] for d in left)
    )


class Node(NamedTuple):
    """One operation: its arguments by position and by name, and the shape of its result."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: tuple[int, ...]

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """An argument by position or name."""
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)


def sliced(value: Value, dim: int, start: int | None, end: int | None, step: int = 1) -> Value:
    """Part of a dimension."""
    dim %= len(value.shape)
    first, last, step = slice(start, end, step).indices(value.shape[dim])
    shape, strides = list(value.shape), list(value.strides)
    shape[dim], strides[dim] = max(0, -(-(last - first) // step)), value.strides[dim] * step
    return dataclasses.replace(
        value, shape=tuple(shape), strides=tuple(strides), offset=value.offset + first * value.strides[dim]
    )


def write_slice(w: Writer, n: Node) -> Value:
    dim, start, end = n.arg(1, "dim", 0), n.arg(2, "start"), n.arg(3, "end")
    return sliced(n.args[0], dim, start, end, n.arg(4, "step", 1))


def write_split(w: Writer, n: Node) -> list[Value]:
    value, sizes, dim = n.args[0], n.args[1], n.arg(2, "dim", 0)
    total = value.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - first) for first in range(0, total, sizes)]
    ends = np.cumsum([0, *sizes]).tolist()
    return [sliced(value, dim, first, last) for first, last in pairwise(ends)]


def write_select(w: Writer, n: Node) -> Value:
    value, dim, index = n.args
    dim %= len(value.shape)
    index %= value.shape[dim]
    return squeezed(sliced(value, dim, index, index + 1), [dim], keep=False)


def write_unsqueeze(w: Writer, n: Node) -> Value:
    value, dim = n.args
    dim %= len(value.shape) + 1
    strides = (*value.strides[:dim], 0, *value.strides[dim:])
    return dataclasses.replace(value, shape=n.shape, strides=strides)


def write_squeeze(w: Writer, n: Node) -> Value:
    value = n.args[0]
    dims = n.arg(1, "dim", list(range(len(value.shape))))
    dims = [dims] if isinstance(dims, int) else dims
    return squeezed(value, [d for d in dims if value.shape[d] == 1], keep=False)


def write_permute(w: Writer, n: Node) -> Value:
    value = n.args[0]
    dims = [d % len(value.shape) for d in n.args[1]]
    return dataclasses.replace(
        value, shape=tuple(value.shape[d] for d in dims), strides=tuple(value.strides[d] for d in dims)
    )


def write_expand(w: Writer, n: Node) -> Value:
    value = n.args[0]
    lead = len(n.shape) - len(value.shape)
    sizes = zip(value.shape, value.strides, n.shape[lead:], strict=True)
    strides = [0] * lead + [0 if size == 1 and want > 1 else stride for size, stride, want in sizes]
    return dataclasses.replace(value, shape=n.shape, strides=tuple(strides))


def write_cat(w: Writer, n: Node) -> Value:
    out, dim, first = w.new(n.shape), n.arg(1, "dim", 0), 0
    for part in map(w.value, n.args[0]):
        if part.shape == (0,):
            continue
        place = sliced(out, dim, first, first + part.shape[dim])
        w.loop(part.shape, lambda i, place=place, part=part: f"{place.at(i)} = {part.at(i)}")
        first += part.shape[dim]
    return out


def write_slice_scatter(w: Writer, n: Node) -> Value:
    out, part = w.pointwise(n.shape, "{0}", n.args[0]), w.value(n.args[1])
    dim, start, end = n.arg(2, "dim", 0), n.arg(3, "start"), n.arg(4, "end")
    place = sliced(out, dim, start, end, n.arg(5, "step", 1))
    w.loop(place.shape, lambda i: f"{place.at(i)} = {part.at(i)}")
    return out


def write_pad(w: Writer, n: Node) -> Value:
    value, ends = w.value(n.args[0]), n.args[1]
    place = out = w.pointwise(n.shape, "{0}", float(n.arg(2, "value", 0.0)))
    for number, (before, after) in enumerate(zip(ends[::2], ends[1::2], strict=True), start=1):
        place = sliced(place, -number, before, place.shape[-number] - after)
    w.loop(value.shape, lambda i: f"{place.at(i)} = {value.at(i)}")
    return out


def write_full(number: float | None) -> Callable[[Writer, Node], Value]:
    def write(w: Writer, n: Node) -> Value:
        return w.value(torch.full(n.shape, float(n.args[1]) if number is None else number))

    return write


def write_clamp(w: Writer, n: Node) -> Any:
    value = n.args[0]
    low, high = n.arg(1, "min"), n.arg(2, "max")
    if low is not None:
        value = w.pointwise(n.shape, "{0} < {1} ? {1} : {0}", value, low)
    if high is not None:
        value = w.pointwise(n.shape, "{0} > {1} ? {1} : {0}", value, high)
    return value


def write_binary(name: str) -> Callable[[Writer, Node], Value]:
    def write(w: Writer, n: Node) -> Value:
        a, b = n.args[:2]
        if n.kwargs.get("alpha", 1) != 1:
            b = w.pointwise(w.value(b).shape, "{0} * {1}", b, float(n.kwargs["alpha"]))
        return w.pointwise(n.shape, BINARY[name], a, b)

    return write


def write_elu(w: Writer, n: Node) -> Value:
    alpha, scale, input_scale = (
        float(n.arg(i, name, 1.0)) for i, name in enumerate(("alpha", "scale", "input_scale"), 1)
    )
    inner = (
        f"{{0}} > 0.0f ? {literal(scale)} * {{0}} : {literal(alpha * scale)} * expm1f({literal(input_scale)} * {{0}})"
    )
    return w.pointwise(n.shape, inner, n.args[0])


def write_gelu(w: Writer, n: Node) -> Value:
    name = "gelu_tanh" if n.kwargs.get("approximate") == "tanh" else "gelu"
    w.helpers.add(name)
    return w.pointwise(n.shape, f"{name}({{0}})", n.args[0])


def write_softplus(w: Writer, n: Node) -> Value:
    w.helpers.add("softplus")
    beta, threshold = float(n.arg(1, "beta", 1.0)), float(n.arg(2, "threshold", 20.0))
    return w.pointwise(n.shape, f"softplus({{0}}, {literal(beta)}, {literal(threshold)})", n.args[0])


def write_leaky_relu(w: Writer, n: Node) -> Value:
    slope = literal(float(n.arg(1, "negative_slope", 0.01)))
    return w.pointwise(n.shape, f"{{0}} > 0.0f ? {{0}} : {slope} * {{0}}", n.args[0])


def dims_of(n: Node) -> list[int]:
    """The reduced dimensions; all if none are named."""
    dims = n.arg(1, "dim")
    value = n.args[0]
    return list(range(len(value.shape))) if dims in (None, []) else [dims] if isinstance(dims, int) else list(dims)


def write_reduction(start: str, text: str, is_mean: bool = False) -> Callable[[Writer, Node], Value]:
    def write(w: Writer, n: Node) -> Value:
        value, dims = w.value(n.args[0]), dims_of(n)
        out = w.reduce(value, dims, start, text)
        if is_mean:
            count = math.prod(value.shape[d] for d in dims)
            out = w.pointwise(out.shape, "{0} * {1}", out, 1.0 / count)
        return squeezed(out, dims, keep=bool(n.arg(2, "keepdim", False)))

    return write


def write_argmax(w: Writer, n: Node) -> Value:
    value, dim = w.value(n.args[0]), n.arg(1, "dim", -1)
    dim %= len(value.shape)
    best = w.reduce(value, [dim], "{0}", "{1} > {0} ? {1} : {0}")
    out = w.pointwise(best.shape, "{0}", -1.0)

    def body(i: list[str]) -> str:
        place = out.at(i)
        return f"if ({place} < 0.0f && {value.at(i)} == {best.at(i)}) {place} = (float){i[dim]}"

    w.loop(value.shape, body)
    return squeezed(out, [dim], keep=bool(n.arg(2, "keepdim", False)))


def write_max(w: Writer, n: Node) -> list[Value]:
    value, dim, keep = w.value(n.args[0]), n.arg(1, "dim"), bool(n.arg(2, "keepdim", False))
    top = w.reduce(value, [dim], "{0}", "{1} > {0} ? {1} : {0}")
    return [squeezed(top, [dim], keep), write_argmax(w, Node((value, dim, keep), {}, ()))]


def write_norm(w: Writer, n: Node) -> Value:
    value, order, dims = w.value(n.args[0]), n.arg(1, "ord", 2), n.arg(2, "dim")
    if order != 2:
        raise NotInCError(f"a norm of order {order}")
    dims = list(range(len(value.shape))) if dims is None else dims
    total = w.reduce(w.pointwise(value.shape, "{0} * {0}", value), dims, "0.0f", "{0} + {1}")
    return squeezed(w.pointwise(total.shape, "sqrtf({0})", total), dims, keep=bool(n.arg(3, "keepdim", False)))


def write_softmax(w: Writer, n: Node) -> Value:
    value, dim = w.value(n.args[0]), n.args[1]
    top = w.reduce(value, [dim], "{0}", "{1} > {0} ? {1} : {0}")
    risen = w.pointwise(n.shape, "expf({0} - {1})", value, top)
    return w.pointwise(n.shape, "{0} / {1}", risen, w.reduce(risen, [dim], "0.0f", "{0} + {1}"))


def write_layer_norm(w: Writer, n: Node) -> list[Any]:
    value, shape, weight, bias, eps = n.args
    value = w.value(value)
    dims, count = list(range(-len(shape), 0)), math.prod(shape)
    mean = w.pointwise(
        (*value.shape[: -len(shape)], *[1] * len(shape)),
        "{0} * {1}",
        w.reduce(value, dims, "0.0f", "{0} + {1}"),
        1.0 / count,
    )
    centred = w.pointwise(value.shape, "{0} - {1}", value, mean)
    squares = w.reduce(w.pointwise(value.shape, "{0} * {0}", centred), dims, "0.0f", "{0} + {1}")
    scale = w.pointwise(squares.shape, f"1.0f / sqrtf({{0}} * {literal(1.0 / count)} + {literal(eps)})", squares)
    out = w.pointwise(value.shape, "{0} * {1}", centred, scale)
    if weight is not None:
        out = w.pointwise(value.shape, "{0} * {1}", out, weight)
    return [out if bias is None else w.pointwise(value.shape, "{0} + {1}", out, bias), mean, scale]


def write_addmm(w: Writer, n: Node) -> Value:
    bias, a, b = n.args
    if n.kwargs.get("alpha", 1) != 1 or n.kwargs.get("beta", 1) != 1:
        raise NotInCError("a matrix product with scaled terms")
    return w.matmul(w.value(a), w.value(b), bias, n.shape)


def write_mm(w: Writer, n: Node) -> Value:
    a, b = map(w.value, n.args)
    return w.matmul(a, b, torch.zeros(n.shape[-1]), n.shape)


def write_convolution(w: Writer, n: Node) -> Value:
    x, kernel, bias, stride, padding, dilation, is_transposed, _, groups = n.args
    if is_transposed or groups != 1:
        raise NotInCError("a transposed or grouped convolution")
    x, kernel = w.value(x), w.value(kernel)
    zeros = torch.zeros(kernel.shape[0])
    start = w.value(zeros if bias is None else bias)
    dims = len(kernel.shape) - 2
    start = dataclasses.replace(start, shape=(start.shape[0], *[1] * dims), strides=(start.strides[0], *[0] * dims))
    out = w.pointwise(n.shape, "{0}", start)

    def body(i: list[str]) -> str:
        row, channel, source, *places = i
        spots, taps = places[:dims], places[dims:]
        inside, at = [], []
        for d in range(dims):
            place = f"{spots[d]} * {stride[d]} + {taps[d]} * {dilation[d]} - {padding[d]}"
            at.append(f"({place})")
            if padding[d]:
                inside.append(f"{place} >= 0 && {place} < {x.shape[2 + d]}")
        check = f"if ({' && '.join(inside)}) " if inside else ""
        product = f"{x.at([row, source, *at])} * {kernel.at([channel, source, *taps])}"
        return f"{check}{out.at([row, channel, *spots])} += {product}"

    w.loop((n.shape[0], n.shape[1], kernel.shape[1], *n.shape[2:], *kernel.shape[2:]), body)
    return out


def write_copy(w: Writer, n: Node) -> Value:
    """A conversion of types: to whole numbers it cuts off, otherwise every number is a float already."""
    to = n.kwargs.get("dtype")
    if to is None or to.is_floating_point:
        return n.args[0]
    return w.pointwise(n.shape, "{0} != 0.0f" if to == torch.bool else "truncf({0})", n.args[0])


def same(w: Writer, n: Node) -> Value:
    return n.args[0]


WRITERS: dict[str, Callable[[Writer, Node], Any]] = {
    "view": lambda w, n: w.view(n.args[0], n.shape),
    "reshape": lambda w, n: w.view(n.args[0], n.shape),
    "_unsafe_view": lambda w, n: w.view(n.args[0], n.shape),
    "slice": write_slice,
    "select": write_select,
    "split_with_sizes": write_split,
    "split": write_split,
    "unsqueeze": write_unsqueeze,
    "squeeze": write_squeeze,
    "permute": write_permute,
    "expand": write_expand,
    "cat": write_cat,
    "slice_scatter": write_slice_scatter,
    "clone": same,
    "alias": same,
    "detach": same,
    "lift_fresh_copy": same,
    "_to_copy": write_copy,
    "clamp": write_clamp,
    "elu": write_elu,
    "gelu": write_gelu,
    "softplus": write_softplus,
    "leaky_relu": write_leaky_relu,
    "addmm": write_addmm,
    "mm": write_mm,
    "bmm": write_mm,
    "constant_pad_nd": write_pad,
    "full_like": write_full(None),
    "zeros_like": write_full(0.0),
    "ones_like": write_full(1.0),
    "convolution": write_convolution,
    "copy": lambda w, n: w.pointwise(n.shape, "{0}", n.args[1]),
    "linalg_vector_norm": write_norm,
    "argmax": write_argmax,
    "max": write_max,
    "_softmax": write_softmax,
    "native_layer_norm": write_layer_norm,
    "where": lambda w, n: w.pointwise(n.shape, "{0} != 0.0f ? {1} : {2}", *n.args),
    "sum": write_reduction("0.0f", "{0} + {1}"),
    "mean": write_reduction("0.0f", "{0} + {1}", is_mean=True),
    "amax": write_reduction("{0}", "{1} > {0} ? {1} : {0}"),
    "amin": write_reduction("{0}", "{1} < {0} ? {1} : {0}"),
    "any": write_reduction("0.0f", "{0} != 0.0f || {1} != 0.0f"),
    **{name: write_binary(name) for name in BINARY},
    **{name: (lambda w, n, text=text: w.pointwise(n.shape, text, n.args[0])) for name, text in UNARY.items()},
}
VIEWS = (
    "view",
    "reshape",
    "_unsafe_view",
    "slice",
    "select",
    "split_with_sizes",
    "split",
    "unsqueeze",
    "squeeze",
    "permute",
    "expand",
)
