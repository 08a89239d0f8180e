"""Left-right symmetry: every step is also learned from as its mirror image."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from canter.algorithms.mirrors import ActionMirror, BetaMirror, observation_mirror
from canter.modules.distributions import Beta
from canter.modules.memory import Carried
from canter.modules.policy import Hidden, Policy, PolicyOutput
from canter.storage.rollout_storage import MiniBatch
from canter.utils.config import settings
from canter.utils.obs_layout import ObsLayout

PREFIX = "mirrored_"
AVERAGED = ("surrogate_loss", "value_loss")


@settings
class SymmetryConfig:
    """The mirror of observations and actions, and what is done with it."""

    obs: Any
    """Mirror of every component of the actor's observation, by name."""
    actions: Any
    """Mirror of the action."""
    critic_obs: Any = None
    """The same for the critic; None where both see the same components."""
    augment: bool = True
    """Learn from the mirror image of every step too."""
    mirror_loss_coef: float = 0.0
    """Weight of the difference between the action for a mirrored observation and the mirrored action."""


class _Twin(Carried):
    """The state of a memory that has seen the mirror image of everything."""

    def __init__(self, memory: Carried) -> None:
        self.memory, self.state_shape = memory, memory.state_shape

    def zero_state(self, num_envs: int) -> Tensor:
        """As the memory's."""
        return self.memory.zero_state(num_envs)


class Symmetry:
    """Mirror images of observations, actions and minibatches, and the losses made with them."""

    def __init__(self, cfg: Mapping[str, Any], policy: Policy, device: torch.device | str) -> None:
        self.cfg = SymmetryConfig(**cfg)
        layout, critic_layout = layouts(policy)
        if self.cfg.critic_obs is None and critic_layout.shapes != layout.shapes:
            raise ValueError(
                f"the critic sees {list(critic_layout.shapes)}; give symmetry_cfg critic_obs mirrors for them"
            )
        self.policy = policy
        self.obs = observation_mirror(layout, self.cfg.obs, "obs").to(device)
        critic = self.cfg.obs if self.cfg.critic_obs is None else self.cfg.critic_obs
        self.critic_obs = observation_mirror(critic_layout, critic, "critic_obs").to(device)
        kind = BetaMirror if isinstance(policy.distribution, Beta) else ActionMirror
        self.actions = kind(policy.distribution, self.cfg.actions, device)
        if not self.cfg.augment and not self.cfg.mirror_loss_coef:
            raise ValueError("symmetry_cfg neither augments nor has a mirror_loss_coef; leave it out, or set one")
        memories = {name: memory for name, memory in policy.memories.items() if name not in policy.carried}
        self.twins = {name: PREFIX + name for name in memories}
        policy.carried |= {PREFIX + name: _Twin(memory) for name, memory in memories.items()}

    def follow(
        self, forward: Callable[..., PolicyOutput], obs: Any, critic_obs: Any, hidden: Hidden, tosses: Any
    ) -> Hidden:
        """State of the memories that see the mirror images, one step on; nothing without memories."""
        if not self.twins:
            return {}
        own = {name: hidden[twin] for name, twin in self.twins.items()}
        out = forward(self.obs(obs), self.critic_obs(obs if critic_obs is None else critic_obs), own, tosses)
        return {twin: out.hidden[name] for name, twin in self.twins.items()}

    def mirrored(self, batch: MiniBatch) -> MiniBatch:
        """The minibatch as the mirrored robot would have lived it."""
        images = {
            "obs": self.obs(batch.obs),  # pyright: ignore[reportArgumentType]
            "critic_obs": self.critic_obs(batch.critic_obs),  # pyright: ignore[reportArgumentType]
            "actions": self.actions.actions(batch.actions),
            "old_params": self.actions.params(batch.old_params),
            "hidden": {name: batch.hidden[twin] for name, twin in self.twins.items()},
        }
        return MiniBatch(**{**vars(batch), **images})

    def extend(self, terms: Any, batch: MiniBatch, out: PolicyOutput, learner: Any) -> Any:
        """The terms of a minibatch together with those of its mirror image; statistics stay those of the original."""
        image = self.mirrored(batch)
        seen = learner.batch_output(image)
        losses = dict(terms.losses)
        if self.cfg.augment:
            others = learner.loss_terms(image, seen).losses
            losses |= {name: 0.5 * (losses[name] + others[name]) for name in AVERAGED}
        # The original is the target: it is where the policy was.
        target = self.actions.params({name: p.detach() for name, p in out.params.items()})
        losses["mirror_loss"] = batch.mean(self.actions.difference(self.policy.distribution, target, seen.params))
        return terms._replace(losses=losses)


def layouts(policy: Any) -> tuple[ObsLayout, ObsLayout]:
    """Components of the observation and of the critic's; one called "obs" where the policy names none."""
    if hasattr(policy, "obs_layout"):
        return policy.obs_layout, policy.critic_obs_layout
    found = [getattr(part, "obs_space", None) for part in (policy.actor, policy.critic)]
    if not all(isinstance(space, spaces.Box) and len(space.shape) == 1 for space in found):
        raise ValueError(f"symmetry needs flat observations, which {type(policy).__name__} does not have")
    layout, critic_layout = (ObsLayout({"obs": space.shape}) for space in found)  # pyright: ignore[reportOptionalMemberAccess]
    return layout, critic_layout
