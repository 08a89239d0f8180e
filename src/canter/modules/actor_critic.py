"""The actor-critic for flat observations: hooks around two networks. A mixin extends a hook, never a public method."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium.spaces import Box
from torch import Tensor, nn
from torch.distributions import Normal

from canter.compat.arguments import documented
from canter.modules.distributions import (
    SMALLEST_STD,
    Beta,
    Gaussian,
    Params,
    bounded_std,
    clip_std_parameter,
    distribution_for,
    init_std,
)
from canter.modules.mlp import layer_sizes, mlp
from canter.modules.policy import Context, Policy
from canter.modules.utils import activation as activation_class
from canter.modules.utils import orthogonal_init as init_orthogonal
from canter.utils.config import refuse_unknown
from canter.utils.obs_layout import ObsLayout

Segments = Mapping[str, Any]


class ActorCritic(Policy):
    """MLP actor and critic on flat observations, or any two modules.

    `ActorCritic(num_obs, num_actions)` gives both the same observation. `ActorCritic(actor=..., critic=...)` without
    widths passes observations of any structure to the modules as they are.

    Args:
        num_actions: Width of the action, or number of logits.
        actor: Module instead of the MLP: its output is the mean or the logits (an input of the distribution); or it
            has `get_params(obs)` and a `distribution`, as the classes of `canter.modules.actors`.
        critic: Module instead of the MLP, with output (B,) or (B, 1) or a method `get_value(obs)`.
        actor_hidden_dims: Hidden layers of the actor.
        critic_hidden_dims: Hidden layers of the critic.
        activation: Name of the activation between layers.
        actor_activation: Activation of the actor alone; `activation` if None.
        critic_activation: Activation of the critic alone; `activation` if None.
        actor_layer_norm: Layer normalisation in the hidden layers of the actor.
        critic_layer_norm: Layer normalisation in the hidden layers of the critic.
        init_noise_std: Initial standard deviation, one number or one per action.
        noise_std_type: "scalar" learns the standard deviation itself, "log" its logarithm. With `state_dependent_std`,
            "scalar" is the softplus of the actor's output, "clamped" the output itself.
        learn_noise_std: Learn the standard deviation; if false it stays `init_noise_std`.
        state_dependent_std: The actor outputs a standard deviation for each observation, instead of one for all.
        mu_activation: Activation after the actor's last layer.
        orthogonal_init: Orthogonal weights, in encoders too; small in the actor's last layer, as is usual for control.
        squash_actions: Squash actions into the bounds of `action_space` with tanh.
        action_distribution: For a Box: "gaussian", "squashed" or "beta"; if None, `squash_actions` decides.
        action_space: Discrete and MultiDiscrete spaces give categorical actions; None or a Box a Gaussian.
        obs_segments: Names and shapes of the observation's parts, in order.
        critic_obs_segments: The same for the critic; the actor's if None.
    """

    @documented(obs_dim="num_actor_obs", act_dim="num_actions")
    def __init__(
        self,
        num_actor_obs: int | None = None,
        num_critic_obs: int | None = None,
        num_actions: int | None = None,
        *,
        actor: nn.Module | None = None,
        critic: nn.Module | None = None,
        actor_hidden_dims: Sequence[int] = (256, 256, 256),
        critic_hidden_dims: Sequence[int] = (256, 256, 256),
        activation: str = "elu",
        actor_activation: str | None = None,
        critic_activation: str | None = None,
        actor_layer_norm: bool = False,
        critic_layer_norm: bool = False,
        init_noise_std: float | Sequence[float] = 1.0,
        noise_std_type: str = "scalar",
        learn_noise_std: bool = True,
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
        elif num_critic_obs is None and critic is None:
            num_critic_obs = num_actor_obs
        self._check_given("actor", actor, num_actor_obs, actor_activation or mu_activation)
        self._check_given("critic", critic, num_critic_obs, critic_activation)
        self.noise_std_type, self.state_dependent_std = noise_std_type, state_dependent_std
        self._init_distribution(actor, num_actions, action_space, squash_actions, action_distribution)
        if state_dependent_std and not isinstance(self.distribution, Gaussian):
            name = type(self.distribution).__name__
            raise ValueError(f"state_dependent_std is for Gaussian actions; a {name} has no standard deviation")
        if isinstance(self.distribution, Beta) and mu_activation is not None:
            raise ValueError(f"mu_activation={mu_activation!r} has no mean to act on in a Beta distribution; leave it")
        head_width = self.num_actions * (2 if state_dependent_std or isinstance(self.distribution, Beta) else 1)
        head_activation = None if state_dependent_std else mu_activation
        if state_dependent_std:
            self.mu_activation = activation_class(mu_activation or "identity")()
        actor_width, critic_width = self._init_layouts(num_actor_obs, num_critic_obs, obs_segments, critic_obs_segments)
        self.actor_gives_params, self.critic_gives_value = hasattr(actor, "get_params"), hasattr(critic, "get_value")
        # The base hooks return their input; they are not called where no class of the policy overrides them.
        self.has_actor_features = type(self).actor_features is not ActorCritic.actor_features
        self.has_critic_features = type(self).critic_features is not ActorCritic.critic_features
        actor_sizes = [actor_width, *layer_sizes("actor_hidden_dims", actor_hidden_dims), head_width]
        critic_sizes = [critic_width, *layer_sizes("critic_hidden_dims", critic_hidden_dims), 1]
        actor_kind, critic_kind = actor_activation or activation, critic_activation or activation
        self.actor = mlp(actor_sizes, actor_kind, head_activation, actor_layer_norm) if actor is None else actor
        self.critic = mlp(critic_sizes, critic_kind, None, critic_layer_norm) if critic is None else critic
        for given, built, gain in ((actor, self.actor, 0.01), (critic, self.critic, 1.0)):
            if orthogonal_init and given is None:
                init_orthogonal(built, last_gain=gain)
        if isinstance(self.distribution, Gaussian) and not self.actor_gives_params:
            self._init_noise(init_std(self.num_actions, init_noise_std), sets_last_layer=actor is None)
            for parameter in self.parameters(recurse=False):
                parameter.requires_grad_(learn_noise_std)

    def _check_given(self, part: str, module: nn.Module | None, width: int | None, unused: str | None) -> None:
        """Refuse a missing width, a setting of an MLP that is not built, and a module that has half of an interface."""
        if module is None:
            if width is None:
                raise TypeError(f"{type(self).__name__} needs num_{part}_obs to build the {part}, or {part}=<module>")
            return
        if unused is not None:
            raise ValueError(f"activation {unused!r} is for the MLP of the {part}, but {part}=<module> replaces it")
        if part == "actor" and hasattr(module, "get_params") and not hasattr(module, "distribution"):
            way_out = "derive it from ContinuousActor or DiscreteActor"
            raise TypeError(f"{type(module).__name__} cannot be used as actor: it lacks distribution; {way_out}")

    def _init_distribution(
        self, actor: nn.Module | None, num_actions: int | None, action_space: Any, squash: bool, name: str | None
    ) -> None:
        """The actor's own distribution, or one for the action space."""
        if hasattr(actor, "get_params"):
            self.distribution = actor.distribution  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
            self.action_space = getattr(actor, "action_space", action_space)
        else:
            if action_space is None:
                if num_actions is None:
                    raise TypeError(f"{type(self).__name__} needs num_actions or action_space to choose a distribution")
                action_space = Box(-np.inf, np.inf, (num_actions,))
            self.action_space = action_space
            self.distribution = distribution_for(self.action_space, squash, name)
        self.num_actions = next(iter(self.distribution.param_shapes.values()))[0]
        if num_actions not in (None, self.num_actions):
            kind = "logits" if "logits" in self.distribution.param_shapes else "numbers"
            wanted = f"an action of {self.action_space} has {self.num_actions} {kind}"
            raise ValueError(f"num_actions is {num_actions}, but {wanted}; give {self.num_actions}")

    def _init_layouts(
        self, num_actor_obs: int | None, num_critic_obs: int | None, segments: Any, critic_segments: Any
    ) -> tuple[int, int]:
        """Names of the observations' parts; the widths of both networks' inputs."""
        self.flattens_obs = num_actor_obs is not None
        if num_actor_obs is None or num_critic_obs is None:
            if num_actor_obs is not num_critic_obs:
                raise TypeError(f"{type(self).__name__} needs num_actor_obs and num_critic_obs, or neither of them")
            return 0, 0  # both modules were given, and take observations as they are
        self.obs_layout = ObsLayout(segments or {"obs": (num_actor_obs,)})
        if critic_segments is None and self.obs_layout.width == num_critic_obs:
            critic_segments = segments
        self.critic_obs_layout = ObsLayout(critic_segments or {"obs": (num_critic_obs,)})
        for name, width in (("obs", num_actor_obs), ("critic_obs", num_critic_obs)):
            layout = getattr(self, f"{name}_layout")
            if layout.width != width:
                sums = f"{layout.shapes} add up to {layout.width} values"
                raise ValueError(f"{name}_segments {sums}, but the observation has {width}")
        shapes = (*self.obs_layout.shapes.values(), *self.critic_obs_layout.shapes.values())
        self.has_image = any(len(shape) > 1 for shape in shapes)
        self.feature_layout, self.critic_feature_layout = self.obs_layout, self.critic_obs_layout
        """Names of the parts that the next stage gets; a stage that changes their widths replaces it."""
        return self.feature_widths(num_actor_obs, num_critic_obs)

    def _init_noise(self, std: Tensor, sets_last_layer: bool) -> None:
        """The noise parameter; or bounds of the actor's output, whose last layer then starts with `std` everywhere."""
        more = "'clamped', " if self.state_dependent_std else ""
        if self.noise_std_type not in ("scalar", "log", *(["clamped"] if more else [])):
            raise ValueError(f"noise_std_type must be {more}'scalar' or 'log', got {self.noise_std_type!r}")
        raw = std.log() if self.noise_std_type == "log" else std
        if self.state_dependent_std:
            if sets_last_layer:
                last = [layer for layer in self.actor.modules() if isinstance(layer, nn.Linear)][-1]
                with torch.no_grad():
                    last.weight[self.num_actions :] = 0.0
                    last.bias[self.num_actions :] = raw.expm1().log() if self.noise_std_type == "scalar" else raw
            # Bounds that `clip_std` sets; a parameter could be clamped instead, a network's output cannot.
            self.std_low = nn.Buffer(torch.full_like(std, SMALLEST_STD), persistent=False)
            self.std_high = nn.Buffer(torch.full_like(std, torch.inf), persistent=False)
        elif self.noise_std_type == "log":
            self.log_std = nn.Parameter(raw)
        else:
            self.std = nn.Parameter(raw)

    def feature_widths(self, num_actor_obs: int, num_critic_obs: int) -> tuple[int, int]:
        """Widths of the results of `actor_features` and `critic_features`."""
        return num_actor_obs, num_critic_obs

    def actor_features(self, obs: Tensor, ctx: Context) -> Tensor:
        """Features for the actor from its normalised observation."""
        return obs

    def critic_features(self, obs: Tensor, ctx: Context) -> Tensor:
        """Features for the critic from its normalised observation."""
        return obs

    def head_params(self, features: Tensor, obs: Tensor, ctx: Context) -> Params:
        """Parameters of the action distribution from features; `obs` is the normalised observation they are made of."""
        if self.actor_gives_params:
            return self.actor.get_params(features)  # pyright: ignore[reportCallIssue]
        head = self.actor(features)
        if "logits" in self.distribution.param_shapes:
            return {"logits": head}
        if isinstance(self.distribution, Beta):
            return self.distribution.from_head(head)
        if not self.state_dependent_std:
            return {"mu": head, "sigma": self.noise_std()}  # (A,): one noise serves every row
        mu, raw = head.chunk(2, dim=-1)
        raw = F.softplus(raw.float()) if self.noise_std_type == "scalar" else raw.float()
        kind = "log" if self.noise_std_type == "log" else "scalar"
        sigma = bounded_std(raw, kind, self.std_low, self.std_high)
        return {"mu": self.mu_activation(mu), "sigma": sigma}

    def head_value(self, features: Tensor, obs: Tensor, ctx: Context) -> Tensor:
        """(..., 1) value from features; `obs` is the normalised critic observation they are made of."""
        if self.critic_gives_value:
            return self.critic.get_value(features).unsqueeze(-1)  # pyright: ignore[reportCallIssue]
        value = self.critic(features)
        has_column = value.dim() == features.dim() if self.flattens_obs else value.dim() > 1 and value.shape[-1] == 1
        return value if has_column else value.unsqueeze(-1)

    def actor_params(self, obs: Any, ctx: Context) -> Params:
        """Parameters of the action distribution for normalised observations."""
        if self.flattens_obs and (self.has_image or not isinstance(obs, Tensor) or obs.dtype == torch.uint8):
            obs = self.obs_layout.flat(obs)
        return self.head_params(self.actor_features(obs, ctx) if self.has_actor_features else obs, obs, ctx)

    def critic_value(self, critic_obs: Any, ctx: Context) -> Tensor:
        """(..., 1) value of normalised critic observations."""
        obs = critic_obs
        if self.flattens_obs and (self.has_image or not isinstance(obs, Tensor) or obs.dtype == torch.uint8):
            obs = self.critic_obs_layout.flat(obs)
        return self.head_value(self.critic_features(obs, ctx) if self.has_critic_features else obs, obs, ctx)

    def noise_std(self) -> Tensor:
        """(A,) standard deviation of the exploration noise."""
        return bounded_std(self.log_std if self.noise_std_type == "log" else self.std, self.noise_std_type)

    @torch.no_grad()
    def clip_std(self, min: Any = None, max: Any = None) -> None:  # noqa: A002 (documented names)
        """Clamp the noise parameter in place, or bound the actor's output; bounds are numbers or (A,) tensors."""
        if self.actor_gives_params:
            if hasattr(self.actor, "clip_std"):
                self.actor.clip_std(min=min, max=max)  # pyright: ignore[reportCallIssue]
        elif self.state_dependent_std:
            if min is not None:
                self.std_low.copy_(torch.as_tensor(min).clamp_min(SMALLEST_STD))
            if max is not None:
                self.std_high.copy_(torch.as_tensor(max))
        elif "sigma" in self.distribution.param_shapes:
            clip_std_parameter(self, min, max)


class Actor(nn.Module):
    """The documented minimal actor: observation -> Normal."""

    def __init__(self, obs_dim: int, act_dim: int) -> None:
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(obs_dim, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.mean = nn.Linear(64, act_dim)
        self.log_std = nn.Parameter(torch.zeros(act_dim))

    def forward(self, obs: Tensor) -> Normal:
        """The action distribution."""
        return Normal(self.mean(self.fc(obs)), self.log_std.exp())


class Critic(nn.Module):
    """The documented minimal critic: observation -> (B, 1) value."""

    def __init__(self, obs_dim: int) -> None:
        super().__init__()
        self.fc = mlp([obs_dim, 64, 64, 1], "tanh")

    def forward(self, obs: Tensor) -> Tensor:
        """(B, 1) value."""
        return self.fc(obs)
