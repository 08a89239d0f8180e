"""Running statistics that bring observations, returns and motion features to unit scale.

The torch classes decide everything on the device (which rows count, when to stop) and write their buffers in place, so
that an update may be captured in a CUDA graph. `RunningMeanStd` and `Normalizer` serve numpy data.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from canter.utils.checkpoint import NORMALIZER_CLIP
from canter.utils.distributed import RANKS
from canter.utils.tree import Obs, tree_leaves, tree_map

VALUE_NORMALIZATIONS = ("off", "running", "popart")
EXPERT_BATCH = 256  # windows of an AMPLoader per batch of the policy's
LARGEST = 1e15  # rows beyond it would overflow a float32 sum of squares; NaN and inf fail the comparison too


def merge_moments(
    mean: Tensor, var: Tensor, count: Tensor, rows: Tensor, keep: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, population variance and count after the rows (B, *shape) where `keep` (B,) holds (Chan et al. 1979).

    The rows of all ranks count.
    """
    if RANKS.size > 1 and keep is None:
        keep = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    if keep is None:  # deviations are taken from the running mean, so that a large offset does not cancel
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
        if RANKS.size > 1:
            added, step, batch_var = RANKS.merge(added, step, batch_var)
        total = count + added
        rate = added / total.clamp(min=1)
    return mean + rate * step, var + rate * (batch_var - var + (1.0 - rate) * step.square()), total


def mark(obs: Tensor, normalizer: nn.Module) -> Tensor:
    """Note on an observation that this normaliser has made it; a copy of the tensor has no such note."""
    obs.normalized_by = normalizer  # pyright: ignore[reportAttributeAccessIssue]
    return obs


def normalized(obs: Any, normalizer: Any) -> Any:
    """The observation as a network gets it; one that the same normaliser was called with stays as it is."""
    first = obs
    while isinstance(first, Mapping):
        first = next(iter(first.values()))
    return obs if getattr(first, "normalized_by", None) is normalizer else normalizer.normalize(obs)


