"""Filming a policy."""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from canter.envs.vec_env import VecEnv

FPS = 30
MAX_FRAMES = 3000
_said: set[str] = set()


def headless() -> bool:
    """Whether there is no screen to open a window on."""
    return sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def drawn_task(task: str) -> str:
    """The task to draw: for EnvPool's, which can end the process where it cannot draw, Gymnasium's of the same name."""
    return task.removeprefix("envpool/")


def prepare_rendering() -> None:
    """Without a screen, let SDL pretend there is one and MuJoCo draw off-screen; what the user set stays."""
    if headless():
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("MUJOCO_GL", "egl")


def hush_mujoco() -> None:
    """Say each of MuJoCo's warnings once, where by itself it repeats them for every environment it loads."""
    try:
        import mujoco
    except ImportError:
        return

    def say(text: str) -> None:
        # Deprecations are about the models that Gymnasium brings, nothing a user could change.
        if text not in _said and "deprecated" not in text:
            print(f"MuJoCo: {text}", file=sys.stderr)
        _said.add(text)

    mujoco.set_mju_user_warning(say)  # pyright: ignore[reportAttributeAccessIssue]


@torch.inference_mode()
def film(
    act: Any, env: VecEnv, num_episodes: int = 1, seconds: float = math.inf
) -> tuple[list[np.ndarray], list[float]]:
    """Frames and returns of `num_episodes` episodes of the first environment; stops early if drawing takes too long."""
    frames: list[np.ndarray] = []
    returns: list[float] = []
    total, deadline = 0.0, time.monotonic() + seconds
    act.reset()
    obs, _ = env.reset()
    while not frames or (len(returns) < num_episodes and len(frames) < MAX_FRAMES and time.monotonic() < deadline):
        picture = env.render()
        if picture is None:
            raise RuntimeError("the environment gives no pictures")
        frames.append(np.asarray(picture, np.uint8))
        record = env.step(act(obs))
        obs = record.obs
        act.reset(record.done | ~record.valid)
        total += float(record.reward[0]) if record.valid[0] else 0.0
        if record.done[0]:
            returns.append(total)
            total = 0.0
    return frames, returns


def frame_rate(env: VecEnv) -> int:
    """How fast the film must run to be as fast as the simulation, within reason."""
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
