"""What a simulator says of the episodes of an evaluation: reward terms, metrics, reasons of termination, commands."""

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from canter.envs.spec import innermost
from canter.envs.vec_env import StepRecord, VecEnv
from canter.envs.wrappers import VecEnvWrapper

TERMINATION = "Episode_Termination/"
SHARES = ("lin_vel_x", "lin_vel_y", "ang_vel_z")


class EpisodeLog(VecEnvWrapper):
    """Collects `extras["log"]` of the steps in which episodes end, as mjlab's and Isaac Lab's managers write it.

    Reasons of termination are counted; everything else is a mean over the episodes.
    """

    def __init__(self, env: VecEnv) -> None:
        super().__init__(env)
        self.sums: dict[str, float] = {}
        self.episodes: dict[str, int] = {}

    def step(self, actions: Tensor) -> StepRecord:
        """Apply one action per environment."""
        record = super().step(actions)
        log, ended = record.extras.get("log"), int((record.done & record.valid).sum())
        if isinstance(log, dict) and ended:
            for name, value in log.items():
                if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
                    weight = 1 if name.startswith(TERMINATION) else ended
                    self.sums[name] = self.sums.get(name, 0.0) + weight * float(value)
                    self.episodes[name] = self.episodes.get(name, 0) + ended
        return record

    def summary(self) -> dict[str, float]:
        """Every entry by its name: a mean over the episodes, or of a reason of termination its share of them."""
        return {name: total / self.episodes[name] for name, total in self.sums.items()}


@contextlib.contextmanager
def one_command(env: VecEnv, command: Sequence[float]) -> Iterator[None]:
    """Give every robot this velocity command, forward, sideways and turning, without curriculum or standing robots."""
    base = innermost(env)
    manager: Any = getattr(base, "command_manager", None)
    terms = [manager.get_term(name) for name in getattr(manager, "active_terms", ())]
    cfg = next((t.cfg for t in terms if all(hasattr(getattr(t.cfg, "ranges", None), part) for part in SHARES)), None)
    if cfg is None:
        raise ValueError(f"{type(base).__name__} has no command of velocities; leave --commands out")
    if len(command) != len(SHARES):
        raise ValueError(f"a command is forward, sideways and turning velocity, got {list(command)}")
    switches: dict[str, Any] = {"heading_command": False}
    switches |= dict.fromkeys(("rel_standing_envs", "rel_forward_envs", "rel_world_envs"), 0.0)
    before = {name: getattr(cfg, name) for name in switches if hasattr(cfg, name)}
    ranges = {name: getattr(cfg.ranges, name) for name in SHARES}
    curriculum = getattr(base, "curriculum_manager", None)
    for name in before:
        setattr(cfg, name, switches[name])
    for name, value in zip(SHARES, command, strict=True):
        setattr(cfg.ranges, name, (float(value), float(value)))
    if curriculum is not None:
        base.curriculum_manager = SimpleNamespace(compute=lambda env_ids=None: None, reset=lambda env_ids=None: {})
    try:
        env.step(torch.zeros(env.num_envs, env.num_actions, device=env.device))  # so that a reset draws new commands
        yield
    finally:
        for name, value in before.items():
            setattr(cfg, name, value)
        for name, value in ranges.items():
            setattr(cfg.ranges, name, value)
        if curriculum is not None:
            base.curriculum_manager = curriculum
