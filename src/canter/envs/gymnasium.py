"""Single Gymnasium environments stepped together in one process, and the conversion between arrays and tensors."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, create_empty_array, iterate
from torch import Tensor

from canter.envs.records import split_groups, to_obs
from canter.envs.vec_env import Device, StepRecord, VecEnv
from canter.utils.tree import Obs

EnvSource = gymnasium.Env | Callable[[], gymnasium.Env]
EnvSources = EnvSource | Sequence[EnvSource]
Rows = np.ndarray | dict[str, Any]


class GymVecEnv(VecEnv):
    """Steps Gymnasium environments one after the other and resets each in the step that ends its episode.

    `env_fns` are environments or functions that make one each, or a single one. Every environment gets a random stream
    of its own from `seed`. With `clip_actions`, continuous actions are clipped to the bounds of their Box.
    """

    adapter = "Gymnasium"
    contract = "gymnasium.Env"
    autoreset = "by canter, in the same step"
    makes_new_records = True
    first_env = 0
    """Number of the first environment, on which the random streams depend."""
    steps_in_process = True
    """Whether the environments are stepped here; those of workers are all described by one."""

    def __init__(
        self, env_fns: EnvSources, device: Device = "cpu", seed: int | None = None, clip_actions: bool = True
    ) -> None:
        sources = list(env_fns) if isinstance(env_fns, Sequence) else [env_fns]
        if not sources:
            raise ValueError("GymVecEnv needs at least one environment, got an empty list")
        made = [source if isinstance(source, gymnasium.Env) else source() for source in sources]
        if self.steps_in_process:
            refuse_twins(made)
        is_nested = isinstance(made[0].action_space, (spaces.Tuple, spaces.Dict))
        self.envs: list[gymnasium.Env] = [FlatActions(env) for env in made] if is_nested else made
        first, self.num_envs, self.device = self.envs[0], len(self.envs), torch.device(device)
        for index, env in enumerate(self.envs):
            if (env.observation_space, env.action_space) != (first.observation_space, first.action_space):
                raise ValueError(f"environment {index} has other spaces than environment 0")
        self.raw_obs_space = first.observation_space
        self._stored = stored_space(self.raw_obs_space)
        # Arrays of this shape are copied row by row without conversion: the usual case, and the fastest.
        self._row_shape = self.raw_obs_space.shape if isinstance(self.raw_obs_space, spaces.Box) else None
        # Makes new arrays for an observation of every environment.
        self._empty_rows: Callable[[], Any] = functools.partial(create_empty_array, self._stored, self.num_envs)
        if self._row_shape is not None:
            self._empty_rows = functools.partial(np.empty, (self.num_envs, *self._row_shape), self._stored.dtype)
        is_plain = self.device.type == "cpu" and self._row_shape is not None
        self._to_obs = torch.from_numpy if is_plain else functools.partial(to_obs, device=self.device)
        move = functools.partial(torch.as_tensor, device=self.device)
        self._to_tensor = torch.from_numpy if self.device.type == "cpu" else move
        self.obs_space, self.critic_obs_space = split_groups(self._stored)
        self._has_groups = self.obs_space is not self._stored
        self.action_space = policy_space(first.action_space)
        self._to_array = ActionCast(first.action_space, self.num_envs, clip_actions)
        self.action_bounds = self._to_array.bounds
        self.max_episode_length = time_limit(first)
        self._valid = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self._seed, self._current = seed, None

    def seed(self, seed: int) -> None:
        """Give every environment its own random stream from the next `reset` on."""
        self._seed = seed

    def reset(self) -> tuple[Obs, Obs]:
        """Start a new episode in every environment."""
        seeds: list[Any] = [None] * self.num_envs
        if self._seed is not None:
            numbers = range(self.first_env, self.first_env + self.num_envs)
            streams = [np.random.SeedSequence(self._seed, spawn_key=(number,)) for number in numbers]
            seeds = [int(stream.generate_state(1)[0]) for stream in streams]
        self._seed, self._current = None, create_empty_array(self._stored, self.num_envs)
        for index, (env, seed) in enumerate(zip(self.envs, seeds, strict=True)):
            put_row(self._current, index, first_obs(env.reset(seed=seed), index), self.raw_obs_space)
        return self.get_observations()

    def get_observations(self) -> tuple[Obs, Obs]:
        """Return the current observation and the critic's."""
        return self.reset() if self._current is None else split_groups(self._to_obs(self._current))

    def step(self, actions: Tensor) -> StepRecord:
        """Step every environment once."""
        if self._current is None:
            self.reset()
        num_envs, row_shape = self.num_envs, self._row_shape
        given = self._to_array(actions)
        given = given.tolist() if isinstance(self.action_space, spaces.Discrete) else given
        rows, final = self._empty_rows(), None
        rewards, infos = np.empty(num_envs, np.float32), []
        terminal, cut_off = np.zeros(num_envs, np.bool_), np.zeros(num_envs, np.bool_)
        for index, (env, action) in enumerate(zip(self.envs, given, strict=True)):
            result = env.step(action)
            is_whole = isinstance(result, (tuple, list)) and len(result) == 5
            if not is_whole or not (isinstance(result[1], (float, int)) or getattr(result[1], "ndim", None) == 0):
                refuse_step(result, index)
            obs, rewards[index], is_terminal, is_cut_off, info = result
            has_ended = is_terminal or is_cut_off
            if has_ended:
                (terminal if is_terminal else cut_off)[index] = True
                final = self._empty_rows() if final is None else final
            for batch in (final, rows) if has_ended else (rows,):
                if row_shape is not None and getattr(obs, "shape", None) == row_shape:
                    batch[index] = obs  # type: ignore[index]
                else:
                    put_row(batch, index, obs, self.raw_obs_space)
                if batch is final:
                    result = env.reset()
                    is_pair = isinstance(result, (tuple, list)) and len(result) == 2
                    obs = result[0] if is_pair else first_obs(result, index)
            infos.append(info)
        self._current = rows
        reward, terminated, truncated = map(self._to_tensor, (rewards, terminal, cut_off))
        extras = {"terminated": terminated, "truncated": truncated, "time_outs": truncated, "infos": infos}
        obs = critic_obs = self._to_obs(rows)
        final_obs = final_critic_obs = None
        if final is not None:
            final_obs = final_critic_obs = extras["final_observation"] = self._to_obs(final)
        if self._has_groups:
            obs, critic_obs = split_groups(obs)
            final_obs, final_critic_obs = split_groups(final_obs)
        return StepRecord(
            obs, critic_obs, reward, terminated, truncated, final_obs, final_critic_obs, self._valid, extras
        )

    def render(self) -> Any:
        """Return an image of the first environment, if it was made with `render_mode="rgb_array"`."""
        return self.envs[0].render() if self.envs[0].render_mode == "rgb_array" else None

    def close(self) -> None:
        """Close every environment."""
        for env in self.envs:
            env.close()


