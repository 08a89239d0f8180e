"""Telling a hyper-parameter search how the run goes: Optuna trials and Ray-style callables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any


class StopTraining(Exception):  # noqa: N818 (it is a request, not an error)
    """Raised by a callback to end `learn` cleanly, with a final checkpoint."""


class TrialPruned(Exception):  # noqa: N818 (Optuna's name)
    """The search asked to give this run up; Optuna's own exception where Optuna is installed."""


def pruned_exception(message: str) -> Exception:
    """Optuna's TrialPruned if there is an Optuna, else ours."""
    try:
        from optuna import TrialPruned as OptunaPruned
    except ImportError:
        return TrialPruned(message)
    return OptunaPruned(message)


def report_trial(
    trial: Any, metric: str | Callable[[Mapping[str, float]], float], values: Mapping[str, float], iteration: int
) -> bool:
    """Report one iteration; True if the search wants the run to stop.

    `values` has velrmsd, CoT and mean_reward.
    """
    if not hasattr(trial, "report"):
        trial({**values, "iteration": iteration})
        return False
    if not hasattr(trial, "should_prune"):
        trial.report({**values, "iteration": iteration})
        return False
    if metric == "mean_reward" and math.isnan(values["mean_reward"]):
        return False  # no episode has ended yet
    value = float(metric(values) if callable(metric) else chosen(metric, values))
    trial.report(value, iteration)
    if hasattr(trial, "set_user_attr") and not math.isnan(values["CoT"]):
        trial.set_user_attr("CoT", float(values["CoT"]))
    return bool(trial.should_prune())


def chosen(metric: str, values: Mapping[str, float]) -> float:
    """The named value; one the environment does not give is an error."""
    if metric not in values:
        raise ValueError(f"trial_metric must be one of {', '.join(values)} or a callable, got {metric!r}")
    if math.isnan(values[metric]):
        raise ValueError(f"the environment gives no {metric!r} to report; use trial_metric='mean_reward'")
    return values[metric]
