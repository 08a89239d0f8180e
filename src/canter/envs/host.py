"""Between tensors and the numpy world of CPU environments: stored spaces, batch rows, actions, seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from canter.utils.tree import Obs

Rows = np.ndarray | dict[str, Any]


def stored_space(space: spaces.Space) -> spaces.Space:
    """The space of an observation as canter keeps it: Boxes of uint8 or float32, in a Dict where they are named."""
    if isinstance(space, spaces.Dict):
        # A list keeps the order of the names, a dict would be sorted.
        return spaces.Dict([(name, stored_space(part)) for name, part in space.spaces.items()])
    if not isinstance(space, spaces.Box):
        # Discrete parts become one-hot, Tuple parts follow each other.
        space = spaces.flatten_space(space)
    if not isinstance(space, spaces.Box):
        raise TypeError(f"observations of the space {space} have no tensor form; use Box, Dict or Discrete spaces")
    if space.dtype in (np.dtype(np.uint8), np.dtype(np.float32)):
        return space
    low, high = space.low.astype(np.float32), space.high.astype(np.float32)
    return spaces.Box(low, high, dtype=np.float32)


def space_of(obs: Obs) -> spaces.Space:
    """The space of one row of a batch of observations, with names in the same order."""
    if isinstance(obs, dict):
        return spaces.Dict([(name, space_of(part)) for name, part in obs.items()])
    return leaf_space(obs)


def leaf_space(leaf: Tensor) -> spaces.Box:
    """The space of one row of an observation leaf."""
    if leaf.dtype == torch.uint8:
        return spaces.Box(0, 255, tuple(leaf.shape[1:]), np.uint8)
    return spaces.Box(-np.inf, np.inf, tuple(leaf.shape[1:]))


def check_action_space(space: spaces.Space) -> spaces.Space:
    """`space` itself if canter has actions for it."""
    if isinstance(space, spaces.Box) and not np.all(space.low <= space.high):
        raise ValueError(f"the action space {space} has a lower bound above its upper bound")
    if not isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete)):
        raise TypeError(f"actions must be Box, Discrete or MultiDiscrete, not {space}")
    return space


def empty_rows(stored: spaces.Space, num_envs: int) -> Rows:
    """A new zeroed array (N, ...) for every leaf of a stored space."""
    if isinstance(stored, spaces.Dict):
        return {name: empty_rows(part, num_envs) for name, part in stored.spaces.items()}
    return np.zeros((num_envs, *(stored.shape or ())), stored.dtype)


def put_row(rows: Rows, index: int, obs: Any, space: spaces.Space, name: str = "obs") -> None:
    """Write one environment's observation, given in its own `space`, into row `index`."""
    if isinstance(rows, dict):
        parts = space.spaces  # type: ignore[attr-defined]
        if set(obs) != set(rows):
            raise ValueError(f"observation {name!r} of environment {index} has {sorted(obs)}, expected {sorted(rows)}")
        for key, part in rows.items():
            put_row(part, index, obs[key], parts[key], f"{name}.{key}" if name != "obs" else key)
        return
    if not isinstance(space, spaces.Box):
        obs = spaces.flatten(space, obs)
    elif not isinstance(obs, np.ndarray):
        obs = np.asarray(obs)
    if obs.shape != rows.shape[1:]:
        # A row of another shape might be broadcast silently.
        raise ValueError(
            f"observation {name!r} of environment {index} has shape {obs.shape}, expected {rows.shape[1:]}"
        )
    rows[index] = obs


def rows_to_obs(rows: Rows, device: torch.device) -> Obs:
    """Rows as tensors; on the CPU they share memory, so the rows must not be written again."""
    if isinstance(rows, dict):
        return {name: rows_to_obs(part, device) for name, part in rows.items()}
    tensor = torch.from_numpy(rows)
    return tensor if device.type == "cpu" else tensor.to(device)


def batch_to_rows(batch: Any, space: spaces.Space, num_envs: int, name: str = "obs") -> Rows:
    """New arrays in stored dtypes from a batched observation of a vector environment."""
    if isinstance(space, spaces.Dict):
        if not isinstance(batch, Mapping) or set(batch) != set(space.spaces):
            got = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
            raise ValueError(f"observation {name!r} is {got}, expected the keys {sorted(space.spaces)}")
        return {k: batch_to_rows(batch[k], part, num_envs, k) for k, part in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return np.eye(int(space.n), dtype=np.float32)[np.asarray(batch, np.int64).reshape(num_envs) - int(space.start)]
    if not isinstance(space, spaces.Box):
        return np.array([spaces.flatten(space, row) for row in spaces_rows(batch, num_envs)], np.float32)
    dtype = np.uint8 if space.dtype == np.uint8 else np.float32
    array = np.array(batch, dtype)
    if array.shape != (num_envs, *space.shape):
        raise ValueError(f"observation {name!r} has shape {array.shape}, expected {(num_envs, *space.shape)}")
    return array


def array_per_env(value: Any, dtype: Any, name: str, num_envs: int) -> np.ndarray:
    """A new (N,) array from (N,), (N, 1) or, for one environment, a scalar; any other shape is an error."""
    array = np.array(value, dtype)
    check_per_env(array.shape, name, num_envs)
    return array.reshape(num_envs)


def check_per_env(shape: Sequence[int], name: str, num_envs: int) -> None:
    """Raise unless the shape is (N,), (N, 1) or, for one environment, that of a scalar."""
    if tuple(shape) not in {(num_envs,), (num_envs, 1)} and not (num_envs == 1 and not shape):
        raise ValueError(f"{name} of {num_envs} environments must have shape ({num_envs},), got {tuple(shape)}")


def spaces_rows(batch: Any, num_envs: int) -> list[Any]:
    """One entry per environment of a batched array or of a tuple of them."""
    if isinstance(batch, tuple):
        return list(zip(*(spaces_rows(part, num_envs) for part in batch), strict=True))
    return [batch[i] for i in range(num_envs)]


class ActionCast:
    """Turns a tensor of actions into the array that an environment's action space asks for."""

    def __init__(self, space: spaces.Space, num_envs: int, clip: bool = True) -> None:
        self.space = check_action_space(space)
        self.shape = (num_envs, *(space.shape or ()))
        self.bounds = None
        self.start: Any = 0
        if isinstance(space, spaces.Box):
            if clip and (np.isfinite(space.low).any() or np.isfinite(space.high).any()):
                self.bounds = (space.low, space.high)
        else:
            self.start = space.start  # type: ignore[attr-defined]
        self.shifted = bool(np.any(self.start))

    def __call__(self, actions: Tensor) -> np.ndarray:
        """(N, ...) actions within bounds, in the dtype of the space."""
        array = actions.numpy(force=True)
        if array.shape != self.shape:
            if array.size != np.prod(self.shape) or array.shape[:1] != self.shape[:1]:
                raise ValueError(f"actions have shape {array.shape}; the environment wants {self.shape} ({self.space})")
            array = array.reshape(self.shape)
        array = array.astype(self.space.dtype, copy=True)
        if self.bounds is not None:
            np.clip(array, *self.bounds, out=array)
        elif self.shifted:
            array += self.start
        return array


def spawn_seeds(seed: int, num_envs: int) -> list[int]:
    """One independent seed per environment."""
    return [int(child.generate_state(1)[0]) for child in np.random.SeedSequence(seed).spawn(num_envs)]
