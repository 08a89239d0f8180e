"""Gymnasium's `VectorEnv` in all three autoreset modes, and EnvPool, which has the same interface."""

import contextlib
import ctypes
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv
from gymnasium.vector.utils import create_empty_array
from torch import Tensor

from canter.envs.gymnasium import ActionCast, batch_to_rows, policy_space, put_row, stored_space, time_limit
from canter.envs.records import EndWatch, fill_extras, find_final, full_final, per_env, split_groups, to_obs
from canter.envs.vec_env import Device, StepRecord, VecEnv
from canter.envs.workers import TIMEOUT_SECONDS, WorkerError, find_death, wait_for_answers
from canter.utils.config import unknown_name
from canter.utils.runtime import usable_cores
from canter.utils.tree import Obs, tree_leaves

AUTORESET = {
    AutoresetMode.NEXT_STEP: "next step (the resetting step is masked)",
    AutoresetMode.SAME_STEP: "same step",
    AutoresetMode.DISABLED: "by canter",
}
PLAYERS = "info:players.env_id"


def autoreset_mode(env: Any) -> AutoresetMode:
    """The mode in which a vector environment restarts ended episodes."""
    # ManiSkill's vector environment states no mode and resets within the step; Gymnasium 1.0's resets in the next.
    default = AutoresetMode.SAME_STEP if hasattr(env, "base_env") else AutoresetMode.NEXT_STEP
    return AutoresetMode((env.metadata or {}).get("autoreset_mode") or default)


