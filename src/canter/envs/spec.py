"""The description of an environment in plain containers: spaces, names, control period, joints and gains.

It is saved with every checkpoint, so that a policy is built and exported without its environment.
"""

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from canter.compat.managers import describe_managers, numbers
from canter.envs.records import split_names
from canter.envs.vec_env import StepRecord, VecEnv, flat_size
from canter.utils.tree import Obs

SPEC_VERSION = 1
MAX_SIZE = 1 << 26  # numbers in an observation, against files that claim more


def describe_env(env: VecEnv) -> dict[str, Any]:
    """Spaces, segments, action bounds and what the simulation knows of the robot, in plain containers.

    What cannot be described is left out with a warning, since a checkpoint must be written all the same: the robot, or
    everything for spaces that no policy of canter is built from.
    """
    is_shared = env.critic_obs_space is env.obs_space
    try:
        description: dict[str, Any] = {
            "version": SPEC_VERSION,
            "obs_space": plain_space(env.obs_space),
            "critic_obs_space": None if is_shared else plain_space(env.critic_obs_space),
            "action_space": plain_space(env.action_space),
            "obs_segments": plain_segments(env.obs_segments),
            "critic_obs_segments": plain_segments(env.critic_obs_segments),
            "obs_group": obs_group(env),
            "action_clip": None if env.action_bounds is None else [numbers(bound) for bound in env.action_bounds],
        }
    except TypeError as error:
        warnings.warn(f"{type(env).__name__} could not be described: {error}", stacklevel=2)
        return {}
    try:
        return description | {"robot": describe_robot(env)}
    except Exception as error:  # a simulator's attributes may be anything
        warnings.warn(f"the robot of {type(env).__name__} could not be described: {error!r}", stacklevel=2)
        return description | {"robot": {}}


class SpecEnv(VecEnv):
    """Stands for an environment when a policy is built from a description; it cannot be stepped."""

    def __init__(self, description: Mapping[str, Any], device: torch.device | str = "cpu") -> None:
        if not isinstance(description, Mapping) or description.get("version") != SPEC_VERSION:
            version = description.get("version") if isinstance(description, Mapping) else description
            raise ValueError(f"this canter reads descriptions of version {SPEC_VERSION}, got {version!r}")
        self.num_envs, self.device, self.description = 1, torch.device(device), description
        self.obs_space = self.critic_obs_space = space_from(description["obs_space"])
        if description["critic_obs_space"] is not None:
            self.critic_obs_space = space_from(description["critic_obs_space"])
        self.action_space = space_from(description["action_space"])
        for name in ("obs_segments", "critic_obs_segments"):
            segments = description[name]
            setattr(self, name, segments and {part: tuple(shape) for part, shape in segments.items()})
        clip = description["action_clip"]
        self.action_bounds = clip and tuple(np.asarray(bound, np.float32) for bound in clip)

    def _refuse(self) -> Any:
        raise NotImplementedError("the description of an environment cannot be stepped; make the environment itself")

    def reset(self) -> tuple[Obs, Obs]:
        """Refuse."""
        return self._refuse()

    def get_observations(self) -> tuple[Obs, Obs]:
        """Refuse."""
        return self._refuse()

    def step(self, actions: Tensor) -> StepRecord:
        """Refuse."""
        return self._refuse()


def plain_space(space: spaces.Space) -> dict[str, Any]:
    """A Box, Discrete, MultiDiscrete, or Dict of them in plain containers; equal bounds are one number."""
    if isinstance(space, spaces.Dict):
        return {"type": "Dict", "spaces": {str(name): plain_space(part) for name, part in space.spaces.items()}}
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"type": "MultiDiscrete", "nvec": numbers(space.nvec), "start": numbers(space.start)}
    if not isinstance(space, spaces.Box):
        raise TypeError(f"a {type(space).__name__} space has no description; use Box, Dict, Discrete or MultiDiscrete")
    bounds = {name: numbers(getattr(space, name)) for name in ("low", "high")}
    bounds = {name: value[0] if len(set(value)) == 1 else value for name, value in bounds.items()}
    return {"type": "Box", "shape": list(space.shape), "dtype": str(space.dtype), **bounds}


def space_from(description: Mapping[str, Any]) -> spaces.Space:
    """The space that `plain_space` described."""
    kind = description["type"]
    if kind == "Dict":
        return spaces.Dict([(name, space_from(part)) for name, part in description["spaces"].items()])
    if kind == "Discrete":
        return spaces.Discrete(description["n"], start=description["start"])
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(description["nvec"], start=description["start"])
    if kind != "Box":
        raise ValueError(f"unknown kind of space {kind!r}; known are Box, Dict, Discrete and MultiDiscrete")
    shape, dtype = tuple(description["shape"]), np.dtype(description["dtype"])
    if any(type(n) is not int or n < 0 for n in shape) or math.prod(shape) > MAX_SIZE:
        raise ValueError(f"a Box of shape {shape} is not a space of observations or actions")
    ends = [np.broadcast_to(np.asarray(description[name], dtype).ravel(), math.prod(shape)) for name in ("low", "high")]
    low, high = (end.reshape(shape) for end in ends)
    return spaces.Box(low, high, shape, dtype.type)


def plain_segments(segments: Mapping[str, Sequence[int]] | None) -> dict[str, list[int]] | None:
    """Segments with lists as shapes."""
    return None if segments is None else {str(name): [int(n) for n in shape] for name, shape in segments.items()}


