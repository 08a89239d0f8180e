"""A stage that estimates components of the state, for a loss and for the stages that follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from canter.modules.actor_critic import ActorCritic
from canter.modules.actor_critic_recurrent import ActorCriticRecurrent
from canter.modules.memory import ActorCriticHiddenState
from canter.modules.mlp import MlpModel
from canter.modules.normalizer import DictNormalization, EmpiricalNormalization
from canter.modules.policy import Context, Hidden
from canter.utils.obs_layout import ObsLayout
from canter.utils.utils import namedarraytuple

EstimatorActorHiddenState = namedarraytuple("EstimatorActorHiddenState", ["estimator", "actor"])
HIDDEN_SIZES = (128, 64)


class IncompatibleSettingsError(ValueError, AssertionError):
    """Two settings that exclude each other."""


class Estimate(NamedTuple):
    """An estimate of a policy: its name in `aux`, and the components that are its target."""

    aux: str
    target: ObsLayout
    networks: tuple[str, ...]
    """Children of the policy that are trained by the loss of this estimate alone."""


@dataclasses.dataclass
class Prediction:
    """A prediction of components from other components, and how the next stages see it.

    The networks are children of the policy, named `head` and `memory`.
    """

    aux: str
    head: str
    memory: str
    setting: str
    """Prefix of its settings, for error messages."""
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
            raise ValueError(f"no components to estimate; set {self.setting}_target_components=[...]")
        if not 0.0 <= self.replace_prob <= 1.0:
            raise ValueError(f"a probability is from 0 to 1, got {self.replace_prob} for {self.aux}")

    def join(self, policy: ActorCritic) -> int:
        """Read the layout at this place in the pipeline; returns by how much the observation grows here."""
        self.layout = policy.feature_layout
        names = [self.targets] if isinstance(self.targets, str) else list(self.targets or ())
        in_actor, in_critic = (
            all(name in layout for name in names) for layout in (policy.obs_layout, policy.critic_obs_layout)
        )
        self.target = (policy.obs_layout if in_actor and not in_critic else policy.critic_obs_layout).part(names)
        if self.inputs is None:
            self.inputs = [name for name in self.layout.shapes if name not in self.target]
        self.inputs = self.layout.ordered(self.inputs)
        if not self.inputs:
            raise ValueError(f"{self.setting}_obs_components is empty; there is nothing to estimate from")
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

    def build(self, policy: ActorCritic, width: int, has_memory: bool, kwargs: Mapping[str, Any] | None) -> Estimate:
        """Add the networks to the policy; `width` is the width of their input."""
        if has_memory:
            setattr(policy, self.memory, policy.new_memory(width))  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
            width = policy.rnn_hidden_size  # pyright: ignore[reportAttributeAccessIssue, reportAssignmentType]
        options = {"hidden_sizes": HIDDEN_SIZES, **(kwargs or {})}
        setattr(policy, self.head, MlpModel(width, output_size=self.target.width, **options))
        if 0.0 < self.replace_prob < 1.0:
            policy.random_mask_probs[self.aux] = self.replace_prob
        return Estimate(self.aux, self.target, (self.head, self.memory))

    def features(self, policy: ActorCritic, obs: Tensor, ctx: Context) -> Tensor:
        """The head's input: the input components, or the output of the memory that gets them."""
        inputs = self.layout.take(obs, self.inputs or ())
        memory = getattr(policy, self.memory, None)
        return inputs if memory is None else ctx.remember(self.memory, memory, inputs)

    def place(self, obs: Tensor, estimate: Tensor, ctx: Context) -> Tensor:
        """The observation with the estimate in it; the gradient of the next stages does not reach the estimator."""
        parts = self.target.split(estimate.detach())
        if self.appends:
            return torch.cat([obs, *parts.values()], dim=-1)
        if self.replace_prob == 0.0:
            return obs
        names = self.layout.ordered(list(parts))
        replaced = self.layout.put(obs, names, torch.cat([parts[name] for name in names], dim=-1))
        mask = ctx.random_masks.get(self.aux)
        return replaced if mask is None else torch.where(mask, replaced, obs)

    def nest_hidden(self, policy: ActorCritic, states: Any) -> Any:
        """The documented hidden state of the policy, with the state of this memory beside the actor's."""
        memory = getattr(policy, self.memory, None)
        if memory is None or states is None:
            return states
        return states._replace(actor=self.hidden_state(memory.hidden_states, states.actor))

    def peel_hidden(self, policy: ActorCritic, states: Any, branch: str) -> tuple[Hidden, Any]:
        """The inverse of `nest_hidden` for one branch: the state of this memory by name, and the rest."""
        if isinstance(states, ActorCriticHiddenState):
            states = getattr(states, branch)
        memory = getattr(policy, self.memory, None)
        if memory is None or branch == "critic":
            return {}, states
        if not isinstance(states, self.hidden_state):
            raise ValueError(f"the hidden state must be the {self.hidden_state.__name__} of get_hidden_states()")
        return {self.memory: memory.pack(states.get(0))}, states.get(1)


def rescale(policy: ActorCritic, layout: ObsLayout, values: Tensor, inverse: bool = False) -> Tensor:
    """Raw components normalised as in the actor's observation, else the critic's; or the inverse."""
    parts = layout.split(values)
    for name, part in parts.items():
        seen, normalizer = policy.obs_layout, policy.obs_normalizer
        if seen.sizes.get(name) != layout.sizes[name]:
            seen, normalizer = policy.critic_obs_layout, policy.critic_obs_normalizer
        columns = seen.slice(name)
        if isinstance(normalizer, DictNormalization):
            normalizer, columns = normalizer.leaf(name), slice(None)
        if isinstance(normalizer, EmpiricalNormalization):
            mean, divisor = normalizer.mean.flatten()[columns], normalizer.std.flatten()[columns] + normalizer.eps
            parts[name] = part * divisor + mean if inverse else (part - mean) / divisor
    return torch.cat(list(parts.values()), dim=-1)


