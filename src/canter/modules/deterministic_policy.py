"""A mixin for policies that act without noise."""

from typing import Any

import torch
from torch import Tensor

from canter.modules.distributions import Params
from canter.modules.policy import Policy


class DeterministicPolicyMixin:
    """Makes a policy take the mean of its distribution: `class Mine(DeterministicPolicyMixin, ActorCritic)`.

    A class that is no `Policy` needs `act`, which sets its distribution, and `action_mean`.
    """

    distribution: Any
    has_entropy = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        after = cls.__mro__[cls.__mro__.index(DeterministicPolicyMixin) + 1 :]
        if not any("action_mean" in vars(base) for base in after):
            raise AttributeError(f"{cls.__name__}: DeterministicPolicyMixin must precede a class with action_mean")
        if DeterministicPolicyMixin in cls.__bases__ and not issubclass(cls, Policy) and "act" not in vars(cls):
            cls.act = act_by_mean  # pyright: ignore[reportAttributeAccessIssue]

    def sample_action(self, params: Params, generator: torch.Generator | None) -> Tensor:
        """The mean."""
        return self.distribution.mode(params)


def act_by_mean(policy: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Call the `act` of the class after the mixin, and return the mean of the distribution that it set."""
    super(DeterministicPolicyMixin, policy).act(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
    return policy.action_mean
