"""What every action distribution can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
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


class DeviceConstants:
    """Fixed numbers as float32 tensors on whatever device asks for them; the copy is made once per device."""

    def __init__(self, values: Mapping[str, np.ndarray]) -> None:
        self._host = dict(values)
        self._on_device: dict[torch.device, dict[str, Tensor]] = {}

    def __call__(self, device: torch.device) -> dict[str, Tensor]:
        """Every constant by name."""
        if device not in self._on_device:
            with torch.inference_mode(False):  # a constant made by a rollout must serve a backward pass later
                made = {name: torch.as_tensor(v, dtype=torch.float32, device=device) for name, v in self._host.items()}
            self._on_device[device] = made
        return self._on_device[device]


def finite_bounds(
    low: np.ndarray | Sequence[float], high: np.ndarray | Sequence[float], who: str
) -> tuple[np.ndarray, np.ndarray]:
    """Flat float64 bounds of an action that has some; `who` is the word for what needs them in an error."""
    bounds = np.stack([np.asarray(low, dtype=np.float64), np.asarray(high, dtype=np.float64)])
    if not np.isfinite(bounds).all() or not (bounds[0] < bounds[1]).all():
        raise ValueError(
            f"{who} needs finite bounds with low < high, got low={low}, high={high}; bound the action space"
        )
    low, high = bounds.reshape(2, -1)
    return low, high