def first_obs(result: Any, index: int) -> Any:
    """The observation in the result of an environment's `reset`."""
    if isinstance(result, (tuple, list)) and len(result) == 2:
        return result[0]
    raise TypeError(f"reset() of environment {index} must return (obs, info), got {short(result)}")


def refuse_step(result: Any, index: int) -> None:
    """Raise because an environment's `step` did not return five parts, of which the second is a number."""
    if isinstance(result, (tuple, list)) and len(result) == 5:
        raise TypeError(f"the reward of environment {index} must be a number, got {short(result[1])}")
    got = f"{len(result)} values" if isinstance(result, (tuple, list)) else short(result)
    want = "(obs, reward, terminated, truncated, info)"
    raise TypeError(f"step() of environment {index} must return {want}, got {got}")


def refuse_twins(envs: Sequence[gymnasium.Env]) -> None:
    """Raise if one environment is in the list twice: each of its steps would count for the other one too."""
    first: dict[int, int] = {}
    for index, env in enumerate(envs):
        if (twin := first.setdefault(id(env.unwrapped), index)) != index:
            way_out = "pass a function that makes a new one at every call, with num_envs="
            raise ValueError(f"environments {twin} and {index} are the same {type(env.unwrapped).__name__}; {way_out}")


def time_limit(env: Any) -> int | None:
    """Steps after which an environment, or a vector environment, cuts its episodes off; None if that is not known."""
    limit = getattr(env.spec, "max_episode_steps", None)
    while limit is None and isinstance(env, gymnasium.Wrapper):
        limit, env = getattr(env, "_max_episode_steps", None), env.env  # of a TimeLimit without a spec
    return limit


