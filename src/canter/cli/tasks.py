"""`canter tasks`: what can be trained."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Sequence

import tyro

from canter.cli.options import parse, preset_for, preset_name
from canter.cli.runs import known_tasks
from canter.presets import FALLBACK, presets


@dataclasses.dataclass
class TasksOptions:
    """List the tasks that have settings of their own, or all whose name contains a text."""

    contains: tyro.conf.Positional[str | None] = None
    """A part of the name, or a pattern such as "*Walker*"; lists every environment that is known."""


def main(args: Sequence[str]) -> int:
    """List."""
    options: TasksOptions = parse(TasksOptions, args, "canter tasks")
    names = [name for name in presets() if name != FALLBACK]
    names += [name for name in known_tasks() if name.startswith("canter/") and name not in names]
    if options.contains is not None:
        pattern = options.contains if "*" in options.contains else f"*{options.contains}*"
        everything = sorted({*known_tasks(), *names})
        names = [name for name in everything if fnmatch.fnmatch(name.lower(), pattern.lower())]
    print(f"  {'task':<34}{'steps':>12}  {'envs':>5}  settings")
    for name in names:
        preset = preset_for(name)
        print(f"  {name:<34}{preset['total_timesteps']:>12,}  {preset['num_envs']:>5}  {origin(name)}")
    if options.contains is None:
        print("\n  Any other Gymnasium id trains with general settings; `canter tasks TEXT` searches all of them.")
    return 0


def origin(task: str) -> str:
    """Where a task's settings come from."""
    name = preset_name(task)
    return "its own" if name == task else "general" if name == FALLBACK else f"those of {name}"
