"""Gymnasium's `VectorEnv` in all three autoreset modes, and EnvPool, which has the same interface."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv
from torch import Tensor

from canter.envs.gymnasium import ActionCast, batch_to_rows, empty_rows, put_row, rows_to_obs, stored_space
from canter.envs.records import (
    EndWatch,
    check_per_env,
    fill_extras,
    find_final,
    full_final,
    per_env,
    split_groups,
    split_space,
    to_obs,
)
from canter.envs.vec_env import StepRecord, VecEnv
from canter.utils.runtime import usable_cores
from canter.utils.tree import Obs, tree_leaves

Halves = tuple[Callable[..., None] | None, Callable[[], Any] | None]
AUTORESET = {
    AutoresetMode.NEXT_STEP: "next step (the resetting step is masked)",
    AutoresetMode.SAME_STEP: "same step",
    AutoresetMode.DISABLED: "by canter",
}
PLAYERS = "info:players.env_id"


def autoreset_mode(env: Any) -> AutoresetMode:
    """The mode in which a vector environment restarts ended episodes."""
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
        self.contract = f"gymnasium.vector.VectorEnv ({type(env).__name__})"
        self.autoreset = AUTORESET[self.mode]
        self.has_invalid_steps = self.mode is AutoresetMode.NEXT_STEP
        self._space = env.single_observation_space
        self._stored = stored_space(self._space)
        self.obs_space, self.critic_obs_space = split_space(self._stored)
        self.action_space = env.single_action_space
        self._to_array = ActionCast(self.action_space, self.num_envs, clip_actions)
        self.max_episode_length = getattr(env.spec, "max_episode_steps", None) or 1000
        self._all_valid = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self._begin, self._end = self._halves()
        self.overlaps = self._begin is not None
        self._result: Any = None
        self._was_done: Any = None  # (N,) tensor or array
        self._current: tuple[Obs, Obs] | None = None
        self._tensors = False
        self._bounds: list[Tensor] | None = None
        self._watch = EndWatch(self.device)
        self._seed = seed

    def _halves(self) -> Halves:
        """Functions that begin and finish a step, where the environments run on their own in between."""
        return (self.env.step_async, self.env.step_wait) if isinstance(self.env, AsyncVectorEnv) else (None, None)

    def seed(self, seed: int) -> None:
        """Seed the environments in the next `reset`."""
        self._seed = seed

    def reset(self) -> tuple[Obs, Obs]:
        """Start a new episode in every environment."""
        seed, self._seed = self._seed, None
        obs, _ = self.env.reset(seed=seed)
        self._tensors = any(isinstance(leaf, Tensor) for _, leaf in tree_leaves(obs))
        if self._tensors and self._to_array.bounds is not None:
            place = getattr(self.env, "device", None) or self.device
            self._bounds = [torch.as_tensor(bound, device=place) for bound in self._to_array.bounds]
        self._was_done = None
        self._current = split_groups(self._to_obs(obs))
        return self._current

    def get_observations(self) -> tuple[Obs, Obs]:
        """Return the current observation and the critic's."""
        return self.reset() if self._current is None else self._current

    def step(self, actions: Tensor) -> StepRecord:
        """Step every environment once."""
        self.send(actions)
        return self.recv()

    def send(self, actions: Tensor) -> None:
        """Begin a step; environments with threads or processes of their own start to compute."""
        if self._current is None:
            self.reset()
        if self._tensors:
            given: Any = actions.to(getattr(self.env, "device", None) or actions.device)
            given = given if self._bounds is None else given.clamp(*self._bounds)
        else:
            given = self._to_array(actions)
        if self._begin is None:
            self._result = self.env.step(given)
        else:
            self._begin(given)

    def recv(self) -> StepRecord:
        """Finish the step that `send` began."""
        given, rewards, terminated, truncated, infos = self._result if self._end is None else self._end()
        reward: Any = self._per_env(rewards, "rewards")
        terminated, truncated = self._per_env(terminated, "terminated"), self._per_env(truncated, "truncated")
        valid, was_done = self._all_valid, self._was_done
        if was_done is not None:
            is_valid = ~was_done
            reward = torch.where(is_valid, reward, 0.0) if self._tensors else np.where(is_valid, reward, np.float32(0))
            terminated, truncated = terminated & is_valid, truncated & is_valid
            valid = torch.as_tensor(is_valid, device=self.device)
        obs, final, self._was_done = self._to_obs(given), None, None
        # In most steps of arrays no episode ends. To test tensors for an end would make the host wait.
        if self._tensors or np.count_nonzero(terminated) or np.count_nonzero(truncated):
            truncated = truncated & ~terminated
            done = terminated | truncated
            final, obs = self._final_and_next(obs, done, infos)
            self._was_done = done if self.has_invalid_steps else None
        self._current = split_groups(obs)
        if not self._tensors:
            reward, terminated, truncated = map(torch.from_numpy, (reward, terminated, truncated))
            if self.device.type != "cpu":
                reward, terminated, truncated = (part.to(self.device) for part in (reward, terminated, truncated))
        finals = split_groups(final)
        return fill_extras(StepRecord(*self._current, reward, terminated, truncated, *finals, valid, {"infos": infos}))

    def _per_env(self, value: Any, name: str) -> Any:
        """A new (N,) tensor of float32 rewards or bool flags, or an array if the environment returns arrays."""
        is_reward = name == "rewards"
        if self._tensors:
            dtype = torch.float32 if is_reward else torch.bool
            return per_env(value, dtype, name, self.num_envs, self.device, copy=True)
        array = np.array(value, np.float32 if is_reward else np.bool_)
        check_per_env(array.shape, name, self.num_envs)
        return array.reshape(self.num_envs)

    def _final_and_next(self, obs: Obs, done: Any, infos: dict[str, Any]) -> tuple[Any, Obs]:
        """The final observation and the one to act on next, by the autoreset mode."""
        if self.mode is AutoresetMode.NEXT_STEP:
            return obs, obs
        if self.mode is AutoresetMode.DISABLED:
            return obs, self._to_obs(self.env.reset(options={"reset_mask": done})[0])
        found = find_final(infos)
        if found is None:
            self.gives_final_obs = not self._watch(torch.as_tensor(done, device=self.device))
            return None, obs
        self.gives_final_obs = True
        if not self._tensors and isinstance(found, np.ndarray) and found.dtype == object:
            rows = empty_rows(self._stored, self.num_envs)
            for index in np.flatnonzero(done).tolist():
                put_row(rows, index, found[index], self._space)
            return rows_to_obs(rows, self.device), obs
        return full_final(found, torch.as_tensor(done, device=self.device), copy=True), obs

    def _to_obs(self, obs: Any) -> Obs:
        if self._tensors:
            return to_obs(obs, self.device, copy=True)
        return rows_to_obs(batch_to_rows(obs, self._space, self.num_envs), self.device)

    def render(self) -> Any:
        """Return an image of the first environment, if the environment renders arrays."""
        frames = self.env.render() if getattr(self.env, "render_mode", None) == "rgb_array" else None
        return None if frames is None else frames[0]

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


