"""What the stages that predict have in common: components from components, and where the prediction goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from canter.modules.actor_critic import ActorCritic
from canter.modules.memory import ActorCriticHiddenState, Memory
from canter.modules.mlp import MlpModel
from canter.modules.normalizer import DictNormalization, EmpiricalNormalization
from canter.modules.policy import Context, Hidden
from canter.utils.obs_layout import ObsLayout

HIDDEN_SIZES = (128, 64)


class Estimate(NamedTuple):
    """Something a policy estimates: the name of the estimate in `aux`, and the components it should equal."""

    aux: str
    target: ObsLayout
    networks: tuple[str, ...]
    """Children of the policy that only the loss of this estimate moves."""


@dataclasses.dataclass
class Prediction:
    """How a policy predicts components from others, and what the stages that follow see of it.

    The networks are children of the policy, named `head` and `memory`.
    """

    aux: str
    head: str
    memory: str
    setting: str
    """Prefix of the settings it comes from, for errors."""
    inputs: Sequence[str] | None
    targets: Sequence[str] | None
    replace_prob: float = 0.0
    appends: bool = False
    hidden_state: Any = None
    """Class of the pair of this memory's state and the actor's."""
    layout: ObsLayout = dataclasses.field(init=False)
    target: ObsLayout = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        if not self.targets:
            raise ValueError(f"say what to estimate: {self.setting}_target_components=[...]")
        if not 0.0 <= self.replace_prob <= 1.0:
            raise ValueError(f"a probability is from 0 to 1, got {self.replace_prob} for {self.aux}")

    def join(self, policy: ActorCritic) -> int:
        """Take a place in the pipeline; by how much the observation grows there."""
        self.layout = policy.feature_layout
        self.target = target_layout(policy, self.targets or ())
        if self.inputs is None:
            self.inputs = [name for name in self.layout.shapes if name not in self.target]
        self.inputs = self.layout.ordered(self.inputs)
        if not self.inputs:
            raise ValueError(f"{self.setting}_obs_components leaves nothing to estimate from")
        for name, shape in self.target.shapes.items():
            here = self.layout.shapes.get(name)
            if self.replace_prob > 0 and here != shape:
                there = "not there" if here is None else f"of shape {here}"
                raise ValueError(
                    f"the estimate of {name!r} {shape} cannot replace it in the actor's observation, where it is "
                    f"{there}; append the estimate instead, or leave the probability at 0"
                )
            if self.appends and here is not None:
                raise ValueError(f"the actor's observation has {name!r} already: replace it instead of appending to it")
        if not self.appends:
            return 0
        policy.feature_layout = self.layout.resized(self.target.shapes)
        return self.target.width

    def build(self, policy: ActorCritic, width: int, has_memory: bool, kwargs: Mapping[str, Any] | None) -> None:
        """Give the policy the networks, which see `width` values."""
        if has_memory:
            setattr(policy, self.memory, policy.new_memory(width))  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
            width = policy.rnn_hidden_size  # pyright: ignore[reportAttributeAccessIssue, reportAssignmentType]
        options = {"hidden_sizes": HIDDEN_SIZES, **(kwargs or {})}
        setattr(policy, self.head, MlpModel(width, output_size=self.target.width, **options))
        if 0.0 < self.replace_prob < 1.0:
            policy.coins[self.aux] = self.replace_prob

    def estimate(self) -> Estimate:
        """What the policy lists."""
        return Estimate(self.aux, self.target, (self.head, self.memory))

    def own_memory(self, policy: ActorCritic) -> Memory | None:
        """The memory before the head, if there is one."""
        return getattr(policy, self.memory, None)

    def features(self, policy: ActorCritic, obs: Tensor, ctx: Context) -> Tensor:
        """What the head sees: the input components, or the memory of them."""
        seen = self.layout.take(obs, self.inputs or ())
        memory = self.own_memory(policy)
        return seen if memory is None else ctx.remember(self.memory, memory, seen)

    def place(self, obs: Tensor, estimate: Tensor, ctx: Context) -> Tensor:
        """The observation with the estimate in it; no gradient of what follows reaches the estimator."""
        parts = self.target.split(estimate.detach())
        if self.appends:
            return torch.cat([obs, *parts.values()], dim=-1)
        if self.replace_prob == 0.0:
            return obs
        names = self.layout.ordered(list(parts))
        replaced = self.layout.put(obs, names, torch.cat([parts[name] for name in names], dim=-1))
        toss = ctx.tosses.get(self.aux)
        return replaced if toss is None else torch.where(toss, replaced, obs)

    def nest_hidden(self, policy: ActorCritic, states: Any) -> Any:
        """The documented state of the policy with the state of this memory put around the actor's."""
        memory = self.own_memory(policy)
        if memory is None or states is None:
            return states
        return states._replace(actor=self.hidden_state(memory.hidden_states, states.actor))

    def peel_hidden(self, policy: ActorCritic, states: Any, branch: str) -> tuple[Hidden, Any]:
        """The inverse of `nest_hidden` for one branch: the state of this memory by name, and the rest."""
        if isinstance(states, ActorCriticHiddenState):
            states = getattr(states, branch)
        memory = self.own_memory(policy)
        if memory is None or branch == "critic":
            return {}, states
        if not isinstance(states, self.hidden_state):
            raise ValueError(f"the hidden state must be the {self.hidden_state.__name__} of get_hidden_states()")
        return {self.memory: memory.pack(states.get(0))}, states.get(1)


def target_layout(policy: ActorCritic, names: Sequence[str]) -> ObsLayout:
    """Names and shapes of target components, from the critic's observation or else the actor's."""
    names = [names] if isinstance(names, str) else names
    in_actor = all(name in policy.obs_layout for name in names)
    in_critic = all(name in policy.critic_obs_layout for name in names)
    return (policy.obs_layout if in_actor and not in_critic else policy.critic_obs_layout).part(names)


def component_scale(policy: ActorCritic, name: str, size: int) -> tuple[Tensor, Tensor] | None:
    """Mean and divisor by which the policy normalises a component; the critic's where the actor lacks it."""
    layout, normalizer = policy.obs_layout, policy.obs_normalizer
    if layout.sizes.get(name) != size:
        layout, normalizer = policy.critic_obs_layout, policy.critic_obs_normalizer
    columns = layout.slice(name)
    if isinstance(normalizer, DictNormalization):
        normalizer, columns = normalizer.leaf(name), slice(None)
    if not isinstance(normalizer, EmpiricalNormalization):
        return None
    return normalizer.mean.flatten()[columns], normalizer.std.flatten()[columns] + normalizer.eps


def rescale(policy: ActorCritic, layout: ObsLayout, values: Tensor, inverse: bool = False) -> Tensor:
    """Raw components in the scale that the policy sees them in, or back."""
    parts = []
    for name, part in layout.split(values).items():
        scale = component_scale(policy, name, layout.sizes[name])
        if scale is None:
            parts.append(part)
        else:
            mean, divisor = scale
            parts.append(part * divisor + mean if inverse else (part - mean) / divisor)
    return torch.cat(parts, dim=-1)


def last_estimate(policy: Any, name: str, denormalize: bool) -> Tensor:
    """The estimate of the policy's last act."""
    if name not in policy.estimates:
        raise ValueError(f"{type(policy).__name__} has no estimate {name!r}; it has {list(policy.estimates)}")
    known = policy.estimates[name]
    if known.aux not in policy._aux:
        raise RuntimeError("the policy has not estimated anything yet; call act() first")
    estimate = policy._aux[known.aux]
    return rescale(policy, known.target, estimate, inverse=True) if denormalize else estimate
