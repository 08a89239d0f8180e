"""A policy as plain C99: the graph of one step with one row, as loops over fixed buffers.

The graph comes from `torch.export`, in core ATen operators. Slices, permutations and reshapes cost nothing: a value is
a buffer with an offset and strides. Nodes that depend on weights alone are computed here. Everything is a float.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.fx.node import map_arg

from canter.export.graph import Port, StepModule, exported_program, quiet

MAX_WEIGHTS = 20_000_000


class NotInCError(ValueError):
    """A policy needs an operation that the C writer does not have."""


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor in C: a buffer, the offset of its first number, and the stride of each dimension."""

    buffer: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def is_packed(self) -> bool:
        """Whether the numbers lie in order without gaps."""
        return all(
            stride == packed or size == 1
            for size, stride, packed in zip(self.shape, self.strides, packed_strides(self.shape), strict=True)
        )

    def at(self, indices: Sequence[str]) -> str:
        """The C expression of one number, by an index for each dimension of a broadcast shape."""
        own = list(indices)[len(indices) - len(self.shape) :]
        terms = [
            name if stride == 1 else f"{stride} * {name}"
            for name, size, stride in zip(own, self.shape, self.strides, strict=True)
            if size > 1 and stride
        ]
        terms += [str(self.offset)] if self.offset or not terms else []
        return f"{self.buffer}[{' + '.join(terms)}]"

    @property
    def pointer(self) -> str:
        """The C expression of the address of the first number."""
        return f"{self.buffer} + {self.offset}" if self.offset else self.buffer


def packed_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor without gaps."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


UNARY = {
    "relu": "{0} > 0.0f ? {0} : 0.0f", "tanh": "tanhf({0})", "sigmoid": "1.0f / (1.0f + expf(-{0}))",
    "exp": "expf({0})", "expm1": "expm1f({0})", "log": "logf({0})", "log1p": "log1pf({0})", "neg": "-{0}",
    "abs": "fabsf({0})", "sqrt": "sqrtf({0})", "rsqrt": "1.0f / sqrtf({0})", "sin": "sinf({0})", "cos": "cosf({0})",
    "erf": "erff({0})", "reciprocal": "1.0f / {0}", "logical_not": "{0} == 0.0f ? 1.0f : 0.0f",
    "bitwise_not": "{0} == 0.0f ? 1.0f : 0.0f", "floor": "floorf({0})", "sign": "({0} > 0.0f) - ({0} < 0.0f)",
}  # fmt: skip
BINARY = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "pow": "powf({0}, {1})",
    "maximum": "{0} > {1} ? {0} : {1}", "minimum": "{0} < {1} ? {0} : {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}",
    "lt": "{0} < {1}", "le": "{0} <= {1}", "eq": "{0} == {1}", "ne": "{0} != {1}",
    "logical_and": "{0} != 0.0f && {1} != 0.0f", "logical_or": "{0} != 0.0f || {1} != 0.0f",
    "bitwise_and": "{0} != 0.0f && {1} != 0.0f", "bitwise_or": "{0} != 0.0f || {1} != 0.0f",
}  # fmt: skip
HELPERS = {
    "dense": """/* y = b + W x, with W by columns: loops over rows become vector instructions */
static void dense(const float *restrict w, const float *restrict b, const float *restrict x, float *restrict y,
                  int rows, int cols)
{
    int c = 0;
    for (int r = 0; r < rows; r++)
        y[r] = b[r];
    for (; c + 4 <= cols; c += 4, w += 4 * rows) {
        const float x0 = x[c], x1 = x[c + 1], x2 = x[c + 2], x3 = x[c + 3];
        for (int r = 0; r < rows; r++)
            y[r] += (w[r] * x0 + w[rows + r] * x1) + (w[2 * rows + r] * x2 + w[3 * rows + r] * x3);
    }
    for (; c < cols; c++, w += rows)
        for (int r = 0; r < rows; r++)
            y[r] += w[r] * x[c];
}
""",
    "gelu": """static float gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678f)); }
""",
    "gelu_tanh": """static float gelu_tanh(float x)
{
    return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
}
""",
    "softplus": """static float softplus(float x, float beta, float threshold)
{
    return x * beta > threshold ? x : log1pf(expf(x * beta)) / beta;
}
""",
}


