"""The reports of a run: to its directory and logging services, to callbacks, and to a hyperparameter search."""

import contextlib
import inspect
import json
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from canter.algorithms.user_code import is_users
from canter.utils.checkpoint import find_checkpoints
from canter.utils.code_state import store_code_state
from canter.utils.console import Console, table
from canter.utils.distributed import RANKS
from canter.utils.files import atomic_write
from canter.utils.logging import Logger
from canter.utils.reading import MAX_TEXT, read_limited
from canter.utils.run_data import MACHINE_NAME
from canter.utils.runtime import describe_machine

EVENTS = ("pre_iteration", "post_iteration", "pre_rollout", "post_rollout", "pre_update", "post_update")
MAX_HISTORY = 10_000  # log entries; metrics.jsonl has them all
LOSS_NAMES = {"surrogate_loss": "policy_loss", "entropy": "entropy_loss"}
DIFF_HEADING = b"\n# git diff HEAD\n"


def store_code(directory: Path, repositories: list[str], with_diff: bool, writer: Logger) -> None:
    """Store the machine and the state of the code's git repositories; the text of a diff is never uploaded."""
    with contextlib.suppress(OSError):
        atomic_write(directory / MACHINE_NAME, json.dumps(describe_machine(), indent=2).encode())
    for path in store_code_state(directory, repositories, with_diff):
        with contextlib.suppress(OSError):  # the run goes on without this copy
            status, heading, _ = read_limited(path, 2 * MAX_TEXT, directory).partition(DIFF_HEADING)
            if heading:
                atomic_write(path.with_suffix(".status"), status, root=directory)
            writer.save_file(path.with_suffix(".status") if heading else path)


def open_log(runner: Any) -> None:
    """Open the logger of a runner, if it has a run directory; after loading, later entries are removed."""
    if runner.writer is None and runner.log_dir is not None and RANKS.is_first:
        if runner.tot_timesteps == 0 and runner.resumed_at is None:
            warn_of_earlier_run(runner.save_dir or runner.log_dir)
        runner.write_config()
        cfg = runner.cfg
        runner.writer = Logger(cfg.logger_backend, runner.log_dir, cfg.logger_kwargs, runner.config())
    if runner.writer is not None and runner.resumed_at is not None:
        runner.writer.truncate_after(runner.resumed_at)
        runner.resumed_at = None


def warn_of_earlier_run(directory: Path) -> None:
    """Warn if a new run is about to write its files between those of another one."""
    if directory.is_dir() and (found := find_checkpoints(directory)):
        problem = f"{directory} has checkpoints of an earlier run, up to {found[-1][1].name}; this run adds its own"
        warnings.warn(f"{problem}: use another log_dir, or load a checkpoint to continue that run", stacklevel=5)


def train_metrics(losses: Mapping[str, Any], stats: Mapping[str, Any]) -> dict[str, Any]:
    """Results of an update under the names by which they are logged."""
    named = {f"train/{LOSS_NAMES.get(name, name)}": value for name, value in losses.items()}
    return named | {name if "/" in name else f"train/{name}": value for name, value in stats.items()}


def log_metrics(runner: Any, locs: Mapping[str, Any], width: int = 80, pad: int = 35) -> str:
    """Write metrics to the backends of a runner, print them as a table and return the table; see `Runner.log`."""
    metrics = locs.get("metrics")
    if not isinstance(metrics, Mapping):
        dicts = (locs[name] if isinstance(locs.get(name), Mapping) else {} for name in ("losses", "stats"))
        named = train_metrics(*dicts).items()
        named = {name: float(value) for name, value in named if not torch.is_tensor(value) or value.numel() == 1}
        floats = {name: value for name, value in locs.items() if isinstance(value, float)}
        if runner.stats.tracker.step:
            runner.stats.rollout_metrics({})
        metrics = runner.stats.newest | runner.robot_metrics() | floats | named
    if runner.writer is not None:
        runner.writer.log_scalars({**metrics, "iteration": runner.iteration}, runner.tot_timesteps)
    text = table(metrics, width, pad)
    if locs.get("console") is None:  # within `learn` the progress display shows the metrics
        print(text)  # noqa: T201 (documented)
    return text


def log_histograms(runner: Any) -> None:
    """Log the distributions of the policy's parameters, the last actions and the rollout, to backends with histograms.

    As a callback: `runner.add_callback("post_iteration", lambda runner, stats: runner.is_due(50) and
    log_histograms(runner))`.
    """
    if runner.writer is None:
        return
    values = {f"weights/{name}": parameter for name, parameter in runner.policy.named_parameters()}
    rollout = getattr(getattr(runner.alg, "storage", None), "data", {})
    values |= {f"rollout/{name}": rollout[name] for name in ("advantages", "returns", "values") if name in rollout}
    if runner.actions is not None:
        values["rollout/actions"] = runner.actions
    for tag, tensor in values.items():
        runner.writer.log_histogram(tag, tensor, runner.tot_timesteps)


