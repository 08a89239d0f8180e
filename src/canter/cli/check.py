"""`canter check-env`: how canter understands an environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tyro

from canter.cli.options import parse
from canter.cli.runs import open_env
from canter.envs.check import check_env


@dataclasses.dataclass
class CheckOptions:
    """Step an environment with random actions and report how canter understands it; exit code 1 if it needs repair."""

    task: tyro.conf.Positional[str]
    """A Gymnasium id, canter/<name> or envpool/<id>."""
    num_envs: int = 4
    """Environments stepped together."""
    num_steps: int = 200
    """How long."""
    seed: int = 0
    """Seed of the environments and the actions."""


def main(args: Sequence[str]) -> int:
    """Check."""
    options: CheckOptions = parse(CheckOptions, args, "canter check-env")
    report = check_env(open_env(options.task, options.num_envs, "cpu", options.seed), options.num_steps, options.seed)
    print(report)
    return 0 if report.ok else 1
