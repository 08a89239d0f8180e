"""The reports of a run: to its directory and logging services, to callbacks, and to a hyperparameter search."""

import contextlib
import inspect
import json
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from canter.algorithms.user_code import is_users
from canter.utils.distributed import RANKS
from canter.utils.files import atomic_write, store_code_state
from canter.utils.logging import Logger
from canter.utils.run_data import MACHINE_NAME
from canter.utils.runtime import describe_machine

EVENTS = ("pre_iteration", "post_iteration", "pre_rollout", "post_rollout", "pre_update", "post_update")
LOSS_NAMES = {"surrogate_loss": "policy_loss", "entropy": "entropy_loss"}
DIFF_HEADING = b"\n# git diff HEAD\n"


def store_code(directory: Path, repositories: list[str], with_diff: bool, writer: Logger) -> None:
    """Store the machine and the state of the code's git repositories; the text of a diff is never uploaded."""
    with contextlib.suppress(OSError):
        atomic_write(directory / MACHINE_NAME, json.dumps(describe_machine(), indent=2).encode())
    for path in store_code_state(directory, repositories, with_diff):
        with contextlib.suppress(OSError):  # the run goes on without this copy
            status, heading, _ = path.read_bytes().partition(DIFF_HEADING)
            if heading:
                atomic_write(path.with_suffix(".status"), status, root=directory)
            writer.save_file(path.with_suffix(".status") if heading else path)


def train_metrics(losses: Mapping[str, Any], stats: Mapping[str, Any]) -> dict[str, Any]:
    """Results of an update under the names by which they are logged."""
    named = {f"train/{LOSS_NAMES.get(name, name)}": value for name, value in losses.items()}
    return named | {name if "/" in name else f"train/{name}": value for name, value in stats.items()}


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
            except StopTraining:  # noqa: PERF203 (the other callbacks still run)
                if RANKS.size == 1:
                    raise
                self.is_stop_asked = True  # the others wait for what this rank does in the rest of the iteration
            except Exception as error:
                if self.errors == "raise":
                    raise
                warnings.warn(f"the {event} callback {fn!r} failed: {error!r}", stacklevel=2)
        if self.by_event[event]:
            self.sync()


class RunnerLogger:
    """A runner's logging under the names of rsl_rl's `Logger`."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.log_dir, self.writer = runner, runner.log_dir and str(runner.log_dir), runner.writer
        self.git_status_repos, self.cfg, self.tot_timesteps = runner.git_repos, runner.cfg, runner.tot_timesteps
        self.rewbuffer, self.lenbuffer = runner.rewbuffer, runner.lenbuffer
        self.disable_logs = runner.disable_logs

    @property
    def logger_type(self) -> str:
        """Name of the first logging backend."""
        backend = self.cfg.logger_backend
        return backend if isinstance(backend, str) else backend[0]

    def save_model(self, path: str | Path, it: int) -> None:
        """Send a checkpoint to the logging services."""
        if self.writer is not None:
            self.writer.save_model(Path(path), it)


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
                known = "velrmsd, CoT, mean_reward, the name of a metric such as 'eval/mean_reward', or a callable"
                raise ValueError(f"trial_metric must be one of {known}, got {metric!r}")
            if metric.startswith("eval/") and metric not in ("eval/velrmsd", "eval/CoT") and not eval_interval:
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
        if isinstance(name, str) and name not in values:  # as before the first episode ends
            return False
        self.trial.report(float(values[name] if isinstance(name, str) else name(values)), iteration)
        self.num_reports += 1
        if hasattr(self.trial, "set_user_attr") and not math.isnan(cot):
            self.trial.set_user_attr("CoT", float(cot))
        return hasattr(self.trial, "should_prune") and bool(self.trial.should_prune())
