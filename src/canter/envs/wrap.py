"""`wrap_env` turns anything that looks like environments into a `VecEnv`, by registered adapters and names."""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from types import ModuleType
from typing import Any, NamedTuple

import gymnasium
import torch

from canter.compat.batched_envs import ObsGroups, RslRlAdapter, is_apexrl, is_batched
from canter.compat.stable_baselines3 import SB3Vector, is_sb3
from canter.envs.components import MotionFeatures, ObsComponents
from canter.envs.gymnasium import GymVecEnv
from canter.envs.gymnasium_vector import EnvPoolAdapter, GymVectorEnvAdapter, is_envpool, make_envpool
from canter.envs.mjlab import MjlabAdapter, is_mjlab, make_mjlab
from canter.envs.torch_envs import TORCH_ENVS
from canter.envs.vec_env import Device, VecEnv
from canter.envs.workers import WorkerVecEnv
from canter.envs.wrappers import ChannelsFirst, ClipActions, FlattenObs, ToDevice, VecEnvWrapper
from canter.utils.config import unknown_name
from canter.utils.memory import MemoryLimit, free_memory, readable


class Adapter(NamedTuple):
    """A family of environments that `wrap_env` recognises."""

    name: str
    matches: Callable[[Any], bool]
    adapt: Callable[..., VecEnv]
    looks_for: str


ADAPTERS: dict[str, Adapter] = {}
"""Registered adapters; the newest is tried first."""
ENV_NAMES: dict[str, Callable[..., Any]] = {}
"""Functions that make environments, by name or by the part of a name before the slash."""
ENV_OPTIONS = ("env_kwargs", "wrappers", "components")
"""Arguments of `make_env` that are part of a run's configuration."""
LEAST_ENV, LEAST_WORKER = 1 << 10, 1 << 24  # bytes that an environment and a worker process need at least
VEC_WRAPPERS = {cls.__name__: cls for cls in (ChannelsFirst, ClipActions, FlattenObs, MotionFeatures, ObsComponents)}


def register_adapter(
    name: str, matches: Callable[[Any], bool], adapt: Callable[..., VecEnv], looks_for: str = ""
) -> None:
    """Make `wrap_env` recognise one more family of environments.

    The adapter registered last is tried first, so a user's adapters come before canter's. A known name is replaced.
    `matches` is called with any object given to `wrap_env`; `adapt(env, device, seed, obs_groups)`, whose arguments may
    be None, returns a `VecEnv`; `looks_for`, by default the docstring of `matches`, is for error messages.
    """
    ADAPTERS.pop(name, None)
    ADAPTERS[name] = Adapter(name, matches, adapt, looks_for or (matches.__doc__ or "no description").strip())


def register_env(name: str, make: Callable[..., Any]) -> None:
    """Make environments available by name, in `wrap_env`, `make_env` and on the command line.

    `name` is a full name, "my/reach", or a prefix, "my", for every name "my/<task>". `make(task, num_envs, device,
    seed, render_mode)`, called with the part after the slash as `task`, returns any environments `wrap_env` recognises.
    The `env_kwargs` of `make_env` are further keywords of it.
    """
    ENV_NAMES[name] = make


def find_adapter(env: Any) -> Adapter | None:
    """The adapter registered last that matches `env`."""
    return next((adapter for adapter in reversed(ADAPTERS.values()) if adapter.matches(env)), None)