class EmpiricalNormalization(nn.Module):
    """Subtracts the running mean and divides by the running standard deviation.

    Args:
        shape: Of one observation.
        eps: Added to the standard deviation.
        until: Number of rows after which the statistics stay as they are; None for never.
        min_std: Smallest standard deviation that is divided by.
        clip: Bound of the results, saved with the statistics; a normaliser without one takes the one that it loads.
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        eps: float = 1e-2,
        until: float | None = None,
        min_std: float = 0.0,
        clip: float | None = None,
    ) -> None:
        super().__init__()
        self.shape = tuple(int(n) for n in np.ravel(shape))
        self.eps, self.until, self.min_std, self.clip = eps, until, min_std, clip
        self._mean, self.count = nn.Buffer(torch.zeros(1, *self.shape)), nn.Buffer(torch.zeros((), dtype=torch.int64))
        self._var, self._std = nn.Buffer(torch.ones(1, *self.shape)), nn.Buffer(torch.ones(1, *self.shape))

    @property
    def mean(self) -> Tensor:
        """A copy of the running mean, (*shape)."""
        return self._mean[0].clone()

    @property
    def std(self) -> Tensor:
        """A copy of the running standard deviation, at least `min_std`, (*shape)."""
        return self._std[0].clone()

    def forward(self, x: Tensor) -> Tensor:
        """Update the statistics in training mode, then normalise (..., *shape)."""
        if not torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]
            self.update(x)
            return mark(self.normalize(x), self)
        return self.normalize(x)

    def normalize(self, x: Tensor) -> Tensor:
        """Normalise (..., *shape) with the current statistics."""
        y, clip = (x - self._mean[0]) / (self._std[0] + self.eps), self.clip
        return y if clip is None else y.clamp(-clip, clip)

    def inverse(self, y: Tensor) -> Tensor:
        """The values that `normalize` maps to y, if they are within its bound."""
        return y * (self._std[0] + self.eps) + self._mean[0]

    @torch.no_grad()
    def update(self, x: Tensor, valid: Tensor | None = None) -> None:
        """In training mode, before `until` rows, add rows (..., *shape) that are `valid` (...) and below `LARGEST`."""
        if not self.training:
            return
        if x.shape[x.dim() - len(self.shape) :] != self.shape:
            raise ValueError(f"the statistics are of values of shape {self.shape}, got {tuple(x.shape)}")
        rows = x.reshape(-1, *self.shape).to(self._mean.dtype)
        keep = (rows.abs() < LARGEST).view(-1, math.prod(self.shape)).all(1)
        if valid is not None:
            keep = keep & valid.reshape(-1)
        if self.until is not None:
            keep = keep & (self.count < self.until)
        mean, var, count = merge_moments(self._mean[0], self._var[0], self.count, rows, keep)
        std = var.sqrt().clamp(min=self.min_std)  # saved so, for policies that are loaded without their settings
        for buffer, new in ((self._mean, mean), (self._var, var), (self._std, std), (self.count, count)):
            buffer.copy_(new)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.clip is not None:  # otherwise the entries are those of a checkpoint that knows no bound
            bound = torch.tensor(self.clip, dtype=torch.float64, device=self._mean.device)
            destination[prefix + NORMALIZER_CLIP] = bound

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        saved = state_dict.pop(prefix + NORMALIZER_CLIP, None)
        if self.clip is None and saved is not None:
            self.clip = float(saved)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class ValueNormalizer(EmpiricalNormalization):
    """Statistics of returns, for a critic whose output is (value - mean) / std; `inverse` gives the value.

    Args:
        layer: The critic's last layer; if given, it is rescaled together with the statistics so that no value changes
            (PopArt, van Hasselt et al. 2016).
        memory: Number of rollouts over which the statistics average; returns grow while a policy learns.
    """

    def __init__(self, layer: nn.Linear | None = None, memory: int = 20, eps: float = 1e-4) -> None:
        super().__init__(1, eps)
        self.memory = memory
        self.preserved = () if layer is None else (layer,)  # in a tuple: it belongs to the critic, not to this module

    @property
    def scale(self) -> Tensor:
        """(1,) factor from normalised values to values."""
        return self._std[0] + self.eps

    @torch.no_grad()
    def update(self, x: Tensor, valid: Tensor | None = None) -> None:
        """Add the returns (..., 1) of a rollout where `valid` (...) is true; only in training mode."""
        if not self.training:
            return
        rows = torch.full_like(self.count, x.numel()) if valid is None else valid.sum()
        if RANKS.size > 1:
            rows = RANKS.merge(rows, self.mean, self.mean)[0]
        # A rollout has a weight of at least 1 / memory: the earlier count is reduced accordingly.
        recent = torch.minimum(self.count, rows * (self.memory - 1))
        self.count.copy_(torch.where(rows > 0, recent, self.count))
        mean, scale = self.mean, self.scale
        super().update(x, valid)
        for layer in self.preserved:
            layer.bias.copy_((scale * layer.bias + mean - self.mean) / self.scale)
            layer.weight.mul_(scale / self.scale)


def install_value_normalizer(policy: nn.Module, kind: str) -> None:
    """Make the policy's critic predict normalised values; statistics that it has already are kept."""
    if kind == "off":
        return
    layer = None
    if kind == "popart":
        modules = getattr(policy, "critic", nn.Identity()).modules()
        layer = ([None] + [module for module in modules if isinstance(module, nn.Linear)])[-1]
        if layer is None or layer.out_features != 1 or layer.bias is None:
            name, needed = type(policy).__name__, "the critic's last linear layer, with one output and a bias"
            raise ValueError(f"popart rescales {needed}, which {name} does not have; use value_normalization='running'")
    fresh = ValueNormalizer(layer).to(next(policy.parameters()).device)
    if isinstance(policy.value_normalizer, ValueNormalizer):
        fresh.load_state_dict(policy.value_normalizer.state_dict())
    policy.value_normalizer = fresh


class NoNormalization(nn.Identity):
    """The identity with the interface of `EmpiricalNormalization`; calling it runs no code of this library."""

    normalize = inverse = nn.Identity.forward

    def update(self, x: Any, valid: Tensor | None = None) -> None:
        """Do nothing: there are no statistics."""