class GymVectorEnvAdapter(VecEnv):
    """A Gymnasium `VectorEnv` of arrays or of tensors.

    In NEXT_STEP mode the step after an episode's end only resets: its record has `valid` false and reward 0.
    In DISABLED mode this adapter resets, within the step.
    """

    def __init__(
        self, env: VectorEnv, device: Device | None = None, seed: int | None = None, clip_actions: bool = True
    ) -> None:
        self.env: Any = env
        self.num_envs, self._seed = int(env.num_envs), seed
        self._place = getattr(env, "device", None) or device or "cpu"
        self.device = torch.device(device or self._place)
        self.mode = autoreset_mode(env)
        self.contract = f"gymnasium.vector.VectorEnv ({type(env).__name__})"
        self.autoreset = AUTORESET[self.mode]
        self.has_invalid_steps = self.mode is AutoresetMode.NEXT_STEP
        self._space = env.single_observation_space
        self._stored = stored_space(self._space)
        self.obs_space, self.critic_obs_space = split_groups(self._stored)
        self.action_space = policy_space(env.single_action_space)
        self._to_array = ActionCast(env.single_action_space, self.num_envs, clip_actions)
        self.action_bounds = self._to_array.bounds
        self.max_episode_length = time_limit(env)
        self._all_valid = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self.overlaps = isinstance(env, AsyncVectorEnv)
        # Begin and finish a step; the environments run on their own in between.
        self._begin, self._end = (env.step_async, env.step_wait) if isinstance(env, AsyncVectorEnv) else (None, None)
        self._failure: WorkerError | None = None
        self._was_done = self._current = self._bounds = None
        self._result: Any = None
        self._tensors = False
        self._watch = EndWatch(self.device)

    def seed(self, seed: int) -> None:
        """Seed the environments in the next `reset`."""
        self._seed = seed

    def reset(self) -> tuple[Obs, Obs]:
        """Start a new episode in every environment."""
        seed, self._seed = self._seed, None
        if isinstance(self.env, AsyncVectorEnv):
            self.env.reset_async(seed=seed)
            obs, _ = self._answer(self.env.reset_wait)
        else:
            obs, _ = self.env.reset(seed=seed)
        self._tensors = any(isinstance(leaf, Tensor) for _, leaf in tree_leaves(obs))
        if self._tensors and self._to_array.bounds is not None:
            self._bounds = [torch.as_tensor(bound, device=self._place) for bound in self._to_array.bounds]
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
        given: Any = actions.to(self._place) if self._tensors else self._to_array(actions)
        if self._bounds is not None:
            given = given.clamp(*self._bounds)
        self._result = self.env.step(given) if self._begin is None else self._begin(given)

    def recv(self) -> StepRecord:
        """Finish the step that `send` began."""
        given, rewards, terminated, truncated, infos = self._result if self._end is None else self._answer(self._end)
        reward = self._per_env(rewards, "rewards")
        terminated, truncated = self._per_env(terminated, "terminated"), self._per_env(truncated, "truncated")
        obs, final, valid = self._to_obs(given), None, self._all_valid
        if self._was_done is not None:
            valid = ~self._was_done
            reward = reward.masked_fill(self._was_done, 0.0)
            terminated, truncated, self._was_done = terminated & valid, truncated & valid, None
        # In most steps of arrays no episode ends. To test tensors for an end would make the host wait.
        if self._tensors or terminated.any() or truncated.any():
            truncated = truncated & ~terminated
            done = terminated | truncated
            final, obs = self._final_and_next(obs, done, infos)
            self._was_done = done if self.has_invalid_steps else None
        self._current = split_groups(obs)
        reward, terminated, truncated, valid = (x.to(self.device) for x in (reward, terminated, truncated, valid))
        finals = split_groups(final)
        return fill_extras(StepRecord(*self._current, reward, terminated, truncated, *finals, valid, {"infos": infos}))

    def _answer(self, receive: Callable[[], Any]) -> Any:
        """The answers of the workers; WorkerError names one that died or hangs."""
        if not isinstance(self.env, AsyncVectorEnv):
            return receive()
        workers = self.env.processes
        try:
            wait_for_answers(dict(enumerate(self.env.parent_pipes)), workers, TIMEOUT_SECONDS)
            return receive()
        except WorkerError as error:
            self._failure = error
            workers[error.worker].kill()  # or closing would wait for it
            raise
        except (EOFError, ConnectionError):
            self._failure = find_death(workers)
            raise self._failure from None

    def _per_env(self, value: Any, name: str) -> Tensor:
        """A new (N,) tensor of float32 rewards or bool flags, on the CPU if the environment returns arrays."""
        dtype, np_dtype = (torch.float32, np.float32) if name == "rewards" else (torch.bool, np.bool_)
        if self._tensors:
            return per_env(value, dtype, name, self.num_envs, self.device, copy=True)
        array = np.array(value, np_dtype)
        if array.shape == (self.num_envs,):  # the usual case, and faster than `per_env`
            return torch.from_numpy(array)
        return per_env(array, dtype, name, self.num_envs, torch.device("cpu"), copy=False)

    def _final_and_next(self, obs: Obs, done: Tensor, infos: dict[str, Any]) -> tuple[Any, Obs]:
        """The final observation and the one to act on next, by the autoreset mode."""
        if self.mode is AutoresetMode.NEXT_STEP:
            return obs, obs
        if self.mode is AutoresetMode.DISABLED:
            return obs, self._to_obs(self.env.reset(options={"reset_mask": done if self._tensors else done.numpy()})[0])
        found = find_final(infos)
        self.gives_final_obs = found is not None or not self._watch(done.to(self.device))
        if not self._tensors and isinstance(found, np.ndarray) and found.dtype == object:
            rows = create_empty_array(self._stored, self.num_envs)
            for index in done.nonzero().flatten().tolist():
                put_row(rows, index, found[index], self._space)
            return to_obs(rows, self.device), obs
        return None if found is None else full_final(found, done.to(self.device), copy=True), obs

    def _to_obs(self, obs: Any) -> Obs:
        rows = obs if self._tensors else batch_to_rows(obs, self._space, self.num_envs)
        return to_obs(rows, self.device, copy=self._tensors)

    def render(self) -> Any:
        """Return an image of the first environment, if the environment renders arrays."""
        frames = self.env.render() if getattr(self.env, "render_mode", None) == "rgb_array" else None
        return None if frames is None else frames[0]

    def close(self) -> None:
        """Close the environment."""
        if self._failure is None:
            self.env.close()
        else:
            with contextlib.suppress(EOFError, OSError):
                self.env.close(terminate=True)


