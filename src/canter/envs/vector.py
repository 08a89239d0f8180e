"""Gymnasium's `VectorEnv` in all three autoreset modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv
from torch import Tensor

from canter.envs.final_obs import find_final, full_final
from canter.envs.groups import split_groups, split_space
from canter.envs.host import ActionCast, array_per_env, batch_to_rows, empty_rows, put_row, rows_to_obs, stored_space
from canter.envs.records import EndWatch, per_env, told
from canter.envs.tensors import take_obs
from canter.envs.vec_env import StepRecord, VecEnv
from canter.utils.tree import Obs, tree_leaves


def autoreset_mode(env: Any) -> AutoresetMode:
    """How a vector environment restarts an episode that ended."""
    mode = (env.metadata or {}).get("autoreset_mode")
    if mode is not None:
        return AutoresetMode(mode)
    # ManiSkill's vector environment states no mode and resets within the step; Gymnasium 1.0's resets in the next.
    return AutoresetMode.SAME_STEP if hasattr(env, "base_env") else AutoresetMode.NEXT_STEP


class GymVectorEnvAdapter(VecEnv):
    """A Gymnasium `VectorEnv` of arrays or of tensors.

    In NEXT_STEP mode the step after an episode's end only resets: its record has `valid` false and reward 0.
    In DISABLED mode this adapter resets, within the step.
    """

    def __init__(
        self,
        env: VectorEnv,
        device: torch.device | str | None = None,
        seed: int | None = None,
        clip_actions: bool = True,
    ) -> None:
        self.env: Any = env
        self.num_envs = int(env.num_envs)
        self.device = torch.device(device or getattr(env, "device", None) or "cpu")
        self.mode = autoreset_mode(env)
        self.has_invalid_steps = self.mode is AutoresetMode.NEXT_STEP
        self._space = env.single_observation_space
        self._stored = stored_space(self._space)
        self.obs_space, self.critic_obs_space = split_space(self._stored)
        self.action_space = env.single_action_space
        self._cast = ActionCast(self.action_space, self.num_envs, clip_actions)
        self.max_episode_length = getattr(env.spec, "max_episode_steps", None) or 1000
        self._all_valid = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self._begin, self._end = self._halves()
        self.overlaps = self._begin is not None
        self._answer: Any = None
        self._was_done: Tensor | None = None
        self._current: tuple[Obs, Obs] | None = None
        self._tensors = False
        self._bounds: list[Tensor] | None = None
        self._watch = EndWatch(self.device)
        self._seed = seed

    def _halves(self) -> tuple[Callable[..., None] | None, Callable[[], Any] | None]:
        """How to begin a step and how to end it, where the environments go on by themselves between."""
        if isinstance(self.env, AsyncVectorEnv):
            return self.env.step_async, self.env.step_wait
        return None, None

    def seed(self, seed: int) -> None:
        """Seed the environments in the next `reset`."""
        self._seed = seed

    def reset(self) -> tuple[Obs, Obs]:
        """Start every episode anew."""
        seed, self._seed = self._seed, None
        obs, _ = self.env.reset(seed=seed)
        self._tensors = any(isinstance(leaf, Tensor) for _, leaf in tree_leaves(obs))
        if self._tensors and self._cast.bounds is not None:
            place = getattr(self.env, "device", None) or self.device
            self._bounds = [torch.as_tensor(bound, device=place) for bound in self._cast.bounds]
        self._was_done = None
        self._current = split_groups(self._take(obs))
        return self._current

    def get_observations(self) -> tuple[Obs, Obs]:
        """The current observation and the critic's."""
        return self.reset() if self._current is None else self._current

    def step(self, actions: Tensor) -> StepRecord:
        """Step every environment once."""
        self.send(actions)
        return self.recv()

    def send(self, actions: Tensor) -> None:
        """Begin a step; where the environments have threads or processes of their own, they are on their way."""
        if self._current is None:
            self.reset()
        given = self._to_env(actions)
        if self._begin is None:
            self._answer = self.env.step(given)
        else:
            self._begin(given)

    def recv(self) -> StepRecord:
        """The step that was begun."""
        if self._end is not None:
            self._answer = self._end()
        given, rewards, terminated, truncated, infos = self._answer
        self._answer = None
        flags = self._tensor_flags if self._tensors else self._array_flags
        reward, terminated, truncated, valid, some_ended = flags(rewards, terminated, truncated)
        obs, final = self._take(given), None
        if some_ended:
            done = terminated | truncated
            final, obs = self._finish(obs, done, infos)
            self._was_done = done if self.has_invalid_steps else None
        else:
            self._was_done = None
        self._current = split_groups(obs)
        final_obs, final_critic_obs = (None, None) if final is None else split_groups(final)
        record = StepRecord(
            *self._current, reward, terminated, truncated, final_obs, final_critic_obs, valid, {"infos": infos}
        )
        return told(record)

    def _tensor_flags(
        self, rewards: Any, terminated: Any, truncated: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
        """Reward, the two ends, what is valid, and whether to look for ends: to ask would make the host wait."""
        reward = per_env(rewards, torch.float32, "rewards", self.num_envs, self.device, copy=True)
        terminated = per_env(terminated, torch.bool, "terminated", self.num_envs, self.device, copy=True)
        truncated = per_env(truncated, torch.bool, "truncated", self.num_envs, self.device) & ~terminated
        valid = self._all_valid
        if self._was_done is not None:
            valid = ~self._was_done
            reward = reward.masked_fill(self._was_done, 0.0)
            terminated, truncated = terminated & valid, truncated & valid
        return reward, terminated, truncated, valid, True

    def _array_flags(
        self, rewards: Any, terminated: Any, truncated: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
        """The same from arrays: most steps end nothing, and there is little to compute."""
        count = self.num_envs
        terminated = array_per_env(terminated, np.bool_, "terminated", count)
        truncated = array_per_env(truncated, np.bool_, "truncated", count)
        reward = array_per_env(rewards, np.float32, "rewards", count)
        valid, some_ended = self._all_valid, bool(np.count_nonzero(terminated) or np.count_nonzero(truncated))
        if self._was_done is not None:
            valid = ~self._was_done
            mask = valid.numpy(force=True)
            reward, terminated, truncated = np.where(mask, reward, np.float32(0)), terminated & mask, truncated & mask
        if some_ended:
            truncated = truncated & ~terminated
        tensors = [torch.from_numpy(array) for array in (reward, terminated, truncated)]
        if self.device.type != "cpu":
            tensors = [tensor.to(self.device) for tensor in tensors]
        return tensors[0], tensors[1], tensors[2], valid, some_ended

    def _finish(self, obs: Obs, done: Tensor, infos: dict[str, Any]) -> tuple[Any, Obs]:
        """The final observation and the one to act on next, by the autoreset mode."""
        if self.mode is AutoresetMode.NEXT_STEP:
            return obs, obs
        if self.mode is AutoresetMode.DISABLED:
            mask = done if self._tensors else done.cpu().numpy()
            return obs, self._take(self.env.reset(options={"reset_mask": mask})[0])
        found = find_final(infos)
        if found is None:
            self.gives_final_obs = not self._watch(done)
            return None, obs
        self.gives_final_obs = True
        if not self._tensors and isinstance(found, np.ndarray) and found.dtype == object:
            rows = empty_rows(self._stored, self.num_envs)
            for index in np.flatnonzero(done.cpu().numpy()).tolist():
                put_row(rows, index, found[index], self._space)
            return rows_to_obs(rows, self.device), obs
        return full_final(found, done, copy=True), obs

    def _take(self, obs: Any) -> Obs:
        if self._tensors:
            return take_obs(obs, self.device, copy=True)
        return rows_to_obs(batch_to_rows(obs, self._space, self.num_envs), self.device)

    def _to_env(self, actions: Tensor) -> Any:
        if not self._tensors:
            return self._cast(actions)
        actions = actions.to(getattr(self.env, "device", None) or actions.device)
        return actions if self._bounds is None else actions.clamp(*self._bounds)

    def render(self) -> Any:
        """A picture of the first environment, if the environment renders arrays."""
        frames = self.env.render() if getattr(self.env, "render_mode", None) == "rgb_array" else None
        return None if frames is None else frames[0]

    def close(self) -> None:
        """Close the environment."""
        self.env.close()