def wrap_env(
    env: Any,
    device: Device | None = None,
    num_envs: int | None = None,
    seed: int | None = None,
    obs_groups: ObsGroups | None = None,
    render_mode: str | None = None,
) -> VecEnv:
    """Adapt environments of any registered family to a `VecEnv`.

    Args:
        env: An environment, a function that makes one, or a name.
        device: Device of the learner; by default that of the environment.
        num_envs: Number of environments to make, for a name or a function.
        seed: Makes the episodes repeatable.
        obs_groups: For environments with observation groups, the groups of the "actor" and of the "critic".
        render_mode: For a name; with "rgb_array", `render` returns images.
    """
    if num_envs is not None:
        check_num_envs(num_envs)
    if isinstance(env, str):
        return make_env(env, device, num_envs or 1, seed, render_mode)
    adapter, source = None if isinstance(env, type) else find_adapter(env), env
    is_function = adapter is None and callable(env)
    if is_function:
        source = env()
        adapter = find_adapter(source)
    if adapter is None:
        names = ", ".join(f'"{name}"' if "/" in name else f'"{name}/<task>"' for name in ENV_NAMES)
        known = [f"- {adapter.name}: {adapter.looks_for}" for adapter in reversed(ADAPTERS.values())]
        known += ["- a function that returns one of these", f"- a name: a Gymnasium id, {names}"]
        text = f"{env!r} returned {source!r}; it must return an environment."
        text = text if is_function else f"{type(env).__name__} is no environment that canter knows."
        raise TypeError("\n".join([f"{text} Registered adapters, in the order tried:", *known]))
    if is_function and adapter.name == "Gymnasium" and isinstance(source, gymnasium.Env):
        source = [source, *(env() for _ in range((num_envs or 1) - 1))]
    wrapped = adapter.adapt(source, device, seed, obs_groups)
    if not isinstance(wrapped, VecEnv):
        raise TypeError(f"the adapter {adapter.name!r} returned {type(wrapped).__name__}, not a canter.envs.VecEnv")
    if wrapped is not source:
        wrapped.adapter = adapter.name
    if num_envs is not None and wrapped.num_envs != num_envs:
        raise ValueError(f"num_envs={num_envs} was requested, but {type(env).__name__} holds {wrapped.num_envs}")
    return on_device(wrapped, device)


def check_num_envs(number: Any) -> None:
    """Raise if the number of environments is not a whole one of at least 1."""
    if not isinstance(number, Integral) or isinstance(number, bool) or number < 1:
        raise ValueError(f"num_envs must be a whole number of at least 1, got {number!r}")


def on_device(env: VecEnv, device: Device | None) -> VecEnv:
    """`env` itself if it is on `device`, otherwise a wrapper that moves its tensors; "cuda" is any CUDA device."""
    a, b = env.device, torch.device(device or env.device)
    same = a.type == b.type and (a.index == b.index or a.index is None or b.index is None)
    return env if same else ToDevice(env, b)