class Writer:
    """Turns the nodes of one graph into C statements."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.weights: dict[str, np.ndarray] = {}
        self.scratch = 0
        self.helpers: set[str] = set()
        self.known: dict[bytes, Value] = {}

    def constant(self, tensor: Tensor) -> Value:
        """A table of numbers; equal tables are written once."""
        array = tensor.detach().float().contiguous().numpy()
        key = array.tobytes() + str(array.shape).encode()
        if key not in self.known:
            name = f"w{len(self.weights)}"
            self.weights[name] = array.ravel()
            if sum(table.size for table in self.weights.values()) > MAX_WEIGHTS:
                raise NotInCError(f"the policy has more than {MAX_WEIGHTS} weights, too many for a C file")
            shape = tuple(array.shape)
            self.known[key] = Value(name, shape, packed_strides(shape))
        return self.known[key]

    def value(self, given: Any) -> Value:
        """The C value of a node's argument."""
        if isinstance(given, Value):
            return given
        return self.constant(torch.as_tensor(given, dtype=torch.float32) if not torch.is_tensor(given) else given)

    def new(self, shape: Sequence[int]) -> Value:
        """A new buffer in the scratch memory."""
        first, shape = self.scratch, tuple(int(n) for n in shape)
        self.scratch += math.prod(shape)
        return Value("scratch", shape, packed_strides(shape), first)

    def loop(self, shape: Sequence[int], body: Callable[[list[str]], str]) -> None:
        """Nested loops over a shape, around one statement."""
        names = [f"i{d}" if n > 1 else "0" for d, n in enumerate(shape)]
        heads = [f"for (int {name} = 0; {name} < {n}; {name}++)" for name, n in zip(names, shape, strict=True) if n > 1]
        for depth, head in enumerate(heads):
            self.lines.append("    " * (depth + 1) + head)
        self.lines.append("    " * (len(heads) + 1) + body(names) + ";")

    def pointwise(self, shape: Sequence[int], text: str, *args: Any) -> Value:
        """A new value: an expression of the elements of broadcast arguments."""
        out, values = self.new(shape), [self.value(arg) for arg in args]
        self.loop(out.shape, lambda i: f"{out.at(i)} = {text.format(*(value.at(i) for value in values))}")
        return out

    def packed(self, given: Any) -> Value:
        """The value without gaps, copied if it has some."""
        value = self.value(given)
        return value if value.is_packed else self.pointwise(value.shape, "{0}", value)

    def view(self, value: Value, shape: Sequence[int]) -> Value:
        """The same numbers in another shape."""
        packed, shape = self.packed(value), tuple(shape)
        return Value(packed.buffer, shape, packed_strides(shape), packed.offset)

    def matmul(self, a: Value, b: Value, bias: Any, out_shape: Sequence[int]) -> Value:
        """(..., M, K) x (..., K, N) plus a broadcast bias."""
        (rows, inner), cols = a.shape[-2:], b.shape[-1]
        bias_value = self.value(bias)
        is_dense = len(out_shape) == 2 and rows == 1 and b.is_packed
        if is_dense and math.prod(bias_value.shape) == cols and bias_value.is_packed:
            self.helpers.add("dense")
            x, out = self.packed(a), self.new(out_shape)
            given = (b.pointer, bias_value.pointer, x.pointer, out.pointer, cols, inner)
            self.lines.append(f"    dense({', '.join(map(str, given))});")
            return out
        out = self.pointwise(out_shape, "{0}", bias_value)
        batch = tuple(out_shape[:-2])

        def body(i: list[str]) -> str:
            *front, m, n, k = i
            return f"{out.at([*front, m, n])} += {a.at([*front, m, k])} * {b.at([*front, k, n])}"

        self.loop((*batch, rows, cols, inner), body)
        return out

    def reduce(self, value: Value, dims: Sequence[int], start: str, text: str) -> Value:
        """A new value with dimensions of size 1 in place of the reduced ones."""
        dims = [d % len(value.shape) for d in dims]
        out = self.new([1 if d in dims else n for d, n in enumerate(value.shape)])
        first = dataclasses.replace(value, shape=out.shape)  # the first element along reduced dimensions
        self.loop(out.shape, lambda i: f"{out.at(i)} = {start.format(first.at(i))}")
        self.loop(value.shape, lambda i: f"{out.at(i)} = {text.format(out.at(i), value.at(i))}")
        return out


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
    mean = w.pointwise((*value.shape[: -len(shape)], *[1] * len(shape)), "{0} * {1}",
                       w.reduce(value, dims, "0.0f", "{0} + {1}"), 1.0 / count)  # fmt: skip
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
    "view": lambda w, n: w.view(n.args[0], n.shape), "reshape": lambda w, n: w.view(n.args[0], n.shape),
    "_unsafe_view": lambda w, n: w.view(n.args[0], n.shape), "slice": write_slice, "select": write_select,
    "split_with_sizes": write_split, "split": write_split, "unsqueeze": write_unsqueeze, "squeeze": write_squeeze,
    "permute": write_permute, "expand": write_expand, "cat": write_cat, "slice_scatter": write_slice_scatter,
    "clone": same, "alias": same, "detach": same, "lift_fresh_copy": same, "_to_copy": write_copy,
    "clamp": write_clamp, "elu": write_elu, "gelu": write_gelu, "softplus": write_softplus,
    "leaky_relu": write_leaky_relu, "addmm": write_addmm, "mm": write_mm, "bmm": write_mm,
    "constant_pad_nd": write_pad, "full_like": write_full(None), "zeros_like": write_full(0.0),
    "ones_like": write_full(1.0), "convolution": write_convolution,
    "copy": lambda w, n: w.pointwise(n.shape, "{0}", n.args[1]),
    "linalg_vector_norm": write_norm, "argmax": write_argmax, "max": write_max, "_softmax": write_softmax,
    "native_layer_norm": write_layer_norm,
    "where": lambda w, n: w.pointwise(n.shape, "{0} != 0.0f ? {1} : {2}", *n.args),
    "sum": write_reduction("0.0f", "{0} + {1}"), "mean": write_reduction("0.0f", "{0} + {1}", is_mean=True),
    "amax": write_reduction("{0}", "{1} > {0} ? {1} : {0}"), "amin": write_reduction("{0}", "{1} < {0} ? {1} : {0}"),
    "any": write_reduction("0.0f", "{0} != 0.0f || {1} != 0.0f"),
    **{name: write_binary(name) for name in BINARY},
    **{name: (lambda w, n, text=text: w.pointwise(n.shape, text, n.args[0])) for name, text in UNARY.items()},
}  # fmt: skip
SKIPPED = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size")


