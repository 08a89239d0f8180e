"""Comparisons of groups of runs: their numbers, as JSON, and one HTML page that shows them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from canter.utils.files import atomic_write
from canter.utils.html_page import SVG_STYLE, Page
from canter.utils.plots import COLORS, STYLE, TITLES, add_legend, common_grid
from canter.utils.reading import FileContentError, read_medium
from canter.utils.run_data import RunData, differing_settings, short
from canter.utils.statistics import (
    CONFIDENCE,
    Estimate,
    Scores,
    few_runs,
    improvement,
    iqm_curve,
    iqm_estimate,
    profile,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Groups = Mapping[str, Sequence[RunData]]
CURVE_POINTS = 100
SHARES = (0.5, 0.75, 0.9)  # of the way from the first to the best score, for sample efficiency
MAX_MEDIUM_BYTES = 6_000_000
MEDIA = ("*.mp4", "*.gif", "*.png")


@dataclasses.dataclass
class Curve:
    """A group's curve on one task: interquartile means at `steps`, the runs behind them, and the time of training."""

    steps: np.ndarray
    runs: np.ndarray  # (runs, points)
    iqm: Estimate
    seconds: np.ndarray  # mean over the runs

    def reaches(self, target: float) -> tuple[float, float] | None:
        """The steps and seconds at which the interquartile mean first reaches a score."""
        above = np.flatnonzero(self.iqm.value >= target)
        return (float(self.steps[above[0]]), float(self.seconds[above[0]])) if len(above) else None


