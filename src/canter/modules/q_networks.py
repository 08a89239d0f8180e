"""Networks of Q-learning, ensembles of them, and the policies of off-policy algorithms.

A custom network derives from `DiscreteQNetwork` and implements `forward(obs)`, or from `ContinuousQNetwork` and
implements `forward(obs, actions)`.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor, nn

from canter.envs.vec_env import flat_size
from canter.modules.actors import (
    CNN_SETTINGS,
    MLP_Q_SETTINGS,
    Cfg,
    ConfiguredNetwork,
    build_network,
    flatten_obs,
    flattening,
)
from canter.modules.distributions import Categorical, Params
from canter.modules.mlp import ALIGNMENT, mlp
from canter.modules.policy import Context, Policy
from canter.modules.utils import activation, orthogonal_init
from canter.utils.tree import Obs


class DiscreteQNetwork(ConfiguredNetwork):
    """Maps observations to the value of each of n actions."""

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None = None) -> None:
        super().__init__(obs_space, cfg)
        if not isinstance(action_space, spaces.Discrete):
            raise ValueError(f"{type(self).__name__} needs Discrete actions, got {action_space}; use SAC for a Box")
        self.action_space, self.num_actions = action_space, int(action_space.n)

    def forward(self, obs: Obs) -> Tensor:
        """Values (B, n)."""
        raise NotImplementedError(f"{type(self).__name__} must implement forward(obs)")

    @torch.no_grad()
    def act(self, obs: Obs, epsilon: float | Tensor = 0.0, generator: torch.Generator | None = None) -> Tensor:
        """The best action of each row, or with probability `epsilon` a random one, drawn for each row by itself."""
        return explore_rows(self(obs), epsilon, generator)


def explore_rows(values: Tensor, epsilon: float | Tensor, generator: torch.Generator | None) -> Tensor:
    """The best column of each row of (B, n) values, or with probability `epsilon` a random one."""
    best = values.argmax(-1)
    draw = torch.rand(best.shape, device=best.device, generator=generator)
    other = torch.randint(values.shape[-1], best.shape, device=best.device, generator=generator)
    return torch.where(draw < epsilon, other, best)


def cumulative_lengths(max_steps: int, device: torch.device) -> Tensor:
    """Probabilities of at most 1, 2, ... steps, if n of up to `max_steps` have one proportional to 1 / n²."""
    weights = torch.arange(1, max_steps + 1, dtype=torch.float64).pow(-2.0)
    return (weights.cumsum(0) / weights.sum())[:-1].float().to(device)


class HeldNoise:
    """Standard normal noise that is held for up to `max_steps` steps: n with a probability proportional to 1 / n²."""

    def __init__(self, num_envs: int, num_actions: int, max_steps: int, device: torch.device) -> None:
        self.noise = torch.zeros(num_envs, num_actions, device=device)
        self.left = torch.zeros(num_envs, dtype=torch.long, device=device)
        """Steps for which every environment goes on with its noise."""
        self.cumulative = cumulative_lengths(max_steps, device)

    def draw(self, generator: torch.Generator | None) -> Tensor:
        """(N, A) noise of the next step, in tensor code."""
        fresh = torch.randn(self.noise.shape, device=self.noise.device, generator=generator)
        length = torch.rand(self.left.shape, device=self.left.device, generator=generator)
        begins = self.left == 0
        self.noise.copy_(torch.where(begins.unsqueeze(1), fresh, self.noise))
        steps = torch.searchsorted(self.cumulative, length, right=True) + 1
        self.left.copy_(torch.where(begins, steps, self.left) - 1)
        return self.noise.clone()


class RepeatedExploration:
    """Random actions that last up to `max_steps` steps: n with a probability proportional to 1 / n² (Dabney 2021)."""

    def __init__(self, num_envs: int, max_steps: int, device: torch.device) -> None:
        self.actions = torch.zeros(num_envs, dtype=torch.long, device=device)
        self.left = torch.zeros_like(self.actions)
        """Steps for which every environment goes on with its random action."""
        self.cumulative = cumulative_lengths(max_steps, device)

    def explore(self, values: Tensor, epsilon: Tensor, generator: torch.Generator | None) -> Tensor:
        """The best column of each row of (N, n) values, a random one begun with `epsilon`, or the one in progress."""
        best = values.argmax(-1)
        draw, length = torch.rand((2, *best.shape), device=best.device, generator=generator)
        other = torch.randint(values.shape[-1], best.shape, device=best.device, generator=generator)
        begins = (self.left == 0) & (draw < epsilon)
        self.actions.copy_(torch.where(begins, other, self.actions))
        steps = torch.searchsorted(self.cumulative, length, right=True) + 1
        self.left.copy_(torch.where(begins, steps, self.left))
        actions = torch.where(self.left > 0, self.actions, best)
        self.left.sub_(1).clamp_min_(0)
        return actions

    def end_episodes(self, ended: Tensor) -> None:
        """End the repetitions of the environments (N,) whose episode ended."""
        self.left.masked_fill_(ended, 0)

    def state(self) -> Tensor:
        """(2, N) actions and the steps that are left of them."""
        return torch.stack([self.actions, self.left])

    def set_state(self, state: Tensor) -> None:
        """Continue from a `state`."""
        self.actions.copy_(state[0])
        self.left.copy_(state[1])


class EncodedQNetwork(DiscreteQNetwork):
    """An encoder of observations, and a head that `dueling` (Wang et al. 2016) splits into a level and advantages."""

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None = None) -> None:
        super().__init__(obs_space, action_space, cfg)
        *hidden, last = self.cfg["hidden_dims"]
        self.encoder = build_network(obs_space, last, {**self.cfg, "hidden_dims": hidden})
        orthogonal_init(self.encoder)
        out = nn.Linear(last, self.num_actions + int(self.cfg["dueling"]))
        orthogonal_init(out, last_gain=1.0)
        norm = nn.LayerNorm(last) if self.cfg.get("layer_norm") else nn.Identity()
        self.heads = nn.ModuleDict({"norm": norm, "nonlinearity": activation(self.cfg["activation"])(), "out": out})

    def forward(self, obs: Obs) -> Tensor:
        """Values (B, n)."""
        out = self.heads["out"](self.heads["nonlinearity"](self.heads["norm"](self.encoder(obs))))
        if not self.cfg["dueling"]:
            return out
        level, advantage = out[..., :1], out[..., 1:]
        return level + advantage - advantage.mean(-1, keepdim=True)


class MLPQNetwork(EncodedQNetwork):
    """MLP on flattened observations."""

    defaults = {**MLP_Q_SETTINGS, "dueling": False}


class CNNQNetwork(EncodedQNetwork):
    """Convolutions on one image."""

    defaults = {**CNN_SETTINGS, "dueling": False}


class QPolicy(Policy):
    """Takes the action with the highest value; `params["logits"]` are the values."""

    has_entropy = False

    def __init__(self, q_network: nn.Module, action_space: spaces.Discrete) -> None:
        super().__init__()
        self.q_network = q_network
        self.distribution = Categorical(int(action_space.n))

    def actor_params(self, obs: Any, ctx: Context) -> Params:
        """The values of all actions."""
        return {"logits": self.q_network(obs)}

    def critic_value(self, critic_obs: Any, ctx: Context) -> Tensor:
        """The value of the best action, (..., 1)."""
        return self.q_network(critic_obs).amax(-1, keepdim=True)


class UnitActions(nn.Module):
    """Scales the actions of a Box to [-1, 1], so that every joint counts alike; infinite ranges stay as they are."""

    def __init__(self, action_space: spaces.Space) -> None:
        super().__init__()
        if not isinstance(action_space, spaces.Box):
            raise ValueError(f"a critic of actions needs a Box of them, got {action_space}; use DQN for Discrete")
        low, high = (np.asarray(bound, np.float64).reshape(-1) for bound in (action_space.low, action_space.high))
        is_finite = np.isfinite(low) & np.isfinite(high)
        with np.errstate(invalid="ignore"):
            half, middle = np.where(is_finite, (high - low) / 2, 1.0), np.where(is_finite, (high + low) / 2, 0.0)
        self.is_identity = bool((half == 1).all() and (middle == 0).all())
        self.scale = nn.Buffer(torch.as_tensor(1 / half, dtype=torch.float32), persistent=False)
        self.offset = nn.Buffer(torch.as_tensor(-middle / half, dtype=torch.float32), persistent=False)

    def forward(self, actions: Tensor) -> Tensor:
        """(..., A) in the environment's units -> (..., A) in [-1, 1]."""
        return actions if self.is_identity else torch.addcmul(self.offset, actions, self.scale)


