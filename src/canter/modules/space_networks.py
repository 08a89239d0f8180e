"""Networks built from an observation space and a `cfg` dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from canter.envs.vec_env import flat_size
from canter.modules.conv2d import Conv2dHeadModel
from canter.modules.utils import activation as activation_class
from canter.utils.config import check_settings
from canter.utils.tree import Obs

Cfg = Mapping[str, Any]

MLP_SETTINGS: Cfg = {"hidden_dims": [256, 256], "activation": "elu", "layer_norm": False}
CNN_SETTINGS: Cfg = {
    "conv_channels": [32, 64, 64],
    "conv_kernels": [8, 4, 3],
    "conv_strides": [4, 2, 1],
    "hidden_dims": [512],
    "activation": "relu",
}


def read_cfg(owner: type, cfg: Cfg | None, defaults: Cfg | None) -> dict[str, Any]:
    """`cfg` over the defaults, strictly; as it is where a class declares no defaults."""
    if defaults is None:
        return dict(cfg or {})
    return {**defaults, **check_settings(owner.__name__, cfg or {}, defaults)}


def flatten_obs(obs: Obs, space: spaces.Space) -> Tensor:
    """A (nested dict) observation as one float vector (..., D), in the order of the space's keys."""
    if isinstance(space, spaces.Dict):
        assert isinstance(obs, Mapping)
        return torch.cat([flatten_obs(obs[name], part) for name, part in space.spaces.items()], dim=-1)
    assert isinstance(obs, Tensor)
    return _scaled(obs, space).reshape(*batch_shape(obs, space), flat_size(space))


def build_mlp(
    input_dim: int,
    hidden_dims: Sequence[int],
    output_dim: int,
    activation: str | type[nn.Module] = "elu",
    layer_norm: bool = False,
) -> nn.Sequential:
    """Linear, optional LayerNorm and activation per hidden layer, then a plain linear layer."""
    between = activation_class(activation)
    layers: list[nn.Module] = []
    size_in = input_dim
    for size in hidden_dims:
        layers += [nn.Linear(size_in, size), *([nn.LayerNorm(size)] if layer_norm else []), between()]
        size_in = size
    return nn.Sequential(*layers, nn.Linear(size_in, output_dim))


class FlatNetwork(nn.Module):
    """An MLP on any observation space, flattened."""

    def __init__(self, obs_space: spaces.Space, output_dim: int, cfg: Cfg) -> None:
        super().__init__()
        self.obs_space = obs_space
        self.mlp = build_mlp(flat_size(obs_space), cfg["hidden_dims"], output_dim, cfg["activation"], cfg["layer_norm"])

    def forward(self, obs: Obs) -> Tensor:
        """Observations (B, ...) -> (B, output_dim)."""
        return self.mlp(flatten_obs(obs, self.obs_space))


class ImageNetwork(nn.Module):
    """Convolutions on one image, channels first or last; uint8 is scaled to [0, 1]."""

    def __init__(self, obs_space: spaces.Space, output_dim: int, cfg: Cfg) -> None:
        super().__init__()
        if not isinstance(obs_space, spaces.Box) or len(obs_space.shape) != 3:
            raise TypeError(f"a CNN needs one 3-D image as observation, got {obs_space}; flatten it for an MLP")
        self.obs_space = obs_space
        first, second, last = obs_space.shape
        self.channels_last = last in (1, 3, 4) and first not in (1, 3, 4)
        shape = (last, first, second) if self.channels_last else obs_space.shape
        layers = (cfg["conv_channels"], cfg["conv_kernels"], cfg["conv_strides"], cfg["hidden_dims"])
        self.cnn = Conv2dHeadModel(shape, *layers, output_size=output_dim, nonlinearity=cfg["activation"])

    def forward(self, obs: Tensor) -> Tensor:
        """Images (B, C, H, W) or (B, H, W, C) -> (B, output_dim)."""
        image = _scaled(obs, self.obs_space)
        return self.cnn(image.movedim(-1, -3) if self.channels_last else image)


def _scaled(obs: Tensor, space: spaces.Space) -> Tensor:
    """Float32; a uint8 image in [0, 1]."""
    if obs.dtype == torch.uint8 and space.shape is not None and len(space.shape) >= 3:
        return obs.float() / 255.0
    return obs.float() if not obs.is_floating_point() else obs


def batch_shape(obs: Any, space: spaces.Space) -> torch.Size:
    """The batch dimensions of an observation."""
    while isinstance(space, spaces.Dict):
        name, space = next(iter(space.spaces.items()))
        obs = obs[name]
    assert space.shape is not None
    return obs.shape[: obs.dim() - len(space.shape)]
