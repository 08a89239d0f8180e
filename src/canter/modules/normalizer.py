"""Running statistics that bring observations, returns and motion features to unit scale.

The torch classes decide everything on the device (what counts, when to stop) and write their buffers in place, so that
an update may be captured in a CUDA graph. `RunningMeanStd` and `Normalizer` serve data that lives on the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from canter.modules.running_mean_std import Normalizer, RunningMeanStd
from canter.utils.tree import Obs, tree_leaves

__all__ = [
    "DictNormalization",
    "EmpiricalNormalization",
    "NoNormalization",
    "Normalize",
    "Normalizer",
    "ReturnScaler",
    "RunningMeanStd",
    "merge_moments",
]

LARGEST = 1e15  # rows beyond it would overflow a float32 sum of squares; NaN and inf fail the comparison too


def merge_moments(
    mean: Tensor, var: Tensor, count: Tensor, rows: Tensor, keep: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, population variance and count after the rows (B, *shape) where `keep` (B,) holds (Chan et al. 1979).

    Deviations are taken from the running mean, so that a large offset does not cancel.
    """
    if keep is None:
        batch_var, step = torch.var_mean(rows - mean, 0, correction=0)
        total = count + len(rows)
        rate = len(rows) / total
    else:
        weight = keep.view(-1, *[1] * (rows.dim() - 1))
        added = keep.sum()
        safe = added.clamp(min=1)
        off = torch.where(weight, rows - mean, 0.0)
        step = off.sum(0) / safe
        batch_var = torch.where(weight, (off - step).square(), 0.0).sum(0) / safe
        total = count + added
        rate = added / total.clamp(min=1)
    return mean + rate * step, var + rate * (batch_var - var + (1.0 - rate) * step.square()), total


class EmpiricalNormalization(nn.Module):
    """Subtracts the running mean and divides by the running standard deviation of everything seen in training mode."""

    _mean: Tensor
    _var: Tensor
    _std: Tensor
    count: Tensor

    def __init__(self, shape: int | Sequence[int], eps: float = 1e-2, until: float | None = None) -> None:
        super().__init__()
        self.shape = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
        self.eps, self.until = eps, until
        self.register_buffer("_mean", torch.zeros(1, *self.shape))
        self.register_buffer("_var", torch.ones(1, *self.shape))
        self.register_buffer("_std", torch.ones(1, *self.shape))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @property
    def mean(self) -> Tensor:
        """A copy of the running mean, (*shape)."""
        return self._mean[0].clone()

    @property
    def std(self) -> Tensor:
        """A copy of the running standard deviation, (*shape)."""
        return self._std[0].clone()

    def forward(self, x: Tensor) -> Tensor:
        """Learn from x in training mode, then normalise it."""
        self.update(x)
        return self.normalize(x)

    def normalize(self, x: Tensor) -> Tensor:
        """Normalise (..., *shape) with the statistics as they are."""
        return (x - self._mean[0]) / (self._std[0] + self.eps)

    def inverse(self, y: Tensor) -> Tensor:
        """What `normalize` made y from."""
        return y * (self._std[0] + self.eps) + self._mean[0]

    @torch.no_grad()
    def update(self, x: Tensor, valid: Tensor | None = None) -> None:
        """Learn from (..., *shape) where `valid` (...) holds; nothing in eval mode or once `until` rows were counted.

        Rows with a value that is not finite, or too large to square, are left out.
        """
        if not self.training:
            return
        rows = x.reshape(-1, *self.shape).to(self._mean.dtype)
        keep = (rows.abs() < LARGEST).view(-1, math.prod(self.shape)).all(1)
        if valid is not None:
            keep = keep & valid.reshape(-1)
        if self.until is not None:
            keep = keep & (self.count < self.until)
        mean, var, count = merge_moments(self._mean[0], self._var[0], self.count, rows, keep)
        self._mean[0].copy_(mean)
        self._var[0].copy_(var)
        self._std[0].copy_(var.sqrt())
        self.count.copy_(count)


class NoNormalization(nn.Identity):
    """Leaves everything as it is, with the interface of `EmpiricalNormalization`."""

    def normalize(self, x: Any) -> Any:
        """The input itself."""
        return x

    def inverse(self, y: Any) -> Any:
        """The input itself."""
        return y

    def update(self, x: Any, valid: Tensor | None = None) -> None:
        """Learn nothing."""