class ContinuousQNetwork(ConfiguredNetwork):
    """Maps observations and actions of a Box to values (B,), or to logits over `num_atoms` values (B, K)."""

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None = None) -> None:
        super().__init__(obs_space, cfg)
        self.unit_actions = UnitActions(action_space)
        self.action_space, self.num_actions = action_space, flat_size(action_space)

    def forward(self, obs: Obs, actions: Tensor) -> Tensor:
        """Values (B,) or logits (B, K)."""
        raise NotImplementedError(f"{type(self).__name__} must implement forward(obs, actions)")


class MLPContinuousQNetwork(ContinuousQNetwork):
    """MLP on the flattened observation and the action."""

    defaults = {**MLP_Q_SETTINGS, "num_atoms": 1}

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None = None) -> None:
        super().__init__(obs_space, action_space, cfg)
        sizes = [flat_size(obs_space) + self.num_actions, *self.cfg["hidden_dims"], self.cfg["num_atoms"]]
        self.mlp = mlp(sizes, self.cfg["activation"], layer_norm=self.cfg["layer_norm"])
        orthogonal_init(self.mlp, last_gain=1.0)

    def forward(self, obs: Obs, actions: Tensor) -> Tensor:
        """Values (B,) or logits (B, K)."""
        out = self.mlp(torch.cat([flatten_obs(obs, self.obs_space), self.unit_actions(actions)], dim=-1))
        return out.squeeze(-1) if self.cfg["num_atoms"] == 1 else out


