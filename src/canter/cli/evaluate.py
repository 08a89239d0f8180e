"""`canter eval`: how good a trained policy is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import tyro

from canter.cli.errors import user_errors
from canter.cli.options import parse
from canter.cli.runs import EVAL_ENVS, find_checkpoint, load_policy, read_run


@dataclasses.dataclass
class EvalOptions:
    """Play episodes without exploration noise and print their returns."""

    run: tyro.conf.Positional[Path]
    """The run directory."""
    episodes: int = 20
    """How many."""
    checkpoint: str | None = None
    """A file, or "best"; by default the newest valid one."""
    seed: int | None = 0
    """Seed of the episodes; None draws one."""
    device: str | None = None
    """Where to compute; the CPU by default."""
    json: bool = False
    """Print JSON instead."""


def main(args: Sequence[str]) -> int:
    """Evaluate."""
    options: EvalOptions = parse(EvalOptions, args, "canter eval")
    saved = read_run(options.run)
    checkpoint = find_checkpoint(saved.path, options.checkpoint)
    num_envs = max(1, min(EVAL_ENVS, options.episodes))
    runner = load_policy(saved, checkpoint, num_envs, options.seed, options.device)
    with user_errors():
        result = runner.eval(options.episodes)
    runner.close()
    if options.json:
        print(json.dumps({**result, "episodes": options.episodes, "step": runner.tot_timesteps}))
        return 0
    print(f"  {saved.task}, {checkpoint}, {options.episodes} episodes without noise")
    for name, value in result.items():
        print(f"  {name.removeprefix('eval/').replace('_', ' '):<14}{value:10.2f}")
    return 0