class DictNormalization(nn.Module):
    """Normalises each float vector of a nested dict of observations; images, integers and leaves of shape None pass.

    Args:
        shapes: nested dict of leaf shapes. A shape of three or more dimensions is an image.
        eps: see `EmpiricalNormalization`.
        until: see `EmpiricalNormalization`.
    """

    def __init__(self, shapes: Mapping[str, Any], eps: float = 1e-2, until: float | None = None) -> None:
        super().__init__()
        leaves = {name: shape for name, shape in tree_leaves(shapes) if shape is not None and np.size(shape) < 3}
        # The prefix keeps a leaf called "values" from hiding a method of ModuleDict; a dot is not allowed in its keys.
        made = {_module_name(name): EmpiricalNormalization(shape, eps, until) for name, shape in leaves.items()}
        self.leaves = nn.ModuleDict(made)

    def forward(self, x: Obs) -> Obs:
        """Learn from x in training mode, then normalise it."""
        self.update(x)
        return self.normalize(x)

    def normalize(self, x: Obs) -> Obs:
        """Normalise every float vector with the statistics as they are."""
        return self._map("normalize", x)

    def inverse(self, y: Obs) -> Obs:
        """What `normalize` made y from."""
        return self._map("inverse", y)

    def update(self, x: Obs, valid: Tensor | None = None) -> None:
        """Learn from every float vector where `valid` (...) holds."""
        for name, leaf in tree_leaves(x):
            if _module_name(name) in self.leaves and leaf.is_floating_point():
                self._leaf(name).update(leaf, valid)

    def leaf(self, name: str) -> EmpiricalNormalization | None:
        """The statistics of one leaf by its dotted name; None if it is left as it is."""
        return self._leaf(name) if _module_name(name) in self.leaves else None

    def _leaf(self, name: str) -> EmpiricalNormalization:
        module = self.leaves[_module_name(name)]
        assert isinstance(module, EmpiricalNormalization)
        return module

    def _map(self, method: str, tree: Any, name: str = "") -> Any:
        if isinstance(tree, Mapping):
            return {key: self._map(method, leaf, f"{name}.{key}" if name else key) for key, leaf in tree.items()}
        known = _module_name(name) in self.leaves and tree.is_floating_point()
        return getattr(self._leaf(name), method)(tree) if known else tree


def _module_name(dotted: str) -> str:
    return "obs/" + dotted.replace(".", "/")


class ReturnScaler(nn.Module):
    """Divides rewards by the running standard deviation of the discounted return, one accumulator per environment."""

    returns: Tensor
    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, num_envs: int, gamma: float, eps: float = 1e-8, clip: float = 10.0) -> None:
        super().__init__()
        self.gamma, self.eps, self.clip = gamma, eps, clip
        self.register_buffer("returns", torch.zeros(num_envs))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("var", torch.ones(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def forward(self, reward: Tensor, done: Tensor, valid: Tensor | None = None) -> Tensor:
        """Scale rewards (N,) after learning from them in training mode; `done` (N,) starts an accumulator anew.

        Rows where `valid` (N,) is false are steps that only reset an environment, and teach nothing.
        """
        if self.training:
            self.learn(reward, done, valid)
        return (reward / (self.var + self.eps).sqrt()).clamp(-self.clip, self.clip)

    @torch.no_grad()
    def learn(self, reward: Tensor, done: Tensor, valid: Tensor | None = None) -> None:
        """Take rewards (N,) into the statistics."""
        returns = self.returns * self.gamma + torch.where(reward.abs() < LARGEST, reward, 0.0)
        self.take(returns, valid)
        self.returns.copy_(returns.masked_fill(done.bool(), 0.0))

    @torch.no_grad()
    def take(self, returns: Tensor, valid: Tensor | None = None) -> None:
        """Take returns (N,) into the statistics."""
        mean, var, count = merge_moments(self.mean, self.var, self.count, returns, valid)
        self.mean.copy_(mean)
        self.var.copy_(var)
        self.count.copy_(count)

    def reach(self) -> Tensor:
        """How far from 0 nearly all returns lie: their mean and four standard deviations; 1 while none are known."""
        reach = self.mean.abs() + 4.0 * (self.var + self.eps).sqrt()
        return torch.where(self.count > 0, reach, torch.ones_like(reach))


class Normalize(nn.Module):
    """Scales vectors to length 1."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D) with L2 norm 1 along the last dimension."""
        return F.normalize(x, dim=-1)
