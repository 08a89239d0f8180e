"""Plots of learning curves from the `metrics.jsonl` of one or several runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from canter.utils.files import StrPath, atomic_write
from canter.utils.logging.backends import METRICS_NAME, read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colour-blind-safe palette of Okabe and Ito, without yellow (too faint on white).
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_TITLES = {
    "episode/mean_reward": "Episode return",
    "eval/mean_reward": "Evaluation return",
    "episode/mean_length": "Episode length",
    "train/policy_loss": "Policy loss",
    "train/value_loss": "Value loss",
    "train/actor_loss": "Actor loss",
    "train/critic1_loss": "Critic loss",
    "train/q_loss": "Q loss",
    "train/distillation_loss": "Distillation loss",
    "train/estimator_loss": "Estimator loss",
    "train/discriminator_loss": "Discriminator loss",
    "train/entropy_loss": "Entropy loss",
    "train/approx_kl": "KL divergence",
    "train/learning_rate": "Learning rate",
    "policy/mean_noise_std": "Action std",
    "time/fps": "Steps per second",
}
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}
_GRID_POINTS = 400


class _Run(NamedTuple):
    label: str
    series: dict[str, tuple[list[int], list[float]]]


def read_metrics(run_dir: StrPath) -> dict[str, tuple[list[int], list[float]]]:
    """Return the environment steps and values of every metric of a run, in the order of logging."""
    path = Path(run_dir)
    path = path / METRICS_NAME if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; a run with a log_dir writes it")
    series: dict[str, tuple[list[int], list[float]]] = {}
    for row in read_rows(path):
        for tag, value in row.items():
            if tag not in ("step", "time") and isinstance(value, (int, float)):
                steps, values = series.setdefault(tag, ([], []))
                steps.append(row["step"])
                values.append(float(value))
    return series


def plot_runs(
    run_dirs: Sequence[StrPath],
    path: StrPath,
    metrics: Sequence[str] | None = None,
    labels: Sequence[str] | None = None,
) -> Path:
    """Plot the learning curves of `run_dirs` into the image `path` (.png, .svg or .pdf) and return its path.

    A single run is drawn raw (faint) and smoothed. Runs with the same label are seeds of one experiment; they are drawn
    as their mean with a band of one standard deviation.

    Args:
        run_dirs: Run directories, or `metrics.jsonl` files.
        path: The image to write.
        metrics: Tags to plot; by default all known ones that were logged.
        labels: One per run; by default the directory name.
    """
    runs = _load(run_dirs, labels)
    tags = _choose(runs, metrics)
    path = Path(path)
    kind = path.suffix[1:].lower() or "png"

    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with matplotlib.rc_context(_STYLE):
        figure = _draw(runs, tags)
        FigureCanvasAgg(figure)
        atomic_write(path, lambda file: figure.savefig(file, format=kind, dpi=150))
    return path


def _load(run_dirs: Sequence[StrPath], labels: Sequence[str] | None) -> list[_Run]:
    if not run_dirs:
        raise ValueError("there is no run to plot")
    if labels is not None and len(labels) != len(run_dirs):
        raise ValueError(f"{len(run_dirs)} runs need as many labels, got {len(labels)}")
    names = labels or [_name(Path(run_dir)) for run_dir in run_dirs]
    return [_Run(name, read_metrics(run_dir)) for name, run_dir in zip(names, run_dirs, strict=True)]


def _name(path: Path) -> str:
    path = path.resolve()
    return path.parent.name if path.is_file() else path.name


def _choose(runs: list[_Run], metrics: Sequence[str] | None) -> list[str]:
    there = {tag for run in runs for tag in run.series}
    if metrics is not None:
        missing = [tag for tag in metrics if tag not in there]
        if missing:
            raise ValueError(f"no run has the metric {missing[0]!r}; there are {', '.join(sorted(there)) or 'none'}")
    chosen = list(dict.fromkeys(metrics)) if metrics is not None else [tag for tag in _TITLES if tag in there]
    if not chosen:
        raise ValueError(f"none of the usual metrics was logged; choose from {', '.join(sorted(there)) or 'none'}")
    return chosen


def _draw(runs: list[_Run], tags: list[str]) -> Figure:
    from matplotlib.figure import Figure

    rows, columns, places = _layout(len(tags))
    figure = Figure(figsize=(3.5 * columns, 2.6 * rows + 0.4), layout="constrained")
    grid = figure.add_gridspec(rows, columns)
    groups: dict[str, list[_Run]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    handles: dict[str, Any] = {}
    for tag, (row, column) in zip(tags, places, strict=True):
        axes = figure.add_subplot(grid[row, column])
        for index, (label, group) in enumerate(groups.items()):
            line = _draw_group(axes, tag, group, _COLORS[index % len(_COLORS)], "-" if index < len(_COLORS) else "--")
            if line is not None:
                name = f"{label} ({len(group)} seeds)" if len(group) > 1 else label
                handles.setdefault(name, line)
        _finish(axes, tag)
    columns_of_legend = min(4, len(handles))
    figure.legend(list(handles.values()), list(handles), loc="outside upper left", ncols=columns_of_legend)
    return figure


def _layout(count: int) -> tuple[int, int, list[tuple[slice, slice]]]:
    """Return rows, columns and the position of each panel; the first of many is four times as large as the others."""
    if count <= 3:
        return 1, count, [(slice(0, 1), slice(i, i + 1)) for i in range(count)]
    columns = 3 if count <= 5 else 4
    cells = [(row, column) for row in range(2) for column in range(2, columns)]
    cells += [(row, column) for row in range(2, 2 + math.ceil(count / columns)) for column in range(columns)]
    used = cells[: count - 1]
    places = [(slice(0, 2), slice(0, 2))] + [(slice(r, r + 1), slice(c, c + 1)) for r, c in used]
    return max(2, used[-1][0] + 1), columns, places


def _draw_group(axes: Axes, tag: str, group: list[_Run], color: str, style: str) -> Any:
    curves = [_finite(*run.series[tag]) for run in group if tag in run.series]
    curves = [(steps, values) for steps, values in curves if len(steps)]
    if not curves:
        return None
    marker = "o" if len(curves[0][0]) == 1 else None  # a line through one point is invisible
    shared = common_grid([steps for steps, _ in curves])
    if len(curves) == 1 or shared is None:
        line = None
        for steps, values in curves:
            axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
            (line,) = axes.plot(steps, smooth(values), color=color, linewidth=1.8, linestyle=style, marker=marker)
        return line
    table = np.stack([np.interp(shared, steps, smooth(values)) for steps, values in curves])
    mean, spread = table.mean(0), table.std(0)
    axes.fill_between(shared, mean - spread, mean + spread, color=color, alpha=0.18, linewidth=0)
    (line,) = axes.plot(shared, mean, color=color, linewidth=1.8, linestyle=style)
    return line


def _finite(steps: list[int], values: list[float]) -> tuple[np.ndarray, np.ndarray]:
    kept = np.isfinite(values)
    return np.asarray(steps, dtype=np.float64)[kept], np.asarray(values, dtype=np.float64)[kept]


def common_grid(steps: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return evenly spaced steps in the range that all curves cover; None if they have no common range."""
    first, last = max(s[0] for s in steps), min(s[-1] for s in steps)
    return np.linspace(first, last, _GRID_POINTS) if last > first else None


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the centred moving average over 1/40 of the curve; the window is cut at the ends."""
    window = max(1, len(values) // 40) | 1
    kernel = np.ones(window)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def _finish(axes: Axes, tag: str) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.set_title(_TITLES.get(tag, tag))
    axes.set_xlabel("environment steps", color="#444444")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.margins(x=0.01)
    data = np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines] or [np.zeros(1)])
    if tag == "train/learning_rate" and data.min() > 0 and data.max() > 20 * data.min():
        axes.set_yscale("log")
    elif np.abs(data).max() >= 1e4:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
