"""Multi-layer perceptrons."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from canter.modules.utils import activation as activation_class

ALIGNMENT = 8


class Linear(nn.Linear):
    """A linear layer that widens odd inputs with zeros on a GPU, whose fast matrix kernels need rows of 8 numbers."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """(..., in_features) -> (..., out_features)."""
        missing = -self.in_features % ALIGNMENT
        if missing and input.is_cuda and self.in_features > ALIGNMENT:
            return F.linear(F.pad(input, (0, missing)), F.pad(self.weight, (0, missing)), self.bias)
        return F.linear(input, self.weight, self.bias)


def mlp(
    sizes: Sequence[int],
    activation: str | type[nn.Module] = "elu",
    output_activation: str | type[nn.Module] | None = None,
) -> nn.Sequential:
    """Linear layers of the given sizes, input and output included, with an activation between them."""
    if len(sizes) < 2:
        raise ValueError(f"an MLP needs an input and an output size, got {list(sizes)}")
    between = activation_class(activation)
    layers: list[nn.Module] = []
    for size_in, size_out in pairwise(int(size) for size in sizes):
        layers += [Linear(size_in, size_out), between()]
    layers.pop()
    if output_activation is not None:
        layers.append(activation_class(output_activation)())
    return nn.Sequential(*layers)


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
        last = None if output_size is not None else nonlinearity
        sizes = [input_size, *hidden] if output_size is None else [input_size, *hidden, output_size]
        self.model = mlp(sizes, nonlinearity, output_activation=last)
        self._output_size = int(sizes[-1])

    @property
    def output_size(self) -> int:
        """Width of the output."""
        return self._output_size

    def forward(self, x: Tensor) -> Tensor:
        """(..., input_size) -> (..., output_size)."""
        return self.model(x)
