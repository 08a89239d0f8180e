"""Actors and critics given apart, as ApexRL's users write them: `actor_class(obs_space=, action_space=, cfg=)`.

A custom actor derives from `ContinuousActor` or `DiscreteActor` and writes `get_action_dist(obs)`; a custom critic
derives from `Critic` and writes `forward(obs)`. What PPO reads is `actor.distribution`, `actor.get_params(obs)` and
`critic.get_value(obs)`.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch import distributions as td

from canter.modules.distributions import ActionDistribution, Params, bounded_std, distribution_for, init_std
from canter.modules.space_networks import (
    CNN_SETTINGS,
    MLP_SETTINGS,
    Cfg,
    FlatNetwork,
    ImageNetwork,
    batch_shape,
    build_mlp,
    read_cfg,
)
from canter.modules.utils import orthogonal_init
from canter.utils.tree import Obs

__all__ = [
    "Actor",
    "CNNActor",
    "CNNCritic",
    "ContinuousActor",
    "Critic",
    "DiscreteActor",
    "MLPActor",
    "MLPCritic",
    "MLPDiscreteActor",
    "NetworkActor",
    "build_mlp",
]

NOISE_SETTINGS: Cfg = {
    "learn_std": True,
    "init_std": 1.0,
    "min_log_std": -5.0,
    "max_log_std": 2.0,
    "use_tanh_squash": False,
}


class Actor(nn.Module):
    """Maps observations to the parameters of an action distribution; by default those of `get_action_dist`."""

    defaults: ClassVar[Cfg | None] = None
    """Every setting of `cfg` with its default; None accepts any."""
    distribution: ActionDistribution

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None = None) -> None:
        super().__init__()
        self.obs_space, self.action_space = obs_space, action_space
        self.cfg = read_cfg(type(self), cfg, self.defaults)
        self.distribution = distribution_for(action_space, squash=bool(self.cfg.get("use_tanh_squash", False)))
        self.action_dim = next(iter(self.distribution.param_shapes.values()))[0]

    def get_action_dist(self, obs: Obs) -> td.Distribution:
        """The distribution that a custom actor chooses: `Normal` for a Box, `Categorical` for a Discrete space."""
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
        """Parameters of the action distribution; a custom actor may return what it likes."""
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

    @torch.no_grad()
    def clip_std(self, min: Any = None, max: Any = None) -> None:  # noqa: A002, the documented names
        """Clamp a parameter called `log_std` or `std` in place to bounds of the standard deviation."""
        for name, raw in self.named_parameters(recurse=False):
            if name in ("log_std", "std"):
                low, high = (_noise_bound(bound, raw, is_log=name == "log_std") for bound in (min, max))
                if low is not None:
                    raw.clamp_(min=low)
                if high is not None:
                    raw.clamp_(max=high)


def _noise_bound(bound: Any, raw: Tensor, is_log: bool) -> Any:
    """A bound of the standard deviation as one of the parameter; numbers stay numbers, which cost no copy."""
    if bound is None or isinstance(bound, (int, float)):
        return math.log(max(bound, 1e-38)) if is_log and bound is not None else bound
    tensor = torch.as_tensor(bound, dtype=raw.dtype, device=raw.device)
    return tensor.log() if is_log else tensor


class ContinuousActor(Actor):
    """An actor for a Box of actions; `get_action_dist` returns a `Normal` (before squashing, where that is on)."""

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None = None) -> None:
        if not isinstance(action_space, spaces.Box):
            raise TypeError(f"{type(self).__name__} needs a Box of actions, got {action_space}; use a DiscreteActor")
        super().__init__(obs_space, action_space, cfg)


class DiscreteActor(Actor):
    """For Discrete actions, whose `get_action_dist` gives a `Categorical`; MultiDiscrete writes `get_params`."""

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None = None) -> None:
        if not isinstance(action_space, (spaces.Discrete, spaces.MultiDiscrete)):
            raise TypeError(f"{type(self).__name__} needs discrete actions, got {action_space}; use a ContinuousActor")
        super().__init__(obs_space, action_space, cfg)


class NetworkActor(Actor):
    """An actor whose `network` gives the logits, or the mean beside a standard deviation that no state changes."""

    network: nn.Module
    log_std: Tensor

    def _finish(self, network: nn.Module) -> None:
        orthogonal_init(network, last_gain=0.01)
        self.network = network
        if "mu" in self.distribution.param_shapes:
            log_std = init_std(self.action_dim, self.cfg["init_std"]).log()
            if self.cfg["learn_std"]:
                self.log_std = nn.Parameter(log_std)
            else:
                self.register_buffer("log_std", log_std)

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

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None = None) -> None:
        super().__init__(obs_space, action_space, cfg)
        self._finish(FlatNetwork(obs_space, self.action_dim, self.cfg))


class MLPDiscreteActor(NetworkActor, DiscreteActor):
    """MLP on flattened observations for Discrete and MultiDiscrete actions."""

    defaults = MLP_SETTINGS

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None = None) -> None:
        super().__init__(obs_space, action_space, cfg)
        self._finish(FlatNetwork(obs_space, self.action_dim, self.cfg))


class CNNActor(NetworkActor):
    """Convolutions on one image for continuous or discrete actions."""

    defaults = {**CNN_SETTINGS, **NOISE_SETTINGS}

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None = None) -> None:
        super().__init__(obs_space, action_space, cfg)
        self._finish(ImageNetwork(obs_space, self.action_dim, self.cfg))


class Critic(nn.Module):
    """Maps observations to values; a custom critic writes `forward(obs)`, which may return (B,) or (B, 1)."""

    defaults: ClassVar[Cfg | None] = None
    """Every setting of `cfg` with its default; None accepts any."""

    def __init__(self, obs_space: spaces.Space, cfg: Cfg | None = None) -> None:
        super().__init__()
        self.obs_space = obs_space
        self.cfg = read_cfg(type(self), cfg, self.defaults)

    def forward(self, obs: Obs) -> Tensor:
        """Values (B,)."""
        raise NotImplementedError(f"{type(self).__name__} must implement forward(obs)")

    def get_value(self, obs: Obs) -> Tensor:
        """Values (B,)."""
        value = self(obs)
        return value.squeeze(-1) if value.dim() > len(batch_shape(obs, self.obs_space)) else value


class MLPCritic(Critic):
    """MLP on flattened observations."""

    defaults = MLP_SETTINGS

    def __init__(self, obs_space: spaces.Space, cfg: Cfg | None = None) -> None:
        super().__init__(obs_space, cfg)
        self.network = FlatNetwork(obs_space, 1, self.cfg)
        orthogonal_init(self.network, last_gain=1.0)

    def forward(self, obs: Obs) -> Tensor:
        """Values (B,)."""
        return self.network(obs).squeeze(-1)


class CNNCritic(Critic):
    """Convolutions on one image."""

    defaults = CNN_SETTINGS

    def __init__(self, obs_space: spaces.Space, cfg: Cfg | None = None) -> None:
        super().__init__(obs_space, cfg)
        self.network = ImageNetwork(obs_space, 1, self.cfg)
        orthogonal_init(self.network, last_gain=1.0)

    def forward(self, obs: Obs) -> Tensor:
        """Values (B,)."""
        return self.network(obs).squeeze(-1)
