"""Constraints as terminations (Chane-Sane 2024): an episode ends with a probability that grows with the violation.

With x_i the signal of constraint i, M_i the running largest violation, p_i the largest probability of an end:

    c_i   = max(0, x_i - limit_i)
    M_i  <- decay M_i + (1 - decay) max c_i          over the steps of a rollout
    delta = max_i p_i clip(c_i / M_i, 0, 1)
    r    <- (1 - delta) max(0, r)
    A_t   = r_t + gamma (1 - delta_t) V_t+1 - V_t + gamma lam (1 - delta_t) A_t+1

Nothing is terminated in the environment: delta only scales what a state is worth. At a step that a time limit cuts off
the value of the state reached is not scaled.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from canter.algorithms.extension import Extension
from canter.envs.vec_env import StepRecord
from canter.storage.rollout_storage import Field, RolloutStorage
from canter.utils.config import setting, settings
from canter.utils.metrics import MeanMeter
from canter.utils.tree import Obs

OF_ACTION = ("action", "action_rate")


@settings
class ConstraintSettings:
    """The setting that switches constraints on."""

    constraints_cfg: dict[str, Any] | None = setting(None, fixed=True)
    """Constraints as terminations, the fields of `ConstraintConfig`, of which `limits` is needed; off if None."""


@settings
class ConstraintConfig:
    """Limits of signals, and how hard they are."""

    limits: dict[str, float]
    """Largest allowed value by name: of "action", "action_rate" (largest component), or of `extras["costs"][name]`."""
    probability: float | dict[str, float] = 0.25
    """Probability of an end at the largest violation, one number or one by name; 1 for a hard constraint."""
    warmup_iterations: int = setting(0, low=0)
    """Iterations over which the probabilities rise from 0."""
    decay: float = setting(0.95, low=0.0, high=1.0)
    """Decay of the running largest violation."""
    clip_rewards: bool = True
    """Raise negative rewards to 0; an end would be a relief from them."""


class Constraints(Extension):
    """Scales rewards and discounts down where signals exceed their limits."""

    name = "constraints"
    settings_class = ConstraintSettings
    switch = "constraints_cfg"
    extras = ("costs",)

    def attach(self, alg: Any) -> None:
        """Read limits and probabilities."""
        super().attach(alg)
        self.terms = ConstraintConfig(**self.cfg.constraints_cfg)
        self.names = list(self.terms.limits)
        given = self.terms.probability
        chances = given if isinstance(given, Mapping) else dict.fromkeys(self.names, given)
        if not self.names or set(chances) != set(self.names) or not all(0 < p <= 1 for p in chances.values()):
            raise ValueError(f"constraints_cfg needs limits, and for each a probability in (0, 1]; got {self.terms}")
        self.limits = torch.tensor([float(self.terms.limits[name]) for name in self.names], device=alg.device)
        self.chances = torch.tensor([float(chances[name]) for name in self.names], device=alg.device)
        self.largest, self.ramp = torch.zeros_like(self.limits), alg.device_scalar(1.0)
        self.rates = MeanMeter()

    def fields(self) -> dict[str, Field]:
        """Violations, and the probability of an end, which the returns are computed with."""
        return {"violations": Field((len(self.names),), batch=""), "ends": Field((1,), batch="", default=0.0)}

    def begin(self, storage: RolloutStorage) -> None:
        """Memories of the last action."""
        self.previous = torch.zeros(storage.num_envs, *storage.actions_shape, device=storage.device)
        self.has_previous = torch.zeros(storage.num_envs, dtype=torch.bool, device=storage.device)
        self.signals = torch.zeros(storage.num_envs, len(OF_ACTION), device=storage.device)

    def after_act(self, step: dict[str, Any], obs: Obs, critic_obs: Obs) -> None:
        """Measure the action as the environment gets it."""
        action = step["for_env"].float()
        rate = torch.where(self.has_previous.unsqueeze(1), action - self.previous, 0.0)
        self.signals.copy_(torch.stack([part.abs().amax(1) for part in (action, rate)], 1))
        self.previous.copy_(action)

    def record(self, record: StepRecord) -> dict[str, Tensor]:
        """(N, C) by how much each signal exceeds its limit."""
        costs = {**dict(zip(OF_ACTION, self.signals.unbind(1), strict=True)), **(record.extras.get("costs") or {})}
        if missing := [name for name in self.names if name not in costs]:
            raise KeyError(f"constraints_cfg limits {missing}; the environment's extras['costs'] has {list(costs)}")
        signals = torch.stack([costs[name].to(self.limits) for name in self.names], 1)
        return {"violations": (signals - self.limits).clamp(min=0).masked_fill(~record.valid.unsqueeze(1), 0.0)}

    def reset(self, ends: Tensor) -> None:
        """The first action of an episode has no rate."""
        self.has_previous.copy_(~ends)

    def reward(self, rewards: Tensor, rollout: RolloutStorage) -> Tensor:
        """Compute the probabilities, and scale the rewards."""
        violations = rollout.data["violations"][rollout.newest]
        newest, decay = violations.flatten(0, 1).amax(0), self.terms.decay
        self.largest.copy_(torch.where(self.largest > 0, decay * self.largest + (1 - decay) * newest, newest))
        share = (violations / self.largest.clamp(min=1e-9)).clamp(max=1.0)
        chance = (share * self.chances * self.ramp).amax(-1)
        done = rollout.column("dones").to(chance)
        rollout.data["ends"][rollout.newest].copy_((done + (1.0 - done) * chance).unsqueeze(-1))
        broken = (violations > 0).float().flatten(0, 1).mean(0).unbind()
        self.rates.add({f"constraints/{name}": rate for name, rate in zip(self.names, broken, strict=True)})
        return (rewards.clamp(min=0) if self.terms.clip_rewards else rewards) * (1.0 - chance)

    def begin_update(self, iteration: int) -> tuple[()]:
        """Raise the probabilities for the next rollout."""
        self.ramp.fill_(min(1.0, (iteration + 1) / max(1, self.terms.warmup_iterations)))
        return ()

    def metrics(self) -> dict[str, Tensor]:
        """Share of the steps that break each constraint."""
        return self.rates.take()

    def resume_state(self) -> dict[str, Any]:
        """The running largest violations and the ramp."""
        return {"constraints": {"largest": self.largest.clone(), "ramp": self.ramp.clone()}}

    def load_resume_state(self, state: Mapping[str, Any]) -> None:
        """Continue exactly from a `resume_state`."""
        for name, value in state.get("constraints", {}).items():
            getattr(self, name).copy_(value)