class Comparison:
    """The numbers of a report.

    Args:
        groups: Runs by the name of their group; a group has all tasks.
        metric: The score of a run: of its evaluation at the end, else its last value.
        ranges: Scores of a task that count as 0 and 1; with several tasks the lowest and highest one by default.
    """

    def __init__(
        self, groups: Groups, metric: str = "eval/mean_reward", ranges: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        self.groups, self.metric = groups, metric
        self.runs = [run for group in groups.values() for run in group]
        self.tasks = sorted({run.task for run in self.runs})
        if unknown := [task for task in ranges or () if task not in self.tasks]:
            tasks = f"the tasks are {', '.join(self.tasks)}"
            raise ValueError(f"there is a score range of {unknown[0]!r}, but no run of it; {tasks}")
        self.raw = {label: [self._scores(label, task) for task in self.tasks] for label in groups}
        self.ranges = {task: self._range(task, ranges or {}) for task in self.tasks}
        self.is_normalised = len(self.tasks) > 1 or bool(ranges)
        self.scores = {label: self._normalised(raw) for label, raw in self.raw.items()}
        self.iqm = {label: iqm_estimate(scores) for label, scores in self.scores.items()}
        pairs = itertools.permutations(groups, 2)
        self.improvement = {(x, y): improvement(self.scores[x], self.scores[y]) for x, y in pairs}
        every = np.concatenate([score for scores in self.scores.values() for score in scores])
        pad = 0.05 * (np.ptp(every) or 1.0)
        self.thresholds = np.linspace(every.min() - pad, every.max() + pad, 101)
        self.profiles = {label: profile(scores, self.thresholds) for label, scores in self.scores.items()}
        self.curves = {task: self._curves(task) for task in self.tasks}
        self.targets = {task: self._targets(list(curves.values())) for task, curves in self.curves.items()}
        self.settings = differing_settings(self.runs)

    def _scores(self, label: str, task: str) -> np.ndarray:
        found: list[float] = []
        for run in (run for run in self.groups[label] if run.task == task):
            if (score := run.final_score(self.metric)) is None:
                known = ", ".join(sorted(run.series)) or "none"
                raise ValueError(f"the run {run.path} has no metric {self.metric!r}; choose one with --metric: {known}")
            found.append(score)
        if not found:
            problem = f"the group {label!r} has no run of {task}; groups are compared on the same tasks"
            raise ValueError(f"{problem}: name runs of one task, or make groups with --group NAME=RUN,RUN")
        return np.array(found)

    def _range(self, task: str, given: Mapping[str, Sequence[float]]) -> tuple[float, float]:
        index = self.tasks.index(task)
        every = np.concatenate([raw[index] for raw in self.raw.values()])
        found: Any = given.get(task, (every.min(), every.max()))
        try:
            low, high = map(float, found)
        except (TypeError, ValueError):
            low = high = math.nan
        if not math.isfinite(high - low) or low > high:
            raise ValueError(f"the range of {task} must be its low and its high score, such as [0, 500], got {found}")
        return low, high

    def _normalised(self, raw: Scores) -> list[np.ndarray]:
        if not self.is_normalised:
            return list(raw)
        ranges = [self.ranges[task] for task in self.tasks]
        return [(scores - low) / ((high - low) or 1.0) for scores, (low, high) in zip(raw, ranges, strict=True)]

    def _curves(self, task: str) -> dict[str, Curve]:
        curves: dict[str, Curve] = {}
        for label, group in self.groups.items():
            runs = [run for run in group if run.task == task and len(run.series.get(self.metric, ((),))[0]) > 1]
            tables = [np.array(run.series[self.metric], dtype=np.float64) for run in runs]
            steps = common_grid([table[0] for table in tables]) if tables else None
            if steps is None:
                continue
            same = tables[0][0]
            if all(np.array_equal(table[0], same) for table in tables) and len(same) <= CURVE_POINTS:
                steps = same
            else:
                steps = np.linspace(steps[0], steps[-1], CURVE_POINTS)
            values = np.stack([np.interp(steps, *table) for table in tables])
            clocks = [np.interp(steps, run.steps, run.seconds) for run in runs if run.steps]
            seconds = np.mean(clocks, 0) if clocks else np.full(len(steps), np.nan)
            curves[label] = Curve(steps, values, iqm_curve(values), seconds)
        return curves

    def _targets(self, curves: Sequence[Curve]) -> dict[float, float]:
        """Scores at some shares of the way from the lowest first to the highest point of the groups' curves."""
        if not curves:
            return {}
        low, high = min(curve.iqm.value[0] for curve in curves), max(curve.iqm.value.max() for curve in curves)
        return {share: float(low + share * (high - low)) for share in SHARES}

    def to_dict(self) -> dict[str, Any]:
        """All numbers in JSON types."""
        groups: dict[str, Any] = {}
        for label, group in self.groups.items():
            mean, median, std = self.spread(label)
            groups[label] = {"iqm": plain(self.iqm[label]), "mean": mean, "median": median, "std": std}
            groups[label]["steps_per_second"] = self.speed(label)
            groups[label]["profile"] = plain(self.profiles[label])
            groups[label]["runs"] = [self._run_row(run) for run in group]
            groups[label]["curves"] = {
                task: {"steps": curves[label].steps.tolist(), "seconds": curves[label].seconds.tolist()}
                | plain(curves[label].iqm)
                for task, curves in self.curves.items()
                if label in curves
            }
        return {
            "metric": self.metric,
            "tasks": self.tasks,
            "score_ranges": {task: list(self.ranges[task]) for task in self.tasks} if self.is_normalised else None,
            "confidence": CONFIDENCE,
            "groups": groups,
            "thresholds": self.thresholds.tolist(),
            "improvement": [{"of": x, "over": y, **plain(e)} for (x, y), e in self.improvement.items()],
            "sample_efficiency": [
                {
                    "task": task,
                    "group": label,
                    "target": target,
                    "steps": reached and reached[0],
                    "seconds": reached and reached[1],
                }
                for task, label, target, reached in self.efficiency()
            ],
        }

    def _run_row(self, run: RunData) -> dict[str, Any]:
        row = {"path": str(run.path), "task": run.task, "seed": run.settings.get("seed")}
        row |= {"score": run.final_score(self.metric), "steps": run.steps[-1] if run.steps else None}
        row |= {"seconds": run.seconds[-1] if run.seconds else None, "machine": run.machine}
        row["is_finished"] = run.is_finished
        return row | {"settings": {name: run.settings.get(name) for name in self.settings}}

    def unfinished(self) -> list[str]:
        """The runs that have not come to their end, and how far they are."""
        found = [run for run in self.runs if not run.is_finished]
        ends = [f"{run.steps[-1] if run.steps else 0:,}" for run in found]
        totals = [run.settings.get("run.total_timesteps") for run in found]
        lengths = [f" of {total:,}" if isinstance(total, int) else "" for total in totals]
        return [f"{run.path.name} (step {a}{b})" for run, a, b in zip(found, ends, lengths, strict=True)]

    def spread(self, label: str) -> tuple[float, float, float]:
        """Mean, median and standard deviation of a group's scores."""
        scores = np.concatenate(self.scores[label])
        return float(scores.mean()), float(np.median(scores)), float(scores.std())

    def speed(self, label: str) -> float | None:
        """Mean of the environment steps per second of training."""
        rates = [run.steps[-1] / run.seconds[-1] for run in self.groups[label] if run.seconds and run.seconds[-1] > 0]
        return float(np.mean(rates)) if rates else None

    def efficiency(self) -> list[tuple[str, str, float, tuple[float, float] | None]]:
        """Task, group, target score, and the steps and seconds at which the group reaches it."""
        rows = itertools.product(self.tasks, self.groups, SHARES)
        found = [(task, label, share) for task, label, share in rows if label in self.curves[task]]
        return [(t, g, self.targets[t][s], self.curves[t][g].reaches(self.targets[t][s])) for t, g, s in found]


def plain(estimate: Estimate) -> dict[str, Any]:
    """An estimate in JSON types."""
    parts = estimate._asdict().items()
    return {name: part.tolist() if isinstance(part, np.ndarray) else part for name, part in parts}


def run_count(group: Sequence[RunData]) -> str:
    """The number of runs in words: "1 run", "5 runs"."""
    return f"{len(group)} run{'s' * (len(group) != 1)}"


def interval_text(estimate: Estimate, group: Sequence[RunData]) -> str:
    """The interval of an estimate in words; one run has none."""
    if len(group) < 2:
        return "-"
    return f"{estimate.low:.4g} to {estimate.high:.4g}{few_runs(len(group))}"


def write_report(comparison: Comparison, path: Path, title: str | None = None) -> None:
    """Write the page `path`, and the numbers beside it as JSON."""
    import matplotlib

    c = comparison
    tasks, counts = ", ".join(c.tasks), ", ".join(f"{label}: {run_count(group)}" for label, group in c.groups.items())
    page = Page(title or tasks, f"{tasks}. {counts}.")
    colors = [COLORS[index % len(COLORS)] for index in range(len(c.groups))]
    with matplotlib.rc_context({**STYLE, **SVG_STYLE}):
        _add_summary(page, c, colors)
        _add_curves(page, c, colors)
        _add_comparison(page, c, colors)
    _add_efficiency(page, c)
    _add_settings(page, c)
    _add_media(page, c)
    _add_machines(page, c)
    page.write(path)
    numbers = json.dumps(c.to_dict(), indent=1, default=str)
    atomic_write(path.with_suffix(".json"), f"{numbers}\n".encode())


def _add_summary(page: Page, c: Comparison, colors: Sequence[str]) -> None:
    score = (
        "return without noise at the end of a run" if c.metric == "eval/mean_reward" else f"last {c.metric} of a run"
    )
    text = f"The score is the {score}. "
    if c.is_normalised:
        text += (
            "Scores of a task are scaled: " + ", ".join(f"{t} {a:g} to {b:g}" for t, (a, b) in c.ranges.items()) + ". "
        )
    text += "IQM is the mean of the middle half of the runs, with its stratified bootstrap interval of 95%."
    page.section("Summary", text)
    if found := c.unfinished():
        text = "Not finished, so that the last score counts and the group's curve ends there"
        page.text(f"{text}: {', '.join(found)}.")
    rows: list[list[str]] = []
    for label, group in c.groups.items():
        mean, median, std = c.spread(label)
        e, rate = c.iqm[label], c.speed(label)
        hours = [run.seconds[-1] for run in group if run.seconds]
        clock = duration(float(np.mean(hours))) if hours else "-"
        shown = [f"{e.value:.4g}", interval_text(e, group), f"{mean:.4g} ± {std:.3g}", f"{median:.4g}"]
        rows.append([label, str(len(group)), *shown, f"{rate:,.0f}" if rate else "-", clock])
    page.table(
        ["group", "runs", "IQM", "95% interval", "mean ± std", "median", "steps/s", "time per run"], rows, colors
    )
    page.drawing(_draw_intervals(c, colors), "interquartile means with their intervals, and every run")


def _draw_intervals(c: Comparison, colors: Sequence[str]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 0.9 + 0.5 * len(c.groups)), layout="constrained")
    axes = figure.add_subplot()
    for row, (label, color) in enumerate(zip(c.groups, colors, strict=True)):
        e = c.iqm[label]
        axes.barh(row, e.high - e.low, left=e.low, height=0.5, color=color, alpha=0.35)
        axes.plot([e.value, e.value], [row - 0.25, row + 0.25], color=color, linewidth=2.5)
        scores = np.concatenate(c.scores[label])
        axes.scatter(scores, np.full(len(scores), row), s=26, color=color, edgecolors="white", linewidths=0.6, zorder=3)
    axes.use_sticky_edges = False  # a bar without width is seen whole at the edge
    axes.set_yticks(range(len(c.groups)), list(c.groups))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(_score_name(c))
    return figure


