"""Plots of learning curves from the `metrics.jsonl` of one or several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from canter.utils.config import unknown_name
from canter.utils.files import StrPath, atomic_write
from canter.utils.run_data import Series, load_run, read_metrics

__all__ = ["plot_runs", "read_metrics"]

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colour-blind-safe palette of Okabe and Ito, without yellow (too faint on white).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LOSSES = ("policy", "value", "actor", "critic1", "q", "distillation", "estimator", "discriminator", "entropy")
TITLES = {
    "episode/mean_reward": "Episode return",
    "eval/mean_reward": "Evaluation return",
    "episode/mean_length": "Episode length",
    **{f"train/{name}_loss": f"{name.removesuffix('1').capitalize()} loss" for name in _LOSSES},
    "train/approx_kl": "KL divergence",
    "train/learning_rate": "Learning rate",
    "policy/mean_noise_std": "Action std",
    "time/fps": "Steps per second",
}
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "text.parse_math": False,  # names may have dollars
}


def plot_runs(
    run_dirs: Sequence[StrPath], path: StrPath, metrics: Sequence[str] | None = None, labels: list[str] | None = None
) -> Path:
    """Plot the learning curves of `run_dirs` (or `metrics.jsonl` files) into the image `path` (.png, .svg or .pdf).

    A single run is drawn raw (faint) and smoothed; runs with the same label (by default the directory's name) are
    seeds, drawn as their mean with a band of one standard deviation. `metrics` are the tags, by default all known ones.
    """
    import matplotlib

    groups, path = _load(run_dirs, labels), Path(path)
    there = sorted({tag for group in groups.values() for series in group for tag in series})
    if not there:
        raise ValueError("no metric was logged: the run was not trained, or is shorter than its log_interval")
    choices = ", ".join(there)
    if missing := [tag for tag in metrics or () if tag not in there]:
        raise ValueError(unknown_name("metric", missing[0], there))
    tags = list(dict.fromkeys(metrics)) if metrics is not None else [tag for tag in TITLES if tag in there]
    if not tags:
        raise ValueError(f"none of the usual metrics was logged; choose from {choices}")
    with matplotlib.rc_context(STYLE):
        figure = _draw(groups, tags)
        atomic_write(path, lambda file: figure.savefig(file, format=path.suffix[1:].lower() or "png", dpi=150))
    return path


def _load(run_dirs: Sequence[StrPath], labels: list[str] | None) -> dict[str, list[Series]]:
    """Read the metrics of every run and group them by label."""
    if not run_dirs:
        raise ValueError("there is no run to plot")
    if labels is not None and len(labels) != len(run_dirs):
        raise ValueError(f"{len(run_dirs)} runs need as many labels, got {len(labels)}")
    paths = [Path(run_dir).resolve() for run_dir in run_dirs]
    groups: dict[str, list[Series]] = {}
    for path, label in zip(paths, labels or [p.parent.name if p.is_file() else p.name for p in paths], strict=True):
        groups.setdefault(label, []).append(load_run(path).series)
    return groups


def _draw(groups: dict[str, list[Series]], tags: list[str]) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter, StrMethodFormatter

    rows, columns, places = _layout(len(tags))
    figure = Figure(figsize=(3.5 * columns, 2.6 * rows + 0.4), layout="constrained")
    grid = figure.add_gridspec(rows, columns)
    handles: dict[str, Any] = {}
    for tag, (row, column) in zip(tags, places, strict=True):
        axes = figure.add_subplot(grid[row, column])
        for index, (label, group) in enumerate(groups.items()):
            line = _draw_group(axes, tag, group, COLORS[index % len(COLORS)], "-" if index < len(COLORS) else "--")
            if line is not None:
                handles.setdefault(f"{label} ({len(group)} seeds)" if len(group) > 1 else label, line)
        axes.set_title(TITLES.get(tag, tag))
        axes.set_xlabel("environment steps", color="#444444")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.margins(x=0.01)
        data = np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines] or [np.zeros(1)])
        if tag == "train/learning_rate" and data.min() > 0 and data.max() > 20 * data.min():
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.0e}"))  # the usual one writes math
            axes.yaxis.set_minor_formatter(NullFormatter())
        elif np.abs(data).max() >= 1e4:
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    add_legend(figure, handles)
    return figure


def add_legend(figure: Figure, handles: dict[str, Any]) -> None:
    """Put the legend above the panels, in as many columns as fit; the figure grows by the rest."""
    for columns in range(min(4, len(handles)), 0, -1):
        legend = figure.legend(list(handles.values()), list(handles), loc="outside upper left", ncols=columns)
        size = legend.get_window_extent()
        if size.width <= figure.bbox.width or columns == 1:
            width, height = figure.get_size_inches()
            figure.set_size_inches(max(width, size.width / figure.dpi + 0.1), height + size.height / figure.dpi - 0.3)
            return
        legend.remove()


def _layout(count: int) -> tuple[int, int, list[tuple[slice, slice]]]:
    """Return rows, columns and the position of each panel; the first of many is four times as large as the others."""
    if count <= 3:
        return 1, count, [(slice(0, 1), slice(i, i + 1)) for i in range(count)]
    columns = 3 if count <= 5 else 4
    cells = [(r, c) for r in range(count) for c in range(columns) if r > 1 or c > 1][: count - 1]
    places = [(slice(0, 2), slice(0, 2))] + [(slice(r, r + 1), slice(c, c + 1)) for r, c in cells]
    return max(2, cells[-1][0] + 1), columns, places


def _draw_group(axes: Axes, tag: str, group: list[Series], color: str, style: str) -> Any:
    tables = [np.array(series.get(tag, ((), ())), dtype=np.float64) for series in group]  # steps and values
    curves = [table[:, np.isfinite(table[1])] for table in tables if np.isfinite(table[1]).any()]
    if not curves:
        return None
    look: Any = {"color": color, "linewidth": 1.8, "linestyle": style}
    shared = common_grid([steps for steps, _ in curves])
    if len(curves) == 1 or shared is None:
        line = None
        for steps, values in curves:
            axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
            # A line through one point is invisible without a marker.
            (line,) = axes.plot(steps, smooth(values), marker="o" if len(steps) == 1 else None, **look)
        return line
    table = np.stack([np.interp(shared, steps, smooth(values)) for steps, values in curves])
    mean, spread = table.mean(0), table.std(0)
    axes.fill_between(shared, mean - spread, mean + spread, color=color, alpha=0.18, linewidth=0)
    return axes.plot(shared, mean, **look)[0]


def common_grid(steps: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return 400 evenly spaced steps in the range that all curves cover; None if they have no common range."""
    first, last = max(s[0] for s in steps), min(s[-1] for s in steps)
    return np.linspace(first, last, 400) if last > first else None


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the centred moving average over 1/40 of the curve; the window is cut at the ends."""
    window = max(1, len(values) // 40) | 1
    kernel = np.ones(window)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")
