"""Multi-layer perceptrons."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from canter.modules.utils import activation as activation_class

Activation = str | type[nn.Module]
ALIGNMENT = 8  # fast matrix kernels of a GPU need rows of 8 numbers


class Linear(nn.Linear):
    """A linear layer that pads an input of unaligned width with zeros on a GPU."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.padding = [0, -in_features % ALIGNMENT]  # an attribute: TorchScript reads no global

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """(..., in_features) -> (..., out_features)."""
        if not input.is_cuda:
            return F.linear(input, self.weight, self.bias)
        return F.linear(F.pad(input, self.padding), F.pad(self.weight, self.padding), self.bias)


def layer_sizes(name: str, sizes: Any) -> list[Any]:
    """The sizes of hidden layers in a setting, or an error that names the setting."""
    is_list = isinstance(sizes, Iterable) and not isinstance(sizes, (str, Mapping))
    found: list[Any] = list(sizes) if is_list else []
    if not is_list or any(isinstance(size, bool) or not isinstance(size, Real) for size in found):
        raise TypeError(f"{name} must be a list of layer sizes such as [64, 64], got {sizes!r}")
    if bad := [size for size in found if size < 1]:
        raise ValueError(f"{name} must be layer sizes of at least 1, got {bad[0]!r} in {found}")
    return found


def mlp(
    sizes: Sequence[int],
    activation: Activation = "elu",
    output_activation: Activation | None = None,
    layer_norm: bool = False,
) -> nn.Sequential:
    """Linear layers of the sizes, input and output included, with layer norms if set and activations between."""
    if len(sizes) < 2:
        raise ValueError(f"an MLP needs an input and an output size, got {list(sizes)}")
    if bad := [size for size in sizes if size < 1 or size != int(size)]:
        raise ValueError(f"the size of a layer must be a whole number of at least 1, got {bad[0]!r} in {list(sizes)}")
    between = activation_class(activation)
    layers: list[nn.Module] = []
    for size_in, size_out in pairwise(int(size) for size in sizes):
        needs_padding = size_in > ALIGNMENT and size_in % ALIGNMENT
        layers.append((Linear if needs_padding else nn.Linear)(size_in, size_out))
        layers += [nn.LayerNorm(size_out), between()] if layer_norm else [between()]
    last = [] if output_activation is None else [activation_class(output_activation)()]
    return nn.Sequential(*layers[: -2 if layer_norm else -1], *last)


class MlpModel(nn.Module):
    """Hidden layers, each followed by the nonlinearity, and a plain linear layer to `output_size` if one is given."""

    def __init__(
        self,
        input_size: int,
        hidden_sizes: int | Sequence[int] | None,
        output_size: int | None = None,
        nonlinearity: str | type[nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        hidden = [hidden_sizes] if isinstance(hidden_sizes, int) else list(hidden_sizes or [])
        if not hidden and output_size is None:
            raise ValueError("MlpModel without hidden_sizes needs an output_size")
        sizes = [input_size, *hidden] if output_size is None else [input_size, *hidden, output_size]
        self.model = mlp(sizes, nonlinearity, nonlinearity if output_size is None else None)
        self.output_size = self._output_size = int(sizes[-1])

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (documented name)
        """(..., input_size) -> (..., output_size)."""
        return self.model(input)