def last_estimate(policy: Any, name: str, denormalize: bool) -> Tensor:
    """The estimate of the policy's last act."""
    if name not in policy.estimates:
        raise ValueError(f"{type(policy).__name__} has no estimate {name!r}; it has {list(policy.estimates)}")
    known = policy.estimates[name]
    if known.aux not in policy._aux:
        raise RuntimeError("the policy has not estimated anything yet; call act() first")
    estimate = policy._aux[known.aux]
    return rescale(policy, known.target, estimate, inverse=True) if denormalize else estimate


class EstimatorMixin(ActorCritic):
    """Estimates components of the state: from the observation, from a memory of it, or from the actor's memory.

    Args:
        estimator_obs_components: Input components; all but the targets if None.
        estimator_target_components: Estimated components, by their names in the critic's observation (or the actor's).
        estimator_kwargs: Settings of its MLP.
        use_actor_rnn: Estimate from the output of the actor's memory instead of a memory of its own.
        replace_state_prob: Probability, at each collecting step, that the estimate replaces the component in the input
            of the next stages. Inference always replaces it if this is above 0.
        append_estimate: Append the estimate to the actor's observation, which lacks the component.
    """

    estimates: dict[str, Estimate]
    state_estimator: MlpModel

    def __init__(
        self,
        *args: Any,
        estimator_obs_components: Sequence[str] | None = None,
        estimator_target_components: Sequence[str] | None = None,
        estimator_kwargs: Any = None,
        use_actor_rnn: bool = False,
        replace_state_prob: float = 0.0,
        append_estimate: bool = False,
        **kwargs: Any,
    ) -> None:
        name = "append_estimate" if append_estimate else "replace_state_prob"
        if use_actor_rnn and (replace_state_prob > 0 or append_estimate):
            raise IncompatibleSettingsError(f"{name} needs the estimate before the actor's memory: use_actor_rnn=False")
        if replace_state_prob > 0 and append_estimate:
            raise IncompatibleSettingsError("an estimate is either appended or replaces: replace_state_prob=0")
        if use_actor_rnn and not self.is_recurrent:
            raise IncompatibleSettingsError(f"use_actor_rnn: {type(self).__name__} has no memory; take a recurrent one")
        self.use_actor_rnn = use_actor_rnn
        self.estimator_stage = Prediction(
            "estimated_state", "state_estimator", "memory_s", "estimator",
            estimator_obs_components, estimator_target_components, replace_state_prob, append_estimate,
            EstimatorActorHiddenState,
        )  # fmt: skip
        super().__init__(*args, **kwargs)
        self.estimates = {**getattr(self, "estimates", {}), "estimator": self.build_estimator(estimator_kwargs)}

    def build_estimator(self, estimator_kwargs: Mapping[str, Any] | None) -> Estimate:
        """Build the estimator's MLP, and a memory of its own before it if the policy is recurrent."""
        stage = self.estimator_stage
        width = self.rnn_hidden_size if self.use_actor_rnn else stage.layout.size(stage.inputs or ())  # pyright: ignore[reportAttributeAccessIssue]
        has_memory = self.is_recurrent and not self.use_actor_rnn
        return stage.build(self, width, has_memory, estimator_kwargs)  # pyright: ignore[reportArgumentType]

    def feature_widths(self, num_actor_obs: int, num_critic_obs: int) -> tuple[int, int]:
        """The actor's observation grows by an appended estimate."""
        return super().feature_widths(num_actor_obs + self.estimator_stage.join(self), num_critic_obs)

    def actor_features(self, obs: Tensor, ctx: Context) -> Tensor:
        """Estimate, and pass the estimate to the next stages if it is appended or replaces."""
        stage = self.estimator_stage
        if self.use_actor_rnn:
            features = super().actor_features(obs, ctx)
            ctx.aux[stage.aux] = self.state_estimator(features)
            return features
        estimate = self.state_estimator(stage.features(self, obs, ctx))
        ctx.aux[stage.aux] = estimate
        return super().actor_features(stage.place(obs, estimate, ctx), ctx)

    def get_estimated_state(self, name: str | None = None, denormalize: bool = False) -> Tensor:
        """The estimate of the last act, with its gradient; in physical units if `denormalize`."""
        return last_estimate(self, name or "estimator", denormalize)

    @property
    def estimator_obs_components(self) -> list[str]:
        """Input components of the estimator."""
        return list(self.estimator_stage.inputs or ())

    @property
    def estimator_target_components(self) -> list[str]:
        """Estimated components."""
        return list(self.estimator_stage.target.shapes)

    def get_hidden_states(self) -> Any:
        """ActorCriticHiddenState whose actor is EstimatorActorHiddenState, if the estimator has a memory."""
        return self.estimator_stage.nest_hidden(self, super().get_hidden_states())

    def unpack_hidden(self, hidden_states: Any, branch: str) -> Hidden:
        """The state of the branch's memories."""
        own, rest = self.estimator_stage.peel_hidden(self, hidden_states, branch)
        return own | super().unpack_hidden(rest, branch)


class StateAc(EstimatorMixin, ActorCritic):
    """An estimator, then MLPs."""


class StateAcRecurrent(EstimatorMixin, ActorCriticRecurrent):
    """An estimator, then memories, then MLPs."""
