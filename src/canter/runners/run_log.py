"""The reports of a run: to its directory and logging services, to callbacks, and to a hyperparameter search."""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import yaml
from torch import Tensor

from canter.utils.files import atomic_write, store_code_state
from canter.utils.logging import Logger

EVENTS = ("pre_iteration", "post_iteration", "pre_rollout", "post_rollout", "pre_update", "post_update")
LOSS_NAMES = {"surrogate_loss": "policy_loss", "entropy": "entropy_loss"}
DIFF_HEADING = b"\n# git diff HEAD\n"


class RunLog:
    """The logger of one run, opened when training starts.

    Args:
        directory: Run directory; None writes nothing.
        cfg: Settings of the run.
    """

    def __init__(self, directory: Path | None, cfg: Any) -> None:
        self.directory, self.cfg = directory, cfg
        self.writer: Logger | None = None
        self.git_repos: list[str] = [__file__]
        self.has_stored_code = False
        self._first_step: int | None = None

    def open(self, config: Mapping[str, Any]) -> None:
        """Write the configuration and open the backends, once."""
        if self.writer is None and self.directory is not None:
            self.write_config(config)
            self.writer = Logger(self.cfg.logger_backend, self.directory, self.cfg.logger_kwargs, config)
            if self._first_step is not None:
                self.writer.truncate_after(self._first_step)

    def continue_from(self, timesteps: int) -> None:
        """Drop entries logged after the loaded checkpoint, now or when the backends open."""
        if self.writer is None:
            self._first_step = timesteps
        else:
            self.writer.truncate_after(timesteps)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write config.yaml, from which the run can be built again."""

        def write(file: BinaryIO) -> None:
            file.write(yaml.safe_dump(dict(config), sort_keys=False).encode())

        if self.directory is not None:
            atomic_write(self.directory / "config.yaml", write)

    def log(self, metrics: Mapping[str, Any], timesteps: int) -> None:
        """Write metrics to every backend."""
        if self.writer is not None:
            self.writer.log_scalars(metrics, timesteps)

    def store_code(self) -> None:
        """Store the state of the code's git repositories, once; the text of a diff is never uploaded."""
        if self.has_stored_code or self.directory is None:
            return
        self.has_stored_code = True
        for path in store_code_state(self.directory, self.git_repos, self.cfg.git_diff):
            if self.writer is not None:
                with contextlib.suppress(OSError):  # the run goes on without this copy
                    self.writer.save_file(without_diff(path))

    def flush(self) -> None:
        """Flush every backend."""
        if self.writer is not None:
            self.writer.flush()

    def close(self) -> None:
        """Close every backend."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None


def without_diff(path: Path) -> Path:
    """A file with the state of a repository and no diff: the given one, or a copy that leaves the diff out."""
    status, heading, _ = path.read_bytes().partition(DIFF_HEADING)
    if not heading:
        return path
    copy = path.with_suffix(".status")
    copy.write_bytes(status)
    return copy


def train_metrics(losses: Mapping[str, Any], stats: Mapping[str, Any]) -> dict[str, Any]:
    """Results of an update under the names by which they are logged."""
    named = {f"train/{LOSS_NAMES.get(name, name)}": value for name, value in losses.items()}
    return named | {name if "/" in name else f"train/{name}": value for name, value in stats.items()}


def local_metrics(locs: Mapping[str, Any]) -> dict[str, float]:
    """Metrics among the local variables of a training loop: `losses`, `stats` and every float."""
    losses, stats = (locs[name] if isinstance(locs.get(name), Mapping) else {} for name in ("losses", "stats"))
    floats = {name: value for name, value in locs.items() if isinstance(value, float)}
    named = train_metrics(losses, stats).items()
    return floats | {name: float(value) for name, value in named if not isinstance(value, Tensor) or value.numel() == 1}


class StopTraining(Exception):  # noqa: N818 (it is a request, not an error)
    """Raised by a callback to end `learn` cleanly, with a final checkpoint."""


class Callbacks:
    """User functions by event, called in the order in which they were added.

    Args:
        errors: Effect of an exception in a callback: "raise", or "warn" and continue.
    """

    def __init__(self, errors: str = "raise") -> None:
        if errors not in ("raise", "warn"):
            raise ValueError(f"callback_errors must be 'raise' or 'warn', got {errors!r}")
        self.errors = errors
        self.by_event: dict[str, list[Callable[..., None]]] = {event: [] for event in EVENTS}

    def add(self, event: str, fn: Callable[..., None]) -> None:
        """Call `fn(runner)` at a `pre_*` event, `fn(runner, stats)` at a `post_*` event."""
        if event not in self.by_event:
            raise ValueError(f"unknown event {event!r}; events are {', '.join(EVENTS)}")
        self.by_event[event].append(fn)

    def fire(self, event: str, *args: Any) -> None:
        """Call the functions of an event with the runner and, at a `post_*` event, the metrics."""
        for fn in self.by_event[event]:
            try:
                fn(*args)
            except Exception as error:  # noqa: PERF203 (the other callbacks still run)
                if self.errors == "raise" or isinstance(error, StopTraining):
                    raise
                warnings.warn(f"the {event} callback {fn!r} failed: {error!r}", stacklevel=2)


class TrialPruned(Exception):  # noqa: N818 (Optuna's name)
    """The search pruned this run; Optuna's own exception is raised instead where Optuna is installed."""


