"""What off-policy algorithms learn, behind the one policy interface."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces
from torch import Tensor, nn

from canter.modules.categorical import Categorical
from canter.modules.distributions import Params
from canter.modules.policy import Context, Policy


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


class ActorQPolicy(Policy):
    """An actor, and critics that score its actions."""

    def __init__(self, actor: nn.Module, critics: nn.Module) -> None:
        super().__init__()
        missing = [name for name in ("get_params", "distribution") if not hasattr(actor, name)]
        if missing:
            raise TypeError(
                f"{type(actor).__name__} cannot be used as actor: it lacks {', '.join(missing)}; derive it from "
                "ContinuousActor"
            )
        self.actor, self.critics = actor, critics
        self.distribution = actor.distribution  # pyright: ignore[reportAttributeAccessIssue]

    def actor_params(self, obs: Any, ctx: Context) -> Params:
        """What the actor says."""
        return self.actor.get_params(obs)  # pyright: ignore[reportCallIssue]

    def critic_value(self, critic_obs: Any, ctx: Context) -> Tensor:
        """Refuse: what an observation is worth depends on the action."""
        raise NotImplementedError("critics of off-policy algorithms score actions: policy.critics(critic_obs, actions)")