class CNNContinuousQNetwork(ContinuousQNetwork):
    """Convolutions on one image; the action is appended to their features."""

    defaults = {**CNN_SETTINGS, "num_atoms": 1}

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None = None) -> None:
        super().__init__(obs_space, action_space, cfg)
        *hidden, width = self.cfg["hidden_dims"]
        self.encoder = build_network(obs_space, width, {**self.cfg, "hidden_dims": hidden})
        orthogonal_init(self.encoder)
        self.mlp = mlp([width + self.num_actions, width, self.cfg["num_atoms"]], self.cfg["activation"])
        orthogonal_init(self.mlp, last_gain=1.0)

    def forward(self, obs: Obs, actions: Tensor) -> Tensor:
        """Values (B,) or logits (B, K)."""
        out = self.mlp(torch.cat([torch.relu(self.encoder(obs)), self.unit_actions(actions)], dim=-1))
        return out.squeeze(-1) if self.cfg["num_atoms"] == 1 else out


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
        if missing and x.is_cuda and x.shape[-1] > ALIGNMENT:  # as in `canter.modules.mlp.Linear`
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


STACKED = (StackedLinear, StackedLayerNorm)


class StackedMLPCritics(ContinuousQNetwork):
    """`MLPContinuousQNetwork`s of one shape, whose layers are batched on a GPU: half the operations for twins."""

    defaults = MLPContinuousQNetwork.defaults

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None, members: int) -> None:
        super().__init__(obs_space, action_space, cfg)
        self.members, self.flatten = members, flattening(obs_space)
        sizes = [flat_size(obs_space) + self.num_actions, *self.cfg["hidden_dims"]]
        layers: list[nn.Module] = []
        for size_in, size_out in pairwise(sizes):
            layers.append(StackedLinear(members, size_in, size_out, math.sqrt(2.0)))
            layers += [StackedLayerNorm(members, size_out)] if self.cfg["layer_norm"] else []
            layers.append(activation(self.cfg["activation"])())
        self.mlp = nn.Sequential(*layers, StackedLinear(members, sizes[-1], self.cfg["num_atoms"], 1.0))

    def forward(self, obs: Obs, actions: Tensor) -> Tensor:
        """(E, B) values or (E, B, K) logits."""
        x = torch.cat([self.flatten(obs), self.unit_actions(actions)], dim=-1)
        if x.device.type == "cpu":
            out = torch.stack(self.forward_each(x))
        else:
            x = x.expand(self.members, *x.shape)
            for layer in tuple(self.mlp)[:-1]:
                x = layer(x)
            with self.last_precision(x) as precise:
                out = self.mlp[-1](precise)
        return out.squeeze(-1) if self.cfg["num_atoms"] == 1 else out

    def forward_each(self, x: Tensor) -> list[Tensor]:
        """What `mlp` gives, member by member: faster on a CPU, whose cache then holds the features of one member."""
        layers: list[Any] = list(self.mlp)
        *hidden, last = layers
        weights: list[Any] = [(p.weight.unbind(), p.bias.unbind()) if isinstance(p, STACKED) else () for p in hidden]
        outs = []
        for member, (weight, bias) in enumerate(zip(last.weight.unbind(), last.bias.unbind(), strict=True)):
            y = x
            for layer, parts in zip(hidden, weights, strict=True):
                if isinstance(layer, StackedLinear):
                    y = torch.addmm(parts[1][member], y, parts[0][member])
                elif isinstance(layer, StackedLayerNorm):
                    y = F.layer_norm(y, y.shape[-1:], parts[0][member].flatten(), parts[1][member].flatten())
                else:
                    y = layer(y)
            if torch.is_autocast_enabled(x.device.type):
                with self.last_precision(y) as precise:
                    outs.append(torch.addmm(bias, precise, weight))
            else:
                outs.append(torch.addmm(bias, y, weight))
        return outs

    @contextmanager
    def last_precision(self, features: Tensor) -> Iterator[Tensor]:
        """Features for the last layer, which gives values in float32: bfloat16 knows a value of 1000 only up to 4."""
        device = features.device.type
        if self.cfg["num_atoms"] > 1 or not torch.is_autocast_enabled(device):
            yield features
        else:
            with torch.autocast(device, enabled=False):
                yield features.float()