def _score_name(c: Comparison) -> str:
    return "normalised score" if c.is_normalised else TITLES.get(c.metric, c.metric).lower()


def _add_curves(page: Page, c: Comparison, colors: Sequence[str]) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    page.section("Learning curves", "Thick: the IQM over runs, with its interval of 95%. Thin: every run.")
    for task, curves in c.curves.items():
        if not curves:
            page.section(task, f"No curve: {c.metric} was logged fewer than two times, or the runs share no steps.")
            continue
        figure = Figure(figsize=(9.6, 3.4), layout="constrained")
        left = figure.add_subplot(1, 2, 1)
        right = figure.add_subplot(1, 2, 2, sharey=left)
        longest = max(curve.seconds[-1] for curve in curves.values())
        scale, unit = next(
            ((s, u) for s, u in ((3600.0, "hours"), (60.0, "minutes")) if longest > 2 * s), (1.0, "seconds")
        )
        lines: dict[str, Any] = {}  # named by hand, because matplotlib leaves out labels with a leading underscore
        for label, color in zip(c.groups, colors, strict=True):
            if label in curves:
                lines[label] = _draw_curve(left, curves[label].steps, curves[label], color)
                _draw_curve(right, curves[label].seconds / scale, curves[label], color)
        left.xaxis.set_major_formatter(EngFormatter(sep=""))
        for axes, name in ((left, "environment steps"), (right, f"{unit} of training")):
            axes.xaxis.set_major_locator(MaxNLocator(6))
            axes.set_xlabel(name)
        left.set_title(task)
        left.set_ylabel(TITLES.get(c.metric, c.metric))
        add_legend(figure, lines)
        page.drawing(figure, f"learning curves of {task}")


