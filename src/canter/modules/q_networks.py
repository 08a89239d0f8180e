"""Networks that score actions: `q_network_class(obs_space, action_space, cfg)` for discrete ones, and critics of pairs.

A custom network derives from `DiscreteQNetwork` and writes `forward(obs)`, or from `ContinuousQNetwork` and writes
`forward(obs, actions)`.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from canter.envs.vec_env import flat_size
from canter.modules.space_networks import (
    CNN_SETTINGS,
    MLP_SETTINGS,
    Cfg,
    FlatNetwork,
    ImageNetwork,
    build_mlp,
    flatten_obs,
    read_cfg,
)
from canter.modules.utils import activation, orthogonal_init
from canter.utils.tree import Obs

MLP_Q_SETTINGS: Cfg = {**MLP_SETTINGS, "activation": "relu"}


class DiscreteQNetwork(nn.Module):
    """Maps observations to the value of each of n actions."""

    defaults: ClassVar[Cfg | None] = None
    """Every setting of `cfg` with its default; None accepts any."""

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None = None) -> None:
        super().__init__()
        if not isinstance(action_space, spaces.Discrete):
            raise ValueError(f"{type(self).__name__} needs Discrete actions, got {action_space}; use SAC for a Box")
        self.obs_space, self.action_space, self.num_actions = obs_space, action_space, int(action_space.n)
        self.cfg = read_cfg(type(self), cfg, self.defaults)

    def forward(self, obs: Obs) -> Tensor:
        """Values (B, n)."""
        raise NotImplementedError(f"{type(self).__name__} must implement forward(obs)")

    @torch.no_grad()
    def act(self, obs: Obs, epsilon: float | Tensor = 0.0, generator: torch.Generator | None = None) -> Tensor:
        """The best action of each row, or with probability `epsilon` any; every row tosses its own coin."""
        return explore_rows(self(obs), epsilon, generator)


def explore_rows(values: Tensor, epsilon: float | Tensor, generator: torch.Generator | None) -> Tensor:
    """The best column of each row of (B, n) values, or with probability `epsilon` any."""
    best = values.argmax(-1)
    chance = torch.rand(2, *best.shape, device=best.device, generator=generator)
    other = (chance[1] * values.shape[-1]).long().clamp_(max=values.shape[-1] - 1)
    return torch.where(chance[0] < epsilon, other, best)


class QHeads(nn.Module):
    """Values of n actions from features; `dueling` (Wang et al. 2016) splits them into a level and advantages."""

    def __init__(self, num_features: int, num_actions: int, nonlinearity: str | type[nn.Module], dueling: bool) -> None:
        super().__init__()
        self.nonlinearity, self.dueling = activation(nonlinearity)(), dueling
        self.out = nn.Linear(num_features, num_actions + int(dueling))
        orthogonal_init(self.out, last_gain=1.0)

    def forward(self, features: Tensor) -> Tensor:
        """(..., num_features) before their nonlinearity -> (..., n)."""
        out = self.out(self.nonlinearity(features))
        if not self.dueling:
            return out
        level, advantage = out[..., :1], out[..., 1:]
        return level + advantage - advantage.mean(-1, keepdim=True)


class MLPQNetwork(DiscreteQNetwork):
    """MLP on flattened observations."""

    defaults = {**MLP_Q_SETTINGS, "dueling": False}

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None = None) -> None:
        super().__init__(obs_space, action_space, cfg)
        *hidden, last = self.cfg["hidden_dims"]
        self.encoder = FlatNetwork(obs_space, last, {**self.cfg, "hidden_dims": hidden})
        orthogonal_init(self.encoder)
        self.heads = QHeads(last, self.num_actions, self.cfg["activation"], self.cfg["dueling"])

    def forward(self, obs: Obs) -> Tensor:
        """Values (B, n)."""
        return self.heads(self.encoder(obs))


class CNNQNetwork(DiscreteQNetwork):
    """Convolutions on one image."""

    defaults = {**CNN_SETTINGS, "dueling": False}

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None = None) -> None:
        super().__init__(obs_space, action_space, cfg)
        *hidden, last = self.cfg["hidden_dims"]
        self.encoder = ImageNetwork(obs_space, last, {**self.cfg, "hidden_dims": hidden})
        orthogonal_init(self.encoder)
        self.heads = QHeads(last, self.num_actions, self.cfg["activation"], self.cfg["dueling"])

    def forward(self, obs: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Values (B, n)."""
        return self.heads(self.encoder(obs))