class ListedCritics(nn.Module):
    """Critics of any class, one after the other."""

    def __init__(self, critics: Iterable[nn.Module]) -> None:
        super().__init__()
        self.critics = nn.ModuleList(critics)

    def forward(self, obs: Obs, actions: Tensor) -> Tensor:
        """(E, B) values or (E, B, K) logits; a critic of one's own may give its values as (B, 1)."""
        out = torch.stack([critic(obs, actions) for critic in self.critics])
        return out.squeeze(-1) if out.dim() == 3 and out.shape[-1] == 1 else out


def build_critics(
    critic_class: Any, obs_space: spaces.Space, action_space: spaces.Space, cfg: Cfg | None, members: int = 2
) -> nn.Module:
    """`members` critics of a class, stacked where their layers can be batched."""
    if critic_class is MLPContinuousQNetwork:
        return StackedMLPCritics(obs_space, action_space, cfg, members)
    return ListedCritics(critic_class(obs_space=obs_space, action_space=action_space, cfg=cfg) for _ in range(members))


class ScalarReturns:
    """Values and losses of critics whose outputs (E, B) are the values."""

    bound = 4.0  # largest normalised return: about four standard deviations

    def values(self, out: Tensor) -> Tensor:
        """(E, B) values."""
        return out

    expected = values

    def target(self, out: Tensor, rewards: Tensor, discounts: Tensor, bonus: Tensor | float, reduction: str) -> Tensor:
        """Targets (B,) or (E, B): rewards, plus the discounted next values and bonus."""
        value = out.amin(0) if reduction == "min" else out
        return rewards + discounts * (value + bonus)

    def losses(self, out: Tensor, target: Tensor) -> Tensor:
        """(E,) mean square errors."""
        return (out - target).square().mean(1)


