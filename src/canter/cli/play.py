"""`canter play`: watch a trained policy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import tyro

from canter.cli.errors import UserError, user_errors
from canter.cli.options import parse
from canter.cli.runs import SavedRun, find_checkpoint, load_policy, open_env, read_run, shown_as
from canter.cli.video import drawn_task, film, frame_rate, headless, prepare_rendering, write_video
from canter.envs.vec_env import VecEnv
from canter.runners.evaluation import run_episodes


@dataclasses.dataclass
class PlayOptions:
    """Watch a policy act without noise: in a window where there is a screen, else in a video file."""

    run: tyro.conf.Positional[Path]
    """The run directory."""
    video: Path | None = None
    """Write this .mp4 or .gif instead of opening a window; <run>/play.mp4 where there is no screen."""
    episodes: int = 1
    """How many."""
    checkpoint: str | None = None
    """A file, or "best"; by default the newest valid one."""
    seed: int | None = 0
    """Seed of the episodes; None draws one."""
    device: str | None = None
    """Where to compute; the CPU by default."""
    seconds: float = math.inf
    """End a video that takes longer than this to draw."""


def main(args: Sequence[str]) -> int:
    """Play."""
    options: PlayOptions = parse(PlayOptions, args, "canter play")
    if options.episodes < 1:
        raise UserError(f"--episodes must be at least 1, got {options.episodes}")
    saved = read_run(options.run)
    can_show = not headless() and not saved.task.startswith("canter/")
    path = options.video or (None if can_show else saved.path / "play.mp4")
    prepare_rendering()
    returns = show(saved, options) if path is None else record(saved, options, path)
    if returns:
        print("  return      " + ", ".join(f"{value:.1f}" for value in returns))
    return 0


def drawn_env(saved: SavedRun, options: PlayOptions, render_mode: str) -> VecEnv:
    """One environment that draws itself, of which the policy is shown what it was shown in training."""
    env = open_env(drawn_task(saved.task), 1, options.device or "cpu", options.seed, render_mode)
    return shown_as(env, saved.config["run"].get("components"))


def record(saved: SavedRun, options: PlayOptions, path: Path) -> list[float]:
    """Write a video."""
    runner = load_policy(saved, find_checkpoint(saved.path, options.checkpoint), 1, options.seed, options.device)
    env = drawn_env(saved, options, "rgb_array")
    try:
        frames, returns = film(runner.get_inference_policy(), env, options.episodes, options.seconds)
        with user_errors():
            write_video(path, frames, frame_rate(env))
    except (RuntimeError, OSError, AttributeError) as error:
        raise UserError(f"{saved.task} could not be drawn: {error}") from error
    finally:
        env.close()
        runner.close()
    print(f"  video       {path} ({len(frames)} frames)")
    return returns


def show(saved: SavedRun, options: PlayOptions) -> list[float]:
    """Open a window, which the environment draws to as it is stepped."""
    runner = load_policy(saved, find_checkpoint(saved.path, options.checkpoint), 1, options.seed, options.device)
    env = drawn_env(saved, options, "human")
    try:
        return run_episodes(runner.get_inference_policy(), env, options.episodes)[0]
    finally:
        env.close()
        runner.close()
