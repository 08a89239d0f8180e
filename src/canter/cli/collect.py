"""`canter collect`: demonstrations of a trained policy, as trajectory files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from canter.cli.errors import UserError, user_errors
from canter.cli.options import parse
from canter.cli.runs import SavedRun, find_checkpoint, load_policy, read_run
from canter.runners import Runner
from canter.runners.demonstration import DemonstrationSaver


@dataclasses.dataclass
class CollectOptions:
    """Let a trained policy play and save every trajectory; continues a directory that has some."""

    run: tyro.conf.Positional[Path]
    """The run directory."""
    out: Path | None = None
    """Where trajectories go; <run>/demonstrations by default."""
    steps: int = 100_000
    """Collect at least this many steps,"""
    episodes: int = 1
    """and at least this many episodes."""
    num_envs: int = 8
    """Environments stepped together."""
    checkpoint: str | None = None
    """A file, or "best"; by default the newest valid one."""
    seed: int | None = 0
    """Seed of the episodes; None draws one."""
    device: str | None = None
    """Where to compute; the CPU by default."""
    sample: bool = False
    """Act with exploration noise."""
    success_only: bool = False
    """Keep only episodes that ended by a time limit or with success."""
    critic_obs: bool = False
    """The policy sees the critic's observation."""
    images: dict[str, Any] | None = None
    """Parts of the observation to keep as bytes, as YAML: {camera: normalized_image}."""
    file_steps: int = 64
    """The most steps that one file holds."""


def main(args: Sequence[str]) -> int:
    """Collect."""
    options: CollectOptions = parse(CollectOptions, args, "canter collect")
    for name in ("steps", "episodes", "num_envs", "file_steps"):
        if getattr(options, name) < (0 if name in ("steps", "episodes") else 1):
            raise UserError(f"--{name.replace('_', '-')} is too small: {getattr(options, name)}")
    saved = read_run(options.run)
    checkpoint = find_checkpoint(saved.path, options.checkpoint)
    runner = load_policy(saved, checkpoint, options.num_envs, options.seed, options.device)
    out = options.out or saved.path / "demonstrations"
    with user_errors():
        saver = DemonstrationSaver(
            runner.env,
            runner.policy,
            out,
            rollout_storage_length=options.file_steps,
            min_timesteps=options.steps,
            min_episodes=options.episodes,
            success_traj_only=options.success_only,
            use_critic_obs=options.critic_obs,
            obs_disassemble_mapping=options.images,
            demo_by_sample=options.sample,
        )
    collect(saver, saved, checkpoint, runner)
    return 0


def collect(saver: DemonstrationSaver, saved: SavedRun, checkpoint: Path, runner: Runner) -> None:
    """Collect, say what there is, and close the environments."""
    saver.metadata |= {"env": saved.task, "checkpoint": checkpoint.name}
    try:
        with saver:
            saver.collect_and_save(saved.config)
    finally:
        runner.close()
    print(f"  {saver.total_timesteps} steps, {saver.total_episodes} episodes  {saver.save_dir}")
