"""The subcommands of `canter`, and the plugins that add to them and to canter's other registries.

Nothing heavy is imported here: a command's module is imported when the command is run, so that help is immediate.
"""

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import NamedTuple

from canter.cli.errors import UserError

Run = Callable[..., int | None]


class Command(NamedTuple):
    """One subcommand; see `register_command`."""

    run: Run | str
    help: str
    arguments: str = ""


COMMANDS: dict[str, Command] = {}


def register_command(name: str, run: Run | str, help: str, arguments: str = "") -> None:  # noqa: A002
    """Add the subcommand `canter NAME`, with a line of `help` and `arguments`, such as "RUN", for the overview.

    `run` is a function that returns an exit code (None is 0), or "module:function". Its arguments are the flags, with
    their types, defaults and descriptions; a function of `args` alone gets the words after the name.
    """
    if name in COMMANDS and COMMANDS[name].run != run:
        raise ValueError(f"there is a command {name!r} already; register yours under another name")
    COMMANDS[name] = Command(run, help, arguments)


for _name, _run, _arguments, _help in (
    ("train", "train:train", "TASK", "train a policy, evaluate it, plot its curve and record a video"),
    ("resume", "train:resume", "RUN", "continue a run from its newest valid checkpoint"),
    ("eval", "play:evaluate", "RUN", "run episodes without noise and print their returns"),
    ("play", "play:play", "RUN", "show a policy in a window or record a video"),
    ("export", "export:export", "RUN", "write ONNX, TorchScript and C files of a policy and check them"),
    ("push", "push:push", "RUN NAME", "publish a policy on the Hugging Face Hub, with its scores and film"),
    ("collect", "play:collect", "RUN", "run a policy and save its trajectories"),
    ("plot", "inspection:plot", "RUN...", "plot learning curves with their spread over seeds"),
    ("sweep", "sweep:sweep", "TASK", "search settings with Optuna or Ray Tune, in any number of processes"),
    ("seeds", "seeds:seeds", "TASK", "train several seeds in parallel and summarise them"),
    ("report", "report:report", "RUN...", "compare groups of runs in one HTML page, with intervals"),
    ("tasks", "inspection:tasks", "[TEXT]", "list the presets of every algorithm and the returns to expect"),
    ("check-env", "inspection:check_environment", "TASK", "report how canter reads an environment, and its errors"),
    ("check-policy", "train:check", "TASK", "report which functions of a run are replayed, and why others are not"),
    ("motion", "inspection:motion", "FILE", "check, summarise and plot a motion clip"),
    ("dagger", "distill:dagger", "TEACHER", "train a student on its teacher's labels, in two processes"),
    ("distill", "distill:distill", "TEACHER", "train a student that observes less than its teacher"),
    ("replay", "robot:replay", "LOG BUNDLE", "recompute a robot's log, and name what differs and why"),
    ("gap", "robot:gap", "BUNDLE...", "measure what policies lose with delay, noise, pushes and other physics"),
    ("bench", "bench:bench", "[NAME]", "measure the speed of canter on this machine"),
):
    register_command(_name, f"canter.cli.{_run}", _help, _arguments)
register_command("drive", "canter.export.robot.__main__:main", "run a bundle on a robot, real or simulated", "BUNDLE")


def named_plugins() -> list[str]:
    """The modules in CANTER_PLUGINS, which are separated by commas."""
    return [name.strip() for name in os.environ.get("CANTER_PLUGINS", "").split(",") if name.strip()]


def load_plugins() -> None:
    """Import the modules in CANTER_PLUGINS (comma-separated) and the entry points of the group "canter.plugins"."""
    named = named_plugins()
    if named and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    plugins = {f"{name!r} of CANTER_PLUGINS": partial(importlib.import_module, name) for name in named}
    plugins |= {f"{p.name!r}, an entry point": p.load for p in metadata.entry_points(group="canter.plugins")}
    for label, load in plugins.items():
        try:
            load()
        except Exception as error:
            raise UserError(f"cannot import the plugin {label}: {type(error).__name__}: {error}") from error
