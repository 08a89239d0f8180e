"""Tuned settings by task: one YAML file each, in the layout of a run's config.yaml, in a folder for each algorithm."""

import copy
import json
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium

from canter.algorithms import REGISTRY
from canter.runners.run_config import RunPlan, display_name, find_algorithm
from canter.utils.config import NEAR, nearest, unknown_name
from canter.utils.reading import read_yaml

FALLBACK = "default"
PPO = "ppo"
FOLDER = Path(__file__).parent


def presets(algorithm: str = PPO) -> dict[str, dict[str, Any]]:
    """Every preset of an algorithm by its task; empty for an algorithm without a preset folder."""
    name = find_algorithm(algorithm)
    folder = REGISTRY[name].presets
    if folder is None:
        return {}
    for path in (FOLDER / folder, Path(folder).expanduser()):
        if path.is_dir():
            return read_presets(path.resolve())
    raise ValueError(f"the preset folder {folder!r} of algorithm {name!r} does not exist")


@cache
def read_presets(folder: Path) -> dict[str, dict[str, Any]]:
    """The presets in a folder by their task."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("*.yaml")):
        preset = read_yaml(file)
        if not isinstance(preset.get("task"), str):
            raise ValueError(f"the preset {file} does not name its task; add a line such as task: CartPole-v1")
        found[preset["task"]] = preset
    for task, preset in found.items():
        if isinstance(other := preset.get("profiles"), str):  # those of another task
            if not isinstance(profiles := found.get(other, {}).get("profiles"), dict):
                raise ValueError(f"the preset of {task} has the profiles of {other!r}, which has none in {folder}")
            preset["profiles"] = profiles
    return found


def load_preset(task: str, algorithm: str = PPO, profile: str | None = None) -> dict[str, Any]:
    """A copy of the preset that `preset_name` finds for a task, or the defaults of the algorithm's config.

    A `profile` is one of the preset's own `profiles`, whose settings replace the preset's and may name another
    algorithm, or one of the algorithm's, which replaces the settings of the algorithm.
    """
    name = find_algorithm(algorithm)
    if preset_name(task, name) == FALLBACK and (near := misspelt(task, name)):
        text = f"{unknown_name('preset', task, [near])} These are the defaults of {display_name(name)}"
        warnings.warn(text, stacklevel=2)
    return find_preset(task, name, profile)


def find_preset(task: str, algorithm: str = PPO, profile: str | None = None) -> dict[str, Any]:
    """What `load_preset` returns, without a warning about a misspelt task."""
    name = find_algorithm(algorithm)
    preset = copy.deepcopy(presets(name).get(preset_name(task, name)))
    if name == PPO and task.startswith("mjlab/"):
        from canter.envs.mjlab import mjlab_training_dict  # mjlab registers settings with its tasks

        own = preset if has_preset(task, name) else {}
        preset = merged({"num_envs": 4096, **mjlab_training_dict(task.partition("/")[2])}, own or {})
    if preset is None:
        preset = RunPlan(name, REGISTRY[name].config_class()).to_dict()
    profiles = preset.pop("profiles", None) or {}
    preset["algorithm"] = {**(preset.get("algorithm") or {}), "class_name": display_name(name)}
    preset = {"num_envs": 8, "total_timesteps": 1_000_000, **preset, "task": task}
    if profile in profiles:
        chosen = profiles[profile]
        other = find_algorithm((chosen.get("algorithm") or {}).get("class_name", name))
        return merged(preset if other == name else find_preset(task, other), chosen)
    if profile is not None:
        known = [*profiles, *algorithm_profiles().get(name, ())]
        if profile not in known:
            raise ValueError(unknown_name("profile", profile, known, f"{display_name(name)} of {task}"))
        preset["algorithm"] = {"class_name": display_name(name), "profile": profile}
    return preset


@cache
def algorithm_profiles() -> dict[str, dict[str, dict[str, Any]]]:
    """Settings by algorithm and profile."""
    return read_yaml(FOLDER / "profiles.yaml")["algorithms"]


def profile_settings(algorithm: str, name: str | None) -> dict[str, Any]:
    """The settings of an algorithm's profile; {} for None."""
    if name is None:
        return {}
    profiles = algorithm_profiles().get(algorithm.lower(), {})
    if name not in profiles:
        raise ValueError(f"{algorithm} has no profile {name!r}; there are {', '.join(profiles) or 'none'}")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in profiles[name].items()}


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the changes; a section that both have is merged."""
    made = {**settings, **changes}
    for name, value in changes.items():
        if isinstance(value, Mapping) and isinstance(settings.get(name), Mapping):
            made[name] = merged(settings[name], value)
    return made


def preset_name(task: str, algorithm: str = PPO) -> str:
    """The task whose preset is used: the task itself, the Gymnasium task of the same name, or "default"."""
    known = presets(algorithm)
    family, _, rest = task.rpartition("/")
    is_twin = family in ("canter", "envpool")
    same = (name for name in known if is_twin and rest in (name, name.rsplit("-v", 1)[0]))
    return task if task in known else next(same, FALLBACK)


def misspelt(task: str, algorithm: str) -> str | None:
    """The preset that a task which no one has registered most likely stands for, if their names are very alike."""
    known = {preset.rpartition("-v")[0]: preset for preset in presets(algorithm)}
    is_registered = "/" in task or ":" in task or task in gymnasium.registry
    near = None if is_registered else nearest(task.rpartition("-v")[0] or task, known, cutoff=NEAR)
    return near and known[near]


@cache
def scores() -> dict[str, dict[str, dict[str, float]]]:
    """Measured mean return, number of seeds and steps of presets, by algorithm and task."""
    return json.loads((FOLDER / "scores.json").read_text(encoding="utf-8"))


def has_preset(task: str, algorithm: str = PPO) -> bool:
    """Whether a task has settings of its own."""
    return task in presets(algorithm) and task != FALLBACK
