"""Policies composed of mixins, a pipeline from left to right, and loading weights of other observation components."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from canter.compat.arguments import also_here
from canter.modules.actor_critic import ActorCritic
from canter.modules.actor_critic_recurrent import ActorCriticRecurrent
from canter.modules.encoder_actor_critic import EncoderActorCriticMixin, SegmentEncoders
from canter.modules.state_estimator import EstimatorMixin
from canter.utils.obs_layout import ObsLayout, Segments

NORMALIZED = ("_mean", "_var", "_std")
# Columns of a parameter in this policy and in the source, and the components that both have.
Columns = tuple[ObsLayout, ObsLayout, set[str]]


class LoadReport(NamedTuple):
    """Names of the parameters and buffers that were copied, copied in part, and not changed."""

    copied: list[str]
    partial: list[str]
    skipped: list[str]


class MisalignedLoadMixin(ActorCritic):
    """Loads the weights of a policy with other observation components, matched by component name, not by column."""

    @torch.no_grad()
    def load_misaligned_state_dict(
        self,
        module: nn.Module | Mapping[str, Tensor],
        obs_segments: Segments,
        critic_obs_segments: Segments | None = None,
        zero_new: bool = False,
    ) -> LoadReport:
        """Copy the weights of a policy of this kind (or its state dict) with these segments; returns what was copied.

        Columns of components that both have with the same shape are copied; the others keep their initial values, or
        with `zero_new` have weights of 0. A state dict is assumed to encode and estimate the same components as this
        policy.
        """
        source = module
        state = source.state_dict() if isinstance(source, nn.Module) else source
        layouts = Layouts(self, ObsLayout(obs_segments), ObsLayout(critic_obs_segments or obs_segments))
        columns = dict(layouts.columns(source))
        names = {name: name for name in state} | dict(encoder_names(self, source, layouts))
        report = LoadReport([], [], [])
        for name, own in self.state_dict().items():
            theirs = state.get(names.get(name) or "")
            zeroes = zero_new and name.rpartition(".")[2] not in NORMALIZED  # no value is divided by a deviation of 0
            getattr(report, _copy(own, theirs, columns.get(name), zeroes)).append(name)
        if not report.copied and not report.partial:
            raise ValueError(f"no parameter of the source fits {type(self).__name__}: all names or shapes differ")
        return report


class Layouts:
    """Layouts of the inputs of every parameter that is applied to an observation, in this policy and in the source."""

    def __init__(self, policy: ActorCritic, actor: ObsLayout, critic: ObsLayout) -> None:
        self.policy = policy
        self.pairs = ((policy.obs_layout, actor), (policy.critic_obs_layout, critic))

    def same(self, name: str, critic: bool) -> bool:
        """Whether a raw component has the same shape in both."""
        own, theirs = self.pairs[critic]
        return name in own and own.shapes[name] == theirs.shapes.get(name)

    def pair(self, seen: ObsLayout, critic: bool, all_of_it: bool = True, there: ObsLayout | None = None) -> Columns:
        """Input columns in this policy and in the source, inferred if the source's layout (`there`) is not given."""
        own, theirs = self.pairs[critic]
        common = {name for name in seen.shapes if name not in own or self.same(name, critic)}
        if there is not None:
            return seen, there, {name for name in common if seen.sizes[name] == there.sizes.get(name)}
        names = [name for name in theirs.shapes if all_of_it or name in seen]
        # A component that a stage resized here (features), it resized there to the same size.
        resized = {name for name in seen.shapes if name in own and seen.shapes[name] != own.shapes[name]}
        shapes = {name: seen.shapes[name] if name in resized else theirs.shapes[name] for name in names}
        shapes |= {name: seen.shapes[name] for name in seen.shapes if name not in own}  # appended by a stage
        return seen, ObsLayout(shapes), common

    def columns(self, source: Any) -> Iterator[tuple[str, Columns]]:
        """The columns of every parameter or buffer that is applied to an observation, by name."""
        policy: Any = self.policy
        heads = ("memory_a.rnn.weight_ih_l0", "memory_c.rnn.weight_ih_l0")
        if not policy.is_recurrent:
            heads = ("actor.0.weight", "critic.0.weight")
        for critic, layout in enumerate(("feature_layout", "critic_feature_layout")):
            yield heads[critic], self.pair(getattr(policy, layout), bool(critic), there=getattr(source, layout, None))
        for critic, normalizer in enumerate(("obs_normalizer", "critic_obs_normalizer")):
            for part in NORMALIZED:
                yield f"{normalizer}.{part}", self.pair(self.pairs[critic][0], bool(critic))
        for name, estimate in getattr(policy, "estimates", {}).items():
            if name != "estimator" or not policy.use_actor_rnn:
                head, memory = estimate.networks
                first = f"{memory}.rnn.weight_ih_l0" if hasattr(policy, memory) else f"{head}.model.0.weight"
                seen = estimate.layout.part(estimate.inputs)
                yield first, self.pair(seen, critic=False, all_of_it=False)


def encoder_names(policy: ActorCritic, source: Any, layouts: Layouts) -> Iterator[tuple[str, str | None]]:
    """Name here -> name in the source of every encoder parameter; None if the source has no such component."""
    for critic, group in enumerate(("encoders", "critic_encoders")):
        own: Any = getattr(policy, group, None)
        if not isinstance(own, SegmentEncoders):
            continue
        given = getattr(source, group, None)
        theirs = given.names if isinstance(given, SegmentEncoders) else own.names
        if given is None:  # a state dict has encoders of its own components only
            theirs = [name for name in own.names if name in layouts.pairs[critic][1]]
        for index, name in enumerate(own.names):
            there = list(theirs).index(name) if name in theirs and layouts.same(name, bool(critic)) else None
            for key in own[index].state_dict():
                yield f"{group}.{index}.{key}", None if there is None else f"{group}.{there}.{key}"


def _copy(own: Tensor, theirs: Tensor | None, columns: Columns | None, zero_new: bool) -> str:
    """Copy a tensor, or its common columns; returns the field of `LoadReport` for its name."""
    if theirs is None or theirs.shape[:-1] != own.shape[:-1] or (columns is None and theirs.shape != own.shape):
        return "skipped"
    if columns is None:
        own.copy_(theirs)
        return "copied"
    here, there, common = columns
    if theirs.shape[-1] != there.width or own.shape[-1] != here.width or not common:
        return "skipped"
    if zero_new:
        own.zero_()
    for name in common:
        own[..., here.slice(name)] = theirs[..., there.slice(name)].to(own)
    return "copied" if common == here.shapes.keys() else "partial"


class EncoderStateAc(MisalignedLoadMixin, EstimatorMixin, EncoderActorCriticMixin, ActorCritic):
    """An estimator on raw components, then encoders, then MLPs."""


class EncoderStateAcRecurrent(MisalignedLoadMixin, EstimatorMixin, EncoderActorCriticMixin, ActorCriticRecurrent):
    """An estimator on raw components, then encoders, then memories, then MLPs."""


__getattr__ = also_here(
    AmpActorCritic="canter.modules.amp_discriminator",
    AmpActorCriticRecurrent="canter.modules.amp_discriminator",
    EncoderAmpActorCritic="canter.modules.encoder_actor_critic",
    EncoderAmpActorCriticRecurrent="canter.modules.encoder_actor_critic",
)