def make_env(
    name: str,
    device: Device | None = None,
    num_envs: int = 1,
    seed: int | None = None,
    render_mode: str | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Any = None,
    components: Mapping[str, Any] | None = None,
    num_workers: int = 0,
    **worker_options: Any,
) -> VecEnv:
    """Make environments by a registered name or a Gymnasium id.

    Args:
        name: The name. "module:name" imports the module first, which may register the name, as Gymnasium does.
        device: Device of the learner; by default that of the environment.
        num_envs: Number of environments.
        seed: Makes the episodes repeatable.
        render_mode: With "rgb_array", `render` returns images.
        env_kwargs: Further arguments of the environment's constructor.
        wrappers: Names of wrappers, innermost first, each alone or as `{name: arguments}`: of `gymnasium.wrappers`,
            around each environment; of canter, around all of them; or "module:Class".
        components: Arguments of `ObsComponents`, the outermost wrapper.
        num_workers: Processes that step Gymnasium environments; 0 steps them in this one.
        worker_options: Arguments of `WorkerVecEnv`.
    """
    check_num_envs(num_envs)
    free, needed = free_memory(torch.device("cpu")), num_envs * LEAST_ENV + num_workers * LEAST_WORKER
    if free is not None and needed > free:
        number = f"{num_envs:,} environments" + f" in {num_workers:,} processes" * bool(num_workers)
        raise MemoryError(f"{number} need at least {readable(needed)}, but {readable(free)} are free; make fewer")
    calls = [(find_wrapper(wrapper), arguments) for wrapper, arguments in wrapper_arguments(wrappers)]
    inner = [call for call in calls if not issubclass(call[0], VecEnvWrapper)]
    full_name = name
    module, _, name = name.rpartition(":")
    if module:
        import_task_module(module, full_name)
    prefix, _, task = name.rpartition("/")
    make = ENV_NAMES.get(name) or ENV_NAMES.get(prefix)
    if make is not None and num_workers:
        raise ValueError(f"{name!r} is no Gymnasium id: only those are stepped by worker processes; leave out workers")
    if num_workers:
        one = functools.partial(make_one, full_name, env_kwargs, inner)
        made = WorkerVecEnv([one] * num_envs, num_workers, device or "cpu", seed, **worker_options)
    elif make is not None:
        if inner:
            problem = f"{inner[0][0].__name__} wraps single Gymnasium environments, and {name!r} makes a batch"
            raise ValueError(f"{problem}; use {', '.join(VEC_WRAPPERS)} or another subclass of VecEnvWrapper")
        options = {"num_envs": num_envs, "device": device, "seed": seed, "render_mode": render_mode}
        made = make(task, **options, **(env_kwargs or {}))
    else:
        # Not every environment takes a render mode.
        options = {**(env_kwargs or {}), **({} if render_mode is None else {"render_mode": render_mode})}
        envs: list[Any] = [gymnasium.make(name, disable_env_checker=True, **options) for _ in range(num_envs)]
        for wrapper, arguments in inner:
            envs = [wrapper(env, **arguments) for env in envs]
        made = GymVecEnv(envs, device or "cpu", seed)
    # A VecEnv has its seed already: to seed it again would change its random stream, and EnvPool refuses.
    env = on_device(made, device) if isinstance(made, VecEnv) else wrap_env(made, device, num_envs, seed)
    with MemoryLimit("a wrapper of the environments"):
        for wrapper, arguments in calls:
            env = wrapper(env, **arguments) if issubclass(wrapper, VecEnvWrapper) else env
        return env if components is None else ObsComponents(env, **components)


def import_named(module: str) -> ModuleType:
    """Import a module that a user names; the installed `canter` has no working directory in its Python path."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return importlib.import_module(module)


def import_task_module(module: str, task: str) -> None:
    """Import the module in front of a task's name, which registers the task."""
    try:
        import_named(module)
    except ModuleNotFoundError as error:
        if error.name != module:  # the module exists and imports another one that does not
            raise
        problem = f"there is no module {module!r} for the task {task!r}"
        raise ModuleNotFoundError(f"{problem}; start in its folder, or add that to PYTHONPATH", name=module) from error


def make_one(name: str, env_kwargs: Mapping[str, Any] | None, wrappers: Sequence[tuple[Any, Any]]) -> gymnasium.Env:
    """Make one Gymnasium environment in a worker process, where plugins and the module of the name are not loaded."""
    from canter.cli import load_plugins

    load_plugins()
    env = gymnasium.make(name, disable_env_checker=True, **(env_kwargs or {}))
    for wrapper, arguments in wrappers:
        env = wrapper(env, **arguments)
    return env


