"""The actor-critic for flat observations: two hooks around two MLPs. A mixin extends a hook, never a public method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium.spaces import Box
from torch import Tensor, nn
from torch.distributions import Normal

from canter.modules.distributions import (
    SMALLEST_STD,
    Beta,
    Gaussian,
    Params,
    bounded_std,
    distribution_for,
    init_std,
)
from canter.modules.mlp import mlp
from canter.modules.policy import Context, Policy
from canter.modules.segmented import Segmented
from canter.modules.utils import activation as activation_class
from canter.modules.utils import orthogonal_init as init_orthogonal
from canter.utils.config import refuse_unknown
from canter.utils.obs_layout import ObsLayout

Segments = Mapping[str, Any]


class ActorCritic(Segmented, Policy):
    """MLP actor and critic on flat observations.

    `ActorCritic(num_obs, num_actions)` gives both the same observation.

    Args:
        num_actor_obs: Width of the actor's observation.
        num_critic_obs: Width of the critic's observation.
        num_actions: Width of the action, or number of logits.
        actor_hidden_dims: Hidden layers of the actor.
        critic_hidden_dims: Hidden layers of the critic.
        activation: Name of the activation between layers.
        init_noise_std: Initial standard deviation, one number or one per action.
        noise_std_type: "scalar" learns the standard deviation itself, "log" its logarithm.
        state_dependent_std: The actor says the standard deviation for each observation, instead of one for all.
        mu_activation: Activation after the actor's last layer.
        orthogonal_init: Orthogonal weights, in encoders too; small in the actor's last layer, as is usual for control.
        squash_actions: Squash actions into the bounds of `action_space` with tanh.
        action_distribution: For a Box: "gaussian", "squashed" or "beta"; None goes by `squash_actions`.
        action_space: Discrete and MultiDiscrete spaces give categorical actions; None or a Box a Gaussian.
        obs_segments: Names and shapes of the observation's parts, in order.
        critic_obs_segments: The same for the critic; the actor's if None.
    """

    std_low: Tensor
    std_high: Tensor

    def __init__(
        self,
        num_actor_obs: int,
        num_critic_obs: int,
        num_actions: int | None = None,
        *,
        actor_hidden_dims: Sequence[int] = (256, 256, 256),
        critic_hidden_dims: Sequence[int] = (256, 256, 256),
        activation: str = "elu",
        init_noise_std: float | Sequence[float] = 1.0,
        noise_std_type: str = "scalar",
        state_dependent_std: bool = False,
        mu_activation: str | None = None,
        orthogonal_init: bool = False,
        squash_actions: bool = False,
        action_distribution: str | None = None,
        action_space: Any = None,
        obs_segments: Segments | None = None,
        critic_obs_segments: Segments | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown(type(self), (name for name, value in unknown.items() if value is not None))
        super().__init__()
        if num_actions is None:
            num_critic_obs, num_actions = num_actor_obs, num_critic_obs
        self.obs_layout = layout_of(obs_segments, num_actor_obs, "obs_segments")
        if critic_obs_segments is None and self.obs_layout.width == num_critic_obs:
            critic_obs_segments = obs_segments
        self.critic_obs_layout = layout_of(critic_obs_segments, num_critic_obs, "critic_obs_segments")
        self.feature_layout, self.critic_feature_layout = self.obs_layout, self.critic_obs_layout
        """What the parts are called that the next stage gets; a stage that changes their widths replaces it."""
        if action_space is None:
            action_space = Box(-np.inf, np.inf, (num_actions,))
        self.action_space = action_space
        self.distribution = distribution_for(action_space, squash_actions, action_distribution)
        self.num_actions, self.noise_std_type = num_actions, noise_std_type
        self.state_dependent_std = state_dependent_std
        head_width, head_activation = self._head(mu_activation)
        actor_width, critic_width = self.feature_widths(num_actor_obs, num_critic_obs)
        self.actor = mlp([actor_width, *actor_hidden_dims, head_width], activation, head_activation)
        self.critic = mlp([critic_width, *critic_hidden_dims, 1], activation)
        if orthogonal_init:
            init_orthogonal(self.actor, last_gain=0.01)
            init_orthogonal(self.critic, last_gain=1.0)
        if isinstance(self.distribution, Gaussian):
            self._init_noise(init_std(num_actions, init_noise_std))

    def _head(self, mu_activation: str | None) -> tuple[int, str | None]:
        """How many numbers the actor gives for an action, and the activation after all of them."""
        if self.state_dependent_std and not isinstance(self.distribution, Gaussian):
            owner = type(self.distribution).__name__
            raise ValueError(f"state_dependent_std is for Gaussian actions; a {owner} has no standard deviation")
        if isinstance(self.distribution, Beta) and mu_activation is not None:
            raise ValueError(f"mu_activation={mu_activation!r} has no mean to act on in a Beta distribution; leave it")
        if not self.state_dependent_std:
            return self.num_actions * (2 if isinstance(self.distribution, Beta) else 1), mu_activation
        self.mu_activation = nn.Identity() if mu_activation is None else activation_class(mu_activation)()
        return 2 * self.num_actions, None

    def _init_noise(self, std: Tensor) -> None:
        """The noise parameter; or, where the actor says the noise, the layer that starts by saying `std` to all."""
        if self.noise_std_type not in ("scalar", "log"):
            raise ValueError(f"noise_std_type must be 'scalar' or 'log', got {self.noise_std_type!r}")
        raw = std.log() if self.noise_std_type == "log" else std
        if self.state_dependent_std:
            last: Any = [layer for layer in self.actor if isinstance(layer, nn.Linear)][-1]
            with torch.no_grad():
                last.weight[self.num_actions :] = 0.0
                last.bias[self.num_actions :] = raw if self.noise_std_type == "log" else raw.expm1().log()
            # Bounds that `clip_std` sets; a parameter could be clamped instead, a network's output cannot.
            self.register_buffer("std_low", torch.full_like(std, SMALLEST_STD), persistent=False)
            self.register_buffer("std_high", torch.full_like(std, torch.inf), persistent=False)
        elif self.noise_std_type == "log":
            self.log_std = nn.Parameter(raw)
        else:
            self.std = nn.Parameter(raw)

    # ------------------------------------------------------------------ hooks: what a mixin extends
    def feature_widths(self, num_actor_obs: int, num_critic_obs: int) -> tuple[int, int]:
        """Widths of what `actor_features` and `critic_features` return."""
        return num_actor_obs, num_critic_obs

    def actor_features(self, obs: Tensor, ctx: Context) -> Tensor:
        """What the actor's MLP sees."""
        return obs

    def critic_features(self, obs: Tensor, ctx: Context) -> Tensor:
        """What the critic's MLP sees."""
        return obs

    # ------------------------------------------------------------------ core
    def actor_params(self, obs: Tensor, ctx: Context) -> Params:
        """Parameters of the action distribution."""
        return self.head_params(self.actor_features(self.obs_layout.flat(obs), ctx))

    def head_params(self, features: Tensor) -> Params:
        """Mean and standard deviation, or logits, from what `actor_features` returns."""
        head = self.actor(features)
        if "logits" in self.distribution.param_shapes:
            return {"logits": head}
        if isinstance(self.distribution, Beta):
            return self.distribution.from_head(head)
        if self.state_dependent_std:
            mu, raw = head.chunk(2, dim=-1)
            return {"mu": self.mu_activation(mu), "sigma": self._bounded(raw)}
        return {"mu": head, "sigma": self.noise_std()}  # (A,): one noise serves every row

    def critic_value(self, critic_obs: Tensor, ctx: Context) -> Tensor:
        """(..., 1)."""
        return self.critic(self.critic_features(self.critic_obs_layout.flat(critic_obs), ctx))

    def noise_std(self) -> Tensor:
        """(A,) standard deviation of the exploration noise."""
        raw = self.log_std if self.noise_std_type == "log" else self.std
        return bounded_std(raw, self.noise_std_type, None, None)

    def _bounded(self, raw: Tensor) -> Tensor:
        """(..., A) standard deviation that the actor's output stands for: its softplus, or its exponential."""
        raw = raw.float() if self.noise_std_type == "log" else F.softplus(raw.float())
        return bounded_std(raw, self.noise_std_type, self.std_low, self.std_high)

    @torch.no_grad()
    def clip_std(self, min: Any = None, max: Any = None) -> None:  # noqa: A002 (documented names)
        """Clamp the noise parameter in place, or what the actor may say; bounds are numbers or (A,) tensors."""
        if "sigma" not in self.distribution.param_shapes:
            return
        if self.state_dependent_std:
            if min is not None:
                self.std_low.copy_(torch.as_tensor(min).clamp_min(SMALLEST_STD))
            if max is not None:
                self.std_high.copy_(torch.as_tensor(max))
            return
        log = self.noise_std_type == "log"
        raw = self.log_std if log else self.std
        low, high = (
            bound if bound is None else torch.as_tensor(bound, dtype=raw.dtype, device=raw.device)
            for bound in (min, max)
        )
        if log:
            low, high = (bound if bound is None else bound.log() for bound in (low, high))
        if low is not None or high is not None:
            raw.clamp_(low, high)


def layout_of(segments: Segments | None, width: int, name: str) -> ObsLayout:
    """Where the segments of an observation of this width are; one segment "obs" if they are not named."""
    layout = ObsLayout(segments or {"obs": (width,)})
    if layout.width != width:
        raise ValueError(f"{name} {layout.shapes} add up to {layout.width} values, but the observation has {width}")
    return layout


class Actor(nn.Module):
    """The documented minimal actor: observation -> Normal."""

    def __init__(self, obs_dim: int, act_dim: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs_dim, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.mean = nn.Linear(64, act_dim)
        self.log_std = nn.Parameter(torch.zeros(act_dim))

    def forward(self, obs: Tensor) -> Normal:
        """The action distribution."""
        return Normal(self.mean(self.body(obs)), self.log_std.exp())


class Critic(nn.Module):
    """The documented minimal critic: observation -> (B, 1) value."""

    def __init__(self, obs_dim: int) -> None:
        super().__init__()
        self.net = mlp([obs_dim, 64, 64, 1], "tanh")

    def forward(self, obs: Tensor) -> Tensor:
        """(B, 1)."""
        return self.net(obs)
