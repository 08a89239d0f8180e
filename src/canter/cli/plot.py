"""`canter plot`: learning curves of one or several runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import tyro

from canter.cli.errors import UserError, user_errors
from canter.cli.options import parse
from canter.cli.runs import nearest_run
from canter.utils.logging import METRICS_NAME
from canter.utils.plots import plot_runs


@dataclasses.dataclass
class PlotOptions:
    """Draw learning curves; runs that differ only in their seed become one mean and its spread."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories, or directories of them."""
    out: Path | None = None
    """The picture (.png, .svg or .pdf); curve.png in the run, or curves.png here for several."""
    metrics: tuple[str, ...] = ()
    """Which metrics; by default the usual ones that were logged."""
    labels: tuple[str, ...] = ()
    """One per run; runs of one label are drawn together."""


def main(args: Sequence[str]) -> int:
    """Plot."""
    options: PlotOptions = parse(PlotOptions, args, "canter plot")
    runs = [run for path in options.runs for run in runs_in(path)]
    if not runs:
        raise UserError("say which runs to plot: canter plot RUN...")
    out = options.out or (runs[0] / "curve.png" if len(runs) == 1 else Path("curves.png"))
    labels = list(options.labels) or [label_of(run) for run in runs]
    with user_errors():
        print(plot_runs(runs, out, options.metrics or None, labels))
    return 0


def runs_in(path: Path) -> list[Path]:
    """The run at a path, or every run below it."""
    if (path / METRICS_NAME).is_file():
        return [path]
    below = sorted(found.parent for found in path.glob(f"**/{METRICS_NAME}")) if path.is_dir() else []
    if not below:
        raise UserError(f"there is no run in {path}: no {METRICS_NAME}{nearest_run(path)}")
    return below


def label_of(run: Path) -> str:
    """Task and name of a run without its seed."""
    run = run.resolve()
    return f"{run.parent.name} {run.name.rpartition('-seed')[0] or run.name}"