def short(value: Any) -> str:
    """The type of a value and the beginning of its text."""
    return f"{type(value).__name__} {value!r:.60}"


class GymVecEnvContinuous(GymVecEnv):
    """`GymVecEnv` for Box actions; any other action space is an error."""

    def __init__(
        self, env_fns: EnvSources, device: Device = "cpu", clip_actions: bool = True, seed: int | None = None
    ) -> None:
        super().__init__(env_fns, device, seed, clip_actions)
        if not isinstance(self.action_space, spaces.Box):
            raise TypeError(f"GymVecEnvContinuous needs a Box action space, got {self.action_space}; use GymVecEnv")


def policy_space(space: spaces.Space) -> spaces.Space:
    """The space that a policy samples for an action space: MultiBinary is as many choices between 0 and 1."""
    return spaces.MultiDiscrete(np.full(np.prod(space.shape), 2)) if isinstance(space, spaces.MultiBinary) else space


class FlatActions(gymnasium.ActionWrapper):
    """Gives an environment with Tuple or Dict actions one MultiDiscrete action, or one Box, with all parts in a row.

    A Dict has its parts in the order of its space. Parts must be all discrete or all Boxes; `GymVecEnv` adds this
    wrapper itself, an environment that is made for a `VectorEnv` needs it before.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        nested: Any = env.action_space
        self.nested, self.parts = nested, dict(nested.spaces if isinstance(nested, spaces.Dict) else enumerate(nested))
        forms: dict[Any, Any] = {name: policy_space(part) for name, part in self.parts.items()}
        kinds = {type(form) for form in forms.values()}
        if kinds == {spaces.Box}:
            low, high = (np.concatenate([getattr(f, b).ravel() for f in forms.values()]) for b in ("low", "high"))
            self.action_space = spaces.Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)
        elif kinds <= {spaces.Discrete, spaces.MultiDiscrete}:
            counts = [np.ravel(f.n if isinstance(f, spaces.Discrete) else f.nvec) for f in forms.values()]
            self.action_space = spaces.MultiDiscrete(np.concatenate(counts))
        else:
            problem = f"the parts of the action space {nested} are not all discrete or all Boxes"
            raise TypeError(f"{problem}: no policy samples such actions; give the environment one kind of action")
        self.ends = np.cumsum([int(np.prod(part.shape or ())) for part in self.parts.values()])

    def action(self, action: Any) -> Any:
        """The nested action of a flat one."""
        rows = np.split(np.asarray(action), self.ends[:-1])
        made = {}
        for (name, part), row in zip(self.parts.items(), rows, strict=True):
            start = getattr(part, "start", 0)  # of Discrete and MultiDiscrete parts
            value = in_dtype(row.reshape(part.shape or ()) + start, part.dtype)
            made[name] = int(value) if isinstance(part, spaces.Discrete) else value
        return made if isinstance(self.nested, spaces.Dict) else tuple(made.values())


class ActionCast:
    """Converts a tensor of actions to the array that an environment's action space requires."""

    def __init__(self, space: spaces.Space, num_envs: int, clip: bool = True) -> None:
        if not isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
            problem = f"actions must be Box, Discrete, MultiDiscrete or MultiBinary, not {space}"
            raise TypeError(f"{problem}; canter.envs.FlatActions flattens the Tuple or Dict of a single environment")
        self.space, self.shape = space, (num_envs, *(space.shape or ()))
        self.bounds = self.start = None
        if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
            self.start = space.start if np.any(space.start) else None
        elif isinstance(space, spaces.Box):
            if not np.all(space.low <= space.high):
                raise ValueError(f"the action space {space} has a lower bound above its upper bound")
            is_bounded = clip and (np.isfinite(space.low).any() or np.isfinite(space.high).any())
            self.bounds = (space.low, space.high) if is_bounded else None

    def __call__(self, actions: Tensor) -> np.ndarray:
        """(N, ...) actions within bounds, in the dtype of the space."""
        array = (actions.float() if actions.dtype == torch.bfloat16 else actions).numpy(force=True)  # numpy lacks it
        if array.shape != self.shape:
            if array.size != np.prod(self.shape) or array.shape[:1] != self.shape[:1]:
                raise ValueError(f"actions have shape {array.shape}; the environment wants {self.shape} ({self.space})")
            array = array.reshape(self.shape)
        # Before the cast: there is no -1 in uint8.
        array = array.copy() if self.bounds is None else np.clip(array, *self.bounds)
        if array.dtype != self.space.dtype:
            array = in_dtype(array, self.space.dtype)
        if self.start is not None:
            array += self.start
        return array


