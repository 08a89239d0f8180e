"""A mixin for policies that act without noise."""

from typing import Any

import torch
from torch import Tensor

from canter.modules.distributions import Params


class DeterministicPolicyMixin:
    """Makes a policy take the mean of its distribution: `class Mine(DeterministicPolicyMixin, ActorCritic)`."""

    distribution: Any
    has_entropy = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        after = cls.__mro__[cls.__mro__.index(DeterministicPolicyMixin) + 1 :]
        if not any("action_mean" in vars(base) for base in after):
            raise AttributeError(f"{cls.__name__}: DeterministicPolicyMixin must precede a class with action_mean")

    def sample_action(self, params: Params, generator: torch.Generator | None) -> Tensor:
        """The mean."""
        return self.distribution.mode(params)
