"""Actors for off-policy learning: noise that depends on the state, and none."""

from __future__ import annotations

import math

import torch
from gymnasium import spaces
from torch import Tensor, nn

from canter.modules.actors import ContinuousActor
from canter.modules.distributions import Params
from canter.modules.q_networks import MLP_Q_SETTINGS
from canter.modules.space_networks import CNN_SETTINGS, Cfg, FlatNetwork, ImageNetwork
from canter.modules.utils import orthogonal_init
from canter.utils.tree import Obs

SQUASHED_SETTINGS: Cfg = {"min_log_std": -20.0, "max_log_std": 2.0, "init_std": 1.0, "use_tanh_squash": True}


class SquashedGaussianActor(ContinuousActor):
    """An actor whose `network` gives the mean and the logarithm of the standard deviation before squashing."""

    network: nn.Module

    def _finish(self, network: nn.Module) -> None:
        orthogonal_init(network, last_gain=0.01)
        last = [layer for layer in network.modules() if isinstance(layer, nn.Linear)][-1]
        with torch.no_grad():
            last.bias[self.action_dim :] = math.log(self.cfg["init_std"])
        self.network = network

    def get_params(self, obs: Obs) -> Params:
        """`mu` and `sigma`."""
        mu, log_std = self.network(obs).float().chunk(2, -1)
        return {"mu": mu, "sigma": log_std.clamp(self.cfg["min_log_std"], self.cfg["max_log_std"]).exp()}


class MLPSquashedGaussianActor(SquashedGaussianActor):
    """MLP on flattened observations."""

    defaults = {**MLP_Q_SETTINGS, **SQUASHED_SETTINGS}

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None = None) -> None:
        super().__init__(obs_space, action_space, cfg)
        self._finish(FlatNetwork(obs_space, 2 * self.action_dim, self.cfg))


class CNNSquashedGaussianActor(SquashedGaussianActor):
    """Convolutions on one image."""

    defaults = {**CNN_SETTINGS, **SQUASHED_SETTINGS}

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None = None) -> None:
        super().__init__(obs_space, action_space, cfg)
        self._finish(ImageNetwork(obs_space, 2 * self.action_dim, self.cfg))


class DeterministicActor(ContinuousActor):
    """An actor whose `network` gives the action before squashing; noise is the algorithm's business."""

    network: nn.Module
    no_std: Tensor

    def _finish(self, network: nn.Module) -> None:
        orthogonal_init(network, last_gain=0.01)
        self.network = network
        self.register_buffer("no_std", torch.full((self.action_dim,), 1e-6), persistent=False)

    def get_params(self, obs: Obs) -> Params:
        """`mu`, and a `sigma` of nearly nothing."""
        return {"mu": self.network(obs).float(), "sigma": self.no_std}


class MLPDeterministicActor(DeterministicActor):
    """MLP on flattened observations."""

    defaults = {**MLP_Q_SETTINGS, "use_tanh_squash": True}

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None = None) -> None:
        super().__init__(obs_space, action_space, cfg)
        self._finish(FlatNetwork(obs_space, self.action_dim, self.cfg))


class CNNDeterministicActor(DeterministicActor):
    """Convolutions on one image."""

    defaults = {**CNN_SETTINGS, "use_tanh_squash": True}

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None = None) -> None:
        super().__init__(obs_space, action_space, cfg)
        self._finish(ImageNetwork(obs_space, self.action_dim, self.cfg))
