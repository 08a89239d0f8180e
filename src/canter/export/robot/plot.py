"""Figures of a robot's log, and of the gap report."""

import io
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from canter.export.robot.description import Robot
from canter.export.robot.log import Log, read_log
from canter.utils.files import atomic_write
from canter.utils.html_page import SVG_STYLE
from canter.utils.plots import COLORS, STYLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODE_COLORS = ("#DDDDDD", "#CFE5F5", "#DDF2E3", "#FBE8D3", "#F3DCEA")


def new_figure(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, np.ndarray]:
    """A figure in canter's style, with its axes."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    with plt.rc_context({**STYLE, **SVG_STYLE}):
        figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)
    plt.close(figure)
    return figure, axes


def plot_log(path: str | Path, out: str | Path | None = None) -> Path:
    """Draw a robot's log: modes, joints with their targets, torques, contacts as a gait diagram, and tracking."""
    log = read_log(path)
    out = Path(out) if out is not None else Path(path).with_suffix(".png")
    kind = out.suffix.removeprefix(".")
    if kind not in ("png", "svg", "pdf"):
        raise ValueError(f"a picture is .png, .svg or .pdf, got {out.name}")
    content = io.BytesIO()
    log_figure(log).savefig(content, format=kind, dpi=110)
    atomic_write(out, content.getvalue())
    return out


