"""Loading the policy of a run, without its environment."""

import dataclasses
import hashlib
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from canter.algorithms import REGISTRY
from canter.compat.checkpoints import import_state
from canter.envs.spec import SpecEnv, describe_env
from canter.envs.wrap import env_options, make_env
from canter.modules.build import build_actor_critic, build_normalizer, build_policy, env_shapes
from canter.modules.normalizer import ValueNormalizer
from canter.modules.policy import Policy
from canter.runners.construction import open_env
from canter.runners.evaluation import InferencePolicy
from canter.runners.run_config import RunPlan, find_algorithm, parse_train_cfg
from canter.utils.checkpoint import check_compatible, damaged_content, load_checkpoint, newest_valid_checkpoint
from canter.utils.memory import MemoryLimit
from canter.utils.reading import FileContentError, named_modules, read_yaml, refuse_imports
from canter.utils.runtime import resolve_device

BEST = "checkpoint_best.pt"


def load(
    path: str | Path,
    checkpoint: str | None = None,
    device: torch.device | str = "cpu",
    policy: Policy | None = None,
    seed: int | None = None,
    modules: Collection[str] = (),
) -> InferencePolicy:
    """The trained policy of a run directory or a checkpoint file: `actions = canter.load(run).predict(obs)`.

    Args:
        path: A run directory, or a checkpoint file.
        checkpoint: A file of the run directory, or "best"; the newest valid checkpoint if None.
        device: Device to compute on.
        policy: Network to load the weights into, for runs whose networks were built in Python.
        seed: Seed of sampled actions; drawn if None.
        modules: Modules of yours that the checkpoint's settings name and that may be imported.
    """
    file, device = find_file(Path(path), checkpoint), resolve_device(device)
    with damaged_content(file):
        state = import_state(load_checkpoint(file, "cpu"))
    weights = state.get("model_state_dict")
    if not isinstance(weights, Mapping):
        raise ValueError(f"{file} has no model_state_dict; it has {', '.join(map(str, state))}")
    config = state.get("config") or read_config(file)
    if not isinstance(config, Mapping):
        raise FileContentError(f"{file} holds a {type(config).__name__} as its config, not named settings")
    settings = {key: value for key, value in config.items() if key != "run"}  # the task is not made from it
    if policy is None:
        refuse_imports(settings, file, modules, "name it: modules=[{module!r}], or --modules {module}")
    with damaged_content(file), MemoryLimit(f"the policy of {file}"):
        if policy is not None:  # its networks may be of classes that have no name here
            named = settings.get("policy") or {}
            settings["policy"] = {key: value for key, value in named.items() if not key.endswith("_class")}
        plan = parse_train_cfg(settings)
        environment = state.get("environment") or describe_task(config, plan, file)
        env = SpecEnv(environment, device)
        if policy is None:
            policy = new_policy(plan, env, has_settings=bool(config.get("policy")))
        install_normalizers(policy, env, weights)
        check_compatible(policy.state_dict(), weights, type(policy).__name__)
        policy.load_state_dict(dict(weights))
        counters = {"iteration": int(state.get("iter", 0)), "timesteps": int(state.get("total_timesteps", 0))}
    policy.to(device).requires_grad_(False).eval()
    info = {"config": config, "environment": environment, "checkpoint": str(file)}
    info |= {"checkpoint_sha256": hashlib.sha256(file.read_bytes()).hexdigest(), **counters}
    bounds, space = env.action_bounds, env.action_space
    return InferencePolicy(policy, env.obs_space, env.obs_segments, bounds, info, seed, action_space=space)


def find_file(path: Path, checkpoint: str | None) -> Path:
    """The checkpoint file of a run directory, or the file itself."""
    if path.is_file():
        if checkpoint is not None:
            raise ValueError(f"{path} is a checkpoint already; give checkpoint={checkpoint!r} with a run directory")
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"there is no run directory or checkpoint {path}")
    if (path / "policy.json").is_file():
        raise ValueError(f"{path} is a bundle, not a run; load it with canter.export.runtime.Policy({str(path)!r})")
    if checkpoint is None:
        return newest_valid_checkpoint(path)
    file = path / (BEST if checkpoint == "best" else checkpoint)
    if not file.is_file():
        existing = ", ".join(sorted(found.name for found in path.glob("*.pt")))
        raise FileNotFoundError(f"there is no checkpoint {file}; {path} has {existing or 'none'}")
    return file


def read_config(file: Path) -> dict[str, Any]:
    """The config.yaml beside a checkpoint of an earlier version."""
    for folder in (file.parent, file.parent.parent):
        if (folder / "config.yaml").is_file():
            return read_yaml(folder / "config.yaml")
    raise ValueError(f"{file} does not say how its policy was built, and there is no config.yaml beside it")


def describe_task(config: Mapping[str, Any], plan: RunPlan, file: Path) -> dict[str, Any]:
    """The description of an environment that a checkpoint of an earlier version lacks, by making the environment."""
    run = config.get("run") or {}
    if "task" not in run:
        raise ValueError(f"{file} does not describe its environment and names no task; save it again with this canter")
    if any(named_modules({"run": run})):
        problem = f"{file} does not describe its environment, and its task {run['task']!r} would import a module"
        raise ValueError(f"{problem}; resume the run and save it again with this canter")
    opened = open_env(make_env(run["task"], **env_options(run)), torch.device("cpu"), plan)
    try:
        return describe_env(opened)
    finally:
        opened.close()


def new_policy(plan: RunPlan, env: SpecEnv, has_settings: bool) -> Policy:
    """The untrained policy of a plan; networks of PPO that were built in Python have no settings in it."""
    agent_class: Any = REGISTRY[find_algorithm(plan.algorithm)].agent_class
    if not has_settings and not agent_class.learns_from_replay:
        raise ValueError("the networks of this run were built in Python; give them: canter.load(path, policy=<policy>)")
    if "class_name" in plan.policy:
        return build_actor_critic(env, plan.policy["class_name"], plan.policy)
    if not agent_class.learns_from_replay:
        return build_policy(env, **plan.policy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cfg = dataclasses.replace(plan.cfg, execution="eager", device="cpu")
        return agent_class(env=env, cfg=cfg, **plan.policy).policy


def install_normalizers(policy: Policy, env: SpecEnv, weights: Mapping[str, Any]) -> None:
    """Give the policy the normalisers whose statistics were saved."""
    obs_shape, critic_shape = env_shapes(env)
    shapes = {"obs_normalizer": obs_shape, "critic_obs_normalizer": obs_shape if critic_shape is None else critic_shape}
    for name, shape in shapes.items():
        if any(key.startswith(f"{name}.") for key in weights):
            setattr(policy, name, build_normalizer(shape))
    if "value_normalizer._mean" in weights:
        policy.value_normalizer = ValueNormalizer()
