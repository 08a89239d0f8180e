"""The picture of the README: the learning curve of several seeds, and what the policy does before and after.

python docs/make_picture.py RUN... --out docs/assets/lander.png --seed 12
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes

from canter.cli.play import film
from canter.cli.runs import SavedRun, find_checkpoint, load_policy, open_env, read_run
from canter.modules.build import build_actor_critic
from canter.utils.plots import common_grid, read_metrics, smooth

BLUE, STYLE = "#0072B2", {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
STROBES = 9


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/assets/lander.png"))
    parser.add_argument("--seed", type=int, default=0, help="seed of the episodes shown")
    options = parser.parse_args()
    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    with matplotlib.rc_context(STYLE):
        figure, axes = plt.subplot_mosaic(
            [["curve", "before"], ["curve", "after"]], figsize=(11, 5), width_ratios=[1.45, 1], layout="constrained"
        )
        draw_curve(axes["curve"], options.runs)
        saved = read_run(options.runs[0])
        for name, title in (("before", "untrained"), ("after", "trained")):
            picture, total = strobe(saved, name == "after", options.seed)
            axes[name].imshow(picture)
            axes[name].set_title(f"{title}: return {total:.0f}", fontsize=11, loc="left")
            axes[name].axis("off")
        figure.savefig(options.out, dpi=110)


def draw_curve(axes: Axes, runs: list[Path]) -> None:
    """Episode return of every run, their mean and one standard deviation either way."""
    curves = [tuple(map(np.asarray, read_metrics(run)["episode/mean_reward"])) for run in runs]
    grid = common_grid([steps for steps, _ in curves])
    assert grid is not None, "the runs have no steps in common"
    table = np.stack([np.interp(grid, steps, smooth(values)) for steps, values in curves])
    mean, spread = table.mean(0), table.std(0)
    for row in table:
        axes.plot(grid, row, color=BLUE, alpha=0.3, linewidth=1)
    axes.fill_between(grid, mean - spread, mean + spread, color=BLUE, alpha=0.15, linewidth=0)
    axes.plot(grid, mean, color=BLUE, linewidth=2.5)
    axes.axhline(200, color="#888888", linestyle=":", linewidth=1)
    axes.text(grid[-1], 204, "solved", color="#666666", ha="right", va="bottom", fontsize=10)
    task = read_run(runs[0]).task
    axes.set_title(f"canter train {task}   ({len(runs)} seeds)", loc="left", family="monospace", fontsize=11)
    axes.set_xlabel("environment steps")
    axes.set_ylabel("episode return")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:.0f}k")
    axes.grid(color="#EAEAEA")
    axes.set_axisbelow(True)


class Frames(list):
    """A film whose frames are kept instead of encoded."""

    add = list.append
    num_frames = property(len)


def strobe(saved: SavedRun, is_trained: bool, seed: int) -> tuple[np.ndarray, float]:
    """Many moments of one episode in one picture, and the episode's return."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # no window is opened
    runner: Any = load_policy(saved, find_checkpoint(saved.path, None), 1, seed, "cpu")
    if not is_trained:
        torch.manual_seed(seed)
        runner.alg.policy.load_state_dict(
            build_actor_critic(runner.env, saved.config["policy"]["class_name"], saved.config["policy"]).state_dict(),
            strict=False,
        )
    env = open_env(saved.task, 1, "cpu", seed, "rgb_array")
    frames: Any = Frames()
    returns = film(runner.get_inference_policy(), env, frames)
    background = np.median(np.stack(frames[:: max(1, len(frames) // 60)]), axis=0).astype(np.uint8)
    picture = background.copy()
    moved = [np.abs(frame.astype(int) - background).max(-1) > 20 for frame in frames]
    depth = [np.argwhere(mask)[:, 0].mean() if mask.any() else 0.0 for mask in moved]
    landed = next(i for i, d in enumerate(depth) if d >= max(depth) - 2)
    for index in np.linspace(0, landed, STROBES).astype(int):
        picture[moved[index]] = frames[index][moved[index]]
    return recolour(picture), returns[0]


def recolour(picture: np.ndarray) -> np.ndarray:
    """A night sky and a grey moon instead of pure black and white, which would be lost on a white page."""
    picture = picture.copy()
    picture[(picture < 20).all(-1)] = (18, 24, 48)
    picture[(picture > 235).all(-1)] = (196, 200, 212)
    return picture


if __name__ == "__main__":
    main()