def log_figure(log: Log) -> "Figure":
    """All parts of a log over time."""
    joints = log.header["names"]["joint"]
    names = [field.removeprefix("sensor.") for field in log.columns if field.startswith("sensor.")]
    extra = [name for name in ("contact", "command") if name in names]
    rows = -(-len(joints) // 3)
    figure, axes = new_figure(2 * rows + len(extra) + 1, 3, (15.0, 2.0 * (2 * rows + len(extra) + 1)), sharex=True)
    time = log.time - log.time[0]
    torques = log.sensor("joint_torque") if "joint_torque" in names else estimated_torques(log)
    for number, joint in enumerate(joints):
        for block, (values, label) in enumerate(((log.sensor("joint_pos"), "rad"), (torques, "Nm"))):
            axis = axes[block * rows + number // 3, number % 3]
            axis.plot(time, values[:, number], color=COLORS[0], linewidth=0.9, label="measured")
            if block == 0:
                axis.plot(time, log.columns["target"][:, number], color=COLORS[1], linewidth=0.7, label="target")
            axis.set_title(f"{joint}, {label}", fontsize=9)
            shade(axis, log)
    axes[0, 0].legend(fontsize=7)
    for axis in axes[:, :].ravel()[[r * 3 + c for b in (0, rows) for r in range(b, b + rows) for c in range(3)]]:
        if not axis.lines:
            axis.set_visible(False)
    at = 2 * rows
    for name in extra:
        axis = wide(figure, axes, at)
        if name == "contact":
            gait_diagram(axis, time, log.sensor("contact"))
        else:
            tracking(axis, time, log, names)
        shade(axis, log)
        at += 1
    timing_axis(wide(figure, axes, at), time, log)
    figure.suptitle(f"{log.path.name}: {len(log)} steps, {log.damaged} damaged records", fontsize=11)
    return figure


def wide(figure: Any, axes: np.ndarray, row: int) -> Any:
    """One axis over a whole row."""
    grid = axes[row, 0].get_gridspec()
    for axis in axes[row]:
        axis.remove()
    return figure.add_subplot(grid[row, :], sharex=axes[0, 0])


def estimated_torques(log: Log) -> np.ndarray:
    """Torques that the gains make of targets, positions and velocities."""
    error = log.columns["target"] - log.sensor("joint_pos")
    return log.columns["kp"] * error - log.columns["kd"] * log.sensor("joint_vel")


def shade(axis: Any, log: Log) -> None:
    """Colour the background by mode, and mark the faults."""
    time, modes = log.time - log.time[0], log.columns["mode"].astype(int)
    edges = [0, *(np.flatnonzero(np.diff(modes)) + 1).tolist(), len(modes) - 1]
    for first, last in pairwise(edges):
        axis.axvspan(time[first], time[last], color=MODE_COLORS[modes[first] % len(MODE_COLORS)], zorder=0, linewidth=0)
    for step in np.flatnonzero(log.columns["reason"] > 1):
        axis.axvline(time[step], color="#D00000", linewidth=0.8)


def gait_diagram(axis: Any, time: np.ndarray, contact: np.ndarray) -> None:
    """A bar for each foot while it touches the ground."""
    for foot in range(contact.shape[1]):
        axis.fill_between(time, foot + 0.1, foot + 0.9, where=contact[:, foot] > 0.5, color="#333333", step="post")
    axis.set_yticks(np.arange(contact.shape[1]) + 0.5, [f"foot {foot}" for foot in range(contact.shape[1])])
    axis.set_title("contacts", fontsize=9)


def tracking(axis: Any, time: np.ndarray, log: Log, names: Sequence[str]) -> None:
    """Commands, and the measured velocities that belong to them where they are known."""
    command = log.sensor("command")
    measured: list[Any] = [None] * command.shape[1]
    linear = next((name for name in names if name in ("base_lin_vel", "local_linvel", "imu_lin_vel")), None)
    if linear is not None and command.shape[1] >= 2:
        measured[0], measured[1] = log.sensor(linear)[:, 0], log.sensor(linear)[:, 1]
    if "base_ang_vel" in names and command.shape[1] >= 3:
        measured[2] = log.sensor("base_ang_vel")[:, 2]
    for part, (color, values) in enumerate(zip(COLORS, measured, strict=False)):
        axis.plot(time, command[:, part], color=color, linestyle="--", linewidth=1.2, label=f"command {part}")
        if values is not None:
            axis.plot(time, values, color=color, linewidth=0.7, alpha=0.8)
    axis.legend(fontsize=7, ncols=3)
    axis.set_title("commands (dashed) and velocities, m/s and rad/s", fontsize=9)


def timing_axis(axis: Any, time: np.ndarray, log: Log) -> None:
    """Periods and the computing time of the loop."""
    axis.plot(time[1:], 1e3 * np.diff(log.time), color=COLORS[0], linewidth=0.7, label="period, ms")
    axis.plot(time, 1e3 * log.columns["seconds"], color=COLORS[2], linewidth=0.7, label="computing, ms")
    axis.set_title("period and computing time; events", fontsize=9)
    axis.set_xlabel("s")
    shade(axis, log)
    top = axis.get_ylim()[1]
    for number, (at, mode, why) in enumerate(log.events()):
        side = "right" if at > 0.7 * time[-1] else "left"
        axis.text(at, top * (0.92 - 0.14 * (number % 5)), f" {mode}: {why} ", fontsize=7, va="top", ha=side)
    axis.legend(fontsize=7, loc="center right")


def gap_figure(points: Sequence[tuple[float, Sequence[Any]]], label: str, subjects: Sequence[str]) -> "Figure":
    """Falls, velocity errors, power and action rate over a swept value."""
    figure, axes = new_figure(1, 4, (14.0, 2.8))
    values = [value for value, _ in points]
    for number, subject in enumerate(subjects):
        found, color = [outcomes[number] for _, outcomes in points], COLORS[number % len(COLORS)]
        axes[0, 0].plot(values, [100 * f.falls for f in found], "o-", color=color, label=subject)
        for part, style in (("x", "-"), ("y", "--"), ("yaw", ":")):
            errors = [getattr(f, f"error_{part}") for f in found]
            axes[0, 1].plot(values, errors, style, marker="o", color=color, label=part if number == 0 else None)
        axes[0, 2].plot(values, [f.power for f in found], "o-", color=color)
        axes[0, 3].plot(values, [f.action_rate for f in found], "o-", color=color)
    titles = ("falls, %", "error of x, y (m/s), yaw (rad/s)", "power, W", "action rate, 1/s")
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(label, fontsize=8)
        axis.set_ylim(bottom=0.0)
    axes[0, 0].set_ylim(-4, 104)
    axes[0, 0].legend(fontsize=7)
    axes[0, 1].legend(fontsize=7)
    return figure


def grid_figure(points: Sequence[tuple[tuple[float, ...], Any]], subject: str) -> "Figure":
    """Error of the velocity by command: one map of x and yaw for each y; crosses mark falls."""
    parts = [sorted({point[axis] for point, _ in points}) for axis in range(3)]
    found = dict(points)
    figure, axes = new_figure(1, len(parts[1]), (14.0, 3.0))
    errors = [np.hypot(outcome.error_x, outcome.error_y) for outcome in found.values()]
    most = max(0.1, float(np.nanmax(errors)) if np.isfinite(errors).any() else 0.1)
    for axis, y in zip(axes[0], parts[1], strict=True):
        table = np.array([[found[x, y, w] for x in parts[0]] for w in parts[2]], object)
        size = np.array([[np.hypot(outcome.error_x, outcome.error_y) for outcome in row] for row in table], float)
        axis.imshow(size, origin="lower", cmap="viridis_r", vmin=0.0, vmax=most, aspect="auto")
        for (row, column), outcome in np.ndenumerate(table):
            text = "fell" if outcome.falls >= 0.5 else f"{size[row, column]:.2f}"
            dark = size[row, column] > 0.6 * most
            axis.text(column, row, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
        axis.set_xticks(range(len(parts[0])), [f"{x:g}" for x in parts[0]])
        axis.set_yticks(range(len(parts[2])), [f"{w:g}" for w in parts[2]])
        axis.set(xlabel="x, m/s", ylabel="yaw, rad/s")
        axis.grid(visible=False)
        axis.set_title(f"{subject}, y = {y:g} m/s", fontsize=9)
    figure.colorbar(axes[0, 0].images[0], ax=axes[0].tolist(), label="velocity error, m/s")
    return figure


def comparison_figure(logs: Mapping[str, Log], robot: Robot) -> "Figure":
    """Joint positions of a robot and of simulations over the first seconds of its policy."""
    rows = -(-len(robot.joints) // 3)
    figure, axes = new_figure(rows, 3, (14.0, 1.9 * rows))
    first = logs["robot"]
    driven = np.flatnonzero(first.columns["mode"] > 1)
    begin = float(first.time[driven[0]] - first.time[0]) if len(driven) else 0.0
    for number, joint in enumerate(robot.joints):
        axis = axes[number // 3, number % 3]
        for color, (name, log) in zip(COLORS, logs.items(), strict=False):
            time = log.time - log.time[0]
            shown = (time >= begin - 0.2) & (time <= begin + 3.0)
            axis.plot(time[shown], log.sensor("joint_pos")[shown][:, number], color=color, linewidth=0.9, label=name)
        axis.set_title(f"{joint}, rad", fontsize=9)
    for axis in axes.ravel()[len(robot.joints) :]:
        axis.set_visible(False)
    axes[0, 0].legend(fontsize=7)
    return figure
