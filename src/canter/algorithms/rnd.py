"""Random network distillation: a reward for states that a predictor does not know yet (Burda 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from canter.algorithms.optim import GuardedOptimizer
from canter.modules.mlp import mlp
from canter.modules.normalizer import EmpiricalNormalization, NoNormalization, ReturnScaler
from canter.storage.rollout_storage import masked_mean
from canter.utils.config import check_settings, settings

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
        self.schedule = checked_schedule(cfg.weight_schedule or {})
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
        self.optimizer = GuardedOptimizer(self.predictor, "Adam", cfg.learning_rate)

    def weight(self) -> Tensor:
        """Weight of the intrinsic reward at this step, as a device scalar."""
        start = torch.full((), self.cfg.weight, device=self.steps.device)
        if self.schedule["mode"] == "constant":
            return start
        final = float(self.schedule["final_value"])
        first, last = int(self.schedule["initial_step"]), int(self.schedule["final_step"])
        if self.schedule["mode"] == "step":
            return torch.where(self.steps < last, start, final)
        progress = ((self.steps - first) / max(1, last - first)).clamp(0.0, 1.0)
        return start + progress * (final - start)

    @torch.no_grad()
    def intrinsic_reward(self, states: Tensor, done: Tensor, valid: Tensor | None = None) -> Tensor:
        """(N,) weighted novelty of the states just reached; rows that are not valid teach the statistics nothing."""
        self.state_normalizer.update(states, valid)
        seen = self.state_normalizer.normalize(states)
        reward = torch.linalg.vector_norm(self.target(seen) - self.predictor(seen), dim=-1)
        if self.reward_scaler is not None:
            reward = self.reward_scaler(reward, done)
        weighted = self.weight() * reward
        self.steps += 1
        return weighted

    def loss(self, states: Tensor, valid: Tensor | None = None) -> Tensor:
        """How far the predictor is from the target; only the predictor has a gradient."""
        seen = self.state_normalizer.normalize(states.detach())
        return masked_mean((self.predictor(seen) - self.target(seen)).square().mean(-1), valid)


def checked_schedule(given: Mapping[str, Any]) -> dict[str, Any]:
    """A weight schedule with every entry it needs, or an error that names what is wrong."""
    known = ("mode", "initial_step", "final_step", "final_value")
    schedule = {"mode": "constant", "initial_step": 0, **check_settings("weight_schedule", given, known)}
    if schedule["mode"] not in WEIGHT_SCHEDULES:
        raise ValueError(f"weight_schedule mode must be one of {WEIGHT_SCHEDULES}, got {schedule['mode']!r}")
    missing = [name for name in known if name not in schedule]
    if missing and schedule["mode"] != "constant":
        raise ValueError(f"a {schedule['mode']} weight_schedule needs {' and '.join(missing)}")
    return schedule
