"""Runs a bundle in a simulation, at its control period, with delay, noise and pushes, and reports what happened.

Gymnasium and EnvPool tasks and MuJoCo scenes need no torch; other tasks go through canter's adapters, which do.
"""

import dataclasses
import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from canter.export.runtime import BundleError, Policy
from canter.export.scene import push

MAX_STEPS = 100_000
TASK_NAME = re.compile(r"[A-Za-z0-9_./\-]{1,200}")


@dataclasses.dataclass
class Disturbance:
    """What makes a simulation differ from the one that the policy was trained in."""

    delay: int = 0  # Control steps by which actions come late.
    noise: float = 0.0  # Standard deviation of noise that is added to observations.
    push: float = 0.0  # Velocity in m/s that pushes add to the robot's base; MuJoCo only.
    push_interval: float = 2.0  # Seconds between two pushes.


@dataclasses.dataclass
class Report:
    """Episodes of a simulation."""

    returns: list[float]
    lengths: list[int]
    falls: int
    """Episodes that ended in a terminal state."""
    error_x: float | None
    """Root mean square of commanded minus actual forward velocity in m/s, where there is a command."""
    error_y: float | None
    """The same sideways."""
    error_yaw: float | None
    """The same of turning, in rad/s."""
    mean_velocity: float | None
    """Mean forward velocity of the base in m/s, where it is known."""
    step_median: float
    """Median time of the policy's step in seconds."""
    step_p99: float
    late_steps: int
    """Steps of the policy that took longer than the control period."""

    def summary(self) -> dict[str, Any]:
        """The report in plain containers, with the mean and spread of the returns."""
        plain = dataclasses.asdict(self)
        known = [value for value in self.returns if math.isfinite(value)]
        mean = {"mean_return": float(np.mean(known)), "std_return": float(np.std(known))} if known else {}
        return {**mean, **plain, "returns": known}


