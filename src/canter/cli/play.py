"""`canter eval`, `canter play` and `canter collect`: measure, show and record a trained policy."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro

from canter.cli.errors import UserError, user_errors
from canter.cli.options import at_least
from canter.cli.runs import EVAL_ENVS, SavedRun, find_checkpoint, load_policy, open_env, read_run
from canter.envs.vec_env import VecEnv
from canter.runners import Runner
from canter.runners.demonstration import DemonstrationSaver
from canter.runners.evaluation import run_episodes

FPS = 30
MAX_FRAMES = 3000


@dataclasses.dataclass
class PolicyOptions:
    """The policy of a run, and how it is run."""

    run: tyro.conf.Positional[Path]
    """The run directory."""
    checkpoint: str | None = None
    """A file, or "best"; the newest valid checkpoint by default."""
    seed: int | None = 0
    """Seed of the episodes; None draws one."""
    device: str | None = None
    """Device to compute on; the CPU by default."""

    def load(self, num_envs: int) -> tuple[SavedRun, Path, Runner]:
        """The run, its checkpoint, and a runner with the trained policy."""
        saved = read_run(self.run)
        checkpoint = find_checkpoint(saved.path, self.checkpoint)
        return saved, checkpoint, load_policy(saved, checkpoint, num_envs, self.seed, self.device)


TrainedPolicy = Annotated[PolicyOptions, tyro.conf.arg(name="")]
AsJson = Annotated[bool, tyro.conf.arg(name="json")]


def evaluate(run: TrainedPolicy, episodes: int = 20, as_json: AsJson = False) -> int:
    """Run episodes without exploration noise and print their returns.

    Args:
        run: The run and its policy.
        episodes: Number of episodes.
        as_json: Print JSON.
    """
    saved, checkpoint, runner = run.load(max(1, min(EVAL_ENVS, episodes)))
    with user_errors():
        result = runner.eval(episodes)
    runner.close()
    if as_json:
        print(json.dumps({**result, "episodes": episodes, "step": runner.tot_timesteps}))
        return 0
    print(f"  {saved.task}, {checkpoint}, {episodes} episodes without noise")
    for name, value in result.items():
        print(f"  {name.removeprefix('eval/').replace('_', ' '):<14}{value:10.2f}")
    return 0


def play(run: TrainedPolicy, video: Path | None = None, episodes: int = 1, seconds: float = math.inf) -> int:
    """Show a policy without exploration noise, in a window or, without a screen, in a video file.

    Args:
        run: The run and its policy.
        video: Write this .mp4 or .gif instead of opening a window; <run>/play.mp4 without a screen.
        episodes: Number of episodes.
        seconds: End a video that takes longer than this to render.
    """
    at_least(1, episodes=episodes)
    saved, _, runner = run.load(1)
    if video is None and (headless() or saved.task.startswith("canter/")):
        video = saved.path / "play.mp4"
    prepare_rendering()
    # EnvPool can end the process where it cannot render; Gymnasium has tasks of the same names.
    task = saved.task.removeprefix("envpool/")
    render_mode, components = "human" if video is None else "rgb_array", saved.config["run"].get("components")
    env = open_env(task, 1, run.device or "cpu", run.seed, render_mode, components)
    policy = runner.get_inference_policy()
    try:
        if video is None:  # the environment renders to its window as it is stepped
            returns = run_episodes(policy, env, episodes)[0]
        else:
            frames, returns = film(policy, env, episodes, seconds)
            with user_errors():
                write_video(video, frames, frame_rate(env))
            print(f"  video       {video} ({len(frames)} frames)")
    except (RuntimeError, OSError, AttributeError) as error:
        raise UserError(f"{task} could not be rendered: {error}") from error
    finally:
        env.close()
        runner.close()
    if returns:
        print("  return      " + ", ".join(f"{value:.1f}" for value in returns))
    return 0


def collect(
    run: TrainedPolicy,
    out: Path | None = None,
    steps: int = 100_000,
    episodes: int = 1,
    num_envs: int = 8,
    sample: bool = False,
    success_only: bool = False,
    critic_obs: bool = False,
    images: dict[str, Any] | None = None,
    file_steps: int = 64,
) -> int:
    """Run a trained policy and save every trajectory; adds to the trajectories of an existing directory.

    Args:
        run: The run and its policy.
        out: Directory for the trajectories; <run>/demonstrations by default.
        steps: Collect at least this many steps.
        episodes: Collect at least this many episodes.
        num_envs: Environments stepped together.
        sample: Act with exploration noise.
        success_only: Keep only episodes that ended by a time limit or with success.
        critic_obs: The policy observes the critic's observation.
        images: Parts of the observation to store as bytes, as YAML: {camera: normalized_image}.
        file_steps: Most steps in one file.
    """
    at_least(0, steps=steps, episodes=episodes)
    at_least(1, num_envs=num_envs, file_steps=file_steps)
    saved, checkpoint, runner = run.load(num_envs)
    with user_errors():
        saver = DemonstrationSaver(
            runner.env,
            runner.policy,
            out or saved.path / "demonstrations",
            rollout_storage_length=file_steps,
            min_timesteps=steps,
            min_episodes=episodes,
            success_traj_only=success_only,
            use_critic_obs=critic_obs,
            obs_disassemble_mapping=images,
            demo_by_sample=sample,
        )
    save_trajectories(saver, saved, checkpoint, runner)
    return 0


def save_trajectories(saver: DemonstrationSaver, saved: SavedRun, checkpoint: Path, runner: Runner) -> None:
    """Collect, print the totals, and close the environments."""
    saver.metadata |= {"env": saved.task, "checkpoint": checkpoint.name}
    try:
        with saver:
            saver.collect_and_save(saved.config)
    finally:
        runner.close()
    print(f"  {saver.total_timesteps} steps, {saver.total_episodes} episodes  {saver.save_dir}")


def headless() -> bool:
    """Whether there is no screen to open a window on."""
    return sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def prepare_rendering() -> None:
    """Without a screen, use SDL's dummy driver and MuJoCo's off-screen rendering, unless the user set others."""
    if headless():
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("MUJOCO_GL", "egl")


@torch.inference_mode()
def film(
    policy: Any, env: VecEnv, num_episodes: int = 1, seconds: float = math.inf
) -> tuple[list[np.ndarray], list[float]]:
    """Frames and returns of episodes of the first environment; stops early after `seconds` or 3000 frames."""
    frames: list[np.ndarray] = []
    returns: list[float] = []
    total, deadline = 0.0, time.monotonic() + seconds
    policy.reset()
    obs, _ = env.reset()
    while not frames or (len(returns) < num_episodes and len(frames) < MAX_FRAMES and time.monotonic() < deadline):
        picture = env.render()
        if picture is None:
            raise RuntimeError("the environment gives no pictures")
        frames.append(np.asarray(picture, np.uint8))
        step = env.step(policy(obs))
        obs = step.obs
        policy.reset(step.done | ~step.valid)
        total += float(step.reward[0]) if step.valid[0] else 0.0
        if step.done[0]:
            returns.append(total)
            total = 0.0
    return frames, returns


def frame_rate(env: VecEnv) -> int:
    """Frames per second at which a video is as fast as the simulation, from 1 to 120."""
    first = env.envs[0] if hasattr(env, "envs") else env  # pyright: ignore[reportAttributeAccessIssue]
    metadata = getattr(first, "metadata", None) or {}
    return int(min(120, max(1, metadata.get("render_fps") or FPS)))


def write_video(path: Path, frames: list[np.ndarray], fps: int) -> Path:
    """Write frames as .mp4 or .gif."""
    try:
        import imageio.v2 as imageio
    except ImportError as error:
        raise ImportError('videos need imageio: pip install "canter[video]"') from error
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gif":
        imageio.mimsave(path, frames, duration=1000 / fps, loop=0)  # pyright: ignore[reportCallIssue, reportArgumentType]
        return path
    # Sides must be even for the codec; one block of 2 instead of ffmpeg's default 16 keeps the size.
    with imageio.get_writer(path, fps=fps, macro_block_size=2, ffmpeg_log_level="error") as writer:
        for frame in frames:
            writer.append_data(frame)  # pyright: ignore[reportAttributeAccessIssue]
    return path
