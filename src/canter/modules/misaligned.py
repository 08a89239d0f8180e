"""Weights from a policy whose observation is laid out otherwise: matched by component name, not by column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from canter.modules.actor_critic import ActorCritic
from canter.modules.encoder_actor_critic import SegmentEncoders
from canter.modules.prediction import Prediction
from canter.utils.obs_layout import ObsLayout, Segments

NORMALIZED = ("_mean", "_var", "_std")


class LoadReport(NamedTuple):
    """Names of the parameters and buffers that were copied, copied in part, and left as they were."""

    copied: list[str]
    partial: list[str]
    skipped: list[str]


class MisalignedLoadMixin(ActorCritic):
    """Takes over what fits of a policy with other observation components."""

    @torch.no_grad()
    def load_misaligned_state_dict(
        self,
        module_or_state_dict: nn.Module | Mapping[str, Tensor],
        obs_segments: Segments,
        critic_obs_segments: Segments | None = None,
        zero_new: bool = False,
    ) -> LoadReport:
        """Copy the weights of a policy of this kind that saw the given segments; say what was copied.

        Columns of components that both have with the same shape are copied, the others keep their fresh values, or
        become 0 with `zero_new`. A source that is a state dict is taken to encode and estimate what this policy does.
        """
        source = module_or_state_dict
        state = source.state_dict() if isinstance(source, nn.Module) else source
        layouts = Layouts(self, ObsLayout(obs_segments), ObsLayout(critic_obs_segments or obs_segments))
        facing = dict(layouts.facing(source))
        names = {name: name for name in state} | dict(encoder_names(self, source, layouts))
        report = LoadReport([], [], [])
        for name, own in self.state_dict().items():
            there = names.get(name)
            theirs = None if there is None else state.get(there)
            getattr(report, _copy(own, theirs, facing.get(name), zero_new)).append(name)
        if not report.copied and not report.partial:
            raise ValueError(f"nothing of the source fits {type(self).__name__}: no name, or no shape, is the same")
        return report


class Facing(NamedTuple):
    """The columns of a parameter here and in the source, and the components whose columns mean the same."""

    here: ObsLayout
    there: ObsLayout
    common: set[str]


class Layouts:
    """Of what every parameter that faces an observation sees: here, and in the source."""

    def __init__(self, policy: ActorCritic, actor: ObsLayout, critic: ObsLayout) -> None:
        self.policy = policy
        self.pairs = ((policy.obs_layout, actor), (policy.critic_obs_layout, critic))

    def same(self, name: str, critic: bool) -> bool:
        """Whether a raw component is the same in both."""
        own, theirs = self.pairs[critic]
        return name in own and own.shapes[name] == theirs.shapes.get(name)

    def pair(self, seen: ObsLayout, critic: bool, all_of_it: bool = True, there: ObsLayout | None = None) -> Facing:
        """What is seen here and in the source, where it is worked out if it is not known (`there`)."""
        own, theirs = self.pairs[critic]
        common = {name for name in seen.shapes if name not in own or self.same(name, critic)}
        if there is not None:
            return Facing(seen, there, {name for name in common if seen.sizes[name] == there.sizes.get(name)})
        names = [name for name in theirs.shapes if all_of_it or name in seen]
        # What a stage resized here (features), it resized there to the same size.
        resized = {name for name in seen.shapes if name in own and seen.shapes[name] != own.shapes[name]}
        shapes = {name: seen.shapes[name] if name in resized else theirs.shapes[name] for name in names}
        shapes |= {name: seen.shapes[name] for name in seen.shapes if name not in own}  # appended by a stage
        return Facing(seen, ObsLayout(shapes), common)

    def facing(self, source: Any) -> Iterator[tuple[str, Facing]]:
        """Every such parameter or buffer by name."""
        policy: Any = self.policy
        heads = ("memory_a.rnn.weight_ih_l0", "memory_c.rnn.weight_ih_l0")
        if not policy.is_recurrent:
            heads = ("actor.0.weight", "critic.0.weight")
        for critic, layout in enumerate(("feature_layout", "critic_feature_layout")):
            yield heads[critic], self.pair(getattr(policy, layout), bool(critic), there=getattr(source, layout, None))
        for critic, normalizer in enumerate(("obs_normalizer", "critic_obs_normalizer")):
            for part in NORMALIZED:
                yield f"{normalizer}.{part}", self.pair(self.pairs[critic][0], bool(critic))
        for stage in (value for value in vars(policy).values() if isinstance(value, Prediction)):
            if not getattr(policy, "use_actor_rnn", False) or stage.head != "state_estimator":
                own = f"{stage.memory}.rnn.weight_ih_l0" if hasattr(policy, stage.memory) else None
                seen = stage.layout.part(stage.inputs or ())
                yield own or f"{stage.head}.model.0.weight", self.pair(seen, critic=False, all_of_it=False)


def encoder_names(policy: ActorCritic, source: Any, layouts: Layouts) -> Iterator[tuple[str, str | None]]:
    """Name here -> name in the source of every parameter of an encoder; None where the component is another."""
    for critic, group in enumerate(("encoders", "critic_encoders")):
        own: Any = getattr(policy, group, None)
        if not isinstance(own, SegmentEncoders):
            continue
        given = getattr(source, group, None)
        theirs = given.names if isinstance(given, SegmentEncoders) else own.names
        if given is None:  # a state dict: an encoder of a component that was not there is not there either
            theirs = [name for name in own.names if name in layouts.pairs[critic][1]]
        for index, name in enumerate(own.names):
            there = list(theirs).index(name) if name in theirs and layouts.same(name, bool(critic)) else None
            for key in own[index].state_dict():
                yield f"{group}.{index}.{key}", None if there is None else f"{group}.{there}.{key}"


def _copy(own: Tensor, theirs: Tensor | None, facing: Facing | None, zero_new: bool) -> str:
    if theirs is None or theirs.shape[:-1] != own.shape[:-1]:
        return "skipped"
    if facing is None:
        if theirs.shape != own.shape:
            return "skipped"
        own.copy_(theirs)
        return "copied"
    here, there, common = facing
    if theirs.shape[-1] != there.width or own.shape[-1] != here.width or not common:
        return "skipped"
    if zero_new:
        own.zero_()
    for name in common:
        own[..., here.slice(name)] = theirs[..., there.slice(name)].to(own)
    return "copied" if common == here.shapes.keys() else "partial"