def env_options(run: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `make_env` in the `run` section of a configuration."""
    return {name: run[name] for name in ENV_OPTIONS if run.get(name) is not None}


def wrapper_arguments(wrappers: Any) -> Iterable[tuple[str, dict[str, Any]]]:
    """Name and arguments of every wrapper in a name, a mapping by name, or a list of these."""
    if wrappers is None:
        return
    if isinstance(wrappers, str):
        yield wrappers, {}
    elif isinstance(wrappers, Mapping):
        yield from ((str(name), dict(arguments or {})) for name, arguments in wrappers.items())
    elif isinstance(wrappers, Sequence):
        for wrapper in wrappers:
            yield from wrapper_arguments(wrapper)
    else:
        raise TypeError(f"wrappers are names, or {{name: arguments}}, got {wrappers!r}")


def find_wrapper(name: str) -> type:
    """A wrapper class of canter or of `gymnasium.wrappers` by its name, or "module:Class"."""
    module, _, class_name = name.rpartition(":")
    place = import_named(module) if module else gymnasium.wrappers
    found = VEC_WRAPPERS.get(name) or getattr(place, class_name, None)
    if not isinstance(found, type):
        known = [*VEC_WRAPPERS, *(n for n in dir(gymnasium.wrappers) if n[0].isupper())]
        raise ValueError(unknown_name("wrapper", name, [*known, "module:Class"]))
    return found


def make_torch_env(
    task: str, num_envs: int, device: Any, seed: int | None, render_mode: str | None, **options: Any
) -> VecEnv:
    """Make one of canter's torch-native environments."""
    if task not in TORCH_ENVS:
        raise ValueError(unknown_name("torch-native task", f"canter/{task}", [f"canter/{name}" for name in TORCH_ENVS]))
    return TORCH_ENVS[task](num_envs, device or "cpu", seed, **options)


def seed_vec_env(env: VecEnv, device: Any, seed: int | None, obs_groups: Any) -> VecEnv:
    """The environment itself, seeded."""
    if seed is not None:
        env.seed(seed)
    return env


def is_gymnasium(env: Any) -> bool:
    """Whether `env` is a Gymnasium environment, or a list of them or of functions that make them."""
    if isinstance(env, Sequence) and env:
        return all(callable(item) or isinstance(item, gymnasium.Env) for item in env)
    return isinstance(env, gymnasium.Env)


def is_pettingzoo(env: Any) -> bool:
    """Whether `env` is PettingZoo's, with several agents."""
    return any(cls.__module__.startswith("pettingzoo.") for cls in type(env).__mro__)


def refuse_pettingzoo(env: Any, *_: Any) -> VecEnv:
    """Raise an error that says how to train on an environment of several agents."""
    way_out = "SuperSuit's pettingzoo_env_to_vec_env_v1 makes a vector environment of agents that share one policy"
    raise TypeError(f"{type(env).__name__} is an environment of PettingZoo, with several agents; {way_out}")


# Later adapters are tried first, so each is more specific than those above it.
register_adapter(
    "Gymnasium",
    is_gymnasium,
    lambda env, device, seed, _: GymVecEnv(env, device or "cpu", seed),
    "a gymnasium.Env, or a list of them or of functions that make them",
)
register_adapter(
    "rsl_rl style", is_batched, RslRlAdapter, "num_envs, num_actions, step(actions), and reset() or get_observations()"
)
register_adapter("mjlab", is_mjlab, MjlabAdapter, "an mjlab ManagerBasedRlEnv, bare or in RslRlVecEnvWrapper")
register_adapter("ApexRL style", is_apexrl, RslRlAdapter, "the same with observation_space_gym or action_space_gym")
register_adapter(
    "Gymnasium vector",
    lambda env: isinstance(env, gymnasium.vector.VectorEnv),
    lambda env, device, seed, _: GymVectorEnvAdapter(env, device, seed),
    "a gymnasium.vector.VectorEnv",
)
register_adapter(
    "EnvPool", is_envpool, lambda e, device, *_: EnvPoolAdapter(e, device), 'an EnvPool made with env_type="gymnasium"'
)
register_adapter(
    "Stable-Baselines3",
    is_sb3,
    lambda env, device, seed, _: GymVectorEnvAdapter(SB3Vector(env), device, seed),  # pyright: ignore[reportArgumentType]
    "a stable_baselines3 VecEnv",
)
register_adapter("PettingZoo", is_pettingzoo, refuse_pettingzoo, "several agents: refused, with the way out")
register_adapter("canter", lambda env: isinstance(env, VecEnv), seed_vec_env, "a canter.envs.VecEnv, used as it is")
register_env("canter", make_torch_env)
register_env("envpool", make_envpool)
register_env("mjlab", make_mjlab)
