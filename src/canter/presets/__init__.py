"""Settings for tasks, one file each, in the layout of a run's config.yaml."""

from __future__ import annotations

import copy
from functools import cache
from importlib import resources
from typing import Any

import yaml

FALLBACK = "default"
PPO = "ppo"


@cache
def presets(algorithm: str = PPO) -> dict[str, dict[str, Any]]:
    """Every preset of an algorithm by its task; those of PPO and its family lie beside this file."""
    found: dict[str, dict[str, Any]] = {}
    folder = resources.files("canter.presets")
    own = folder / algorithm.lower()
    for entry in sorted((own if own.is_dir() else folder).iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".yaml"):
            preset = yaml.safe_load(entry.read_text(encoding="utf-8"))
            found[preset["task"]] = preset
    return found


def load_preset(task: str, algorithm: str = PPO) -> dict[str, Any]:
    """The settings for a task; sensible ones for a task that has none of its own."""
    known = presets(algorithm)
    return copy.deepcopy(known.get(task) or {**known[FALLBACK], "task": task})


def has_preset(task: str, algorithm: str = PPO) -> bool:
    """Whether a task has settings of its own."""
    return task in presets(algorithm) and task != FALLBACK
