"""Running statistics of numpy data, and the normaliser of motion features built on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class RunningMeanStd:
    """Running mean and variance of a stream of numpy batches, in float64."""

    def __init__(self, epsilon: float = 1e-4, shape: tuple[int, ...] | int = ()) -> None:
        self.mean = np.zeros(shape)
        self.var = np.ones(shape)
        self.count = float(epsilon)

    def update(self, arr: np.ndarray) -> None:
        """Learn from a batch (B, *shape)."""
        arr = np.asarray(arr, dtype=np.float64)
        if len(arr):
            self.update_from_moments(arr.mean(axis=0), arr.var(axis=0), len(arr))

    def update_from_moments(self, mean: np.ndarray, var: np.ndarray, count: float) -> None:
        """Learn from the mean, population variance and size of a batch."""
        total = self.count + count
        step = mean - self.mean
        spread = self.var * self.count + var * count + step**2 * self.count * count / total
        self.mean, self.var, self.count = self.mean + step * count / total, spread / total, total

    def state_dict(self) -> dict[str, Any]:
        """The statistics as tensors and numbers."""
        return {
            "mean": torch.from_numpy(self.mean.copy()),
            "var": torch.from_numpy(self.var.copy()),
            "count": self.count,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        mean, var = (torch.as_tensor(state[name]).cpu().double().numpy().copy() for name in ("mean", "var"))
        if mean.shape != self.mean.shape or var.shape != self.var.shape:
            raise ValueError(f"statistics of shape {mean.shape} do not fit a normaliser of shape {self.mean.shape}")
        self.mean, self.var, self.count = mean, var, float(state["count"])


class _Rollouts(Protocol):
    def feed_forward_generator_amp(self, num_mini_batch: int | None, mini_batch_size: int) -> Iterable[Any]: ...


class _Experts(Protocol):
    @property
    def batch_size(self) -> int: ...

    def __iter__(self) -> Any: ...


class Normalizer(RunningMeanStd):
    """Normalises and clips with running statistics; an instance serves numpy arrays and tensors alike."""

    def __init__(self, input_dim: tuple[int, ...] | int, epsilon: float = 1e-4, clip_obs: float = 10.0) -> None:
        super().__init__(epsilon, input_dim)
        self.epsilon, self.clip_obs = epsilon, clip_obs

    def normalize(self, x: np.ndarray) -> np.ndarray:
        """(x - mean) / sqrt(var + epsilon), clipped."""
        return np.clip((x - self.mean) / np.sqrt(self.var + self.epsilon), -self.clip_obs, self.clip_obs)

    def normalize_torch(self, x: Tensor, device: torch.device | str, update: bool = True) -> Tensor:
        """Learn from (..., *input_dim) unless `update` is off, then do as `normalize` on the device."""
        if update:
            self.update(x.detach().cpu().numpy().reshape(-1, *self.mean.shape))
        mean = torch.as_tensor(self.mean, dtype=torch.float32, device=device)
        std = torch.as_tensor(np.sqrt(self.var + self.epsilon), dtype=torch.float32, device=device)
        return ((x.to(device) - mean) / std).clamp(-self.clip_obs, self.clip_obs)

    def update_normalizer(self, rollouts: _Rollouts, expert_loader: _Experts) -> None:
        """Learn from pairs of a policy batch and an expert batch, until either side ends.

        Args:
            rollouts: a storage with `feed_forward_generator_amp`.
            expert_loader: anything with a `batch_size` that iterates over batches, a `DataLoader` for example.
        """
        policy_batches = rollouts.feed_forward_generator_amp(None, mini_batch_size=expert_loader.batch_size)
        for batches in zip(policy_batches, expert_loader, strict=False):
            parts = [part for batch in batches for part in ((batch,) if isinstance(batch, Tensor) else batch)]
            self.update(torch.vstack([torch.as_tensor(part).cpu() for part in parts]).numpy())
