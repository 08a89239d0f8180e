"""Random network distillation: a reward for states that a predictor does not know yet (Burda 2018)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from canter.modules.mlp import mlp
from canter.modules.normalizer import EmpiricalNormalization, NoNormalization, ReturnScaler
from canter.utils.config import settings

WEIGHT_SCHEDULES = ("constant", "step", "linear")


@settings
class RNDConfig:
    """Settings of random network distillation."""

    num_states: int
    """Width of the states, the critic's observation."""
    num_envs: int = 1
    """Number of environments, for the scale of the intrinsic return."""
    num_outputs: int = 16
    """Width of the embedding."""
    predictor_hidden_dims: tuple[int, ...] = (256, 256)
    """Hidden layers of the predictor."""
    target_hidden_dims: tuple[int, ...] = (256, 256)
    """Hidden layers of the frozen target."""
    activation: str = "elu"
    """Activation of both."""
    state_normalization: bool = False
    """Normalise states by running statistics."""
    reward_normalization: bool = False
    """Divide the intrinsic reward by the standard deviation of its discounted return."""
    weight: float = 0.0
    """Weight of the intrinsic reward."""
    weight_schedule: dict[str, Any] | None = None
    """`{mode: constant | step | linear, initial_step, final_step, final_value}`, in env steps per environment."""
    learning_rate: float = 1e-3
    """Learning rate of the predictor."""


class RND(nn.Module):
    """Predictor, frozen target, their normalisers and the predictor's optimizer."""

    def __init__(self, cfg: RNDConfig, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.cfg = cfg
        schedule = dict(cfg.weight_schedule or {"mode": "constant"})
        if schedule.get("mode", "constant") not in WEIGHT_SCHEDULES:
            raise ValueError(f"weight_schedule mode must be one of {WEIGHT_SCHEDULES}, got {schedule['mode']!r}")
        self.schedule = schedule
        self.predictor = mlp([cfg.num_states, *cfg.predictor_hidden_dims, cfg.num_outputs], cfg.activation)
        self.target = mlp([cfg.num_states, *cfg.target_hidden_dims, cfg.num_outputs], cfg.activation).requires_grad_(
            False
        )
        self.state_normalizer: Any = NoNormalization()
        if cfg.state_normalization:
            self.state_normalizer = EmpiricalNormalization([cfg.num_states])
        self.reward_scaler = ReturnScaler(cfg.num_envs, 0.99) if cfg.reward_normalization else None
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.steps: Tensor
        self.to(device)
        self.optimizer = torch.optim.Adam(self.predictor.parameters(), lr=cfg.learning_rate)

    def weight(self) -> Tensor:
        """Weight of the intrinsic reward at this step, as a device scalar."""
        start = torch.full((), self.cfg.weight, device=self.steps.device)
        mode = self.schedule.get("mode", "constant")
        if mode == "constant":
            return start
        final = float(self.schedule["final_value"])
        if mode == "step":
            return torch.where(self.steps < int(self.schedule["final_step"]), start, final)
        first, last = int(self.schedule.get("initial_step", 0)), int(self.schedule["final_step"])
        progress = ((self.steps - first) / max(1, last - first)).clamp(0.0, 1.0)
        return start + progress * (final - start)

    @torch.no_grad()
    def intrinsic_reward(self, states: Tensor, done: Tensor) -> Tensor:
        """(N,) weighted novelty of the states just reached."""
        self.state_normalizer.update(states)
        seen = self.state_normalizer.normalize(states)
        reward = torch.linalg.vector_norm(self.target(seen) - self.predictor(seen), dim=-1)
        if self.reward_scaler is not None:
            reward = self.reward_scaler(reward, done)
        weighted = self.weight() * reward
        self.steps += 1
        return weighted

    def update(self, states: Tensor, valid: Tensor | None = None) -> Tensor:
        """One step of the predictor towards the target; returns its loss."""
        seen = self.state_normalizer.normalize(states.detach())
        error = (self.predictor(seen) - self.target(seen)).square().mean(-1)
        loss = error.mean() if valid is None else (error * valid).sum() / valid.sum().clamp(min=1)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()
