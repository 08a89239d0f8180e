"""Values and statements of a policy in C: buffers with strides, loops, matrix products, reductions."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

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


def literal(number: float) -> str:
    """A C float that reads back as the same number."""
    value = np.float32(number)
    if not np.isfinite(value):
        return "NAN" if np.isnan(value) else "INFINITY" if value > 0 else "-INFINITY"
    text = repr(float(f"{value:.9g}"))
    return f"{text}f"
