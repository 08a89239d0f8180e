"""How far a student is from its teacher: distances between a mean action and a label, by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

TANH_EDGE = 1e-6  # logarithms and atanh end at 1


def _tanh(mean: Tensor, label: Tensor) -> Tensor:
    """2 BCE of both mapped from [-1, 1] to [0, 1]; per action."""
    guess, wanted = (mean.clamp(TANH_EDGE - 1, 1 - TANH_EDGE) + 1.0) / 2.0, (label.clamp(-1.0, 1.0) + 1.0) / 2.0
    return 2.0 * F.binary_cross_entropy(guess, wanted, reduction="none")


# (..., A) mean and label -> (...,)
DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "real": lambda mean, label: torch.linalg.vector_norm(mean - label, dim=-1),
    "mse_sum": lambda mean, label: (mean - label).square().sum(-1),
    "l1": lambda mean, label: (mean - label).abs().sum(-1),
    "tanh": lambda mean, label: _tanh(mean, label).mean(-1),
    "scaled_tanh": lambda mean, label: _tanh(mean, label).mean(-1) * (mean - label).abs().mean(-1),
}
TARGETS = (*DISTANCES, "max_log_prob")
TANH_TARGETS = ("tanh", "scaled_tanh")


def check_target(setting: str, target: str, known: tuple[str, ...] = TARGETS) -> None:
    """Raise for a target that does not exist."""
    if target not in known:
        raise ValueError(f"{setting} must be one of {', '.join(known)}, got {target!r}")


def tanh_stats(mean: Tensor, label: Tensor) -> dict[str, Tensor]:
    """Mean distance (...,) of the actions, and of what tanh made them from."""
    edge = 1 - TANH_EDGE
    before = torch.atanh(mean.clamp(-edge, edge)) - torch.atanh(label.clamp(-edge, edge))
    return {"l1distance": (mean - label).abs().sum(-1), "l1_before_tanh": before.abs().sum(-1)}
