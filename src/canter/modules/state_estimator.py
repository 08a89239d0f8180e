"""Stages that predict components of the state, for a loss and for the stages that follow."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from canter.modules.actor_critic import ActorCritic
from canter.modules.actor_critic_recurrent import ActorCriticRecurrent
from canter.modules.mlp import MlpModel
from canter.modules.normalizer import DictNormalization, EmpiricalNormalization
from canter.modules.policy import Context
from canter.utils.obs_layout import ObsLayout
from canter.utils.utils import namedarraytuple

EstimatorActorHiddenState = namedarraytuple("EstimatorActorHiddenState", ["estimator", "actor"])
HIDDEN_SIZES = (128, 64)


class IncompatibleSettingsError(ValueError, AssertionError):
    """Two settings that exclude each other."""


@dataclasses.dataclass
class Estimate:
    """A prediction of components from other components, and how the next stages see it."""

    name: str
    """Key in `policy.estimates`, and prefix of the settings in error messages."""
    aux: str
    """Name of the prediction in `Context.aux`."""
    networks: tuple[str, str]
    """Children of the policy that are trained by the loss of this estimate alone: its MLP, and the memory before it."""
    pair: Any
    """Class of the pair of the memory's state and the actor's."""
    inputs: Sequence[str] | None
    targets: Sequence[str] | None
    replace_prob: float
    appends: bool
    layout: ObsLayout = dataclasses.field(init=False)
    """Layout of the observation at this place in the pipeline."""
    target: ObsLayout = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        if not self.targets:
            raise ValueError(f"no components to estimate; set {self.name}_target_components=[...]")
        if not 0.0 <= self.replace_prob <= 1.0:
            raise ValueError(f"a probability is from 0 to 1, got {self.replace_prob} for {self.aux}")

    def join(self, policy: ActorCritic) -> int:
        """Read the layout at this place in the pipeline; returns by how much the observation grows here."""
        self.layout = policy.feature_layout
        names = [self.targets] if isinstance(self.targets, str) else list(self.targets or ())
        own, critics = policy.obs_layout, policy.critic_obs_layout
        in_actor_only = all(name in own for name in names) and not all(name in critics for name in names)
        self.target = (own if in_actor_only else critics).part(names)
        if self.inputs is None:
            self.inputs = [name for name in self.layout.shapes if name not in self.target]
        self.inputs = self.layout.ordered(self.inputs)
        if not self.inputs:
            raise ValueError(f"{self.name}_obs_components is empty; there is nothing to estimate from")
        for name, shape in self.target.shapes.items():
            here = self.layout.shapes.get(name)
            if self.replace_prob > 0 and here != shape:
                there = "not there" if here is None else f"of shape {here}"
                problem = f"cannot replace it in the actor's observation, where it is {there}"
                way_out = "append the estimate instead, or leave the probability at 0"
                raise ValueError(f"the estimate of {name!r} {shape} {problem}; {way_out}")
            if self.appends and here is not None:
                raise ValueError(f"the actor's observation has {name!r} already: replace it instead of appending to it")
        if not self.appends:
            return 0
        policy.feature_layout = self.layout.resized(self.target.shapes)
        return self.target.width

    def build(self, policy: Any, kwargs: Any, from_actor_memory: bool = False) -> None:
        """Add the estimate and its networks to the policy; the memory only if the policy is recurrent."""
        head, memory = self.networks
        width = policy.rnn_hidden_size if from_actor_memory else self.layout.size(self.inputs or ())
        if policy.is_recurrent and not from_actor_memory:
            setattr(policy, memory, policy.new_memory(width))
            policy.nested_memories.append((memory, self.pair))
            width = policy.rnn_hidden_size
        options = {"hidden_sizes": HIDDEN_SIZES, **(kwargs or {})}
        setattr(policy, head, MlpModel(width, output_size=self.target.width, **options))
        if 0.0 < self.replace_prob < 1.0:
            policy.random_mask_probs[self.aux] = self.replace_prob
        policy.estimates = {**getattr(policy, "estimates", {}), self.name: self}

    def embed(self, policy: ActorCritic, obs: Tensor, ctx: Context) -> Tensor:
        """Estimate; returns the observation with the estimate, without its gradient, appended or in its place."""
        head, memory = self.networks
        features = self.layout.take(obs, self.inputs or ())
        if policy.is_recurrent:
            features = ctx.remember(memory, getattr(policy, memory), features)
        ctx.aux[self.aux] = getattr(policy, head)(features)
        parts = self.target.split(ctx.aux[self.aux].detach())
        if self.appends:
            return torch.cat([obs, *parts.values()], dim=-1)
        if self.replace_prob == 0.0:
            return obs
        names = self.layout.ordered(list(parts))
        replaced = self.layout.put(obs, names, torch.cat([parts[name] for name in names], dim=-1))
        mask = ctx.random_masks.get(self.aux)
        return replaced if mask is None else torch.where(mask, replaced, obs)


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


class EstimatingActorCritic(ActorCritic):
    """Access to the estimates of the mixins below and in `state_adaptor`."""

    estimates: dict[str, Estimate]

    def get_estimated_state(self, name: str | None = None, denormalize: bool = False) -> Tensor:
        """The last act's estimate (None: the estimator's, else the adaptor's), in physical units if `denormalize`."""
        if name is None:
            name = "estimator" if "estimator" in self.estimates else "adaptor"
        if name not in self.estimates:
            raise ValueError(f"{type(self).__name__} has no estimate {name!r}; it has {list(self.estimates)}")
        known = self.estimates[name]
        if known.aux not in self._aux:
            raise RuntimeError("the policy has not estimated anything yet; call act() first")
        estimate = self._aux[known.aux]
        return rescale(self, known.target, estimate, inverse=True) if denormalize else estimate


class EstimatorMixin(EstimatingActorCritic):
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
        self.estimator_stage = Estimate(
            "estimator",
            "estimated_state",
            ("state_estimator", "memory_s"),
            EstimatorActorHiddenState,
            estimator_obs_components,
            estimator_target_components,
            replace_state_prob,
            append_estimate,
        )
        super().__init__(*args, **kwargs)
        self.estimator_stage.build(self, estimator_kwargs, use_actor_rnn)

    def feature_widths(self, num_actor_obs: int, num_critic_obs: int) -> tuple[int, int]:
        """The actor's observation grows by an appended estimate."""
        return super().feature_widths(num_actor_obs + self.estimator_stage.join(self), num_critic_obs)

    def actor_features(self, obs: Tensor, ctx: Context) -> Tensor:
        """Estimate, and pass the estimate to the next stages if it is appended or replaces."""
        if not self.use_actor_rnn:
            return super().actor_features(self.estimator_stage.embed(self, obs, ctx), ctx)
        features = super().actor_features(obs, ctx)
        ctx.aux[self.estimator_stage.aux] = self.state_estimator(features)
        return features

    @property
    def estimator_obs_components(self) -> list[str]:
        """Input components of the estimator."""
        return list(self.estimator_stage.inputs or ())

    @property
    def estimator_target_components(self) -> list[str]:
        """Estimated components."""
        return list(self.estimator_stage.target.shapes)


class StateAc(EstimatorMixin, ActorCritic):
    """An estimator, then MLPs."""


class StateAcRecurrent(EstimatorMixin, ActorCriticRecurrent):
    """An estimator, then memories, then MLPs."""
