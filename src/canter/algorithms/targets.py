"""Copies of networks that follow slowly, and what critics' outputs mean: a return, or a distribution over returns."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from canter.algorithms.optim import GuardedOptimizer
from canter.execution.flat_parameters import FlatParameters, copy_tensors, lerp_tensors


class TargetNetwork:
    """A copy that follows a module which `optimizer` trains; one operation where parameters lie end to end."""

    def __init__(self, source: nn.Module, optimizer: GuardedOptimizer) -> None:
        self.source = source
        self.module = copy.deepcopy(source)
        self.module.requires_grad_(False)
        trained: list[Tensor] = [flat.vector for flat in optimizer.flats]
        own: list[Tensor] = list(self.module.parameters())
        if len(trained) == 1 and trained[0].numel() == sum(p.numel() for p in own):
            own = [FlatParameters(list(self.module.parameters())).vector]
            own[0].grad = None
            own[0].requires_grad_(False)
        else:
            trained = list(source.parameters())
        self.pairs = own, trained

    @torch.no_grad()
    def follow(self, tau: float) -> None:
        """Move by `tau` of the way (1 copies); statistics such as those of a batch norm are copied."""
        own, trained = self.pairs
        if tau >= 1:
            copy_tensors(own, trained)
        else:
            lerp_tensors(own, trained, tau)
        for mine, theirs in zip(self.module.buffers(), self.source.buffers(), strict=True):
            mine.copy_(theirs)


class ScalarReturns:
    """Critics' outputs (E, B) are the values themselves."""

    bound = 4.0
    """What normalised returns are to reach: four standard deviations."""

    def values(self, out: Tensor) -> Tensor:
        """(E, B)."""
        return out

    def target(self, out: Tensor, rewards: Tensor, discounts: Tensor, bonus: Tensor | float, reduction: str) -> Tensor:
        """What to predict, (B,) or (E, B): rewards and what the next outputs and the bonus are still worth."""
        value = out.amin(0) if reduction == "min" else out
        return rewards + discounts * (value + bonus)

    def losses(self, out: Tensor, target: Tensor) -> Tensor:
        """(E,) mean square errors."""
        return (out - target).square().mean(1)

    def mean_target(self, target: Tensor) -> Tensor:
        """The mean of a target, for reports."""
        return target.mean()


class CategoricalReturns:
    """Critics' outputs (E, B, K) are logits over K returns between two bounds (Bellemare et al. 2017)."""

    def __init__(self, v_min: float, v_max: float, num_atoms: int, device: torch.device) -> None:
        self.v_min, self.v_max, self.num_atoms = v_min, v_max, num_atoms
        self.step = (v_max - v_min) / (num_atoms - 1)
        self.atoms = torch.linspace(v_min, v_max, num_atoms, device=device)
        self.bound = min(abs(end) for end in (v_min, v_max) if end)

    def values(self, out: Tensor) -> Tensor:
        """(E, B) means."""
        return (out.float().softmax(-1) * self.atoms).sum(-1)

    def target(self, out: Tensor, rewards: Tensor, discounts: Tensor, bonus: Tensor | float, reduction: str) -> Tensor:
        """Probabilities to predict, (B, K) or (E, B, K)."""
        probs = out.float().softmax(-1)
        if reduction == "min":
            lowest = (probs * self.atoms).sum(-1).argmin(0)  # (B,)
            probs = probs.gather(0, lowest.view(1, -1, 1).expand(1, *probs.shape[1:])).squeeze(0)
        bonus = bonus.unsqueeze(-1) if isinstance(bonus, Tensor) else bonus
        moved = rewards.unsqueeze(-1) + discounts.unsqueeze(-1) * (self.atoms + bonus)  # (B, K)
        return self.project(moved.expand_as(probs), probs)

    def project(self, returns: Tensor, probs: Tensor) -> Tensor:
        """Probabilities of returns anywhere, shared out between the two nearest atoms."""
        place = ((returns - self.v_min) / self.step).clamp(0, self.num_atoms - 1)
        lower = place.floor()
        share = place - lower
        low = lower.long()
        high = (low + 1).clamp(max=self.num_atoms - 1)
        shared = torch.zeros_like(probs).scatter_add(-1, low, probs * (1 - share))
        return shared.scatter_add(-1, high, probs * share)

    def losses(self, out: Tensor, target: Tensor) -> Tensor:
        """(E,) mean cross-entropies."""
        return -(target * F.log_softmax(out.float(), -1)).sum(-1).mean(1)

    def mean_target(self, target: Tensor) -> Tensor:
        """The mean of a target, for reports."""
        return (target * self.atoms).sum(-1).mean()