def in_dtype(array: np.ndarray, dtype: Any) -> np.ndarray:
    """The array in another dtype; for one of integers, its nearest whole numbers."""
    is_rounded = np.issubdtype(dtype, np.integer) and array.dtype.kind == "f"
    return (np.rint(array) if is_rounded else array).astype(dtype)


def stored_space(space: spaces.Space) -> spaces.Space:
    """Space of an observation as canter stores it: Boxes of uint8 or float32, in a Dict where they are named."""
    if isinstance(space, spaces.Dict):  # a list keeps the order of the names, a dict would be sorted
        return spaces.Dict([(name, stored_space(part)) for name, part in space.spaces.items()])
    if not isinstance(space, spaces.Box):  # Discrete parts become one-hot, Tuple parts are concatenated
        space = spaces.flatten_space(space)
    if not isinstance(space, spaces.Box):
        raise TypeError(f"observations of the space {space} have no tensor form; use Box, Dict or Discrete spaces")
    if not space.shape:
        raise TypeError(f"an observation of the space {space} is a single number; give it the shape (1,)")
    if space.dtype in (np.dtype(np.uint8), np.dtype(np.float32)):
        return space
    return spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)


def put_row(rows: Any, index: int, obs: Any, space: Any, name: str = "obs") -> None:
    """Write one environment's observation, an element of `space`, into row `index`."""
    if isinstance(rows, dict):
        if set(obs) != set(rows):
            raise ValueError(f"observation {name!r} of environment {index} has {sorted(obs)}, expected {sorted(rows)}")
        for key, part in rows.items():
            put_row(part, index, obs[key], space[key], f"{name}.{key}" if name != "obs" else key)
        return
    obs = np.asarray(obs if isinstance(space, spaces.Box) else spaces.flatten(space, obs))
    want = rows.shape[1:]
    if obs.shape != want:  # a row of another shape might be broadcast silently
        raise ValueError(f"observation {name!r} of environment {index} has shape {obs.shape}, expected {want}")
    if rows.dtype == np.uint8 and obs.dtype.kind == "f":  # numbers between 0 and 1 would all become 0
        way_out = "return uint8, or give the space the dtype float32"
        raise TypeError(f"observation {name!r} of environment {index} is {obs.dtype}, its space is uint8; {way_out}")
    rows[index] = obs


def batch_to_rows(batch: Any, space: spaces.Space, num_envs: int, name: str = "obs") -> Rows:
    """New arrays in stored dtypes from a batched observation of a vector environment."""
    if isinstance(space, spaces.Dict):
        got = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        if got != sorted(space.spaces):
            raise ValueError(f"observation {name!r} is {got}, expected the keys {sorted(space.spaces)}")
        return {k: batch_to_rows(batch[k], part, num_envs, k) for k, part in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return np.eye(int(space.n), dtype=np.float32)[np.asarray(batch, np.int64).reshape(num_envs) - int(space.start)]
    if not isinstance(space, spaces.Box):
        return np.array([spaces.flatten(space, x) for x in iterate(batch_space(space, num_envs), batch)], np.float32)
    array = np.array(batch, np.uint8 if space.dtype == np.uint8 else np.float32)
    if array.shape != (num_envs, *space.shape):
        raise ValueError(f"observation {name!r} has shape {array.shape}, expected {(num_envs, *space.shape)}")
    return array
