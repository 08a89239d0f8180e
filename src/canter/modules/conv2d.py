"""Encoders of images and of windows of past observations."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from canter.modules.mlp import Linear, MlpModel
from canter.modules.utils import activation, conv2d_output_shape

Size = int | tuple[int, int]
KINDS = ("conv", "attention")
SMALLEST_IMAGE = 7
"""Sides of an image that `image_layers` shrinks to one number."""


def image_shape(shape: Sequence[int] | None) -> tuple[int, int, int] | None:
    """(C, H, W) of one image or of stacked ones, with channels first or last; None for what is no image.

    The channels are the side that differs from two equal ones, else the shorter end. The frames of a stack
    (T, C, H, W) or (T, H, W, C) become channels.
    """
    if shape is None or len(shape) not in (3, 4):
        return None
    *frames, first, middle, last = (int(n) for n in shape)
    is_last = channels_are_last((first, middle, last))
    channels, height, width = (last, first, middle) if is_last else (first, middle, last)
    return None if min(height, width) < SMALLEST_IMAGE else (math.prod(frames) * channels, height, width)


def channels_are_last(shape: Sequence[int]) -> bool:
    """Whether an image is (H, W, C), not (C, H, W)."""
    first, middle, last = shape
    return middle != last and (first == middle or last < first)


def channels_first(image: Tensor, shape: Sequence[int]) -> Tensor:
    """(..., *shape) -> (..., C, H, W), for a shape that `image_shape` accepts."""
    image = image.movedim(-1, -3).contiguous() if channels_are_last(shape[-3:]) else image
    return image.flatten(-4, -3) if len(shape) == 4 else image


def image_layers(height: int, width: int) -> dict[str, tuple[int, ...]]:
    """Convolutions for an image: those of Mnih 2015, or two small ones where it is too small for these."""
    if min(height, width) < 36:
        return {"channels": (32, 64), "kernel_sizes": (3, 3), "strides": (2, 2)}
    return {"channels": (32, 64, 64), "kernel_sizes": (8, 4, 3), "strides": (4, 2, 1)}


class Conv2dModel(nn.Module):
    """Convolutions, each followed by an optional norm and a nonlinearity, and by max-pooling instead of strides if set.

    Args:
        channels: Channels after each layer; the next three have one entry per layer too.
        nonlinearity: Class, or name of a class, in `torch.nn`.
        use_maxpool: Convolve with stride 1 and shrink by a max-pool of the stride's size.
        normlayer: Class in `torch.nn`, its name, or any function from a channel count to a module.
    """

    def __init__(
        self,
        in_channels: int,
        channels: Sequence[int],
        kernel_sizes: Sequence[Size],
        strides: Sequence[Size],
        paddings: Sequence[Size] | None = None,
        nonlinearity: str | type[nn.Module] = nn.ReLU,
        use_maxpool: bool = False,
        normlayer: str | Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        pads = [0] * len(channels) if paddings is None else paddings
        lists = {"channels": channels, "kernel_sizes": kernel_sizes, "strides": strides, "paddings": pads}
        lengths = {name: len(values) for name, values in lists.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"every layer needs one entry in each list, but their lengths are {lengths}")
        nonlinear = activation(nonlinearity, "nonlinearity")
        norm: Any = activation(normlayer, "normlayer") if isinstance(normlayer, str) else normlayer
        layers: list[nn.Module] = []
        sizes = [in_channels, *channels]
        for size_in, size_out, kernel, stride, pad in zip(sizes, channels, kernel_sizes, strides, pads, strict=False):
            pools = use_maxpool and stride not in (1, (1, 1))
            layers.append(nn.Conv2d(size_in, size_out, kernel, 1 if pools else stride, pad))
            layers += [nonlinear()] if norm is None else [norm(size_out), nonlinear()]
            if pools:
                layers.append(nn.MaxPool2d(stride))
        self.conv = nn.Sequential(*layers)
        self.in_channels, self.out_channels = in_channels, sizes[-1]

    def forward(self, image: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C', H', W')."""
        return self.conv(image)

    def conv_out_resolution(self, h: int, w: int) -> tuple[int, int]:
        """Height and width of the output for an image of this size."""
        for layer in self.conv:
            if isinstance(layer, (nn.Conv2d, nn.MaxPool2d)):
                size: Any = layer  # both have the three attributes, in slightly different types
                h, w = conv2d_output_shape(h, w, size.kernel_size, size.stride, size.padding)
        return h, w

    def conv_out_size(self, h: int, w: int, c: int | None = None) -> int:
        """Number of values in the output for an image of this size; `c` replaces the number of output channels."""
        out_h, out_w = self.conv_out_resolution(h, w)
        return out_h * out_w * (self.out_channels if c is None else c)


class Conv2dHeadModel(nn.Module):
    """A `Conv2dModel`, flattened, and an MLP on top if it has any layer; the other arguments are those of the two."""

    def __init__(
        self,
        image_shape: Sequence[int],
        channels: Sequence[int],
        kernel_sizes: Sequence[Size],
        strides: Sequence[Size],
        hidden_sizes: int | Sequence[int] | None = None,
        output_size: int | None = None,
        paddings: Sequence[Size] | None = None,
        nonlinearity: str | type[nn.Module] = nn.ReLU,
        use_maxpool: bool = False,
        normlayer: str | Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        c, h, w = (int(n) for n in image_shape)
        self.image_shape = (c, h, w)
        self.conv = Conv2dModel(c, channels, kernel_sizes, strides, paddings, nonlinearity, use_maxpool, normlayer)
        if min(self.conv.conv_out_resolution(h, w)) < 1:
            raise ValueError(f"a {h}x{w} image is too small for kernels {kernel_sizes} with strides {strides}")
        self.output_size = self.conv.conv_out_size(h, w)
        self.head: nn.Module = nn.Identity()
        if hidden_sizes or output_size is not None:
            self.head = MlpModel(self.output_size, hidden_sizes, output_size, nonlinearity)
            self.output_size = self.head.output_size

    def forward(self, image: Tensor) -> Tensor:
        """(..., C, H, W) -> (..., output_size)."""
        flat = self.conv(image.reshape(-1, *image.shape[-3:])).flatten(1)
        return self.head(flat).reshape(*image.shape[:-3], self.output_size)


class HistoryEncoder(nn.Module):
    """Features of a window (K, D), oldest step first: convolutions along time, or attention of the newest step to all.

    Args:
        window_shape: Steps K and values per step D.
        output_size: Width of the output; the last hidden layer's if None.
        channels: Of each convolution; the last is the width of attention.
        kernel_sizes: Steps that each convolution sees; its input is padded, so that any window is long enough.
        nonlinearity: Class, or name of a class, in `torch.nn`.
    """

    def __init__(
        self,
        window_shape: Sequence[int],
        output_size: int | None = None,
        kind: str = "conv",
        channels: Sequence[int] = (32, 32),
        kernel_sizes: Sequence[int] = (3, 3),
        strides: Sequence[int] = (1, 1),
        hidden_sizes: Sequence[int] = (64,),
        num_heads: int = 2,
        nonlinearity: str | type[nn.Module] = nn.ReLU,
    ) -> None:
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