def _draw_curve(axes: Axes, x: np.ndarray, curve: Curve, color: str) -> Any:
    axes.plot(x, curve.runs.T, color=color, alpha=0.3, linewidth=0.7)
    axes.fill_between(x, curve.iqm.low, curve.iqm.high, color=color, alpha=0.18, linewidth=0)
    return axes.plot(x, curve.iqm.value, color=color, linewidth=2)[0]


def _add_comparison(page: Page, c: Comparison, colors: Sequence[str]) -> None:
    from matplotlib.figure import Figure

    text = "The share of runs that score above a threshold, with its interval of 95%. "
    page.section(
        "Comparison", text + "Below: the probability that a run of one group scores higher than one of another."
    )
    figure = Figure(figsize=(9.6, 3.2), layout="constrained")
    axes = figure.add_subplot()
    lines: dict[str, Any] = {}
    for label, color in zip(c.groups, colors, strict=True):
        e = c.profiles[label]
        axes.fill_between(c.thresholds, e.low, e.high, color=color, alpha=0.18, linewidth=0, step="post")
        lines[label] = axes.step(c.thresholds, e.value, color=color, linewidth=2, where="post")[0]
    axes.set_xlabel(f"{_score_name(c)} (threshold)")
    axes.set_ylabel("share of runs above")
    axes.set_ylim(-0.03, 1.03)
    axes.ticklabel_format(axis="x", useOffset=False)
    add_legend(figure, lines)
    page.drawing(figure, "performance profiles")
    rows = [[f"{x} over {y}", f"{e.value:.2f}", f"{e.low:.2f} to {e.high:.2f}"] for (x, y), e in c.improvement.items()]
    if rows:
        page.table(["probability of improvement", "value", "95% interval"], rows)