class EnvPoolAdapter(GymVectorEnvAdapter):
    """An EnvPool made with `env_type="gymnasium"` that returns all environments in every step."""

    def __init__(self, env: Any, device: Device | None = None, clip_actions: bool = True) -> None:
        if not hasattr(env, "single_observation_space"):
            raise TypeError(f'{type(env).__name__} has another interface; make it with env_type="gymnasium"')
        num, num_envs = env.config["batch_size"], env.config["num_envs"]
        if num != num_envs:
            raise ValueError(f"EnvPool returns {num} of {num_envs} environments per step; make it without batch_size")
        super().__init__(env, device or "cpu", None, clip_actions)
        self.contract, self.overlaps = "EnvPool", True
        self._begin, self._end = direct_halves(env, num_envs) or (env.send, env.recv)
        self.max_episode_length = int(env.config["max_episode_steps"])
        self._elapsed = np.zeros(num_envs, np.int64)
        self._camera = 0  # the first of a model's cameras follows its robot
        period = env.config.get("ctrl_dt")
        self.metadata = {"render_fps": None if period is None else round(1 / period)}

    def seed(self, seed: int) -> None:
        """Raise: the seed of an EnvPool is fixed when it is made."""
        raise NotImplementedError(f"an EnvPool is seeded when it is made: envpool.make(..., seed={seed})")

    def reset(self) -> tuple[Obs, Obs]:
        """Start a new episode in every environment."""
        self._elapsed = np.zeros(self.num_envs, np.int64)
        return super().reset()

    def recv(self) -> StepRecord:
        """Finish the step that `send` began."""
        record = super().recv()
        self._elapsed = record.extras["infos"].get("elapsed_step", self._elapsed)
        return record

    @property
    def elapsed_steps(self) -> Tensor:
        """(N,) steps taken in each running episode, 0 where the last step only reset."""
        return torch.as_tensor(np.array(self._elapsed, np.int64), device=self.device)

    def render(self) -> Any:
        """Return an image of the first environment, from the model's first camera or else from a fixed one."""
        if self.env.render_mode != "rgb_array":
            return None
        try:
            return self.env.render(camera_id=self._camera)[0]
        except IndexError:
            self._camera = -1
            return self.env.render(camera_id=self._camera)[0]


def is_envpool(env: Any) -> bool:
    """Whether `env` is an EnvPool, tested without importing envpool."""
    return any(base.__module__.startswith("envpool.") for base in type(env).__mro__)


def make_envpool(
    task: str, num_envs: int, device: Any, seed: int | None, render_mode: str | None, **kwargs: Any
) -> EnvPoolAdapter:
    """Make the EnvPool of an EnvPool id."""
    egl = load_egl()
    try:
        envpool = importlib.import_module("envpool")
    except ImportError as error:
        raise ImportError(f"'envpool/{task}' needs EnvPool: pip install 'canter[envpool]'") from error
    if render_mode == "rgb_array" and egl is not None:
        raise ImportError(f"EnvPool cannot render here: {egl}")
    if task not in (known := envpool.list_all_envs()):
        names = [f"envpool/{name}" for name in known]
        raise ValueError(unknown_name("task", f"envpool/{task}", names, "EnvPool", "envpool.list_all_envs() has all"))
    # As many threads as cores this process may use, which may be fewer than the machine has.
    options = {"num_threads": min(num_envs, usable_cores()), "seed": seed, "render_mode": render_mode}
    given = {name: value for name, value in options.items() if value is not None} | kwargs
    return EnvPoolAdapter(envpool.make(task, env_type="gymnasium", num_envs=num_envs, **given), device)


@functools.cache
def load_egl() -> str | None:
    """Load the system's EGL, without which EnvPool's MuJoCo ends the process when it renders; the reason if it cannot.

    EnvPool brings an EGL of its own, which finds no driver. The one that was loaded first is used.
    """
    if not sys.platform.startswith("linux"):
        return None
    if "envpool" in sys.modules:
        return "envpool was imported before canter loaded EGL; let canter make the environment first"
    try:
        ctypes.CDLL("libEGL.so.1", mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        return f"{error}; install Mesa's EGL (Debian, Ubuntu: apt install libegl1)"
    return None


def direct_halves(env: Any, num_envs: int) -> tuple[Callable[..., None], Callable[[], Any]] | None:
    """EnvPool's `send` and `recv` without its trees, a tenth of the step of eight small robots; None if unusual."""
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
