"""Activations by name, initial weights, and the size of a convolution's output."""

import math
import warnings

import numpy as np
from torch import nn

from canter.utils.config import unknown_name

ALIASES: dict[str, type[nn.Module]] = {
    "elu": nn.ELU,
    "selu": nn.SELU,
    "relu": nn.ReLU,
    "crelu": nn.ReLU,
    "lrelu": nn.LeakyReLU,
    "leaky_relu": nn.LeakyReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "softplus": nn.Softplus,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "identity": nn.Identity,
}


def get_activation_Cls(activation_name: str) -> type[nn.Module] | None:  # noqa: N802, the documented name
    """The activation class of that name: a `torch.nn` class or an alias; warns and returns None for any other name."""
    try:
        return activation(activation_name)
    except ValueError as error:
        warnings.warn(f"invalid activation function {activation_name!r}: {error}", stacklevel=2)
        return None


def activation(name: str | type[nn.Module], kind: str = "activation") -> type[nn.Module]:
    """The `torch.nn` class of a name; a class is returned as it is. `kind` is the noun in the error."""
    if isinstance(name, type):
        return name
    found = getattr(nn, name, None)
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        found = ALIASES.get(name.lower())
    if found is None:
        raise ValueError(unknown_name(kind, name, ALIASES))
    return found


def orthogonal_init(module: nn.Module, last_gain: float = math.sqrt(2.0)) -> None:
    """Orthogonal weights with gain sqrt(2), `last_gain` in the last layer, and zero biases."""
    layers = [layer for layer in module.modules() if isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d))]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, last_gain if layer is layers[-1] else math.sqrt(2.0))
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def conv2d_output_shape(
    h: int,
    w: int,
    kernel_size: int | tuple[int, int] = 1,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
) -> tuple[int, int]:
    """Height and width after a convolution or pooling."""
    k, s, p, d = (np.broadcast_to(value, 2) for value in (kernel_size, stride, padding, dilation))
    out = (np.array((h, w)) + 2 * p - d * (k - 1) - 1) // s + 1
    return int(out[0]), int(out[1])