class CategoricalReturns:
    """Values and losses of critics whose outputs (E, B, K) are logits over K returns (Bellemare et al. 2017)."""

    def __init__(self, v_min: float, v_max: float, num_atoms: int, device: torch.device) -> None:
        if not v_min < v_max:
            raise ValueError(f"v_min must be below v_max, got {v_min} and {v_max}")
        self.v_min, self.v_max, self.num_atoms = v_min, v_max, num_atoms
        self.step = (v_max - v_min) / (num_atoms - 1)
        self.atoms = torch.linspace(v_min, v_max, num_atoms, device=device)
        self.bound = min(abs(end) for end in (v_min, v_max) if end)

    def values(self, out: Tensor) -> Tensor:
        """(E, B) means."""
        return self.expected(out.float().softmax(-1))

    def expected(self, probs: Tensor) -> Tensor:
        """Means of probabilities (..., K)."""
        return (probs * self.atoms).sum(-1)

    def target(self, out: Tensor, rewards: Tensor, discounts: Tensor, bonus: Tensor | float, reduction: str) -> Tensor:
        """Target probabilities, (B, K) or (E, B, K)."""
        probs = out.float().softmax(-1)
        if reduction == "min":
            lowest = self.expected(probs).argmin(0)  # (B,)
            probs = probs.gather(0, lowest.view(1, -1, 1).expand(1, *probs.shape[1:])).squeeze(0)
        bonus = bonus.unsqueeze(-1) if isinstance(bonus, Tensor) else bonus
        moved = rewards.unsqueeze(-1) + discounts.unsqueeze(-1) * (self.atoms + bonus)  # (B, K)
        return self.project(moved.expand_as(probs), probs)

    def project(self, returns: Tensor, probs: Tensor) -> Tensor:
        """Probabilities of the atoms, from those of arbitrary returns split between the two nearest atoms."""
        place = ((returns - self.v_min) / self.step).clamp(0, self.num_atoms - 1)
        lower = place.floor()
        share, low = place - lower, lower.long()
        high = (low + 1).clamp(max=self.num_atoms - 1)
        shared = torch.zeros_like(probs).scatter_add(-1, low, probs * (1 - share))
        return shared.scatter_add(-1, high, probs * share)

    def losses(self, out: Tensor, target: Tensor) -> Tensor:
        """(E,) mean cross-entropies."""
        return -(target * F.log_softmax(out.float(), -1)).sum(-1).mean(1)


def critic_loss(
    returns: ScalarReturns | CategoricalReturns, out: Tensor, target: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of the twin critics' losses, and statistics."""
    losses = returns.losses(out, target)
    with torch.no_grad():
        stats = {"critic1_loss": losses[0], "critic2_loss": losses[1], "q_loss": losses.mean()}
        stats["mean_q"] = returns.values(out).mean()
        stats["td_target_mean"] = returns.expected(target).mean()
    return losses.sum(), {name: value.detach() for name, value in stats.items()}


def find_normalized_layers(module: nn.Module) -> list[nn.Linear | StackedLinear]:
    """The linear layers that a layer norm follows in an `nn.Sequential`."""
    chains = [list(part) for part in module.modules() if isinstance(part, nn.Sequential)]
    pairs = [pair for chain in chains for pair in pairwise(chain)]
    norms = (nn.LayerNorm, StackedLayerNorm)
    return [
        one for one, next_one in pairs if isinstance(one, (nn.Linear, StackedLinear)) and isinstance(next_one, norms)
    ]


@torch.no_grad()
def normalize_weights(layers: Iterable[nn.Linear | StackedLinear]) -> None:
    """Scale layers before a layer norm to the norm of their orthogonal start; the layer norm undoes the scale."""
    for layer in layers:
        if layer.weight.requires_grad:
            size = min(layer.weight.shape[-2:])
            scale = math.sqrt(2.0 * size) / layer.weight.norm(dim=(-2, -1), keepdim=True)  # one per member
            layer.weight.mul_(scale)
            if layer.bias is not None:
                layer.bias.mul_(scale.reshape(-1, *[1] * (layer.bias.dim() - 1)))


class ActorQPolicy(Policy):
    """An actor, and critics that score its actions."""

    def __init__(self, actor: nn.Module, critics: nn.Module) -> None:
        super().__init__()
        missing = [name for name in ("get_params", "distribution") if not hasattr(actor, name)]
        if missing:
            name, lacks = type(actor).__name__, ", ".join(missing)
            raise TypeError(f"{name} cannot be used as actor: it lacks {lacks}; derive it from ContinuousActor")
        self.actor, self.critics = actor, critics
        self.distribution = actor.distribution  # pyright: ignore[reportAttributeAccessIssue]

    def actor_params(self, obs: Any, ctx: Context) -> Params:
        """The actor's parameters."""
        return self.actor.get_params(obs)  # pyright: ignore[reportCallIssue]

    def critic_value(self, critic_obs: Any, ctx: Context) -> Tensor:
        """Refuse: the critics need an action too."""
        raise NotImplementedError("critics of off-policy algorithms score actions: policy.critics(critic_obs, actions)")
