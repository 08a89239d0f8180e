"""Actors and critics in the style of ApexRL: `actor_class(obs_space=, action_space=, cfg=)`.

A custom actor derives from `ContinuousActor` or `DiscreteActor` and implements `get_action_dist(obs)`; a custom critic
derives from `Critic` and implements `forward(obs)`. PPO uses `actor.distribution`, `actor.get_params(obs)` and
`critic.get_value(obs)`. Networks of Q-learning are in `canter.modules.q_networks`.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch import distributions as td

from canter.envs.vec_env import flat_size
from canter.modules.conv2d import Conv2dHeadModel, channels_first, image_layers, image_shape
from canter.modules.distributions import Params, bounded_std, clip_std_parameter, distribution_for, init_std
from canter.modules.mlp import layer_sizes, mlp
from canter.modules.utils import orthogonal_init
from canter.utils.config import check_settings
from canter.utils.tree import Obs

Cfg = Mapping[str, Any]

MLP_SETTINGS: Cfg = {"hidden_dims": [256, 256], "activation": "elu", "layer_norm": False}
MLP_Q_SETTINGS: Cfg = {**MLP_SETTINGS, "activation": "relu"}
CNN_SETTINGS: Cfg = {
    "conv_channels": [32, 64, 64],
    "conv_kernels": [8, 4, 3],
    "conv_strides": [4, 2, 1],
    "hidden_dims": [512],
    "activation": "relu",
}
NOISE_SETTINGS: Cfg = {
    "learn_std": True,
    "init_std": 1.0,
    "min_log_std": -5.0,
    "max_log_std": 2.0,
    "use_tanh_squash": False,
}
SQUASHED_SETTINGS: Cfg = {"min_log_std": -20.0, "max_log_std": 2.0, "init_std": 1.0, "use_tanh_squash": True}


def flatten_obs(obs: Obs, space: spaces.Space) -> Tensor:
    """A (nested dict) observation as one float vector (..., D), in the order of the space's keys."""
    if isinstance(space, spaces.Dict):
        assert isinstance(obs, Mapping)
        return torch.cat([flatten_obs(obs[name], part) for name, part in space.spaces.items()], dim=-1)
    assert isinstance(obs, Tensor)
    return _scaled(obs, space).reshape(*batch_shape(obs, space), flat_size(space))


class FlattenObs(nn.Module):
    """Observations of a space as float vectors; see `flatten_obs`."""

    def __init__(self, space: spaces.Space) -> None:
        super().__init__()
        self.space = space

    def forward(self, obs: Obs) -> Tensor:
        """Observations (B, ...) -> (B, D)."""
        return flatten_obs(obs, self.space)


def flattening(space: spaces.Space) -> nn.Module:
    """A module that flattens observations of a space; the identity if they are float vectors."""
    is_vector = isinstance(space, spaces.Box) and len(space.shape) == 1 and np.issubdtype(space.dtype, np.floating)
    return nn.Identity() if is_vector else FlattenObs(space)


class FlatNetwork(nn.Sequential):
    """An MLP on any observation space, flattened."""

    def __init__(self, obs_space: spaces.Space, output_dim: int, cfg: Cfg) -> None:
        super().__init__()
        self.flatten = flattening(obs_space)
        sizes = [flat_size(obs_space), *cfg["hidden_dims"], output_dim]
        self.mlp = mlp(sizes, cfg["activation"], layer_norm=cfg["layer_norm"])


class ImageNetwork(nn.Module):
    """Convolutions on one image, channels first or last; uint8 is scaled to [0, 1]."""

    def __init__(self, obs_space: spaces.Space, output_dim: int, cfg: Cfg) -> None:
        super().__init__()
        shape = image_shape(obs_space.shape) if isinstance(obs_space, spaces.Box) else None
        if shape is None:
            raise TypeError(f"a CNN needs one 3-D image as observation, got {obs_space}; flatten it for an MLP")
        self.obs_space = obs_space
        names = ("conv_channels", "conv_kernels", "conv_strides")
        layers = tuple(cfg[name] for name in names)
        if layers == tuple(CNN_SETTINGS[name] for name in names):
            layers = tuple(image_layers(*shape[1:]).values())
        options: Any = {
            "hidden_sizes": cfg["hidden_dims"],
            "output_size": output_dim,
            "nonlinearity": cfg["activation"],
        }
        self.cnn = Conv2dHeadModel(shape, *layers, **options)

    def forward(self, obs: Tensor) -> Tensor:
        """Images (B, C, H, W) or (B, H, W, C), or stacks of them -> (B, output_dim)."""
        return self.cnn(channels_first(_scaled(obs, self.obs_space), self.obs_space.shape or ()))


