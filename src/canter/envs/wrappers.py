"""Wrappers around a `VecEnv`: the base that forwards everything, and the one that flattens dict observations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from canter.envs.groups import Segments
from canter.envs.vec_env import StepRecord, VecEnv
from canter.utils.tree import Obs, tree_leaves


class Forwarding:
    """Reads of unknown attributes, and both ways of `episode_length_buf`, go to `self.env`."""

    env: Any

    def __getattr__(self, name: str) -> Any:
        if name == "env" or name.startswith("__"):
            raise AttributeError(name)
        try:
            return getattr(self.env, name)
        except AttributeError:
            inner = type(self.env).__name__
            raise AttributeError(f"neither {type(self).__name__} nor its {inner} has an attribute {name!r}") from None

    @property
    def episode_length_buf(self) -> Tensor:
        """(N,) steps taken in each running episode."""
        return self.env.episode_length_buf

    @episode_length_buf.setter
    def episode_length_buf(self, value: Tensor) -> None:
        if not hasattr(self.env, "episode_length_buf"):
            raise AttributeError(f"{type(self.env).__name__} has no episode_length_buf to set")
        self.env.episode_length_buf = value


class VecEnvWrapper(Forwarding, VecEnv):
    """A `VecEnv` that does what `env` does; subclasses change a part of it."""

    def __init__(self, env: VecEnv) -> None:
        self.env = env
        self.num_envs, self.device = env.num_envs, env.device
        self.obs_space, self.critic_obs_space, self.action_space = env.obs_space, env.critic_obs_space, env.action_space
        self.max_episode_length = env.max_episode_length
        self.obs_segments, self.critic_obs_segments = env.obs_segments, env.critic_obs_segments
        self.has_invalid_steps, self.gives_final_obs = env.has_invalid_steps, env.gives_final_obs
        self.capturable = env.capturable

    def reset(self) -> tuple[Obs, Obs]:
        """Start every episode anew."""
        return self.env.reset()

    def get_observations(self) -> tuple[Obs, Obs]:
        """The current observation and the critic's."""
        return self.env.get_observations()

    def step(self, actions: Tensor) -> StepRecord:
        """Apply one action per environment."""
        record = self.env.step(actions)
        self.gives_final_obs = self.env.gives_final_obs
        return record

    def seed(self, seed: int) -> None:
        """Make the episodes from the next `reset` on repeatable."""
        self.env.seed(seed)

    def get_state(self) -> dict[str, Any] | None:
        """What the wrapped environment needs to continue exactly here."""
        return self.env.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from what `get_state` returned."""
        self.env.set_state(state)

    def render(self) -> Any:
        """A picture of the first environment, or None."""
        return self.env.render()

    def close(self) -> None:
        """Free what the wrapped environment holds."""
        self.env.close()


def flat_space(space: spaces.Space, owner: str) -> tuple[spaces.Space, Segments | None]:
    """The Box of a flattened Dict space and the segments in it; a Box with features in one row stays as it is."""
    if not isinstance(space, Mapping):
        return space, None
    segments: Segments = {}
    for name, leaf in tree_leaves(space):
        if leaf.dtype == np.uint8:
            raise TypeError(
                f"{owner} has the uint8 image {name!r}, which FlattenObs would turn into {int(np.prod(leaf.shape))} "
                "numbers; keep the dict and use a visual policy"
            )
        segments[name] = tuple(leaf.shape)
    low, high = (
        np.concatenate([getattr(leaf, end).ravel() for _, leaf in tree_leaves(space)]) for end in ("low", "high")
    )
    return spaces.Box(low, high, dtype=np.float32), segments


def flatten_obs(obs: Any) -> Any:
    """Every leaf of a dict observation side by side in one (N, D) tensor."""
    if isinstance(obs, Mapping):
        return torch.cat([leaf.flatten(1) for _, leaf in tree_leaves(obs)], dim=1)
    return obs


class FlattenObs(VecEnvWrapper):
    """Turns dict observations of float leaves into one vector and says in `obs_segments` where each leaf went."""

    def __init__(self, env: VecEnv) -> None:
        super().__init__(env)
        self.obs_space, segments = flat_space(env.obs_space, "the observation")
        self.obs_segments = segments or env.obs_segments
        if env.critic_obs_space is env.obs_space:
            self.critic_obs_space, self.critic_obs_segments = self.obs_space, self.obs_segments
        else:
            self.critic_obs_space, segments = flat_space(env.critic_obs_space, "the critic's observation")
            self.critic_obs_segments = segments or env.critic_obs_segments

    def reset(self) -> tuple[Obs, Obs]:
        """Start every episode anew."""
        return self._pair(*super().reset())

    def get_observations(self) -> tuple[Obs, Obs]:
        """The current observation and the critic's."""
        return self._pair(*super().get_observations())

    def step(self, actions: Tensor) -> StepRecord:
        """Apply one action per environment."""
        record = super().step(actions)
        obs, critic_obs = self._pair(record.obs, record.critic_obs)
        final_obs, final_critic_obs = self._pair(record.final_obs, record.final_critic_obs)
        extras = dict(record.extras)
        if final_obs is not None:
            shared = final_critic_obs is final_obs
            extras["final_observation"] = final_obs if shared else {"obs": final_obs, "critic_obs": final_critic_obs}
        return record._replace(
            obs=obs, critic_obs=critic_obs, final_obs=final_obs, final_critic_obs=final_critic_obs, extras=extras
        )

    @staticmethod
    def _pair(obs: Any, critic_obs: Any) -> tuple[Any, Any]:
        flat = flatten_obs(obs)
        return flat, flat if critic_obs is obs else flatten_obs(critic_obs)