class UnitActions(nn.Module):
    """Actions of a Box in units of half its range, so that every joint counts alike; infinite ranges as they are."""

    scale: Tensor
    offset: Tensor

    def __init__(self, action_space: spaces.Space) -> None:
        super().__init__()
        if not isinstance(action_space, spaces.Box):
            raise ValueError(f"a critic of actions needs a Box of them, got {action_space}; use DQN for Discrete")
        low, high = (np.asarray(bound, np.float64).reshape(-1) for bound in (action_space.low, action_space.high))
        is_finite = np.isfinite(low) & np.isfinite(high)
        with np.errstate(invalid="ignore"):
            half, middle = np.where(is_finite, (high - low) / 2, 1.0), np.where(is_finite, (high + low) / 2, 0.0)
        self.is_identity = bool((half == 1).all() and (middle == 0).all())
        self.register_buffer("scale", torch.as_tensor(1 / half, dtype=torch.float32), persistent=False)
        self.register_buffer("offset", torch.as_tensor(-middle / half, dtype=torch.float32), persistent=False)

    def forward(self, actions: Tensor) -> Tensor:
        """(..., A) in the environment's units -> (..., A) in [-1, 1]."""
        return actions if self.is_identity else torch.addcmul(self.offset, actions, self.scale)


class ContinuousQNetwork(nn.Module):
    """Maps observations and actions of a Box to values (B,), or to logits over `num_atoms` values (B, K)."""

    defaults: ClassVar[Cfg | None] = None
    """Every setting of `cfg` with its default; None accepts any."""

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None = None) -> None:
        super().__init__()
        self.obs_space, self.action_space = obs_space, action_space
        self.cfg = read_cfg(type(self), cfg, self.defaults)
        self.unit_actions = UnitActions(action_space)
        self.num_actions = flat_size(action_space)

    def forward(self, obs: Obs, actions: Tensor) -> Tensor:
        """Values (B,) or logits (B, K)."""
        raise NotImplementedError(f"{type(self).__name__} must implement forward(obs, actions)")


class MLPContinuousQNetwork(ContinuousQNetwork):
    """MLP on the flattened observation and the action."""

    defaults = {**MLP_Q_SETTINGS, "num_atoms": 1}

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None = None) -> None:
        super().__init__(obs_space, action_space, cfg)
        width = flat_size(obs_space) + self.num_actions
        nets = (self.cfg["hidden_dims"], self.cfg["num_atoms"], self.cfg["activation"], self.cfg["layer_norm"])
        self.mlp = build_mlp(width, *nets)
        orthogonal_init(self.mlp, last_gain=1.0)

    def forward(self, obs: Obs, actions: Tensor) -> Tensor:
        """Values (B,) or logits (B, K)."""
        out = self.mlp(torch.cat([flatten_obs(obs, self.obs_space), self.unit_actions(actions)], dim=-1))
        return out.squeeze(-1) if self.cfg["num_atoms"] == 1 else out


class CNNContinuousQNetwork(ContinuousQNetwork):
    """Convolutions on one image; the action joins their features."""

    defaults = {**CNN_SETTINGS, "num_atoms": 1}

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None = None) -> None:
        super().__init__(obs_space, action_space, cfg)
        width = self.cfg["hidden_dims"][-1]
        self.encoder = ImageNetwork(obs_space, width, {**self.cfg, "hidden_dims": self.cfg["hidden_dims"][:-1]})
        orthogonal_init(self.encoder)
        self.mlp = build_mlp(width + self.num_actions, [width], self.cfg["num_atoms"], self.cfg["activation"])
        orthogonal_init(self.mlp, last_gain=1.0)

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Values (B,) or logits (B, K)."""
        features = torch.relu(self.encoder(obs))
        out = self.mlp(torch.cat([features, self.unit_actions(actions)], dim=-1))
        return out.squeeze(-1) if self.cfg["num_atoms"] == 1 else out
