"""An environment with almost no cost, for measuring everything else."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from canter.envs.vec_env import Device, StepRecord, VecEnv
from canter.utils.tree import Obs

POOL = 8


class DummyVecEnv(VecEnv):
    """Random observations and rewards that ignore the action; every episode ends at the time limit.

    The numbers are drawn once and repeat every `POOL` steps, so that a step is a handful of small operations.
    """

    def __init__(
        self,
        num_envs: int = 4096,
        num_obs: int = 48,
        num_actions: int = 12,
        device: Device = "cpu",
        max_episode_length: int = 1000,
        num_privileged_obs: int | None = None,
        seed: int = 0,
    ) -> None:
        self.num_envs, self.device, self.max_episode_length = num_envs, torch.device(device), max_episode_length
        boxes = [spaces.Box(-np.inf, np.inf, (width,)) for width in (num_obs, num_privileged_obs) if width]
        self.obs_space, self.critic_obs_space = boxes[0], boxes[-1]
        self.action_space = spaces.Box(-1.0, 1.0, (num_actions,))
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        """(N,) steps taken in each running episode; assigning to it moves the time limits."""
        self._valid = torch.ones(num_envs, dtype=torch.bool, device=self.device)
        self._terminated = ~self._valid
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Draw new numbers."""
        generator = torch.Generator(self.device).manual_seed(seed)

        def draw(*shape: int) -> tuple[Tensor, ...]:
            return torch.randn(POOL, self.num_envs, *shape, generator=generator, device=self.device).unbind()

        self._pools = [draw(width) for width in (self.num_obs, self.num_privileged_obs) if width]
        self._rewards = draw()
        self.reset()

    def reset(self) -> tuple[Obs, Obs]:
        """Start a new episode in every environment."""
        self.episode_length_buf = torch.zeros_like(self.episode_length_buf)
        self._num_steps, self._current = 0, self._pair(0)
        return self._current

    def get_observations(self) -> tuple[Obs, Obs]:
        """Return the current observation and the critic's."""
        return self._current

    def step(self, actions: Tensor) -> StepRecord:
        """Return the next numbers."""
        if actions.shape != (self.num_envs, *(self.action_space.shape or ())):
            raise ValueError(f"actions have shape {tuple(actions.shape)}; wanted {(self.num_envs, self.num_actions)}")
        self._num_steps += 1
        length = self.episode_length_buf + 1
        truncated = length >= (self.max_episode_length or 2**62)
        self.episode_length_buf = length.masked_fill_(truncated, 0)
        final, first = self._pair(self._num_steps), self._pair(self._num_steps + 1)
        rows = truncated.unsqueeze(1)
        obs = torch.where(rows, first[0], final[0])
        self._current = (obs, obs if final[1] is final[0] else torch.where(rows, first[1], final[1]))
        extras: dict[str, Any] = {"terminated": self._terminated, "truncated": truncated, "time_outs": truncated}
        extras["final_observation"] = final[0] if final[1] is final[0] else {"obs": final[0], "critic_obs": final[1]}
        reward = self._rewards[self._num_steps % POOL]
        return StepRecord(*self._current, reward, self._terminated, truncated, *final, self._valid, extras)

    def get_state(self) -> dict[str, Any]:
        """Return the episode lengths, the number of steps and the current observations."""
        obs = dict(zip(("obs", "critic_obs"), self._current, strict=True))
        return {"episode_length": self.episode_length_buf, "turn": self._num_steps, **obs}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue exactly where `get_state` was called."""
        self.episode_length_buf = state["episode_length"].to(self.device, copy=True)
        self._num_steps = int(state["turn"])
        obs = state["obs"].to(self.device)
        self._current = (obs, obs if len(self._pools) == 1 else state["critic_obs"].to(self.device))

    def _pair(self, step: int) -> tuple[Any, Any]:
        """Observation and critic's observation of one step."""
        return self._pools[0][step % POOL], self._pools[-1][step % POOL]
