"""Returns and advantages as pure functions of (T, N, 1) tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def gae(rewards: Tensor, values: Tensor, dones: Tensor, last_values: Tensor, gamma: Tensor | float, lam: Tensor | float) -> Tensor:
    """Generalised advantage estimates (Schulman 2016, eq. 16); all (T, N, 1) but last_values (N, 1).

    A done cuts the trace; what a truncated episode is still worth must already be in its last reward.
    """
    alive = torch.logical_not(dones).to(rewards.dtype)
    next_values = torch.cat([values[1:], last_values.unsqueeze(0)])
    deltas = torch.addcmul(rewards - values, alive * gamma, next_values)
    decay = alive * (gamma * lam)
    advantages = torch.empty_like(deltas)
    advantage = torch.zeros_like(last_values)
    for t in range(len(deltas) - 1, -1, -1):
        advantage = torch.addcmul(deltas[t], decay[t], advantage)
        advantages[t] = advantage
    return advantages


def timeout_bootstrap(rewards: Tensor, values: Tensor, truncated: Tensor, gamma: float) -> Tensor:
    """Rewards that carry the discounted value of the state a truncated episode stopped in; all (N,)."""
    return torch.where(truncated, rewards + gamma * values, rewards)


def masked_mean(x: Tensor, valid: Tensor | None) -> Tensor:
    """Mean of x over the entries where `valid` (broadcast from the left) is true; over all if it is None."""
    if valid is None:
        return x.mean()
    weight = valid.view(*valid.shape, *[1] * (x.dim() - valid.dim())).expand_as(x)
    return torch.where(weight, x, 0.0).sum() / weight.sum().clamp(min=1)


def normalize_advantages(advantages: Tensor, valid: Tensor | None = None) -> Tensor:
    """Advantages with mean 0 and (unbiased) standard deviation 1 over the valid entries."""
    if valid is None and advantages.numel() > 1:
        std, mean = torch.std_mean(advantages)
        return (advantages - mean) / (std + 1e-8)
    count = advantages.new_ones(()) if valid is None else valid.sum().to(advantages.dtype)
    centred = advantages - masked_mean(advantages, valid)
    variance = masked_mean(centred**2, valid) * count / (count - 1).clamp(min=1)
    return centred / (variance.sqrt() + 1e-8)
