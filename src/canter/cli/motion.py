"""`canter motion`: what a motion clip holds, in numbers and as a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tyro

from canter.cli.errors import UserError, user_errors
from canter.cli.options import parse
from canter.datasets.motion_clip import JOINT_POS, JOINT_VEL, MotionClip, read_clip, velocity_of
from canter.datasets.motion_loader import find_clips
from canter.utils.files import atomic_write


@dataclasses.dataclass
class MotionOptions:
    """Check a motion clip, say what it holds, and draw its columns over time."""

    file: tyro.conf.Positional[Path]
    """A clip (.txt, .json, .npz, .csv), or a directory of them."""
    plot: Path | None = None
    """Draw the columns into this picture (.png, .svg, .pdf)."""
    fields: tuple[str, ...] = ()
    """What to draw: groups such as joint_pos, or single columns; everything by default."""
    fps: float | None = None
    """Frames per second, if the file does not say; 30 for a CSV."""
    joint_names: tuple[str, ...] = ()
    """The file's joints in its order, if it does not say."""


def main(args: Sequence[str]) -> int:
    """Inspect."""
    options: MotionOptions = parse(MotionOptions, args, "canter motion")
    if not options.file.exists():
        raise UserError(f"there is no {options.file}")
    with user_errors():
        files = [options.file / p for p in find_clips(options.file)] if options.file.is_dir() else [options.file]
        clips = [read_clip(file, options.joint_names or None, options.fps) for file in files]
    for clip in clips:
        print(describe(clip))
    if options.plot is not None:
        if len(clips) != 1:
            raise UserError(f"--plot draws one clip; name one of {', '.join(file.name for file in files)}")
        with user_errors():
            print(f"  picture     {draw(clips[0], options.plot, options.fields)}")
    return 0


def describe(clip: MotionClip) -> str:
    """A clip's facts, and the range of every group."""
    rate = 1 / clip.frame_duration
    lines = [
        f"  {clip.name}: {len(clip.frames)} frames at {rate:.4g} Hz, {clip.duration:.4g} s, weight {clip.weight:g}",
        f"  {'group':<12}{'columns':>8}{'lowest':>12}{'mean':>12}{'highest':>12}",
    ]
    for group, width in clip.groups.items():
        part = clip.frames[:, clip.where([group])]
        lines.append(f"  {group:<12}{width:>8}{part.min():>12.4f}{part.mean():>12.4f}{part.max():>12.4f}")
    if clip.joint_names:
        lines.append(f"  joints      {', '.join(clip.joint_names)}")
    if JOINT_POS in clip.groups and JOINT_VEL in clip.groups:
        moved = velocity_of(clip.frames[:, clip.where([JOINT_POS])], clip.frame_duration)
        error = np.abs(moved - clip.frames[:, clip.where([JOINT_VEL])])[1:-1]
        if error.size and error.max() > 0.2 * max(1.0, np.abs(moved).max()):
            lines.append(
                f"  joint_vel is not the derivative of joint_pos: they differ by up to {error.max():.3g} rad/s"
            )
    return "\n".join(lines)


def draw(clip: MotionClip, path: Path, fields: Sequence[str] = ()) -> Path:
    """One panel per group, one line per column."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"a picture is .png, .svg or .pdf, not {path.name}")
    chosen = set(clip.where(list(fields) or list(clip.groups)))
    groups = [group for group in clip.groups if chosen & set(clip.where([group]))]
    figure = Figure(figsize=(7.0, 1.8 * len(groups)), layout="constrained")
    FigureCanvasAgg(figure)
    time = np.arange(len(clip.frames)) * clip.frame_duration
    for index, group in enumerate(groups, 1):
        axes = figure.add_subplot(len(groups), 1, index)
        for column in sorted(chosen & set(clip.where([group]))):
            axes.plot(time, clip.frames[:, column], linewidth=1.0, label=clip.columns[column].partition(".")[2])
        axes.set_ylabel(group)
        axes.legend(frameon=False, fontsize=6, ncols=2, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(f"{clip.name} (seconds)")
    atomic_write(path, lambda file: figure.savefig(file, format=path.suffix[1:], dpi=130))
    return path
