"""`canter tasks`, `check-env`, `plot` and `motion`: inspect tasks, environments, runs and motion clips."""

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated

import gymnasium
import numpy as np
import tyro

from canter.algorithms import REGISTRY
from canter.cli.errors import UserError, user_errors
from canter.cli.flags import RunPaths, TaskName
from canter.cli.runs import known_tasks, open_env, runs_below
from canter.datasets.motion_clip import JOINT_POS, JOINT_VEL, MotionClip, read_clip
from canter.datasets.motion_loader import CLIPS, find_clips
from canter.datasets.motion_tracking import write_tracking
from canter.envs.check import check_env
from canter.export.robot.plot import plot_log
from canter.presets import FALLBACK, PPO, find_preset, preset_name, presets, scores
from canter.utils.files import atomic_write
from canter.utils.plots import plot_runs
from canter.utils.run_data import RunData, group_runs, read_settings


def tasks(contains: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[TEXT]")] = None) -> int:
    """List the presets of every algorithm with the returns to expect, or all tasks whose name contains a text.

    Args:
        contains: A part of the name, or a pattern such as "*Walker*", to search every known environment for.
    """
    # Of the algorithms that share a folder of presets, the one after which it is named, as PPO, comes last and stays.
    entries = sorted(REGISTRY.items(), key=lambda item: item[0] == item[1].presets)
    algorithms = {entry.presets: name for name, entry in entries if entry.presets is not None}.values()
    own = {algorithm: [name for name in presets(algorithm) if name != FALLBACK] for algorithm in algorithms}
    names = list(dict.fromkeys(name for tasks in own.values() for name in tasks))
    names += [name for name in known_tasks() if name not in (*gymnasium.registry, *names)]
    if contains is not None:
        pattern = contains if "*" in contains else f"*{contains}*"
        names = [name for name in sorted({*known_tasks(), *names}) if fnmatch(name.lower(), pattern.lower())]
    if not names:
        raise UserError(f"no task has {contains!r} in its name; `canter tasks` lists those with a preset")
    width = max(map(len, names)) + 2
    print(f"  {'task':<{width}}{'algorithm':<11}{'steps':>13}{'envs':>6}  {'preset':<17}return to expect")
    for name in names:
        for algorithm in [a for a in algorithms if a == PPO or name in own[a]]:
            print(task_row(name, algorithm, width))
    if contains is None:
        print("\n  Any other Gymnasium id trains with the general preset; `canter tasks TEXT` searches all of them.")
    return 0


def task_row(task: str, algorithm: str, width: int) -> str:
    """The preset of a task for an algorithm, and the return that was measured with it."""
    origin = preset_name(task, algorithm)
    preset = presets(algorithm).get(origin) or find_preset(task, algorithm)
    score = scores().get(algorithm, {}).get(origin)
    origin = "its own" if origin == task else "general" if origin == FALLBACK else f"of {origin}"
    steps, seeds = (f"{score['steps']:,}", score["seeds"]) if score else ("", 0)
    means = f"mean of {seeds} seeds" if seeds > 1 else "one seed"
    text = f"{score['return']:g} ({means}, {steps} steps)" if score else "not measured"
    columns = f"  {task:<{width}}{algorithm:<11}{preset['total_timesteps']:>13,}{preset['num_envs']:>6}"
    return f"{columns}  {origin:<17}{text}"


def check_environment(task: TaskName, num_envs: int = 4, num_steps: int = 200, seed: int = 0) -> int:
    """Step an environment with random actions and report how canter reads it; exit code 1 if it has errors.

    Args:
        task: A Gymnasium id, canter/<name>, envpool/<id> or a registered name.
        num_envs: Environments stepped together.
        num_steps: Steps of each environment.
        seed: Seed of the environments and the actions.
    """
    report = check_env(open_env(task, num_envs, "cpu", seed), num_steps, seed)
    print(report)
    return 0 if report.ok else 1


def plot(
    runs: RunPaths,
    out: Path | None = None,
    metrics: tuple[str, ...] = (),
    labels: tuple[str, ...] = (),
) -> int:
    """Plot learning curves; runs that differ only in their seed become one mean and its spread.

    The log of a robot becomes a picture of its joints, torques, contacts, tracking and timing.

    Args:
        runs: Run directories, or directories of them; or one log of a robot.
        out: Picture to write (.png, .svg or .pdf); <run>/curve.png by default, or ./curves.png for several runs.
        metrics: Metrics to plot; the usual ones that were logged by default.
        labels: One label per run; runs with the same label become one curve.
    """
    if not runs:
        raise UserError("name the runs to plot: canter plot RUN...")
    if len(runs) == 1 and runs[0].is_file():
        with user_errors():
            print(plot_log(runs[0], out))
        return 0
    found = runs_below(runs)
    out = out or (found[0] / "curve.png" if len(found) == 1 else Path("curves.png"))
    with user_errors():
        print(plot_runs(found, out, metrics or None, list(labels) or labels_of(found)))
    return 0


def labels_of(runs: Sequence[Path]) -> list[str]:
    """Task and name of every run without its seed, and the settings in which runs with the same name differ."""
    loaded = [RunData(run.resolve(), {}, read_settings(run)) for run in runs]
    names = [f"{run.path.parent.name} {run.name}" for run in loaded]
    for name in dict.fromkeys(names):
        groups = group_runs([run for run, other in zip(loaded, names, strict=True) if other == name])
        for label, group in groups.items() if len(groups) > 1 else ():
            names = [f"{n}: {label}" if run in group else n for run, n in zip(loaded, names, strict=True)]
    return names


def motion(
    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")],
    plot: Path | None = None,
    fields: tuple[str, ...] = (),
    fps: float | None = None,
    joint_names: tuple[str, ...] = (),
    tracking: Path | None = None,
    scene: Path | None = None,
    rate: float = 50.0,
    breadth_first: bool = False,
) -> int:
    """Check a motion clip, print a summary of it, plot its columns over time, and convert it for a tracking task.

    Args:
        file: A clip (.txt, .json, .npz, .csv), or a directory of them; or the name of a clip that comes with canter.
        plot: Picture to write (.png, .svg, .pdf).
        fields: Groups such as joint_pos, or single columns, to plot; everything by default.
        fps: Frames per second, if the file does not state it; 30 for a CSV.
        joint_names: Joints in the order of the file, if it does not name them; with --tracking, the scene's by default.
        tracking: Motion file (.npz) of a tracking task of mjlab or BeyondMimic to write, or a folder for several.
        scene: MJCF of the robot, whose forward kinematics give the bodies for --tracking.
        rate: Frames per second of --tracking, those of the task's control.
        breadth_first: Order joints and bodies of --tracking as Isaac Lab does; mjlab has them in the order of the MJCF.
    """
    if (tracking is None) != (scene is None):
        raise UserError("--tracking needs --scene, the MJCF of the robot, and --scene is for --tracking")
    if not file.exists():
        own = [str(name) for name in find_clips(CLIPS)]
        if str(file) not in own:
            raise UserError(f"there is no {file}; the clips that come with canter are {', '.join(own)}")
        file = CLIPS / file
    with user_errors():
        files = [file / name for name in find_clips(file)] if file.is_dir() else [file]
        clips = [read_clip(name, joint_names or None, fps) for name in files]
        for clip in clips:
            print(describe(clip))
        if plot is not None:
            if len(clips) != 1:
                raise UserError(f"--plot shows one clip; name one of {', '.join(name.name for name in files)}")
            print(f"  picture     {draw(clips[0], plot, fields)}")
        if tracking is not None and scene is not None:
            for clip in clips:
                target = tracking if tracking.suffix == ".npz" else tracking / f"{Path(clip.name).stem}.npz"
                if len(clips) > 1 and target == tracking:
                    raise UserError(f"{tracking} is one file for {len(clips)} clips; name a folder")
                arrays = write_tracking(target, clip, scene, rate, breadth_first)
                frames, bodies = arrays["body_pos_w"].shape[:2]
                print(f"  tracking    {target}: {frames} frames, {arrays[JOINT_POS].shape[1]} joints, {bodies} bodies")
    return 0


def describe(clip: MotionClip) -> str:
    """The length and rate of a clip, and the range of every group."""
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
        moved = np.gradient(clip.frames[:, clip.where([JOINT_POS])], clip.frame_duration, axis=0)
        error = np.abs(moved - clip.frames[:, clip.where([JOINT_VEL])])[1:-1]
        if error.size and error.max() > 0.2 * max(1.0, np.abs(moved).max()):
            difference = f"they differ by up to {error.max():.3g} rad/s"
            lines.append(f"  joint_vel is not the derivative of joint_pos: {difference}")
    return "\n".join(lines)


def draw(clip: MotionClip, path: Path, fields: Sequence[str] = ()) -> Path:
    """Plot one panel per group with one line per column; returns the path."""
    from matplotlib.figure import Figure

    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"a picture must be .png, .svg or .pdf, not {path.name}")
    chosen = set(clip.where(fields or list(clip.groups)))
    panels = {group: sorted(chosen & set(clip.where([group]))) for group in clip.groups}
    panels = {group: columns for group, columns in panels.items() if columns}
    figure = Figure(figsize=(7.0, 1.8 * len(panels)), layout="constrained")
    time = np.arange(len(clip.frames)) * clip.frame_duration
    for index, (group, columns) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(len(panels), 1, index)
        for column in columns:
            axes.plot(time, clip.frames[:, column], linewidth=1.0, label=clip.columns[column].partition(".")[2])
        axes.set_ylabel(group)
        axes.legend(frameon=False, fontsize=6, ncols=2, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(f"{clip.name} (seconds)")
    atomic_write(path, lambda file: figure.savefig(file, format=path.suffix[1:], dpi=130))
    return path