class StopTraining(Exception):  # noqa: N818 (it is a request, not an error)
    """Raised by a callback to end `learn` cleanly, with a final checkpoint; in a single process by an environment too.

    Steps of an iteration that has not ended are dropped.
    """


class Callbacks:
    """User functions by event, called in the order of adding; with `errors="warn"` training continues after errors.

    After them `sync()` notices what they changed.
    """

    def __init__(self, errors: str = "raise") -> None:
        if errors not in ("raise", "warn"):
            raise ValueError(f"callback_errors must be 'raise' or 'warn', got {errors!r}")
        self.errors = errors
        self.is_stop_asked = False
        """Whether one of several ranks is to end the run after this iteration."""
        self.sync: Callable[[], None] = lambda: None
        self.by_event: dict[str, list[Callable[..., None]]] = {event: [] for event in EVENTS}

    def add(self, event: str, fn: Callable[..., None]) -> None:
        """Call `fn(runner)` at a `pre_*` event, `fn(runner, stats)` at a `post_*` event."""
        if event not in self.by_event:
            raise ValueError(f"unknown event {event!r}; events are {', '.join(EVENTS)}")
        if not callable(fn):
            example = "lambda runner: ..." if event.startswith("pre_") else "lambda runner, stats: ..."
            raise TypeError(f"the callback of {event} must be a function such as {example}, got {fn!r}")
        self.by_event[event].append(fn)

    def has_users(self) -> bool:
        """Whether there is a function from outside canter."""
        return any(is_users(fn) for functions in self.by_event.values() for fn in functions)

    def fire(self, event: str, *args: Any) -> None:
        """Call the functions of an event with the runner and, at a `post_*` event, the metrics."""
        for fn in self.by_event[event]:
            try:
                fn(*args)
            except StopTraining:
                if RANKS.size == 1:
                    raise
                self.is_stop_asked = True  # the others wait for what this rank does in the rest of the iteration
            except Exception as error:
                if self.errors == "raise":
                    raise
                warnings.warn(f"the {event} callback {fn!r} failed: {error!r}", stacklevel=2)
        if self.by_event[event]:
            self.sync()


class LearnResult(NamedTuple("RobotMetrics", [("velrmsd", float), ("CoT", float)])):
    """Result of `learn`: unpacks to (velrmsd, CoT); `history` has the metrics of the last `MAX_HISTORY` log entries."""

    history: list[dict[str, float]]


class Progress:
    """What one call of `learn` reports: to the log, the terminal and a hyperparameter search."""

    def __init__(self, runner: Any, trial: Any) -> None:
        cfg = runner.cfg
        self.runner = runner
        self.reporter = None if trial is None else TrialReporter(trial, cfg.trial_metric, cfg.eval_interval)
        self.history: deque[dict[str, float]] = deque(maxlen=MAX_HISTORY)
        self.display: Any = None

    @contextlib.contextmanager
    def console(self, last: int) -> Iterator[None]:
        """Show the progress up to the iteration `last` in the terminal."""
        runner = self.runner
        title = str(runner.run_info.get("task", type(runner.alg).__name__))
        with Console(last, title, runner.show_progress, runner.iteration, path=runner.log_dir) as self.display:
            self.display.update(runner.iteration, runner.tot_timesteps, {})
            yield

    def report(self, metrics: dict[str, float]) -> bool:
        """Evaluate and log if that is due, after an iteration; returns whether the search prunes the run."""
        runner, is_pruned = self.runner, False
        evaluated: dict[str, float] = {}
        if runner.is_due(runner.cfg.eval_interval):
            evaluated = RANKS.on_first(self._evaluate)
            metrics |= evaluated
        if is_logged := runner.is_due(runner.log_interval):
            metrics |= runner.stats.extras.take() | runner.stats.components.take()
            if RANKS.size > 1:
                metrics = RANKS.mean_metrics({**metrics, "time/collectives": RANKS.take_seconds()})
        if metrics and self.reporter is not None:
            is_pruned = self.reporter.report(metrics, runner.metrics_velrmsd, runner.metrics_CoT, runner.iteration)
        try:
            if runner.callbacks.by_event["post_iteration"]:
                seen = metrics or runner.stats.so_far()
                runner.callbacks.fire("post_iteration", runner, seen)  # what it adds to the metrics is logged
        finally:
            if is_logged or (evaluated and runner.log_interval):  # an evaluation is logged between two entries too
                entry = metrics if is_logged else evaluated
                runner.log({"metrics": entry, "console": self.display})
                self.history.append(entry)
            self.display.update(runner.iteration, runner.tot_timesteps, metrics)
        if runner.writer is not None and not runner.has_stored_code:
            runner.has_stored_code = True
            store_code(runner.log_dir, runner.git_repos, runner.cfg.git_diff, runner.writer)
        return is_pruned

    def _evaluate(self) -> dict[str, float]:
        """The `eval/` metrics of an iteration; none if a signal ends the training, after this iteration."""
        with contextlib.suppress(StopTraining):
            return self.runner.eval(self.runner.cfg.eval_episodes)
        return {}

    @property
    def newest(self) -> dict[str, float]:
        """The metrics of the last log entry; {} before the first."""
        return self.history[-1] if self.history else {}

    def result(self) -> LearnResult:
        """The robot metrics and the history, at the end of `learn`."""
        if self.reporter is not None:
            self.reporter.warn_if_unused()
        result = LearnResult(float(self.runner.metrics_velrmsd), float(self.runner.metrics_CoT))
        result.history = list(self.history)
        return result