class GymnasiumTask:
    """One Gymnasium environment, with observations in the form of the bundle."""

    def __init__(
        self,
        task: str,
        policy: Policy,
        seed: int | None = None,
        render_mode: str | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        import gymnasium

        options = {**(env_kwargs or {}), **({} if render_mode is None else {"render_mode": render_mode})}
        self.env = gymnasium.make(task, disable_env_checker=True, **options)
        if isinstance(self.env.action_space, (gymnasium.spaces.Tuple, gymnasium.spaces.Dict)):
            from canter.envs.gymnasium import FlatActions

            self.env = FlatActions(self.env)
        self.space, self.seed, self.spec = self.env.observation_space, seed, policy.spec
        self.action_space = self.env.action_space
        self.convert = Converter(self.space, policy.spec)
        base: Any = self.env.unwrapped
        self.physics = (base.model, base.data) if hasattr(base, "model") and hasattr(base, "data") else None
        self.fps = (self.env.metadata or {}).get("render_fps") or 30

    def reset(self, episode: int) -> Any:
        """Start an episode; the first one has the seed, later ones follow it."""
        return self.convert(self.env.reset(seed=None if self.seed is None else self.seed + episode)[0])

    def step(self, action: Any) -> tuple[Any, float, bool, bool]:
        """Apply one action: observation, reward, terminated, truncated."""
        obs, reward, terminated, truncated, _ = self.env.step(env_action(action, self.action_space))
        return self.convert(obs), float(reward), bool(terminated), bool(truncated)

    def render(self) -> Any:
        """A picture."""
        return self.env.render()

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


class EnvPoolTask:
    """One EnvPool environment; a new pool is made for each episode, so that every episode has its own seed."""

    physics, fps = None, 50

    def __init__(
        self, task: str, policy: Policy, seed: int | None = None, env_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.task, self.seed, self.policy, self.env_kwargs = task, seed, policy, env_kwargs or {}
        self.env: Any = None

    def reset(self, episode: int) -> Any:
        """Start an episode."""
        import envpool

        options = {**self.env_kwargs, **({} if self.seed is None else {"seed": self.seed + episode})}
        self.env = envpool.make(self.task, env_type="gymnasium", num_envs=1, num_threads=1, **options)
        self.action_space = self.env.single_action_space
        self.convert = Converter(self.env.single_observation_space, self.policy.spec)
        return self.convert(first_row(self.env.reset()[0]))

    def step(self, action: Any) -> tuple[Any, float, bool, bool]:
        """Apply one action: observation, reward, terminated, truncated."""
        given = np.asarray(env_action(action, self.action_space))[None]
        obs, reward, terminated, truncated, _ = self.env.step(given)
        is_truncated = bool(truncated[0])
        return self.convert(first_row(obs)), float(reward[0]), bool(terminated[0]) and not is_truncated, is_truncated

    def render(self) -> Any:
        """No picture."""
        return None

    def close(self) -> None:
        """Nothing to close."""


class AdaptedTask:
    """One environment of any task that canter's adapters know, torch-native and registered ones included."""

    physics = None

    def __init__(self, task: str, policy: Policy, seed: int | None = None, render_mode: str | None = None) -> None:
        import torch

        from canter.envs.wrap import env_options, make_env
        from canter.envs.wrappers import FlattenObs
        from canter.utils.reading import named_modules
        from canter.utils.tree import tree_leaves

        self.torch, self.leaves = torch, tree_leaves
        options = env_options(policy.spec["training"])
        if any(named_modules({"run": options})):
            raise BundleError(f"the bundle's wrappers {options['wrappers']} would import a module; they are not made")
        env = make_env(task, "cpu", 1, seed, render_mode, **options)
        self.fps = (getattr(env, "metadata", None) or {}).get("render_fps") or 30
        is_flat = len(policy.spec["inputs"]) == 1
        self.env = FlattenObs(env) if is_flat else env
        check_widths({name or "obs": space.shape for name, space in tree_leaves(self.env.obs_space)}, policy.spec)

    def reset(self, episode: int) -> Any:
        """Start an episode."""
        return self._arrays(self.env.reset()[0])

    def _arrays(self, obs: Any) -> dict[str, np.ndarray]:
        return {name or "obs": leaf[0].cpu().numpy() for name, leaf in self.leaves(obs)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool]:
        """Apply one action: observation, reward, terminated, truncated."""
        step = self.env.step(self.torch.as_tensor(np.asarray(action))[None])
        return self._arrays(step.obs), float(step.reward[0]), bool(step.terminated[0]), bool(step.truncated[0])

    def render(self) -> Any:
        """A picture."""
        return self.env.render()

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


def make_task(policy: Policy, task: str | None, seed: int | None, render_mode: str | None = None) -> Any:
    """The simulation of a task by name; by default the task that the bundle was trained on."""
    given, trained = task, policy.spec["training"]
    if task is None:
        task = trained.get("task")
        if not isinstance(task, str):
            raise BundleError("the bundle does not say on which task it was trained; name one: --task NAME")
        if not TASK_NAME.fullmatch(task):  # "module:name" would import a module
            raise BundleError(f"the bundle names the task {task!r}, which is not made without asking; give it: --task")
    kwargs = (trained.get("env_kwargs") if given is None else None) or {}
    is_plain = given is not None or not any(trained.get(name) for name in ("wrappers", "components"))
    is_plain &= all(isinstance(value, (bool, int, float)) for value in kwargs.values())
    if task.startswith("envpool/") and is_plain and render_mode is None:
        return EnvPoolTask(task.removeprefix("envpool/"), policy, seed, kwargs)
    if is_plain and is_gymnasium_task(task):
        return GymnasiumTask(task, policy, seed, render_mode, kwargs)
    return AdaptedTask(task, policy, seed, render_mode)


def is_gymnasium_task(task: str) -> bool:
    """Whether Gymnasium has the task, without making it."""
    import gymnasium

    return task.rpartition(":")[2] in gymnasium.registry or ":" in task


class Converter:
    """Brings observations of a Gymnasium space into the form of a bundle's inputs."""

    def __init__(self, space: Any, spec: Mapping[str, Any]) -> None:
        from gymnasium import spaces

        self.spaces, self.group = spaces, spec.get("obs_group")
        if self.group is not None and isinstance(space, spaces.Dict) and self.group in space.spaces:
            space = space[self.group]
        else:
            self.group = None
        self.space, self.names = space, [port["name"] for port in spec["inputs"]]
        self.is_flat = len(self.names) == 1
        shapes = dict(self._shapes(space, ""))
        if self.is_flat and isinstance(space, spaces.Dict):
            shapes = {self.names[0]: (sum(math.prod(shape) for shape in shapes.values()),)}
        elif self.is_flat:
            shapes = {self.names[0]: next(iter(shapes.values()))}
        check_widths(shapes, spec)

    def _shapes(self, space: Any, prefix: str) -> Any:
        if isinstance(space, self.spaces.Dict):
            for name, part in space.spaces.items():
                yield from self._shapes(part, f"{prefix}.{name}" if prefix else name)
        else:
            is_box = isinstance(space, self.spaces.Box)
            yield prefix, tuple(space.shape if is_box else (self.spaces.flatdim(space),))

    def __call__(self, obs: Any) -> dict[str, np.ndarray]:
        """Arrays by input name."""
        leaves = list(self._leaves(self.space, obs if self.group is None else obs[self.group], ""))
        if not self.is_flat:
            return dict(leaves)
        arrays = [leaf for _, leaf in leaves]
        joined = arrays[0] if len(arrays) == 1 else np.concatenate([array.ravel() for array in arrays])
        return {self.names[0]: joined}

    def _leaves(self, space: Any, obs: Any, prefix: str) -> Any:
        if isinstance(space, self.spaces.Dict):
            for name, part in space.spaces.items():
                yield from self._leaves(part, obs[name], f"{prefix}.{name}" if prefix else name)
        else:
            yield prefix, np.asarray(obs if isinstance(space, self.spaces.Box) else self.spaces.flatten(space, obs))


def check_widths(shapes: Mapping[str, tuple[int, ...]], spec: Mapping[str, Any]) -> None:
    """Refuse an environment whose observations are not those of the bundle."""
    wanted = {port["name"]: tuple(port["shape"]) for port in spec["inputs"]}
    found = {name: tuple(shape) for name, shape in shapes.items()}
    if found != wanted:
        raise BundleError(f"the environment's observations are {found}, but the bundle wants {wanted}")


def first_row(tree: Any) -> Any:
    """The first row of every array."""
    return {name: first_row(leaf) for name, leaf in tree.items()} if isinstance(tree, Mapping) else tree[0]


def env_action(action: Any, space: Any) -> Any:
    """A policy's action, numbered from 0 if it is discrete, as the environment's space wants it."""
    start = getattr(space, "start", 0)
    if np.issubdtype(space.dtype, np.integer):
        counted = np.asarray(action) + start
        return int(counted) if not space.shape else counted.reshape(space.shape).astype(space.dtype)
    return np.clip(np.asarray(action, space.dtype).reshape(space.shape), space.low, space.high)


class Meter:
    """What happens in the steps of a simulation."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.errors: list[np.ndarray] = []
        self.speeds: list[float] = []

    def add(self, task: Any, seconds: float) -> None:
        """Add one step."""
        self.times.append(seconds)
        if hasattr(task, "velocity"):
            velocity, command = task.velocity(), task.command
            self.speeds.append(float(velocity[0]))
            if len(command):
                count = min(len(velocity), len(command))
                self.errors.append((velocity[:count] - command[:count]) ** 2)

    def report(self, returns: list[float], lengths: list[int], falls: int, period: float | None) -> Report:
        """The report of all steps."""
        known: list[float | None] = np.sqrt(np.mean(self.errors, axis=0)).tolist() if self.errors else []
        x, y, yaw = [*known, None, None, None][:3]
        speed = float(np.mean(self.speeds)) if self.speeds else None
        slow = sum(seconds > period for seconds in self.times) if period else 0
        ends = (float(np.median(self.times)), float(np.quantile(self.times, 0.99)))
        return Report(returns, lengths, falls, x, y, yaw, speed, *ends, slow)


def add_noise(obs: Mapping[str, np.ndarray], scale: float, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """The observation with normal noise on its float parts."""
    return {
        name: value + generator.normal(0.0, scale, value.shape) if value.dtype.kind == "f" else value
        for name, value in obs.items()
    }


def simulate(
    policy: Policy,
    task: Any,
    episodes: int = 1,
    disturbance: Disturbance | None = None,
    seed: int | None = None,
    on_step: Callable[[Any], bool | None] | None = None,
) -> Report:
    """Run episodes of a task with a policy; `on_step(task)` is called after every step and ends it all by True."""
    given, generator, meter = disturbance or Disturbance(), np.random.default_rng(seed), Meter()
    if min(given.delay, given.noise, given.push, episodes - 1) < 0 or given.push_interval <= 0:
        raise ValueError(f"delay, noise and push must not be negative, and there must be an episode; got {given}")
    if given.push and task.physics is None:
        raise ValueError("pushes need MuJoCo's data, which this task does not show; play it with --mujoco scene.xml")
    period = getattr(task, "period", None) or policy.spec.get("control_period")
    between = max(1, round(given.push_interval / period)) if period else 100
    returns: list[float] = []
    lengths: list[int] = []
    falls, is_over = 0, False
    while len(returns) < episodes and not is_over:
        obs, total, length, terminated = task.reset(len(returns)), 0.0, 0, False
        policy.reset()
        late: deque[Any] = deque()
        for length in range(1, MAX_STEPS + 1):
            seen = add_noise(obs, given.noise, generator) if given.noise else obs
            begin = time.perf_counter()
            action = policy(seen)
            seconds = time.perf_counter() - begin
            late.append(action)
            ready = late.popleft() if len(late) > given.delay else np.zeros_like(action)
            obs, reward, terminated, truncated = task.step(ready)
            meter.add(task, seconds)
            total += reward
            if given.push and length % between == 0:
                push(task.physics, given.push, generator)
            is_over = bool(on_step is not None and on_step(task))
            if terminated or truncated or is_over:
                break
        returns.append(total)
        lengths.append(length)
        falls += terminated
    return meter.report(returns, lengths, falls, period)
