"""Several critics asked at once."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor, nn

from canter.envs.vec_env import flat_size
from canter.modules.mlp import ALIGNMENT
from canter.modules.q_networks import MLPContinuousQNetwork, UnitActions
from canter.modules.space_networks import Cfg, flatten_obs, read_cfg
from canter.modules.utils import activation
from canter.utils.tree import Obs


class StackedLinear(nn.Module):
    """E linear layers as one batched product."""

    def __init__(self, members: int, size_in: int, size_out: int, gain: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, size_in, size_out))
        self.bias = nn.Parameter(torch.zeros(members, 1, size_out))
        for part in self.weight.data:
            nn.init.orthogonal_(part, gain)

    def forward(self, x: Tensor) -> Tensor:
        """(E, B, size_in) -> (E, B, size_out)."""
        missing = -x.shape[-1] % ALIGNMENT
        weight: Any = self.weight
        if missing and x.is_cuda and x.shape[-1] > ALIGNMENT:  # fast matrix kernels need rows of 8 numbers
            x, weight = F.pad(x, (0, missing)), F.pad(weight, (0, 0, 0, missing))
        return torch.baddbmm(self.bias, x, weight)


class StackedLayerNorm(nn.Module):
    """E layer norms at once."""

    def __init__(self, members: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(members, 1, size))
        self.bias = nn.Parameter(torch.zeros(members, 1, size))

    def forward(self, x: Tensor) -> Tensor:
        """(E, B, size) -> (E, B, size)."""
        return torch.addcmul(self.bias, F.layer_norm(x, x.shape[-1:]), self.weight)


class StackedMLPCritics(nn.Module):
    """`MLPContinuousQNetwork`s of one shape, whose layers are batched: half the operations for twins."""

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None, members: int) -> None:
        super().__init__()
        settings = read_cfg(MLPContinuousQNetwork, cfg, MLPContinuousQNetwork.defaults)
        self.obs_space, self.members, self.num_atoms = obs_space, members, settings["num_atoms"]
        self.unit_actions = UnitActions(action_space)
        nonlinear = activation(settings["activation"])
        sizes = [flat_size(obs_space) + flat_size(action_space), *settings["hidden_dims"]]
        layers: list[nn.Module] = []
        for size_in, size_out in pairwise(sizes):
            layers.append(StackedLinear(members, size_in, size_out, math.sqrt(2.0)))
            layers += [StackedLayerNorm(members, size_out)] if settings["layer_norm"] else []
            layers.append(nonlinear())
        self.mlp = nn.Sequential(*layers, StackedLinear(members, sizes[-1], self.num_atoms, 1.0))

    def forward(self, obs: Obs, actions: Tensor) -> Tensor:
        """(E, B) values or (E, B, K) logits."""
        x = torch.cat([flatten_obs(obs, self.obs_space), self.unit_actions(actions)], dim=-1)
        out = self.mlp(x.expand(self.members, *x.shape))
        return out.squeeze(-1) if self.num_atoms == 1 else out


class ListedCritics(nn.Module):
    """Critics of any class, one after the other."""

    def __init__(
        self, critic_class: Any, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None, members: int
    ) -> None:
        super().__init__()
        self.critics = nn.ModuleList(
            critic_class(obs_space=obs_space, action_space=action_space, cfg=cfg) for _ in range(members)
        )

    def forward(self, obs: Obs, actions: Tensor) -> Tensor:
        """(E, B) values or (E, B, K) logits."""
        return torch.stack([critic(obs, actions) for critic in self.critics])


def build_critics(
    critic_class: Any, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None, members: int = 2
) -> nn.Module:
    """`members` critics of a class, stacked where their layers can be batched."""
    if critic_class is MLPContinuousQNetwork:
        return StackedMLPCritics(obs_space, action_space, cfg, members)
    return ListedCritics(critic_class, obs_space, action_space, cfg, members)
