"""The runs that plots and reports show: their metrics, settings, final evaluation and machine, read from the files."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from canter.utils.files import StrPath
from canter.utils.logging.backends import METRICS_NAME, read_rows
from canter.utils.reading import FileContentError, read_json, read_yaml

Series = dict[str, tuple[list[int], list[float]]]  # steps and values by tag
MAX_VALUE = 1e300  # larger ones, and NaN, are damage, and cannot be drawn
MACHINE_NAME = "machine.json"
EVALUATION_NAME = "evaluation.json"
# Settings in which runs of one group may differ.
_NOT_COMPARED = (
    "seed",
    "device",
    "git_diff",
    "upload_model",
    "keep_checkpoints",
    "save_interval",
    "log_interval",
    "run.video",
    "run.final_episodes",
    "run.threads",
    "run.task",
    "run.launch",
    "run.film_interval",
    "run.histogram_interval",
    "rank_timeout",
)
_PAUSE_S = 60.0  # a longer time between two rows, if it is unusual too, is a pause: the run was resumed


@dataclasses.dataclass
class RunData:
    """One run: `settings` is its config.yaml with dotted names, `seconds` the time of training at `steps`."""

    path: Path
    series: Series
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    evaluation: dict[str, float] = dataclasses.field(default_factory=dict)
    machine: dict[str, Any] = dataclasses.field(default_factory=dict)
    steps: list[int] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def task(self) -> str:
        """The task, or the name of the directory above if the settings do not have it."""
        return str(self.settings.get("run.task", self.path.parent.name))

    @property
    def name(self) -> str:
        """The name of the run without its seed."""
        return self.path.name.rpartition("-seed")[0] or self.path.name

    @property
    def is_finished(self) -> bool:
        """Whether the run has made the evaluation at its end, or was not asked for one."""
        return bool(self.evaluation) or not self.settings.get("run.final_episodes")

    def final_score(self, metric: str) -> float | None:
        """The metric of the evaluation at the end of the run, else its last value; None if it was not logged."""
        if metric in self.evaluation:
            return self.evaluation[metric]
        values = [value for value in self.series.get(metric, ((), ()))[1] if np.isfinite(value)]
        return values[-1] if values else None


def read_metrics(run_dir: StrPath) -> Series:
    """Return the environment steps and values of every metric of a run, in the order of logging."""
    return load_run(run_dir).series


def load_run(run_dir: StrPath) -> RunData:
    """Read a run directory, or a `metrics.jsonl` alone."""
    path = Path(run_dir)
    metrics = path / METRICS_NAME if path.is_dir() else path
    if not metrics.is_file():
        raise FileNotFoundError(f"{metrics} does not exist; a run with a log_dir writes it")
    run = RunData(metrics.resolve().parent, {})
    times: list[float] = []
    for row in read_rows(metrics, path if path.is_dir() else None):
        for tag, value in row.items():
            if tag not in ("step", "time") and is_number(value):
                steps, values = run.series.setdefault(tag, ([], []))
                steps.append(row["step"])
                values.append(float(value))
        if isinstance(row.get("time"), (int, float)):
            before = sum(row.get(f"time/{part}", 0.0) for part in ("collection", "learning")) if not times else 0.0
            run.steps.append(row["step"])
            times += [row["time"] - before, row["time"]] if not times else [row["time"]]
    run.seconds = training_seconds(np.array(times))
    if path.is_dir():
        run.settings = read_settings(path)
        found = {n: v for n, v in _read(path, EVALUATION_NAME, read_json).items() if is_number(v)}
        is_old = bool(run.steps) and found.get("step", math.inf) < run.steps[-1]  # the run was resumed after it
        run.evaluation = {} if is_old else {name: float(value) for name, value in found.items()}
        run.machine = _read(path, MACHINE_NAME, read_json)
    return run


def read_settings(run_dir: Path) -> dict[str, Any]:
    """The settings in a run's config.yaml with dotted names; empty if it cannot be read."""
    return dict(flatten(_read(run_dir, "config.yaml", read_yaml)))


def is_number(value: Any) -> bool:
    """Whether a value of a file is a number that can be drawn."""
    return isinstance(value, (int, float)) and abs(value) < MAX_VALUE


def training_seconds(times: np.ndarray) -> list[float]:
    """Seconds of training at every row but the first, without the pauses of a run that was resumed."""
    gaps = np.maximum(np.diff(times), 0.0)
    if len(gaps):
        usual = float(np.median(gaps))
        gaps[gaps > max(_PAUSE_S, 20 * usual)] = usual
    return np.cumsum(gaps).tolist()


def _read(run: Path, name: str, read: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """The dict in a file of a run; empty if there is none, or another program's file."""
    try:
        return read(run / name, root=run)
    except (OSError, FileContentError):
        return {}


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Nested settings with dotted names."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def find_runs(path: Path) -> list[Path]:
    """A run directory, or all below a directory; FileNotFoundError if there is none."""
    below = [metrics.parent for metrics in sorted(path.glob(f"**/{METRICS_NAME}"))]
    if not below:
        raise FileNotFoundError(f"there is no run in {path}: no {METRICS_NAME}")
    return [path] if path in below else below


def differing_settings(runs: Sequence[RunData]) -> list[str]:
    """Names of the settings that are not the same in all runs, except seeds and matters of logging."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    names = [name for name in names if name not in _NOT_COMPARED and not name.startswith("logger_")]
    return [name for name in names if len({repr(run.settings.get(name)) for run in runs}) > 1]


def group_runs(runs: Sequence[RunData]) -> dict[str, list[RunData]]:
    """Runs with the same settings, by those that differ between groups; tasks and seeds may differ within a group."""
    names = differing_settings(runs)
    groups: dict[tuple[str, ...], list[RunData]] = {}
    for run in runs:
        groups.setdefault(tuple(repr(run.settings.get(name)) for name in names), []).append(run)
    by_name = [", ".join(dict.fromkeys(run.name for run in group)) for group in groups.values()]
    labels = [
        ", ".join(f"{n.rpartition('.')[2]}={short(g[0].settings.get(n))}" for n in names) for g in groups.values()
    ]
    if len(names) > 3 or len(labels) == 1 or len(set(labels)) < len(labels):
        labels = by_name if len(set(by_name)) == len(by_name) else [f"group {i}" for i in range(1, len(labels) + 1)]
    return dict(zip(labels, groups.values(), strict=True))


def short(value: Any) -> str:
    """A value of a setting, in at most four digits if it is a fraction."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
