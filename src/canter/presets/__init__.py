"""Settings for tasks, one file each, in the layout of a run's config.yaml."""

from __future__ import annotations

import copy
from functools import cache
from importlib import resources
from typing import Any

import yaml

FALLBACK = "default"


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Every preset by its task."""
    found: dict[str, dict[str, Any]] = {}
    for entry in sorted(resources.files("canter.presets").iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".yaml"):
            preset = yaml.safe_load(entry.read_text(encoding="utf-8"))
            found[preset["task"]] = preset
    return found


def load_preset(task: str) -> dict[str, Any]:
    """The settings for a task; sensible ones for a task that has none of its own."""
    known = presets()
    return copy.deepcopy(known.get(task) or {**known[FALLBACK], "task": task})


def has_preset(task: str) -> bool:
    """Whether a task has settings of its own."""
    return task in presets() and task != FALLBACK
