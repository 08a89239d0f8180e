"""An actor and a critic given apart, as ApexRL's users write them, behind the one policy interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from canter.modules.distributions import Params
from canter.modules.policy import Context, Policy


class ActorCriticPair(Policy):
    """`actor.get_params(obs)` and `critic.get_value(critic_obs)` as a policy; observations may be nested dicts."""

    def __init__(self, actor: nn.Module, critic: nn.Module) -> None:
        super().__init__()
        for part, owner, needed in (
            ("actor", actor, ("get_params", "distribution")),
            ("critic", critic, ("get_value",)),
        ):
            missing = [name for name in needed if not hasattr(owner, name)]
            if missing:
                raise TypeError(
                    f"{type(owner).__name__} cannot be used as {part}: it lacks {', '.join(missing)}; "
                    f"derive it from {'ContinuousActor or DiscreteActor' if part == 'actor' else 'actors.Critic'}"
                )
        self.actor, self.critic = actor, critic
        self.distribution = actor.distribution  # pyright: ignore[reportAttributeAccessIssue]

    def actor_params(self, obs: Any, ctx: Context) -> Params:
        """What the actor says."""
        return self.actor.get_params(obs)  # pyright: ignore[reportCallIssue]

    def critic_value(self, critic_obs: Any, ctx: Context) -> Tensor:
        """What the critic says, as (..., 1)."""
        value = self.critic.get_value(critic_obs)  # pyright: ignore[reportCallIssue]
        return value.unsqueeze(-1)

    @torch.no_grad()
    def clip_std(self, min: Any = None, max: Any = None) -> None:  # noqa: A002 (documented names)
        """Forward to an actor that has a noise parameter to clip."""
        if hasattr(self.actor, "clip_std"):
            self.actor.clip_std(min=min, max=max)  # pyright: ignore[reportCallIssue]