def _add_efficiency(page: Page, c: Comparison) -> None:
    text = "Environment steps and time of training until the IQM of a group first reaches a score: a share of the way "
    page.section("Sample efficiency", f"{text}from the lowest start to the best point of all groups.")
    rows: list[list[str]] = []
    for task in c.tasks:
        for label in c.curves[task]:
            cells = [reached for t, g, _, reached in c.efficiency() if (t, g) == (task, label)]
            shown = [f"{r[0]:,.0f} ({duration(r[1])})" if r else "not reached" for r in cells]
            rows.append([f"{task}: {label}" if len(c.tasks) > 1 else label, *shown])
    targets = next(iter(c.targets.values()), {}) if len(c.tasks) == 1 else {}
    page.table(["group", *(f"{s:.0%}" + (f" ({targets[s]:.4g})" if s in targets else "") for s in SHARES)], rows)


def _add_settings(page: Page, c: Comparison) -> None:
    page.section("Settings that differ", "" if c.settings else "None: the groups have the same settings.")
    if c.settings:
        cells = [[{short(run.settings.get(name)) for run in g} for g in c.groups.values()] for name in c.settings]
        rows = [[name, *(", ".join(sorted(cell)) for cell in row)] for name, row in zip(c.settings, cells, strict=True)]
        page.table(["setting", *c.groups], rows)


def _add_media(page: Page, c: Comparison) -> None:
    """Add the films and pictures of each group's best run on every task."""
    found: list[tuple[Path, str]] = []
    for label, group in c.groups.items():
        for task in c.tasks:
            run = max(
                (run for run in group if run.task == task), key=lambda run: run.final_score(c.metric) or -math.inf
            )
            files = [file for pattern in MEDIA for file in sorted(run.path.glob(pattern)) if file.name != "curve.png"]
            found += [(file, f"{label}: {task}, {run.path.name}/{file.name}") for file in files]
    if found:
        page.section("Films and pictures", "Of the best run of each group.")
    for file, caption in found:
        try:
            page.medium(file, read_medium(file, MAX_MEDIUM_BYTES, file.parent), caption)
        except (OSError, FileContentError) as error:
            page.text(f"{caption} is not shown: {error}")


def _add_machines(page: Page, c: Comparison) -> None:
    machines: dict[str, int] = {}
    for run in c.runs:
        text = json.dumps(run.machine, sort_keys=True)
        machines[text] = machines.get(text, 0) + 1
    known = [(json.loads(text), count) for text, count in machines.items()]
    page.section("Hardware and versions", "" if any(m for m, _ in known) else "The runs did not record their machine.")
    names = list(dict.fromkeys(name for machine, _ in known for name in machine))
    if names:
        rows = [[name, *(str(machine.get(name, "-")) for machine, _ in known)] for name in names]
        page.table(["", *(f"{count} runs" if count > 1 else "1 run" for _, count in known)], rows)


def duration(seconds: float) -> str:
    """Seconds in a unit that suits them."""
    if not math.isfinite(seconds):
        return "-"
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
