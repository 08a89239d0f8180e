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

PLAYERS = "info:players.env_id"


def is_envpool(env: Any) -> bool:
    """Whether `env` is an EnvPool, found out without importing envpool."""
    return any(base.__module__.startswith("envpool.") for base in type(env).__mro__)


def direct_halves(env: Any, num_envs: int) -> tuple[Callable[..., None], Callable[[], Any]] | None:
    """EnvPool's `send` and `recv` without the trees it packs and unpacks in every step; None for unusual ones.

    For eight small robots those trees take a tenth of the step.
    """
    send, receive, keys = (getattr(env, name, None) for name in ("_send", "_recv", "_state_keys"))
    parts = env.spec.action_array_spec
    if send is None or receive is None or keys is None or list(parts) != ["env_id", "players.env_id", "action"]:
        return None
    info_keys = {key: key.removeprefix("info:") for key in keys if key.startswith("info:") and key != PLAYERS}
    if "obs" not in keys or PLAYERS not in keys or any("." in name for name in info_keys.values()):
        return None
    numbers, dtype = np.arange(num_envs, dtype=np.int32), parts["action"].dtype

    def begin(actions: np.ndarray) -> None:
        send([numbers, numbers, actions.astype(dtype, copy=False)])

    def end() -> Any:
        values = dict(zip(keys, receive(), strict=True))
        infos = {name: values[key] for key, name in info_keys.items()}
        infos |= {"players": {"env_id": values[PLAYERS]}, "elapsed_step": values["elapsed_step"]}
        truncated = values["trunc"]
        return values["obs"], values["reward"], values["done"] & ~truncated, truncated, infos

    return begin, end


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
        return direct_halves(self.env, self.num_envs) or (self.env.send, self.env.recv)

    def recv(self) -> StepRecord:
        """The step that was begun."""
        record = super().recv()
        self._elapsed = record.extras["infos"].get("elapsed_step", self._elapsed)
        return record

    @property
    def elapsed_steps(self) -> Tensor:
        """(N,) steps taken in each running episode, 0 where the last step only reset."""
        return torch.as_tensor(np.array(self._elapsed, np.int64), device=self.device)
