"""`canter resume`: continue a run where its newest valid checkpoint left it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from canter.cli.errors import user_errors
from canter.cli.options import parse
from canter.cli.runs import find_checkpoint, open_runner, read_run
from canter.cli.train import run_to_end
from canter.utils.checkpoint import load_checkpoint


@dataclasses.dataclass
class ResumeOptions:
    """Continue a run from its newest valid checkpoint, with the settings it was started with."""

    run: tyro.conf.Positional[Path]
    """The run directory."""
    total_timesteps: int | None = None
    """Environment steps to add; by default what is left of the run's own."""
    checkpoint: str | None = None
    """A checkpoint to continue from instead: a file, or "best"."""
    device: str | None = None
    """Another device than the run was started on."""


def main(args: Sequence[str]) -> int:
    """Continue."""
    options: ResumeOptions = parse(ResumeOptions, args, "canter resume")
    saved = read_run(options.run)
    checkpoint = find_checkpoint(saved.path, options.checkpoint)
    config: dict[str, Any] = {**saved.config, "run": dict(saved.config["run"])}
    if options.device is not None:
        config["device"] = options.device
    if options.total_timesteps is not None:
        done = int(load_checkpoint(checkpoint, "cpu").get("total_timesteps", 0))
        config["run"]["total_timesteps"] = done + options.total_timesteps
        config |= {name: None for name in ("max_iterations", "max_timesteps") if name in config}
    runner = open_runner(config, saved.path, eval_episodes=config["eval_episodes"])
    with user_errors():
        runner.load(checkpoint)
    print(f"continuing {saved.path} from {checkpoint.name} at step {runner.tot_timesteps}")
    return run_to_end(runner, saved.path)
