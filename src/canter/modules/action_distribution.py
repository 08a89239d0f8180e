"""What every action distribution can do."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Generator, Tensor
from torch import distributions as td

Params = dict[str, Tensor]


class ActionDistribution(ABC):
    """A family of distributions over actions; every method takes the parameters it is about."""

    action_shape: tuple[int, ...]
    action_dtype: torch.dtype
    param_shapes: dict[str, tuple[int, ...]]
    """Parameter name -> shape of one action's parameter."""

    @abstractmethod
    def sample(self, params: Params, generator: Generator | None = None) -> Tensor:
        """Draw one action per row of the parameters, without gradient."""

    @abstractmethod
    def mode(self, params: Params) -> Tensor:
        """The action of a policy that does not explore."""

    @abstractmethod
    def log_prob(self, params: Params, actions: Tensor) -> Tensor:
        """Log-probability of whole actions, (...,)."""

    @abstractmethod
    def entropy(self, params: Params) -> Tensor:
        """Entropy in nats, (...,)."""

    @abstractmethod
    def kl(self, old: Params, new: Params) -> Tensor:
        """Exact KL(old || new), (...,)."""

    @abstractmethod
    def to_env(self, actions: Tensor) -> Tensor:
        """What `VecEnv.step` gets for an action: flat, and counted from 0 where it is discrete."""

    @abstractmethod
    def torch_distribution(self, params: Params) -> td.Distribution:
        """The equivalent `torch.distributions` object, without argument validation."""


def at_least_float32(x: Tensor) -> Tensor:
    """Half-precision parameters in float32, others as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