def pruned_exception(message: str) -> Exception:
    """Optuna's TrialPruned if Optuna is installed, else canter's."""
    try:
        from optuna import TrialPruned as OptunaPruned
    except ImportError:
        return TrialPruned(message)
    return OptunaPruned(message)


class TrialReporter:
    """Reports the metrics of a run to a hyperparameter search.

    Args:
        trial: An object with `report(value, step)` and optionally `should_prune()`, such as an Optuna trial; or, as in
            Ray Tune, a callable that takes a dict, or an object with `report(dict)`.
        metric: Reported value: a metric name, velrmsd, CoT, mean_reward, or a function of the metrics. None reports
            velrmsd where the environment measures it, and `episode/mean_reward` elsewhere.
        eval_interval: The run's setting.
    """

    def __init__(self, trial: Any, metric: Any = None, eval_interval: int | None = None) -> None:
        self.trial, self.metric, self.num_reports = trial, metric, 0
        report = getattr(trial, "report", None)
        if report is None and not callable(trial):
            raise TypeError(f"trial must be callable or have report(value, step), got {type(trial).__name__}")
        if isinstance(metric, str):
            if "/" not in metric and metric not in ("velrmsd", "CoT", "mean_reward"):
                raise ValueError(
                    "trial_metric must be one of velrmsd, CoT, mean_reward, the name of a metric such as "
                    f"'eval/mean_reward', or a callable, got {metric!r}"
                )
            is_evaluated = metric.startswith("eval/") and metric not in ("eval/velrmsd", "eval/CoT")
            if is_evaluated and not eval_interval:
                raise ValueError(f"trial_metric {metric!r} needs eval_interval: without it no evaluation is run")
        try:
            self.takes_value = report is not None and bool(inspect.signature(report).bind(0.0, 0).args)
        except (TypeError, ValueError):  # a builtin may have no signature
            self.takes_value = False

    def report(self, metrics: Mapping[str, float], velrmsd: float, cot: float, iteration: int) -> bool:
        """Report one iteration; returns whether the search prunes the run."""
        values = {**metrics, "velrmsd": float(velrmsd), "CoT": float(cot)}
        values["mean_reward"] = metrics.get("episode/mean_reward", math.nan)
        if not self.takes_value:
            getattr(self.trial, "report", self.trial)({**values, "iteration": iteration})
            return False
        value = self._value(values)
        if value is None:
            return False
        self.trial.report(value, iteration)
        self.num_reports += 1
        if hasattr(self.trial, "set_user_attr") and not math.isnan(cot):
            self.trial.set_user_attr("CoT", float(cot))
        return hasattr(self.trial, "should_prune") and bool(self.trial.should_prune())

    def _value(self, values: Mapping[str, float]) -> float | None:
        """The value to report; None if this iteration has none, as before the first episode ends."""
        name = self.metric
        if not isinstance(name, str | None):
            return float(name(values))
        if name is None:
            name = "mean_reward" if math.isnan(values["velrmsd"]) else "velrmsd"
        if name in ("velrmsd", "CoT") and math.isnan(values[name]):
            raise ValueError(f"the environment gives no {name!r} to report; use trial_metric='mean_reward'")
        if name == "mean_reward":
            name = "episode/mean_reward"
        return float(values[name]) if name in values else None

    def warn_if_silent(self) -> None:
        """Warn if nothing was reported during the run."""
        if self.takes_value and self.num_reports == 0:
            name = "episode/mean_reward" if self.metric is None else self.metric
            warnings.warn(f"nothing was reported to the trial: no iteration had the metric {name!r}", stacklevel=3)
