"""canter teaches robots to move: reinforcement learning and imitation in PyTorch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from canter.algorithms import DQN as DQN
    from canter.algorithms import PPO as PPO
    from canter.algorithms import SAC as SAC
    from canter.algorithms import TD3 as TD3
    from canter.algorithms import DQNConfig as DQNConfig
    from canter.algorithms import PPOConfig as PPOConfig
    from canter.algorithms import SACConfig as SACConfig
    from canter.algorithms import TD3Config as TD3Config
    from canter.envs import check_env as check_env
    from canter.envs import wrap_env as wrap_env
    from canter.presets import load_preset as load_preset
    from canter.runners import OffPolicyRunner as OffPolicyRunner
    from canter.runners import OnPolicyRunner as OnPolicyRunner
    from canter.runners import Runner
    from canter.runners.evaluation import InferencePolicy

__version__ = "0.1.0"

# Imported when they are used: a robot's computer may have no torch.
LAZY = {
    **dict.fromkeys(("PPO", "SAC", "TD3", "DQN", "PPOConfig", "SACConfig", "TD3Config", "DQNConfig"), "algorithms"),
    **dict.fromkeys(("OnPolicyRunner", "OffPolicyRunner"), "runners"),
    **dict.fromkeys(("wrap_env", "check_env"), "envs"),
    "load_preset": "presets",
}
__all__ = ["evaluate", "load", "train", *LAZY]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module 'canter' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"canter.{LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *LAZY})


def train(
    env: Any,
    total_timesteps: int | None = None,
    algorithm: str = "ppo",
    log_dir: str | Path | None = None,
    num_envs: int | None = None,
    settings: Mapping[str, Any] | None = None,
    device: str | None = None,
) -> Runner:
    """Train on an environment with the preset of its task; returns the runner, whose `alg.policy` is trained.

    Args:
        env: A name, such as "CartPole-v1", a function that makes an environment, or anything else `wrap_env` takes.
        total_timesteps: Environment steps; the preset's number if None.
        algorithm: ppo, sac, td3, dqn or another registered name.
        log_dir: Run directory, for `canter.load`, `canter.evaluate` and the command line; None writes nothing.
        num_envs: Environments stepped together, for a name or a function; the preset's number if None.
        settings: Changes of the preset in its layout: `{"algorithm": {"gamma": 0.98}, "seed": 1}`.
        device: Training device; None takes a GPU if there is one.
    """
    from canter.envs import wrap_env
    from canter.presets import merged
    from canter.runners import construction

    runner_class, preset = construction.preset_of(env, algorithm)
    preset = merged(preset, settings or {})
    is_made = isinstance(env, str) or (callable(env) and not hasattr(env, "step"))
    made = wrap_env(env, num_envs=num_envs or preset["num_envs"]) if is_made else wrap_env(env, num_envs=num_envs)
    run = {"task": preset["task"], "num_envs": made.num_envs}
    run["total_timesteps"] = steps = total_timesteps or preset["total_timesteps"]
    runner = runner_class(made, preset, log_dir=log_dir, device=device, run_info=run)
    runner.learn(total_timesteps=steps)
    return runner


def load(path: str | Path, **options: Any) -> InferencePolicy:
    """The trained policy of a run, a checkpoint or `hf://USER/NAME`; see `canter.export.load.load` for the options."""
    from canter.export.load import load

    return load(path, **options)


def evaluate(policy: Any, env: Any = None, episodes: int = 10, seed: int | None = None) -> dict[str, float]:
    """Mean, spread and extremes of the returns of whole episodes without exploration noise.

    Args:
        policy: A runner, a policy from `load`, or the path of a run directory or a checkpoint.
        env: Anything `wrap_env` takes; None is the environment of the run.
        episodes: Number of episodes.
        seed: Makes the episodes repeatable.
    """
    from canter.runners.evaluation import evaluate_policy

    return evaluate_policy(policy, env, episodes, seed)
