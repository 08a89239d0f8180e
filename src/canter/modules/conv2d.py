"""Convolutional encoders of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from canter.modules.mlp import MlpModel
from canter.modules.utils import activation, conv2d_output_shape

Size = int | tuple[int, int]


class Conv2dModel(nn.Module):
    """Convolutions, each followed by an optional norm and a nonlinearity, and by max-pooling instead of strides if set.

    Args:
        channels: Channels after each layer; the next three have one entry per layer too.
        nonlinearity: Class, or name of a class, in `torch.nn`.
        use_maxpool: Convolve with stride 1 and shrink by a max-pool of the stride's size.
        normlayer: Class in `torch.nn`, its name, or any function from a channel count to a module.
    """

    def __init__(
        self, in_channels: int, channels: Sequence[int], kernel_sizes: Sequence[Size], strides: Sequence[Size],
        paddings: Sequence[Size] | None = None, nonlinearity: str | type[nn.Module] = nn.ReLU,
        use_maxpool: bool = False, normlayer: str | Callable[[int], nn.Module] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        pads = [0] * len(channels) if paddings is None else paddings
        lists = {"channels": channels, "kernel_sizes": kernel_sizes, "strides": strides, "paddings": pads}
        lengths = {name: len(values) for name, values in lists.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"every layer needs one entry in each list, but their lengths are {lengths}")
        nonlinear = activation(nonlinearity, "nonlinearity")
        norm: Any = activation(normlayer, "normlayer") if isinstance(normlayer, str) else normlayer
        layers: list[nn.Module] = []
        size_in = in_channels
        for size_out, kernel, stride, pad in zip(channels, kernel_sizes, strides, pads, strict=True):
            pools = use_maxpool and stride not in (1, (1, 1))
            layers.append(nn.Conv2d(size_in, size_out, kernel, 1 if pools else stride, pad))
            layers += [nonlinear()] if norm is None else [norm(size_out), nonlinear()]
            if pools:
                layers.append(nn.MaxPool2d(stride))
            size_in = size_out
        self.conv = nn.Sequential(*layers)
        self.in_channels, self.out_channels = in_channels, size_in

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
        self, image_shape: Sequence[int], channels: Sequence[int], kernel_sizes: Sequence[Size],
        strides: Sequence[Size], hidden_sizes: int | Sequence[int] | None = None, output_size: int | None = None,
        paddings: Sequence[Size] | None = None, nonlinearity: str | type[nn.Module] = nn.ReLU,
        use_maxpool: bool = False, normlayer: str | Callable[[int], nn.Module] | None = None,
    ) -> None:  # fmt: skip
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
        flat = self.conv(image.reshape(-1, *self.image_shape)).flatten(1)
        return self.head(flat).reshape(*image.shape[:-3], self.output_size)