class EnvPoolAdapter(GymVectorEnvAdapter):
    """An EnvPool made with `env_type="gymnasium"` that returns all environments in every step.

    EnvPool takes its seed when it is made: `envpool.make(..., seed=1)`.
    """

    def __init__(self, env: Any, device: torch.device | str | None = None, clip_actions: bool = True) -> None:
        if not hasattr(env, "single_observation_space"):
            raise TypeError(f'{type(env).__name__} has another interface; make it with env_type="gymnasium"')
        config = env.config
        if config["batch_size"] != config["num_envs"]:
            raise ValueError(
                f"EnvPool returns {config['batch_size']} of {config['num_envs']} environments per step; "
                "make it without batch_size, so that every step returns all"
            )
        super().__init__(env, device or "cpu", None, clip_actions)
        self.contract = "EnvPool"
        self.max_episode_length = int(config["max_episode_steps"])
        self._elapsed = np.zeros(self.num_envs, np.int64)

    def seed(self, seed: int) -> None:
        """Raise: the seed of an EnvPool is fixed when it is made."""
        raise NotImplementedError(f"an EnvPool is seeded when it is made: envpool.make(..., seed={seed})")

    def reset(self) -> tuple[Obs, Obs]:
        """Start a new episode in every environment."""
        self._elapsed = np.zeros(self.num_envs, np.int64)
        return super().reset()

    def _halves(self) -> Halves:
        return direct_halves(self.env, self.num_envs) or (self.env.send, self.env.recv)

    def recv(self) -> StepRecord:
        """Finish the step that `send` began."""
        record = super().recv()
        self._elapsed = record.extras["infos"].get("elapsed_step", self._elapsed)
        return record

    @property
    def elapsed_steps(self) -> Tensor:
        """(N,) steps taken in each running episode, 0 where the last step only reset."""
        return torch.as_tensor(np.array(self._elapsed, np.int64), device=self.device)


def is_envpool(env: Any) -> bool:
    """Whether `env` is an EnvPool, tested without importing envpool."""
    return any(base.__module__.startswith("envpool.") for base in type(env).__mro__)


def make_envpool(task: str, num_envs: int, device: Any, seed: int | None, render_mode: str | None) -> EnvPoolAdapter:
    """Make the EnvPool of an EnvPool id."""
    try:
        envpool = importlib.import_module("envpool")
    except ImportError as error:
        raise ImportError(f"'envpool/{task}' needs EnvPool: pip install 'canter[envpool]'") from error
    # As many threads as cores this process may use, which may be fewer than the machine has.
    options: dict[str, Any] = {"num_threads": min(num_envs, usable_cores()), "seed": seed, "render_mode": render_mode}
    given = {name: value for name, value in options.items() if value is not None}
    return EnvPoolAdapter(envpool.make(task, env_type="gymnasium", num_envs=num_envs, **given), device)


def direct_halves(env: Any, num_envs: int) -> Halves | None:
    """EnvPool's `send` and `recv` without the trees it packs and unpacks in every step; None for unusual ones.

    For eight small robots those trees take a tenth of the step.
    """
    send, receive, keys = (getattr(env, name, None) for name in ("_send", "_recv", "_state_keys"))
    parts = env.spec.action_array_spec
    if send is None or receive is None or keys is None or list(parts) != ["env_id", "players.env_id", "action"]:
        return None
    info_keys = {key: key.removeprefix("info:") for key in keys if key.startswith("info:") and key != PLAYERS}
    if "obs" not in keys or PLAYERS not in keys or any("." in name for name in info_keys.values()):
        return None
    numbers, dtype = np.arange(num_envs, dtype=np.int32), parts["action"].dtype

    def begin(actions: np.ndarray) -> None:
        send([numbers, numbers, actions.astype(dtype, copy=False)])

    def end() -> Any:
        values = dict(zip(keys, receive(), strict=True))
        infos = {name: values[key] for key, name in info_keys.items()}
        infos |= {"players": {"env_id": values[PLAYERS]}, "elapsed_step": values["elapsed_step"]}
        truncated = values["trunc"]
        return values["obs"], values["reward"], values["done"] & ~truncated, truncated, infos

    return begin, end