class DictNormalization(nn.Module):
    """Normalises each float vector of a nested dict with leaf `shapes`; images (3-D), integers and shape None pass.

    The options are those of `EmpiricalNormalization`.
    """

    def __init__(self, shapes: Mapping[str, Any], **options: Any) -> None:
        super().__init__()
        leaves = {name: shape for name, shape in tree_leaves(shapes) if shape is not None and np.size(shape) < 3}
        made = {self._key(name): EmpiricalNormalization(shape, **options) for name, shape in leaves.items()}
        self.leaves = nn.ModuleDict(made)

    def _key(self, name: str) -> str:
        # The prefix keeps a leaf called "values" from hiding a method of ModuleDict; a dot is not allowed in its keys.
        return "obs/" + name.replace(".", "/")

    def forward(self, x: Obs) -> Obs:
        """Update the statistics in training mode, then normalise every float vector."""
        self.update(x)
        return tree_map(lambda leaf: mark(leaf, self), self.normalize(x))

    def normalize(self, x: Obs) -> Obs:
        """Normalise every float vector with the current statistics."""
        return self._map("normalize", x)

    def inverse(self, y: Obs) -> Obs:
        """The observations that `normalize` maps to y."""
        return self._map("inverse", y)

    def update(self, x: Obs, valid: Tensor | None = None) -> None:
        """Add every float vector where `valid` (...) is true to the statistics."""
        for name, leaf in tree_leaves(x):
            statistics = self.leaf(name)
            if statistics is not None and leaf.is_floating_point():
                statistics.update(leaf, valid)

    def leaf(self, name: str) -> EmpiricalNormalization | None:
        """The statistics of one leaf by its dotted name; None if it is not normalised."""
        return dict(self.leaves.items()).get(self._key(name))  # pyright: ignore[reportReturnType]

    def _map(self, method: str, tree: Any, name: str = "") -> Any:
        if isinstance(tree, Mapping):
            return {key: self._map(method, leaf, f"{name}.{key}" if name else key) for key, leaf in tree.items()}
        statistics = self.leaf(name)
        return getattr(statistics, method)(tree) if statistics is not None and tree.is_floating_point() else tree


class ReturnScaler(nn.Module):
    """Divides rewards by the running standard deviation of the discounted return, one accumulator per environment."""

    def __init__(self, num_envs: int, gamma: float, eps: float = 1e-8, clip: float = 10.0) -> None:
        super().__init__()
        self.gamma, self.eps, self.clip = gamma, eps, clip
        self.returns, self.count = nn.Buffer(torch.zeros(num_envs)), nn.Buffer(torch.zeros((), dtype=torch.int64))
        self.mean, self.var = nn.Buffer(torch.zeros(())), nn.Buffer(torch.ones(()))

    @torch.no_grad()
    def forward(self, reward: Tensor, done: Tensor, valid: Tensor | None = None) -> Tensor:
        """Scale rewards (N,), in training mode after adding the `valid` (N,) ones; `done` (N,) zeroes accumulators."""
        if self.training:
            self.learn(reward, done, valid)
        return (reward / (self.var + self.eps).sqrt()).clamp(-self.clip, self.clip)

    @torch.no_grad()
    def learn(self, reward: Tensor, done: Tensor, valid: Tensor | None = None) -> None:
        """Add the `valid` (N,) rewards (N,) to the statistics; the other accumulators stay as they are."""
        returns = self.returns * self.gamma + torch.where(reward.abs() < LARGEST, reward, 0.0)
        self.take(returns, valid)
        returns = returns.masked_fill(done.bool(), 0.0)
        self.returns.copy_(returns if valid is None else torch.where(valid, returns, self.returns))

    @torch.no_grad()
    def take(self, returns: Tensor, valid: Tensor | None = None) -> None:
        """Add returns (N,) to the statistics."""
        statistics = (self.mean, self.var, self.count)
        for buffer, new in zip(statistics, merge_moments(*statistics, returns, valid), strict=True):
            buffer.copy_(new)

    def reach(self) -> Tensor:
        """Bound of nearly all returns: |mean| plus four standard deviations; 1 before the first return."""
        reach = self.mean.abs() + 4.0 * (self.var + self.eps).sqrt()
        return torch.where(self.count > 0, reach, torch.ones_like(reach))


