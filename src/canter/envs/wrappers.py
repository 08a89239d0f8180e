"""Wrappers around a `VecEnv`: one that forwards everything, and those that change observations."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from canter.envs.groups import Segments
from canter.envs.records import told
from canter.envs.vec_env import StepRecord, VecEnv
from canter.utils.tree import Obs, tree_leaves, tree_map


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


class TransformObs(VecEnvWrapper):
    """Changes every observation, final ones included, by the two functions that a subclass states."""

    def __init__(self, env: VecEnv) -> None:
        super().__init__(env)
        self.obs_space = self.transform_space(env.obs_space)
        shared = env.critic_obs_space is env.obs_space
        self.critic_obs_space = self.obs_space if shared else self.transform_space(env.critic_obs_space)

    @abstractmethod
    def transform_space(self, space: spaces.Space) -> spaces.Space:
        """The space of a changed observation."""

    @abstractmethod
    def transform(self, obs: Any, space: spaces.Space) -> Any:
        """A changed batch of observations, which come from `space`."""

    def _pair(self, obs: Any, critic_obs: Any) -> tuple[Any, Any]:
        changed = None if obs is None else self.transform(obs, self.env.obs_space)
        if critic_obs is obs or critic_obs is None:
            return changed, changed if critic_obs is obs else None
        return changed, self.transform(critic_obs, self.env.critic_obs_space)

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
        record = record._replace(obs=obs, critic_obs=critic_obs, final_obs=final_obs, final_critic_obs=final_critic_obs)
        final = record.extras.get("final_observation")
        groups = final if isinstance(final, Mapping) and "obs" in final else {}
        return told(record, {name: group for name, group in groups.items() if name not in ("obs", "critic_obs")})


class FlattenObs(TransformObs):
    """Turns dict observations of float leaves into one vector and says in `obs_segments` where each leaf went."""

    def __init__(self, env: VecEnv) -> None:
        super().__init__(env)
        self.obs_segments = self._segments(env.obs_space) or env.obs_segments
        self.critic_obs_segments = self._segments(env.critic_obs_space) or env.critic_obs_segments

    @staticmethod
    def _segments(space: spaces.Space) -> Segments | None:
        return {name: tuple(leaf.shape) for name, leaf in tree_leaves(space)} if isinstance(space, Mapping) else None

    def transform_space(self, space: spaces.Space) -> spaces.Space:
        """One Box with the bounds of every leaf."""
        if not isinstance(space, Mapping):
            return space
        for name, leaf in tree_leaves(space):
            if leaf.dtype == np.uint8:
                raise TypeError(
                    f"the observation has the uint8 image {name!r} {leaf.shape}, which FlattenObs would turn into "
                    f"{math.prod(leaf.shape)} numbers; keep the dict and use a visual policy"
                )
        low, high = (
            np.concatenate([getattr(x, end).ravel() for _, x in tree_leaves(space)]) for end in ("low", "high")
        )
        return spaces.Box(low, high, dtype=np.float32)

    def transform(self, obs: Any, space: spaces.Space) -> Any:
        """Every leaf side by side in one (N, D) tensor, in the order of the space: that of a dict may change."""
        if not isinstance(obs, Mapping):
            return obs
        return torch.cat([leaf.flatten(1) for leaf in in_order(obs, space)], 1)


def in_order(obs: Any, space: spaces.Space) -> Iterator[Tensor]:
    """The leaves of an observation in the order of its space."""
    if isinstance(space, spaces.Dict):
        for name, part in space.spaces.items():
            yield from in_order(obs[name], part)
    else:
        yield obs


def is_channels_last(leaf: Any) -> bool:
    """Whether a Box holds a uint8 picture (H, W, C)."""
    shape = leaf.shape
    return leaf.dtype == np.uint8 and len(shape) == 3 and shape[-1] in (1, 3, 4) and shape[0] not in (1, 3, 4)


class ChannelsFirst(TransformObs):
    """Turns uint8 pictures (H, W, C), as Gymnasium has them, into the (C, H, W) that convolutions want."""

    def transform_space(self, space: spaces.Space) -> spaces.Space:
        """The space with its pictures turned."""
        if isinstance(space, Mapping):
            return spaces.Dict([(name, self.transform_space(part)) for name, part in space.items()])
        if not isinstance(space, spaces.Box) or not is_channels_last(space):
            return space
        return spaces.Box(space.low.transpose(2, 0, 1), space.high.transpose(2, 0, 1), dtype=np.uint8)

    def transform(self, obs: Any, space: spaces.Space) -> Any:
        """The observation with its pictures turned."""
        return tree_map(self._turn, obs)

    @staticmethod
    def _turn(leaf: Tensor) -> Tensor:
        if (
            leaf.dtype != torch.uint8
            or leaf.dim() != 4
            or leaf.shape[-1] not in (1, 3, 4)
            or leaf.shape[1] in (1, 3, 4)
        ):
            return leaf
        return leaf.permute(0, 3, 1, 2).contiguous()


class ToDevice(TransformObs):
    """Brings everything to the learner's device, for environments that live on another."""

    def __init__(self, env: VecEnv, device: torch.device | str) -> None:
        super().__init__(env)
        self.device, self.capturable = torch.device(device), False

    def transform_space(self, space: spaces.Space) -> spaces.Space:
        """The same space."""
        return space

    def transform(self, obs: Any, space: spaces.Space) -> Any:
        """The observation on the learner's device."""
        return tree_map(self._move, obs)

    def _move(self, leaf: Any) -> Any:
        return leaf.to(self.device) if isinstance(leaf, Tensor) else leaf

    def step(self, actions: Tensor) -> StepRecord:
        """Apply one action per environment."""
        record = super().step(actions.to(self.env.device))
        moved = {name: self._move(getattr(record, name)) for name in ("reward", "terminated", "truncated", "valid")}
        return record._replace(**moved, extras=tree_map(self._move, record.extras))
