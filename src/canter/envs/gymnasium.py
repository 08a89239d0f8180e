"""Gymnasium's single environments, stepped together in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from canter.envs.groups import split_groups, split_space
from canter.envs.host import ActionCast, Rows, empty_rows, put_row, rows_to_obs, spawn_seeds, stored_space
from canter.envs.vec_env import StepRecord, VecEnv
from canter.utils.tree import Obs

EnvSource = gymnasium.Env | Callable[[], gymnasium.Env]


class GymVecEnv(VecEnv):
    """Steps Gymnasium environments one after the other and resets each in the step that ends its episode.

    Args:
        env_fns: functions that make one environment each (or environments), or a single one.
        clip_actions: clamp continuous actions to the bounds of their Box.
    """

    def __init__(
        self,
        env_fns: EnvSource | Sequence[EnvSource],
        device: torch.device | str = "cpu",
        seed: int | None = None,
        clip_actions: bool = True,
    ) -> None:
        sources = list(env_fns) if isinstance(env_fns, Sequence) else [env_fns]
        if not sources:
            raise ValueError("GymVecEnv needs at least one environment, got an empty list")
        self.envs = [source if isinstance(source, gymnasium.Env) else source() for source in sources]
        self.num_envs = len(self.envs)
        self.device = torch.device(device)
        self._on_host = self.device.type == "cpu"
        first = self.envs[0]
        for index, env in enumerate(self.envs):
            if (env.observation_space, env.action_space) != (first.observation_space, first.action_space):
                raise ValueError(f"environment {index} has other spaces than environment 0")
        self.raw_obs_space = first.observation_space
        self._stored = stored_space(self.raw_obs_space)
        # Arrays of this shape are copied row by row without further ado: the usual case, and the fastest.
        self._row_shape = self.raw_obs_space.shape if isinstance(self.raw_obs_space, spaces.Box) else None
        self.obs_space, self.critic_obs_space = split_space(self._stored)
        self.action_space = first.action_space
        self._cast = ActionCast(self.action_space, self.num_envs, clip_actions)
        self._as_list = isinstance(self.action_space, spaces.Discrete)
        self.max_episode_length = (first.spec and first.spec.max_episode_steps) or 1000
        self._valid = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self._seeds: list[int] | None = None
        self._current: Rows | None = None
        if seed is not None:
            self.seed(seed)

    def seed(self, seed: int) -> None:
        """Give every environment its own stream from the next `reset` on."""
        self._seeds = spawn_seeds(seed, self.num_envs)

    def reset(self) -> tuple[Obs, Obs]:
        """Start every episode anew."""
        seeds: Sequence[int | None] = self._seeds or [None] * self.num_envs
        self._seeds = None
        rows = empty_rows(self._stored, self.num_envs)
        for index, env in enumerate(self.envs):
            put_row(rows, index, env.reset(seed=seeds[index])[0], self.raw_obs_space)
        self._current = rows
        return self._to_obs(rows)

    def get_observations(self) -> tuple[Obs, Obs]:
        """The current observation and the critic's."""
        return self.reset() if self._current is None else self._to_obs(self._current)

    def step(self, actions: Tensor) -> StepRecord:
        """Step every environment once."""
        if self._current is None:
            self.reset()
        batch = self._cast(actions)
        rows, final = empty_rows(self._stored, self.num_envs), None
        rewards = np.empty(self.num_envs, np.float32)
        flags = np.zeros((2, self.num_envs), np.bool_)  # terminated, truncated
        infos = []
        row_shape = self._row_shape
        for index, (env, action) in enumerate(zip(self.envs, batch.tolist() if self._as_list else batch, strict=True)):
            obs, rewards[index], terminated, truncated, info = env.step(action)
            if terminated or truncated:
                flags[0 if terminated else 1, index] = True
                final = empty_rows(self._stored, self.num_envs) if final is None else final
                put_row(final, index, obs, self.raw_obs_space)
                obs, _ = env.reset()
            if row_shape is not None and getattr(obs, "shape", None) == row_shape:
                rows[index] = obs  # type: ignore[index]
            else:
                put_row(rows, index, obs, self.raw_obs_space)
            infos.append(info)
        self._current = rows
        return self._record(rows, final, rewards, flags, infos)

    def _record(
        self, rows: Rows, final: Rows | None, rewards: np.ndarray, flags: np.ndarray, infos: list[dict[str, Any]]
    ) -> StepRecord:
        obs, critic_obs = self._to_obs(rows)
        reward, terminated, truncated = (torch.from_numpy(array) for array in (rewards, flags[0], flags[1]))
        if not self._on_host:
            reward, terminated, truncated = (part.to(self.device) for part in (reward, terminated, truncated))
        extras: dict[str, Any] = {
            "terminated": terminated,
            "truncated": truncated,
            "time_outs": truncated,
            "infos": infos,
        }
        final_obs = final_critic_obs = None
        if final is not None:
            whole = rows_to_obs(final, self.device)
            final_obs, final_critic_obs = split_groups(whole)
            extras["final_observation"] = whole
        return StepRecord(
            obs, critic_obs, reward, terminated, truncated, final_obs, final_critic_obs, self._valid, extras
        )

    def _to_obs(self, rows: Rows) -> tuple[Obs, Obs]:
        if self._on_host and isinstance(rows, np.ndarray):
            obs = torch.from_numpy(rows)
            return obs, obs
        return split_groups(rows_to_obs(rows, self.device))

    def render(self) -> Any:
        """A picture of the first environment, if it was made with `render_mode="rgb_array"`."""
        return self.envs[0].render() if self.envs[0].render_mode == "rgb_array" else None

    def close(self) -> None:
        """Close every environment."""
        for env in self.envs:
            env.close()


class GymVecEnvContinuous(GymVecEnv):
    """`GymVecEnv` for Box actions, refusing any other."""

    def __init__(
        self,
        env_fns: EnvSource | Sequence[EnvSource],
        device: torch.device | str = "cpu",
        clip_actions: bool = True,
        seed: int | None = None,
    ) -> None:
        super().__init__(env_fns, device, seed, clip_actions)
        if not isinstance(self.action_space, spaces.Box):
            raise TypeError(f"GymVecEnvContinuous needs a Box action space, got {self.action_space}; use GymVecEnv")
