"""An environment that costs almost nothing, for measuring everything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from canter.envs.vec_env import StepRecord, VecEnv
from canter.utils.tree import Obs

POOL = 8


class DummyVecEnv(VecEnv):
    """Random observations and rewards that ignore the action; every episode ends at the time limit.

    Numbers are drawn once and shown in turn, so that a step is a handful of small operations.
    """

    def __init__(
        self,
        num_envs: int = 4096,
        num_obs: int = 48,
        num_actions: int = 12,
        device: torch.device | str = "cpu",
        max_episode_length: int = 1000,
        num_privileged_obs: int | None = None,
        seed: int = 0,
    ) -> None:
        self.num_envs, self.device, self.max_episode_length = num_envs, torch.device(device), max_episode_length
        self.obs_space = self.critic_obs_space = spaces.Box(-np.inf, np.inf, (num_obs,))
        self._widths = [num_obs]
        if num_privileged_obs:
            self.critic_obs_space = spaces.Box(-np.inf, np.inf, (num_privileged_obs,))
            self._widths.append(num_privileged_obs)
        self.action_space = spaces.Box(-1.0, 1.0, (num_actions,))
        self._episode_length = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._valid = torch.ones(num_envs, dtype=torch.bool, device=self.device)
        self._terminated = ~self._valid
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Draw the numbers anew."""
        generator = torch.Generator(self.device).manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=self.device)

        self._pools = [draw(POOL, self.num_envs, width).unbind() for width in self._widths]
        self._rewards = draw(POOL, self.num_envs).unbind()
        self._turn = 0
        self._current = self._shown(0)

    @property
    def episode_length_buf(self) -> Tensor:
        """(N,) steps taken in each running episode; assigning to it moves the time limits."""
        return self._episode_length

    @episode_length_buf.setter
    def episode_length_buf(self, value: Tensor) -> None:
        self._episode_length.copy_(value)

    def reset(self) -> tuple[Obs, Obs]:
        """Start every episode anew."""
        self._episode_length.zero_()
        self._turn = 0
        self._current = self._shown(0)
        return self._current

    def get_observations(self) -> tuple[Obs, Obs]:
        """The current observation and the critic's."""
        return self._current

    def step(self, actions: Tensor) -> StepRecord:
        """Show the next numbers."""
        if actions.shape != (self.num_envs, *(self.action_space.shape or ())):
            raise ValueError(f"actions have shape {tuple(actions.shape)}; wanted {(self.num_envs, self.num_actions)}")
        self._turn += 1
        self._episode_length.add_(1)
        truncated = self._episode_length >= (self.max_episode_length or 2**62)
        self._episode_length.masked_fill_(truncated, 0)
        final = self._shown(self._turn)
        first = self._shown(self._turn + 1)
        rows = truncated.unsqueeze(1)
        obs = torch.where(rows, first[0], final[0])
        self._current = (obs, obs if final[1] is final[0] else torch.where(rows, first[1], final[1]))
        extras: dict[str, Any] = {"terminated": self._terminated, "truncated": truncated, "time_outs": truncated}
        extras["final_observation"] = final[0] if final[1] is final[0] else {"obs": final[0], "critic_obs": final[1]}
        reward = self._rewards[self._turn % POOL]
        return StepRecord(*self._current, reward, self._terminated, truncated, *final, self._valid, extras)

    def get_state(self) -> dict[str, Any]:
        """Episode lengths and whose turn it is."""
        obs, critic_obs = self._current
        return {
            "episode_length": self._episode_length.clone(),
            "turn": self._turn,
            "obs": obs,
            "critic_obs": critic_obs,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue exactly where `get_state` was called."""
        self._episode_length.copy_(state["episode_length"])
        self._turn = int(state["turn"])
        obs = state["obs"].to(self.device)
        self._current = (obs, obs if len(self._pools) == 1 else state["critic_obs"].to(self.device))

    def _shown(self, turn: int) -> tuple[Any, Any]:
        """Observation and critic's observation of one turn."""
        return self._pools[0][turn % POOL], self._pools[-1][turn % POOL]