def build_network(obs_space: spaces.Space, output_dim: int, cfg: Cfg) -> nn.Module:
    """Convolutions on an image if the settings name some, else an MLP on the flattened observation."""
    return (ImageNetwork if "conv_channels" in cfg else FlatNetwork)(obs_space, output_dim, cfg)


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


class ConfiguredNetwork(nn.Module):
    """A network for an observation space, with the settings `cfg` over its defaults."""

    defaults: ClassVar[Cfg | None] = None
    """Every setting of `cfg` with its default; None accepts any."""

    def __init__(self, obs_space: spaces.Space, cfg: Cfg | None = None) -> None:
        super().__init__()
        self.obs_space, self.cfg = obs_space, dict(cfg or {})
        if self.defaults is not None:
            self.cfg = {**self.defaults, **check_settings(type(self).__name__, self.cfg, self.defaults)}
            if "hidden_dims" in self.defaults:
                sizes = self.cfg["hidden_dims"]  # behind convolutions one number is a layer too
                is_number = "conv_channels" in self.defaults and isinstance(sizes, int)
                layer_sizes(f"{type(self).__name__}: hidden_dims", [sizes] if is_number else sizes)


class Actor(ConfiguredNetwork):
    """Maps observations to the parameters of an action distribution, by default those of `get_action_dist`."""

    action_spaces: ClassVar[tuple[type[spaces.Space], ...]] = (spaces.Space,)
    needs: ClassVar[tuple[str, str]] = ("a space of actions", "an Actor")
    """Words of the error for any other action space: the actions that the class needs, the class for the others."""

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None = None) -> None:
        if not isinstance(action_space, self.action_spaces):
            needed, other = self.needs
            raise TypeError(f"{type(self).__name__} needs {needed}, got {action_space}; use {other}")
        super().__init__(obs_space, cfg)
        self.action_space = action_space
        self.distribution = distribution_for(action_space, squash=bool(self.cfg.get("use_tanh_squash", False)))
        self.action_dim = next(iter(self.distribution.param_shapes.values()))[0]

    def get_action_dist(self, obs: Obs) -> td.Distribution:
        """The action distribution of a custom actor: `Normal` for a Box, `Categorical` for a Discrete space."""
        raise NotImplementedError(f"{type(self).__name__} must implement get_action_dist(obs) or get_params(obs)")

    def get_params(self, obs: Obs) -> Params:
        """Named parameters of the action distribution."""
        # Argument validation waits for the device, which a captured graph forbids; custom actors rarely switch it off.
        validates = td.Distribution._validate_args
        td.Distribution.set_default_validate_args(False)
        try:
            dist: Any = self.get_action_dist(obs)
        finally:
            td.Distribution.set_default_validate_args(validates)
        if "mu" in self.distribution.param_shapes:
            return {"mu": dist.mean, "sigma": dist.stddev}
        return {"logits": dist.logits}

    def forward(self, obs: Obs) -> Any:
        """Parameters of the action distribution; a custom actor may return anything."""
        return self.get_params(obs)

    def act(self, obs: Obs, deterministic: bool = False) -> tuple[Tensor, Tensor]:
        """Actions and their log-probabilities (B,); squashed actors return actions before the squashing."""
        params = self.get_params(obs)
        actions = self.distribution.mode(params) if deterministic else self.distribution.sample(params)
        return actions, self.distribution.log_prob(params, actions)

    def evaluate(self, obs: Obs, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B,) of given actions, and the entropy (B,)."""
        params = self.get_params(obs)
        return self.distribution.log_prob(params, actions), self.distribution.entropy(params)

    def clip_std(self, min: Any = None, max: Any = None) -> None:  # noqa: A002, the documented names
        """Clamp a parameter called `log_std` or `std` in place to bounds of the standard deviation."""
        clip_std_parameter(self, min, max)


class ContinuousActor(Actor):
    """An actor for a Box of actions; `get_action_dist` returns a `Normal` (before squashing, if squashing is on)."""

    action_spaces = (spaces.Box,)
    needs = ("a Box of actions", "a DiscreteActor")


class DiscreteActor(Actor):
    """An actor for discrete actions: `get_action_dist` returns a `Categorical`; MultiDiscrete needs `get_params`."""

    action_spaces = (spaces.Discrete, spaces.MultiDiscrete)
    needs = ("discrete actions", "a ContinuousActor")


class NetworkActor(Actor):
    """An actor whose `network` outputs the logits, or the mean beside a state-independent standard deviation."""

    outputs_per_action: ClassVar[int] = 1

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None = None) -> None:
        super().__init__(obs_space, action_space, cfg)
        self.network = build_network(obs_space, self.outputs_per_action * self.action_dim, self.cfg)
        orthogonal_init(self.network, last_gain=0.01)
        self.init_noise()

    def init_noise(self) -> None:
        """Create the standard deviation of a Box of actions."""
        if "mu" in self.distribution.param_shapes:
            log_std = init_std(self.action_dim, self.cfg["init_std"]).log()
            self.log_std = nn.Parameter(log_std) if self.cfg["learn_std"] else nn.Buffer(log_std)

    def get_params(self, obs: Obs) -> Params:
        """`mu` and `sigma`, or `logits`."""
        out = self.network(obs)
        if "mu" not in self.distribution.param_shapes:
            return {"logits": out}
        low, high = math.exp(self.cfg["min_log_std"]), math.exp(self.cfg["max_log_std"])
        return {"mu": out, "sigma": bounded_std(self.log_std, "log", low, high).expand_as(out)}

    def get_action_dist(self, obs: Obs) -> td.Distribution:
        """The distribution of `get_params`, before squashing."""
        params = self.get_params(obs)
        if "mu" in params:
            return td.Normal(params["mu"], params["sigma"], validate_args=False)
        return self.distribution.torch_distribution(params)


class MLPActor(NetworkActor, ContinuousActor):
    """MLP on flattened observations for continuous actions."""

    defaults = {**MLP_SETTINGS, **NOISE_SETTINGS}


class MLPDiscreteActor(NetworkActor, DiscreteActor):
    """MLP on flattened observations for Discrete and MultiDiscrete actions."""

    defaults = MLP_SETTINGS


class CNNActor(NetworkActor):
    """Convolutions on one image for continuous or discrete actions."""

    defaults = {**CNN_SETTINGS, **NOISE_SETTINGS}


class SquashedGaussianActor(NetworkActor, ContinuousActor):
    """An actor whose `network` outputs the mean and the logarithm of the standard deviation before squashing."""

    outputs_per_action = 2

    def init_noise(self) -> None:
        """Start with the same standard deviation everywhere."""
        last = [layer for layer in self.network.modules() if isinstance(layer, nn.Linear)][-1]
        with torch.no_grad():
            last.bias[self.action_dim :] = math.log(self.cfg["init_std"])

    def get_params(self, obs: Obs) -> Params:
        """`mu` and `sigma`."""
        mu, log_std = self.network(obs).float().chunk(2, -1)
        return {"mu": mu, "sigma": log_std.clamp(self.cfg["min_log_std"], self.cfg["max_log_std"]).exp()}


class MLPSquashedGaussianActor(SquashedGaussianActor):
    """MLP on flattened observations."""

    defaults = {**MLP_Q_SETTINGS, **SQUASHED_SETTINGS}


class CNNSquashedGaussianActor(SquashedGaussianActor):
    """Convolutions on one image."""

    defaults = {**CNN_SETTINGS, **SQUASHED_SETTINGS}


class DeterministicActor(NetworkActor, ContinuousActor):
    """An actor whose `network` outputs the action before squashing; the algorithm adds noise."""

    def init_noise(self) -> None:
        """A standard deviation of almost 0."""
        self.no_std = nn.Buffer(torch.full((self.action_dim,), 1e-6), persistent=False)

    def get_params(self, obs: Obs) -> Params:
        """`mu`, and a `sigma` of almost 0."""
        return {"mu": self.network(obs).float(), "sigma": self.no_std}


class MLPDeterministicActor(DeterministicActor):
    """MLP on flattened observations."""

    defaults = {**MLP_Q_SETTINGS, "use_tanh_squash": True}


class CNNDeterministicActor(DeterministicActor):
    """Convolutions on one image."""

    defaults = {**CNN_SETTINGS, "use_tanh_squash": True}


class Critic(ConfiguredNetwork):
    """Maps observations to values; a custom critic implements `forward(obs)`, with result (B,) or (B, 1)."""

    def forward(self, obs: Obs) -> Tensor:
        """Values (B,)."""
        raise NotImplementedError(f"{type(self).__name__} must implement forward(obs)")

    def get_value(self, obs: Obs) -> Tensor:
        """Values (B,)."""
        value = self(obs)
        return value.squeeze(-1) if value.dim() > len(batch_shape(obs, self.obs_space)) else value


class NetworkCritic(Critic):
    """A critic with a `network` of one output."""

    def __init__(self, obs_space: spaces.Space, cfg: Cfg | None = None) -> None:
        super().__init__(obs_space, cfg)
        self.network = build_network(obs_space, 1, self.cfg)
        orthogonal_init(self.network, last_gain=1.0)

    def forward(self, obs: Obs) -> Tensor:
        """Values (B,)."""
        return self.network(obs).squeeze(-1)


class MLPCritic(NetworkCritic):
    """MLP on flattened observations."""

    defaults = MLP_SETTINGS


class CNNCritic(NetworkCritic):
    """Convolutions on one image."""

    defaults = CNN_SETTINGS
