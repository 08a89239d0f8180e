"""An encoder of a window of past observations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from canter.modules.mlp import Linear, MlpModel
from canter.modules.utils import activation

KINDS = ("conv", "attention")


class HistoryEncoder(nn.Module):
    """Features of a window (K, D), oldest step first: convolutions along time, or attention of the newest step to all.

    Args:
        window_shape: Steps K and values per step D.
        output_size: Width of the output; the last hidden layer's if None.
        kind: "conv" or "attention".
        channels: Of each convolution; the last is the width of attention.
        kernel_sizes: Steps that each convolution sees; its input is padded, so that any window is long enough.
        strides: Of each convolution.
        hidden_sizes: Layers between the window's features and the output.
        num_heads: Of attention.
        nonlinearity: Class, or name of a class, in `torch.nn`.
    """

    def __init__(
        self, window_shape: Sequence[int], output_size: int | None = None, kind: str = "conv",
        channels: Sequence[int] = (32, 32), kernel_sizes: Sequence[int] = (3, 3), strides: Sequence[int] = (1, 1),
        hidden_sizes: Sequence[int] = (64,), num_heads: int = 2, nonlinearity: str | type[nn.Module] = nn.ReLU,
    ) -> None:  # fmt: skip
        super().__init__()
        if len(window_shape) != 2:
            raise ValueError(f"a window has the shape (steps, values), got {tuple(window_shape)}")
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        self.window_shape = (int(window_shape[0]), int(window_shape[1]))
        steps, width = self.window_shape
        self.body: nn.Module
        if kind == "conv":
            lengths = [len(channels), len(kernel_sizes), len(strides)]
            if len(set(lengths)) > 1:
                raise ValueError(f"channels, kernel_sizes and strides must be of one length, got {lengths}")
            between, layers = activation(nonlinearity, "nonlinearity"), []
            layer_settings = zip([width, *channels[:-1]], channels, kernel_sizes, strides, strict=True)
            for size_in, size_out, kernel, stride in layer_settings:
                layers += [nn.Conv1d(size_in, size_out, kernel, stride, kernel // 2), between()]
                steps = (steps + 2 * (kernel // 2) - kernel) // stride + 1
            self.body, features = nn.Sequential(*layers, nn.Flatten()), steps * channels[-1]
        else:
            self.body, features = NewestAttends(steps, width, channels[-1], num_heads), channels[-1]
        self.kind = kind
        sizes = list(hidden_sizes) if output_size is None else [*hidden_sizes, output_size]
        self.head = MlpModel(features, sizes, nonlinearity=nonlinearity)
        self.output_size = self.head.output_size

    def forward(self, window: Tensor) -> Tensor:
        """(..., K, D) -> (..., output_size)."""
        flat = window.reshape(-1, *self.window_shape)
        features = self.body(flat.transpose(1, 2) if self.kind == "conv" else flat)  # convolutions want (B, D, K)
        return self.head(features).reshape(*window.shape[:-2], self.output_size)


class NewestAttends(nn.Module):
    """Multi-head attention whose only query is the last step of the window."""

    def __init__(self, steps: int, width: int, size: int, num_heads: int) -> None:
        super().__init__()
        if size % num_heads:
            raise ValueError(f"the width {size} of attention does not split into num_heads={num_heads}")
        self.num_heads = num_heads
        self.embed, self.query = Linear(width, size), Linear(size, size)
        self.key_value, self.out = Linear(size, 2 * size), Linear(size, size)
        self.position = nn.Parameter(0.02 * torch.randn(steps, size))

    def forward(self, window: Tensor) -> Tensor:
        """(B, K, D) -> (B, size)."""
        tokens = self.embed(window) + self.position  # (B, K, E)
        query = self.query(tokens[:, -1:])
        parts = (query, *self.key_value(tokens).chunk(2, dim=-1))
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in parts)  # (B, heads, K, E / heads)
        mixed = F.scaled_dot_product_attention(q, k, v)  # (B, heads, 1, E / heads)
        return tokens[:, -1] + self.out(mixed.flatten(1))
