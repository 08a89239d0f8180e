"""EnvPool: C++ environments in one batch, which reset in the step after an episode's end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.envs.vec_env import StepRecord
from canter.envs.vector import GymVectorEnvAdapter
from canter.utils.tree import Obs


def is_envpool(env: Any) -> bool:
    """Whether `env` is an EnvPool, found out without importing envpool."""
    return any(base.__module__.startswith("envpool.") for base in type(env).__mro__)


class EnvPoolAdapter(GymVectorEnvAdapter):
    """An EnvPool made with `env_type="gymnasium"` whose every step returns every environment.

    EnvPool takes its seed when it is made: `envpool.make(..., seed=1)`.
    """

    def __init__(self, env: Any, device: torch.device | str | None = None, clip_actions: bool = True) -> None:
        if not hasattr(env, "single_observation_space"):
            raise TypeError(f'{type(env).__name__} speaks another API; make it with env_type="gymnasium"')
        config = env.config
        if config["batch_size"] != config["num_envs"]:
            raise ValueError(
                f"EnvPool returns {config['batch_size']} of {config['num_envs']} environments per step; "
                "make it without batch_size, so that every step returns all"
            )
        super().__init__(env, device or "cpu", None, clip_actions)
        self.max_episode_length = int(config["max_episode_steps"])
        self._elapsed = np.zeros(self.num_envs, np.int64)

    def seed(self, seed: int) -> None:
        """Refuse: the seed of an EnvPool is fixed when it is made."""
        raise NotImplementedError(f"an EnvPool is seeded when it is made: envpool.make(..., seed={seed})")

    def reset(self) -> tuple[Obs, Obs]:
        """Start every episode anew."""
        self._elapsed = np.zeros(self.num_envs, np.int64)
        return super().reset()

    def _halves(self) -> tuple[Callable[..., None] | None, Callable[[], Any] | None]:
        send, parts = self.env.send, self.env.spec.action_array_spec
        if set(parts) != {"env_id", "players.env_id", "action"}:
            return send, self.env.recv
        numbers, dtype = np.arange(self.num_envs, dtype=np.int32), parts["action"].dtype

        def send_to_all(actions: np.ndarray) -> None:
            """Say who acts, which EnvPool would find out anew in every step."""
            send({"env_id": numbers, "players": {"env_id": numbers}, "action": actions.astype(dtype, copy=False)})

        return send_to_all, self.env.recv

    def recv(self) -> StepRecord:
        """The step that was begun."""
        record = super().recv()
        self._elapsed = record.extras["infos"].get("elapsed_step", self._elapsed)
        return record

    @property
    def elapsed_steps(self) -> Tensor:
        """(N,) steps taken in each running episode, 0 where the last step only reset."""
        return torch.as_tensor(np.array(self._elapsed, np.int64), device=self.device)
