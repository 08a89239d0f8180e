"""Wrappers around a `VecEnv`: one that forwards everything, and those that change observations."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from canter.envs.records import with_obs
from canter.envs.vec_env import Device, StepRecord, VecEnv
from canter.utils.obs_layout import ObsLayout
from canter.utils.tree import Obs, tree_leaves, tree_map


class Forwarding:
    """Reads unknown attributes from `self.env`; reads and writes `episode_length_buf` there."""

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


def checked_layout(segments: Mapping[str, Any], width: int, name: str) -> ObsLayout:
    """Layout of the segments of a flat observation; an error unless they fill `width` exactly."""
    layout = ObsLayout(segments)
    if layout.width != width:
        sizes = ", ".join(f"{segment} {size}" for segment, size in layout.sizes.items())
        raise ValueError(f"{name} add up to {layout.width} values ({sizes}), but the observation has {width}")
    return layout


class VecEnvWrapper(Forwarding, VecEnv):
    """A `VecEnv` that behaves as `env` does; subclasses change a part of it."""

    def __init__(self, env: VecEnv) -> None:
        self.env = env
        self.num_envs, self.device, self.max_episode_length = env.num_envs, env.device, env.max_episode_length
        self.obs_space, self.critic_obs_space, self.action_space = env.obs_space, env.critic_obs_space, env.action_space
        self.obs_segments, self.critic_obs_segments = env.obs_segments, env.critic_obs_segments
        self.has_invalid_steps, self.gives_final_obs = env.has_invalid_steps, env.gives_final_obs
        self.capturable, self.adapter, self.action_bounds = env.capturable, env.adapter, env.action_bounds
        self.contract, self.autoreset = env.contract, env.autoreset

    def _pair(self, obs: Any, critic_obs: Any) -> tuple[Any, Any]:
        """Change an observation and the critic's."""
        return obs, critic_obs

    def reset(self) -> tuple[Obs, Obs]:
        """Start a new episode in every environment."""
        return self._pair(*self.env.reset())

    def get_observations(self) -> tuple[Obs, Obs]:
        """Return the current observation and the critic's."""
        return self._pair(*self.env.get_observations())

    def step(self, actions: Tensor) -> StepRecord:
        """Apply one action per environment."""
        record = self.env.step(actions)
        self.gives_final_obs, self.contract = self.env.gives_final_obs, self.env.contract  # may be known by now
        return record

    def seed(self, seed: int) -> None:
        """Make the episodes from the next `reset` on repeatable."""
        self.env.seed(seed)

    def get_state(self) -> dict[str, Any] | None:
        """Return the state of the wrapped environment; None if it cannot be saved."""
        return self.env.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a result of `get_state`."""
        self.env.set_state(state)

    def get_counters(self) -> dict[str, Any]:
        """Return what outlives the episodes of the wrapped environment."""
        return self.env.get_counters()

    def set_counters(self, counters: dict[str, Any]) -> None:
        """Continue from a result of `get_counters`."""
        self.env.set_counters(counters)

    def render(self) -> Any:
        """Return an image of the first environment, or None."""
        return self.env.render()

    def close(self) -> None:
        """Close the wrapped environment."""
        self.env.close()


class ClipActions(VecEnvWrapper):
    """Clamps every action to plus and minus `limit` before the environment gets it."""

    def __init__(self, env: VecEnv, limit: float) -> None:
        super().__init__(env)
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
            raise ValueError(f"the limit of actions (clip_actions) must be a number above 0, got {limit!r}")
        if not isinstance(env.action_space, spaces.Box):
            raise TypeError(f"clip_actions={limit} is for a Box of actions, not for {env.action_space}; leave it out")
        self.limit = float(limit)
        low, high = env.action_bounds or (-np.inf, np.inf)  # an exported policy clips too, where no environment does it
        ends = np.maximum(low, -self.limit), np.minimum(high, self.limit)
        self.action_bounds = tuple(np.broadcast_to(end, env.action_space.shape).astype(np.float32) for end in ends)

    def step(self, actions: Tensor) -> StepRecord:
        """Apply one action per environment."""
        return super().step(actions.clamp(-self.limit, self.limit))


class TransformObs(VecEnvWrapper):
    """Changes every observation, final ones included, by `transform` and `transform_space` of a subclass."""

    def __init__(self, env: VecEnv) -> None:
        super().__init__(env)
        self.obs_space = self.transform_space(env.obs_space)
        shared = env.critic_obs_space is env.obs_space
        self.critic_obs_space = self.obs_space if shared else self.transform_space(env.critic_obs_space)

    def transform_space(self, space: spaces.Space) -> spaces.Space:
        """Return the space of a transformed observation; the same by default."""
        return space

    @abstractmethod
    def transform(self, obs: Any, space: spaces.Space) -> Any:
        """Transform a batch of observations from `space`."""

    def _pair(self, obs: Any, critic_obs: Any) -> tuple[Any, Any]:
        changed = None if obs is None else self.transform(obs, self.env.obs_space)
        if critic_obs is obs or critic_obs is None:
            return changed, changed if critic_obs is obs else None
        return changed, self.transform(critic_obs, self.env.critic_obs_space)

    def step(self, actions: Tensor) -> StepRecord:
        """Apply one action per environment."""
        record = super().step(actions)
        pair = self._pair(record.obs, record.critic_obs)
        return with_obs(record, pair, self._pair(record.final_obs, record.final_critic_obs))


class FlattenObs(TransformObs):
    """Concatenates the float leaves of dict observations to one vector; `obs_segments` names its parts."""

    def __init__(self, env: VecEnv) -> None:
        super().__init__(env)
        for name, space in (("obs", env.obs_space), ("critic_obs", env.critic_obs_space)):
            if isinstance(space, Mapping):
                setattr(self, f"{name}_segments", {part: tuple(leaf.shape) for part, leaf in tree_leaves(space)})

    def transform_space(self, space: spaces.Space) -> spaces.Space:
        """Return one Box with the bounds of every leaf."""
        if not isinstance(space, Mapping):
            return space
        for name, leaf in tree_leaves(space):
            if leaf.dtype == np.uint8:
                image = f"the uint8 image {name!r} {leaf.shape}, which FlattenObs would turn into"
                raise TypeError(f"{image} {math.prod(leaf.shape)} numbers; keep the dict and use a visual policy")
        leaves = [leaf for _, leaf in tree_leaves(space)]
        low, high = (np.concatenate([getattr(leaf, end).ravel() for leaf in leaves]) for end in ("low", "high"))
        return spaces.Box(low, high, dtype=np.float32)

    def transform(self, obs: Any, space: spaces.Space) -> Any:
        """Concatenate the leaves to one (N, D) tensor, in the order of the space: that of a dict may change."""
        if not isinstance(obs, Mapping):
            return obs
        leaves = dict(tree_leaves(obs))
        return torch.cat([leaves[name].flatten(1) for name, _ in tree_leaves(space)], 1)


def is_channels_last(leaf: Any) -> bool:
    """Whether a Box holds a uint8 image (H, W, C)."""
    shape = leaf.shape
    return leaf.dtype == np.uint8 and len(shape) == 3 and shape[-1] in (1, 3, 4) and shape[0] not in (1, 3, 4)


class ChannelsFirst(TransformObs):
    """Transposes uint8 images from Gymnasium's (H, W, C) to the (C, H, W) of convolutions."""

    def transform_space(self, space: spaces.Space) -> spaces.Space:
        """Return the space with its images transposed."""
        if isinstance(space, spaces.Dict):
            return spaces.Dict([(name, self.transform_space(part)) for name, part in space.items()])
        if not isinstance(space, spaces.Box) or not is_channels_last(space):
            return space
        return spaces.Box(space.low.transpose(2, 0, 1), space.high.transpose(2, 0, 1), dtype=np.uint8)

    def transform(self, obs: Any, space: spaces.Space) -> Any:
        """Transpose the images."""
        return tree_map(lambda x, s: x.permute(0, 3, 1, 2).contiguous() if is_channels_last(s) else x, obs, space)


class ToDevice(TransformObs):
    """Moves every tensor to the learner's device, for environments on another one."""

    def __init__(self, env: VecEnv, device: Device) -> None:
        super().__init__(env)
        self.device, self.capturable = torch.device(device), False

    def transform(self, obs: Any, space: spaces.Space) -> Any:
        """Move every tensor of a tree to the learner's device."""
        return tree_map(lambda leaf: leaf.to(self.device) if isinstance(leaf, Tensor) else leaf, obs)

    def step(self, actions: Tensor) -> StepRecord:
        """Apply one action per environment."""
        record = super().step(actions.to(self.env.device))
        names = ("reward", "terminated", "truncated", "valid", "extras")
        return record._replace(**self.transform({name: getattr(record, name) for name in names}, self.obs_space))