def innermost(env: Any) -> Any:
    """The simulation behind adapters and wrappers: the first one of several environments."""
    while isinstance(env, VecEnv):
        own = vars(env)
        env = own["env"] if "env" in own else own["envs"][0] if "envs" in own else None
    return getattr(env, "unwrapped", env)


def obs_group(env: VecEnv) -> str | None:
    """The key of the actor's observation in the simulation's own dict; None if it is the whole observation."""
    base = innermost(env)
    space = getattr(base, "single_observation_space", getattr(base, "observation_space", None))
    names = split_names(tuple(space.spaces))[0] if isinstance(space, spaces.Dict) else ()
    return names[0] if len(names) == 1 else None


def describe_robot(env: VecEnv) -> dict[str, Any]:
    """Control period, joints, actions, commands, physics and observation terms, where the simulation has them.

    The entries are those of a bundle's policy.json; `observation` lists terms in the order of the flat observation.
    """
    base = innermost(env)
    if base is None:  # torch-native
        period = getattr(env, "dt", None)
        return {} if period is None else {"control_period": float(period)}
    robot: dict[str, Any] = {"control_period": control_period(base)}
    if hasattr(base, "observation_manager") and hasattr(base, "action_manager"):
        robot |= describe_managers(base, groups_read(env))
    elif hasattr(base, "observation_structure") and hasattr(base, "model"):
        robot |= describe_gymnasium_mujoco(base)
    elif isinstance(getattr(base, "config", None), Mapping):  # EnvPool
        known = {"action_scale": "scale", "kp": "stiffness", "kd": "damping"}
        action = {name: [float(base.config[key])] for key, name in known.items() if key in base.config}
        robot |= {"action": {"target": "position", **action}} if "kp" in base.config else {}
    terms = robot.pop("observation", None)
    if terms is not None and (seen := terms_seen(env, terms)) is not None:
        robot["observation"] = seen
    return {name: value for name, value in robot.items() if value is not None}


def groups_read(env: Any) -> list[str]:
    """The simulator's observation groups that the actor reads, where the adapter chose among several."""
    while isinstance(env, VecEnv):
        own = vars(env)
        if own.get("sets"):
            return list(own["sets"][0])
        env = own.get("env")
    return []


def terms_seen(env: VecEnv, terms: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The terms of the simulator's observation that wrappers have left in it; None where they made another one."""
    if sum(term["width"] for term in terms) == flat_width(env.obs_space):
        return [dict(term) for term in terms]
    known, seen = {term["name"]: term for term in terms}, []
    for name, shape in (env.obs_segments or {}).items():  # of `ObsComponents`
        base = known.get(name.removesuffix("_history"), {})
        width, steps = math.prod(shape), {}
        group = [term for term in terms if term.get("group") == name]
        if not base and sum(term["width"] for term in group) == width:
            seen += [dict(term) for term in group]
            continue
        if name not in known and base and not base.get("history"):
            steps = {"history": int(shape[0])}
        if not base or base["width"] * steps.get("history", 1) != width:
            return None
        seen.append({**base, "name": name, "width": width, **steps})
    return seen or None


def named_parts(env: VecEnv, wanted: Collection[str] = ()) -> dict[str, tuple[int, ...]] | None:
    """Names and shapes of the parts of the actor's observation: the environment's own, or the simulator's terms.

    Of an environment with both, its own are given if `wanted` names are among them.
    """
    own = None if env.obs_segments is None else {name: tuple(shape) for name, shape in env.obs_segments.items()}
    if own is not None and set(wanted) <= own.keys():
        return own
    try:
        robot = env.description.get("robot") if isinstance(env, SpecEnv) else describe_robot(env)
        terms = (robot or {}).get("observation")
    except Exception:  # a simulator's attributes may be anything
        terms = None
    return {term["name"]: (int(term["width"]),) for term in terms} if terms else own


def flat_width(space: spaces.Space) -> int | None:
    """Width of a flat observation; None for any other."""
    return flat_size(space) if isinstance(space, spaces.Box) and len(space.shape) == 1 else None


def control_period(base: Any) -> float | None:
    """Seconds between two actions."""
    for name in ("step_dt", "dt", "tau"):
        value = getattr(base, name, None)
        if isinstance(value, int | float) and value > 0:
            return float(value)
    config = getattr(base, "config", None)
    if isinstance(config, Mapping) and "ctrl_dt" in config:
        return float(config["ctrl_dt"])
    fps = (getattr(base, "metadata", None) or {}).get("render_fps")
    return 1.0 / fps if fps else None


def describe_gymnasium_mujoco(base: Any) -> dict[str, Any]:
    """Actuators and observation terms of Gymnasium's MuJoCo environments."""
    model, structure = base.model, dict(base.observation_structure)
    terms = []
    for name, width in structure.items():
        if name.startswith("skipped_") or not width:
            continue
        first = structure.get(f"skipped_{name}", 0)
        source = f"{name}[{first}:]" if first else name
        terms.append({"name": name, "width": int(width), "term": source})
    actuators = [model.actuator(i).name for i in range(model.nu)]
    action = {"names": actuators, "target": "ctrl", "default_pose": numbers(base.init_qpos)}
    return {"observation": terms, "action": action}