class TrialPruned(Exception):  # noqa: N818 (Optuna's name)
    """The search pruned this run; Optuna's own exception is raised instead where Optuna is installed."""


def pruned_exception(message: str) -> Exception:
    """Optuna's TrialPruned if Optuna is installed, else canter's."""
    try:
        from optuna import TrialPruned as OptunaPruned
    except ImportError:
        return TrialPruned(message)
    return OptunaPruned(message)


def check_trial_metric(metric: Any) -> None:
    """Refuse a `trial_metric` that no run has."""
    if isinstance(metric, str) and "/" not in metric and metric not in ("velrmsd", "CoT", "mean_reward"):
        known = "velrmsd, CoT, mean_reward, the name of a metric such as 'eval/mean_reward', or a callable"
        raise ValueError(f"trial_metric must be one of {known}, got {metric!r}")


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
        check_trial_metric(metric)
        is_evaluated = str(metric).startswith("eval/") and metric not in ("eval/velrmsd", "eval/CoT")
        if is_evaluated and not eval_interval:
            raise ValueError(f"trial_metric {metric!r} needs eval_interval: without it no evaluation is run")
        try:
            self.takes_value = report is not None and bool(inspect.signature(report).bind(0.0, 0).args)
        except (TypeError, ValueError):  # a builtin may have no signature
            self.takes_value = False

    def warn_if_unused(self) -> None:
        """Warn if no iteration had the metric, at the end of a run."""
        if self.takes_value and self.num_reports == 0:
            name = "episode/mean_reward" if self.metric is None else self.metric
            warnings.warn(f"nothing was reported to the trial: no iteration had the metric {name!r}", stacklevel=3)

    def report(self, metrics: Mapping[str, float], velrmsd: float, cot: float, iteration: int) -> bool:
        """Report one iteration; returns whether the search prunes the run."""
        values = {**metrics, "velrmsd": float(velrmsd), "CoT": float(cot)}
        values["mean_reward"] = metrics.get("episode/mean_reward", math.nan)
        if not self.takes_value:
            getattr(self.trial, "report", self.trial)({**values, "iteration": iteration})
            return False
        name = self.metric
        if name is None:
            name = "mean_reward" if math.isnan(velrmsd) else "velrmsd"
        if name in ("velrmsd", "CoT") and math.isnan(values[name]):
            raise ValueError(f"the environment gives no {name!r} to report; use trial_metric='mean_reward'")
        if name == "mean_reward":
            name = "episode/mean_reward"
        if isinstance(name, str) and name not in values:
            group = [other for other in metrics if other.startswith(f"{name.rpartition('/')[0]}/")]
            # Without an evaluation the group has what the environment measures alone.
            if group and ("eval/mean_reward" in group or not name.startswith("eval/")):
                raise ValueError(f"no metric is named {name!r}, the trial_metric; there are {', '.join(group)}")
            return False  # as before the first episode ends
        self.trial.report(float(values[name] if isinstance(name, str) else name(values)), iteration)
        self.num_reports += 1
        if hasattr(self.trial, "set_user_attr") and not math.isnan(cot):
            self.trial.set_user_attr("CoT", float(cot))
        return hasattr(self.trial, "should_prune") and bool(self.trial.should_prune())