def literal(number: float) -> str:
    """A C float that reads back as the same number."""
    value = np.float32(number)
    if not np.isfinite(value):
        return "NAN" if np.isnan(value) else "INFINITY" if value > 0 else "-INFINITY"
    text = repr(float(f"{value:.9g}"))
    return f"{text}f"


class CFiles(NamedTuple):
    """The two files of a policy in C."""

    header: str
    source: str


def c_files(module: StepModule, comment: str = "") -> CFiles:
    """policy.h and policy.c of a step; NotInCError names an operation that cannot be written."""
    program = exported_program(module, rows=1)
    with quiet():
        program = program.run_decompositions()
    writer, values = Writer(), {}
    inputs = iter(module.input_names)
    by_name = dict(zip(module.input_names, [*module.observations, *module.memories], strict=True))
    state = {**program.state_dict, **program.constants}
    signature = program.graph_signature
    tensors = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    tensors |= signature.inputs_to_lifted_tensor_constants
    for node in program.graph.nodes:
        if node.op == "placeholder":
            if node.name in tensors:
                values[node] = state[tensors[node.name]]
            else:
                name = next(inputs)
                values[node] = input_value(writer, name, by_name[name])
        elif node.op == "call_function":
            values[node] = run_node(writer, node, values)
        elif node.op == "output":
            results = [writer.value(values[given]) for given in node.args[0]]
            # Old memories are copied before new ones are written over them.
            kept = [writer.pointwise(r.shape, "{0}", r) if "->" in r.buffer else r for r in results]
            for port, result in zip(module.results, kept, strict=True):
                write_result(writer, module, port, result)
    return render(module, writer, comment)


def input_value(writer: Writer, name: str, port: Port) -> Value:
    """The C value of an input; bytes become floats first."""
    shape = (1, *port.shape)
    if name.endswith("_in") and port.name != name:
        return Value(f"state->{identifier(port.name)}", shape, packed_strides(shape))
    given = Value(identifier(name), shape, packed_strides(shape))
    return writer.pointwise(shape, "(float){0}", given) if port.dtype != "float32" else given


def has_value(given: Any) -> bool:
    """Whether an argument, or a part of a list, depends on the inputs."""
    return any(map(has_value, given)) if isinstance(given, list | tuple) else isinstance(given, Value)


