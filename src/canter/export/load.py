"""Loading the policy of a run, without its environment."""

import dataclasses
import hashlib
import math
import re
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from canter.algorithms import REGISTRY
from canter.compat.checkpoints import import_state
from canter.envs.spec import SPEC_VERSION, SpecEnv, describe_env
from canter.envs.wrap import env_options, make_env
from canter.modules.build import build_actor_critic, build_normalizer, build_policy, env_shapes
from canter.modules.normalizer import ValueNormalizer
from canter.modules.policy import Policy
from canter.runners.construction import open_env
from canter.runners.evaluation import InferencePolicy
from canter.runners.run_config import RunPlan, find_algorithm, parse_train_cfg
from canter.utils.checkpoint import check_compatible, damaged_content, load_checkpoint, newest_valid_checkpoint
from canter.utils.hub import local_run
from canter.utils.memory import MemoryLimit
from canter.utils.reading import FileContentError, named_modules, parse_yaml, read_limited, read_yaml, refuse_imports
from canter.utils.runtime import resolve_device

BEST = "checkpoint_best.pt"


def load(
    path: str | Path,
    checkpoint: str | None = None,
    device: torch.device | str = "cpu",
    policy: Policy | None = None,
    seed: int | None = None,
    modules: Collection[str] = (),
    config: Mapping[str, Any] | str | Path | None = None,
    task: str | None = None,
) -> InferencePolicy:
    """The trained policy of a run directory or a checkpoint file: `actions = canter.load(run).predict(obs)`.

    A checkpoint of another library does not say how its networks were built: its training dict is `params/agent.yaml`
    of its run or `config`. Without a `task` its observation and actions have widths but no names.

    Args:
        path: A run directory, a checkpoint file, or a model of the Hugging Face Hub, "hf://USER/NAME".
        checkpoint: A file of the run directory, or "best"; the newest valid checkpoint if None.
        device: Device to compute on.
        policy: Network to load the weights into, for runs whose networks were built in Python.
        seed: Seed of sampled actions; drawn if None.
        modules: Modules of yours that the checkpoint's settings name and that may be imported.
        config: The training dict, or a file with it, where the checkpoint has none.
        task: Task that describes the environment, where the checkpoint does not.
    """
    file, device = find_file(local_run(path), checkpoint), resolve_device(device)
    with damaged_content(file):
        state = import_state(load_checkpoint(file, "cpu"))
    weights = state.get("model_state_dict")
    if not isinstance(weights, Mapping):
        raise ValueError(f"{file} has no model_state_dict; it has {', '.join(map(str, state))}")
    given = read_settings(Path(config)) if isinstance(config, str | Path) else config
    config = given or state.get("config") or read_config(file)
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
        run = {**(config.get("run") or {}), **({} if task is None else {"task": task})}
        config = {**config, "run": run} if run else config
        environment = state.get("environment") or described(config, plan, file, weights)
        env = SpecEnv(environment, device)
        if policy is None:
            policy = new_policy(plan, env, has_settings=bool(config.get("policy") or config.get("actor")))
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


class SettingsLoader(yaml.SafeLoader):
    """YAML in which Python's tuples, as other libraries write them, are lists."""


def plain_list(loader: Any, node: Any) -> list[Any]:
    """The list in place of a tuple."""
    return loader.construct_sequence(node, deep=True)


SettingsLoader.add_constructor("tag:yaml.org,2002:python/tuple", plain_list)


def read_settings(path: Path) -> dict[str, Any]:
    """The training dict in a YAML or JSON file."""
    with damaged_content(path):
        content = parse_yaml(read_limited(path).decode("utf-8"), SettingsLoader)
    if not isinstance(content, dict):
        raise FileContentError(f"{path} is no mapping of settings but {content!r}")
    return content


def read_config(file: Path) -> dict[str, Any]:
    """The config.yaml beside a checkpoint of an earlier version, or the params/agent.yaml of Isaac Lab and mjlab."""
    for folder in (file.parent, file.parent.parent):
        if (folder / "config.yaml").is_file():
            return read_yaml(folder / "config.yaml", folder)
        if (folder / "params" / "agent.yaml").is_file():
            return read_settings(folder / "params" / "agent.yaml")
    problem = (
        f"{file} does not say how its policy was built, and there is no config.yaml or params/agent.yaml beside it"
    )
    raise ValueError(f"{problem}; give its training dict: config=..., or --config FILE")


def described(config: Mapping[str, Any], plan: RunPlan, file: Path, weights: Mapping[str, Any]) -> dict[str, Any]:
    """The description of an environment that a checkpoint lacks: of its task, or the widths of its weights."""
    widths = {name: width_of(weights, name) for name in ("actor", "critic")}
    last = [name for name in weights if re.fullmatch(r"actor\.\d+\.weight", name)]
    noise = next((weights[name] for name in ("std", "log_std") if name in weights), None)
    if "task" in (config.get("run") or {}) or widths["actor"] is None or not (last or noise is not None):
        return describe_task(config, plan, file)
    num_actions = len(noise) if noise is not None else weights[last[-1]].shape[0]
    if noise is None and (plan.policy.get("state_dependent_std") or plan.policy.get("action_distribution") == "beta"):
        num_actions //= 2
    box = {"type": "Box", "dtype": "float32", "low": -math.inf, "high": math.inf}
    spaces: dict[str, Any] = {"action_space": {**box, "shape": [num_actions]}}
    spaces["obs_space"] = {**box, "shape": [widths["actor"]]}
    spaces["critic_obs_space"] = {**box, "shape": [widths["critic"] or widths["actor"]]}
    limit = plan.clip_actions
    clip = None if limit is None else [[-limit] * num_actions, [limit] * num_actions]
    empty = dict.fromkeys(("obs_segments", "critic_obs_segments", "obs_group"))
    return {"version": SPEC_VERSION, **spaces, **empty, "action_clip": clip, "robot": {}}


def width_of(weights: Mapping[str, Any], part: str) -> int | None:
    """Width of the observation of an actor or a critic, by its first weights."""
    names = (f"memory_{part[0]}.rnn.weight_ih_l0", f"{part}.0.weight")
    return next((int(weights[name].shape[1]) for name in names if name in weights), None)


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
