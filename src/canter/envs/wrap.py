"""The one door: anything that looks like environments becomes a `VecEnv`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import torch

from canter.envs.envpool import EnvPoolAdapter, is_envpool
from canter.envs.gymnasium import GymVecEnv
from canter.envs.rsl_rl import RslRlAdapter, is_batched
from canter.envs.torch_envs import TORCH_ENVS
from canter.envs.vec_env import VecEnv
from canter.envs.vector import GymVectorEnvAdapter
from canter.envs.wrappers import ToDevice
from canter.utils.runtime import usable_cores

LOOKED_FOR = """\
- a canter.envs.VecEnv
- a gymnasium.vector.VectorEnv or an EnvPool
- a gymnasium.Env, a function that makes one, or a list of such functions
- rsl_rl style: num_envs, num_actions, step(actions), and reset() or get_observations()
- a name: "CartPole-v1" (Gymnasium), "canter/CartPole" (torch-native), "envpool/HalfCheetah-v5\""""


def wrap_env(
    env: Any,
    device: torch.device | str | None = None,
    num_envs: int | None = None,
    seed: int | None = None,
    obs_groups: Mapping[str, Sequence[str]] | None = None,
    render_mode: str | None = None,
) -> VecEnv:
    """Recognise what `env` is and adapt it.

    Args:
        env: an environment of any kind listed in `LOOKED_FOR`, a function or functions that make one, or a name.
        device: where the learner wants its tensors; by default where the environment has them.
        num_envs: how many to make, for a name or a function.
        seed: makes the episodes repeatable.
        obs_groups: for rsl_rl-style environments, which observation groups the "actor" and the "critic" see.
        render_mode: for a name; "rgb_array" makes `render` give pictures.
    """
    if isinstance(env, str):
        return make_env(env, device, num_envs or 1, seed, render_mode)
    wrapped = _adapt(env, device, num_envs, seed, obs_groups)
    if num_envs is not None and wrapped.num_envs != num_envs:
        raise ValueError(f"num_envs={num_envs} was asked for, but {type(env).__name__} holds {wrapped.num_envs}")
    return wrapped


def _adapt(env: Any, device: Any, num_envs: int | None, seed: int | None, obs_groups: Any) -> VecEnv:
    if isinstance(env, VecEnv):
        if seed is not None:
            env.seed(seed)
        return env if device is None or same_device(env.device, torch.device(device)) else ToDevice(env, device)
    if is_envpool(env):
        return EnvPoolAdapter(env, device)
    if isinstance(env, gymnasium.vector.VectorEnv):
        return GymVectorEnvAdapter(env, device, seed)
    if type(getattr(env, "unwrapped", env)).__module__.startswith("mani_skill."):
        raise TypeError("a bare ManiSkill environment does not reset itself; wrap it in ManiSkillVectorEnv first")
    if is_batched(env):
        return RslRlAdapter(env, obs_groups, device, seed)
    if isinstance(env, gymnasium.Env):
        return GymVecEnv(env, device or "cpu", seed)
    if isinstance(env, Sequence) and env and all(callable(item) or isinstance(item, gymnasium.Env) for item in env):
        return GymVecEnv(env, device or "cpu", seed)
    if callable(env):
        return _from_function(env, device, num_envs, seed, obs_groups)
    raise TypeError(f"{type(env).__name__} is no environment that canter knows. It looked for:\n{LOOKED_FOR}")


def _from_function(make: Callable[[], Any], device: Any, num_envs: int | None, seed: int | None, groups: Any) -> VecEnv:
    first = make()
    if isinstance(first, gymnasium.Env) and not is_batched(first) and not is_envpool(first):
        rest = [make() for _ in range((num_envs or 1) - 1)]
        return GymVecEnv([first, *rest], device or "cpu", seed)
    if isinstance(first, str) or callable(first):
        raise TypeError(f"{make!r} returned {first!r}; it must return an environment")
    return _adapt(first, device, num_envs, seed, groups)


def same_device(a: torch.device, b: torch.device) -> bool:
    """Whether two devices are one, "cuda" being any CUDA device."""
    return a.type == b.type and (a.index == b.index or a.index is None or b.index is None)


def make_env(
    name: str,
    device: torch.device | str | None = None,
    num_envs: int = 1,
    seed: int | None = None,
    render_mode: str | None = None,
) -> VecEnv:
    """Make environments by name: "canter/<class>", "envpool/<id>" or a Gymnasium id."""
    family, _, rest = name.partition("/")
    if family == "canter":
        if rest not in TORCH_ENVS:
            raise ValueError(f"no torch-native environment {rest!r}; there are {', '.join(sorted(TORCH_ENVS))}")
        return TORCH_ENVS[rest](num_envs, device or "cpu", seed)
    if family == "envpool":
        try:
            envpool = importlib.import_module("envpool")
        except ImportError as error:
            raise ImportError(f"{name!r} needs EnvPool: pip install 'canter[envpool]'") from error
        # As many threads as cores this process may use, which may be fewer than the machine has.
        options: dict[str, Any] = {"num_threads": min(num_envs, usable_cores())}
        if seed is not None:
            options["seed"] = seed
        if render_mode is not None:
            options["render_mode"] = render_mode
        return EnvPoolAdapter(envpool.make(rest, env_type="gymnasium", num_envs=num_envs, **options), device)
    options = {} if render_mode is None else {"render_mode": render_mode}  # not every environment takes one
    envs = [gymnasium.make(name, disable_env_checker=True, **options) for _ in range(num_envs)]
    return GymVecEnv(envs, device or "cpu", seed)
