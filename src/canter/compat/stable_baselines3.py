"""Stable-Baselines3's `VecEnv` as a Gymnasium vector environment that resets in the step that ends an episode."""

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode


def is_sb3(env: Any) -> bool:
    """Whether `env` is a Stable-Baselines3 `VecEnv`, or a wrapper of one."""
    return any(
        cls.__name__ == "VecEnv" and cls.__module__.startswith("stable_baselines3.") for cls in type(env).__mro__
    )


class SB3Vector:
    """Translates `reset` and `step`, which name the last observation of an episode and its time limit in the infos."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
    spec = None

    def __init__(self, env: Any) -> None:
        self.env, self.num_envs = env, int(env.num_envs)
        self.single_observation_space, self.single_action_space = env.observation_space, env.action_space

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Start a new episode in every environment."""
        if seed is not None:
            self.env.seed(seed)
        return self.env.reset(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step every environment once."""
        obs, rewards, dones, infos = self.env.step(actions)
        truncated = np.array([bool(info.get("TimeLimit.truncated", False)) for info in infos]) & dones
        extras: dict[str, Any] = {"infos": infos}
        if dones.any():
            extras["final_obs"] = [info.get("terminal_observation") for info in infos]
        return obs, rewards, dones & ~truncated, truncated, extras

    def close(self) -> None:
        """Close every environment."""
        self.env.close()