class Normalize(nn.Module):
    """Scales vectors to length 1."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D) with L2 norm 1 along the last dimension."""
        return F.normalize(x, dim=-1)


class RunningMeanStd:
    """Running mean and variance of a stream of numpy batches, in float64."""

    def __init__(self, epsilon: float = 1e-4, shape: tuple[int, ...] | int = ()) -> None:
        self.mean = np.zeros(shape)
        self.var = np.ones(shape)
        self.count = float(epsilon)

    def update(self, arr: np.ndarray) -> None:
        """Add a batch (B, *shape) to the statistics."""
        arr = np.asarray(arr, dtype=np.float64)
        if len(arr):
            self.update_from_moments(arr.mean(axis=0), arr.var(axis=0), len(arr))

    def update_from_moments(self, batch_mean: np.ndarray, batch_var: np.ndarray, batch_count: float) -> None:
        """Add a batch with this mean, population variance and size to the statistics."""
        total = self.count + batch_count
        step = batch_mean - self.mean
        spread = self.var * self.count + batch_var * batch_count + step**2 * self.count * batch_count / total
        self.mean, self.var, self.count = self.mean + step * batch_count / total, spread / total, total

    def state_dict(self) -> dict[str, Any]:
        """The statistics as tensors and numbers."""
        mean, var = torch.from_numpy(self.mean.copy()), torch.from_numpy(self.var.copy())
        return {"mean": mean, "var": var, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the statistics of `state_dict`."""
        mean, var = (torch.as_tensor(state[name]).cpu().double().numpy().copy() for name in ("mean", "var"))
        if mean.shape != self.mean.shape or var.shape != self.var.shape:
            raise ValueError(f"statistics of shape {mean.shape} do not fit a normaliser of shape {self.mean.shape}")
        self.mean, self.var, self.count = mean, var, float(state["count"])


class Normalizer(RunningMeanStd):
    """Normalises and clips motion features with running statistics; takes numpy arrays and tensors."""

    def __init__(self, input_dim: tuple[int, ...] | int, epsilon: float = 1e-4, clip_obs: float = 10.0) -> None:
        super().__init__(epsilon, input_dim)
        self.epsilon, self.clip_obs = epsilon, clip_obs

    def normalize(self, input: np.ndarray) -> np.ndarray:  # noqa: A002 (documented name)
        """(input - mean) / sqrt(var + epsilon), clipped."""
        return np.clip((input - self.mean) / np.sqrt(self.var + self.epsilon), -self.clip_obs, self.clip_obs)

    def normalize_torch(self, input: Tensor, device: torch.device | str, update: bool = True) -> Tensor:  # noqa: A002
        """Add (..., *input_dim) to the statistics if `update`, then normalise it on the device."""
        if update:
            self.update(input.detach().cpu().double().numpy().reshape(-1, *self.mean.shape))
        mean = torch.as_tensor(self.mean, dtype=torch.float32, device=device)
        std = torch.as_tensor(np.sqrt(self.var + self.epsilon), dtype=torch.float32, device=device)
        return ((input.to(device) - mean) / std).clamp(-self.clip_obs, self.clip_obs)

    def update_normalizer(self, rollouts: Any, expert_loader: Any) -> None:
        """Add batches of `rollouts.feed_forward_generator_amp` and of the expert in pairs, until either ends.

        The expert is a `DataLoader`, or an `AMPLoader`, whose windows are as wide as the policy's.
        """
        size = getattr(expert_loader, "batch_size", EXPERT_BATCH)
        policy_batches = list(rollouts.feed_forward_generator_amp(None, mini_batch_size=size))
        expert_batches = expert_loader
        if hasattr(expert_loader, "expert_features"):
            frames = math.prod(self.mean.shape) // len(expert_loader.feature_columns)
            expert_batches = [expert_loader.expert_features(size, frames) for _ in policy_batches]
        for batches in zip(policy_batches, expert_batches, strict=False):
            parts = [part for batch in batches for part in ((batch,) if isinstance(batch, Tensor) else batch)]
            self.update(torch.vstack([torch.as_tensor(part).cpu() for part in parts]).numpy())