def run_node(writer: Writer, node: Any, values: dict[Any, Any]) -> Any:
    """The C value of a node, or the tensor itself where it depends on weights alone."""
    target = node.target
    args, kwargs = map_arg((node.args, node.kwargs), lambda given: values[given])
    if getattr(target, "__name__", "") == "getitem":
        return args[0][args[1]]
    name = str(target).split(".")[1] if str(target).startswith("aten.") else str(target)
    if name in SKIPPED:
        return None
    if not any(has_value(part) for part in (*args, *kwargs.values())):
        return target(*args, **kwargs)
    if name not in WRITERS:
        raise NotInCError(f"the operation {target}")
    shown = node.meta["val"]
    shape = tuple(int(n) for n in shown.shape) if torch.is_tensor(shown) else ()
    if name in VIEWS:  # of a weight: a table first
        args = (writer.value(args[0]), *args[1:])
    return WRITERS[name](writer, Node(tuple(args), dict(kwargs), shape))


VIEWS = ("view", "reshape", "_unsafe_view", "slice", "select", "split_with_sizes", "split", "unsqueeze", "squeeze",
         "permute", "expand")  # fmt: skip


def write_result(writer: Writer, module: StepModule, port: Port, value: Value) -> None:
    """Copy a result to the caller's array, or to the memory of the next step."""
    shape = (1, *port.shape)
    is_memory = port.name in {memory.name for memory in module.memories}
    buffer = f"state->{identifier(port.name)}" if is_memory else identifier(port.name)
    out = Value(buffer, shape, packed_strides(shape))
    cast = "" if port.dtype == "float32" else "(int)"
    writer.loop(shape, lambda i: f"{out.at(i)} = {cast}{value.at(i)}")


def identifier(name: str) -> str:
    """A name that C accepts."""
    clean = re.sub(r"\W", "_", name)
    return f"x{clean}" if clean[:1].isdigit() else clean


def render(module: StepModule, writer: Writer, comment: str) -> CFiles:
    """The text of both files."""
    memories = [(identifier(memory.name), math.prod(memory.shape)) for memory in module.memories]
    results = module.results[: len(module.results) - len(module.memories)]
    kinds = {"float32": "float", "uint8": "unsigned char", "int64": "int"}
    inputs = [f"const {kinds[port.dtype]} *{identifier(port.name)}" for port in module.observations]
    outputs = [f"{kinds[port.dtype]} *{identifier(port.name)}" for port in results]
    prototype = f"void policy_step(policy_state *state, {', '.join([*inputs, *outputs])})"
    sizes = "".join(
        f"#define POLICY_{identifier(port.name).upper()} {math.prod(port.shape)}\n"
        for port in [*module.observations, *results]
    )
    fields = "".join(f"    float {name}[{size}];\n" for name, size in memories)
    header = f"""/* {comment} */
#ifndef CANTER_POLICY_H
#define CANTER_POLICY_H

/* number of values in each array */
{sizes}
/* memories of one robot, zero when an episode begins, and scratch memory; nothing is allocated */
typedef struct {{
{fields}    float scratch[{max(1, writer.scratch)}];
}} policy_state;

#ifdef __cplusplus
extern "C" {{
#endif

/* clear the memories: call it before the first step of every episode */
void policy_reset(policy_state *state);

/* one control step: raw observations in, actions out */
{prototype};

#ifdef __cplusplus
}}
#endif
#endif
"""
    tables = "".join(c_table(name, table) for name, table in writer.weights.items())
    helpers = "".join(text + "\n" for name, text in HELPERS.items() if name in writer.helpers)
    body = "\n".join(writer.lines)
    uses = "    float *scratch = state->scratch;\n" if "scratch" in body else ""
    clears = "".join(f"    memset(state->{name}, 0, sizeof state->{name});\n" for name, _ in memories)
    source = f"""/* {comment} */
#include "policy.h"

#include <math.h>
#include <string.h>

{tables}
{helpers}void policy_reset(policy_state *state)
{{
{clears or "    (void)state;" + chr(10)}}}

{prototype}
{{
{uses or "    (void)state;" + chr(10)}{body}
}}
"""
    return CFiles(header, source)


def c_table(name: str, table: np.ndarray) -> str:
    """One array of weights."""
    texts = [literal(number) for number in table]
    rows = [", ".join(texts[i : i + 8]) for i in range(0, len(texts), 8)]
    return f"static const float {name}[{len(texts)}] = {{\n    " + ",\n    ".join(rows) + "};\n"
