"""Statistics of a few runs: interquartile means, stratified bootstrap intervals, comparisons of two groups.

The definitions are those of Agarwal et al., "Deep RL at the edge of the statistical precipice" (2021), and of its
package rliable. `Scores` are the final scores of a group of runs, one array for each task; runs are resampled within
their task.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Scores = Sequence[np.ndarray]
REPEATS = 10_000
CURVE_REPEATS = 1000
CONFIDENCE = 0.95
FEWEST_RUNS = 3


def few_runs(count: int) -> str:
    """What to say beside an interval of too few runs: a bootstrap of two only repeats them."""
    return "" if count >= FEWEST_RUNS else f" (of {count} runs, too few for an interval)"


class Estimate(NamedTuple):
    """A statistic and the ends of its bootstrap interval; numbers, or arrays along a curve."""

    value: Any
    low: Any
    high: Any


def iqm(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    """Interquartile mean: the mean without the lowest and the highest quarter, each rounded down to whole scores."""
    ordered = np.sort(np.moveaxis(scores, axis, -1), -1)
    cut = ordered.shape[-1] // 4
    return ordered[..., cut : ordered.shape[-1] - cut].mean(-1)


def iqm_estimate(scores: Scores, seed: int = 0) -> Estimate:
    """The interquartile mean over all runs and tasks."""
    return _estimate(iqm(np.concatenate(scores)), iqm(np.concatenate(_resample(scores, seed), -1)))


def iqm_curve(curves: np.ndarray, seed: int = 0) -> Estimate:
    """The interquartile mean over runs at every point of their curves, (runs, points)."""
    drawn = np.random.default_rng(seed).integers(len(curves), size=(CURVE_REPEATS, len(curves)))
    return _estimate(iqm(curves, 0), np.stack([iqm(curves[rows], 0) for rows in drawn]))


def improvement(x: Scores, y: Scores, seed: int = 0) -> Estimate:
    """Probability that a run of `x` scores higher than one of `y`, a tie counting half, averaged over the tasks."""
    samples = zip(_resample(x, seed), _resample(y, seed + 1), strict=True)
    value = np.mean([_wins(a, b) for a, b in zip(x, y, strict=True)])
    return _estimate(value, np.mean([_wins(a, b) for a, b in samples], 0))


def _wins(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    x, y = x[..., :, None], y[..., None, :]
    return (x > y).mean((-1, -2)) + 0.5 * (x == y).mean((-1, -2))


def profile(scores: Scores, thresholds: np.ndarray, seed: int = 0) -> Estimate:
    """Performance profile: the share of runs that score above each threshold."""
    samples = np.sort(np.concatenate(_resample(scores, seed), -1), -1)
    value = _above(np.sort(np.concatenate(scores)), thresholds)
    return _estimate(value, np.stack([_above(sample, thresholds) for sample in samples]))


def _above(ordered: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    return 1.0 - np.searchsorted(ordered, thresholds, side="right") / len(ordered)


def _resample(scores: Scores, seed: int) -> list[np.ndarray]:
    """Runs drawn with replacement within each task, (repeats, runs)."""
    rng = np.random.default_rng(seed)
    return [task[rng.integers(len(task), size=(REPEATS, len(task)))] for task in scores]


def _estimate(value: Any, samples: np.ndarray) -> Estimate:
    """The percentile interval of bootstrap samples along their first axis."""
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(samples, [tail, 100 - tail], axis=0)
    plain = [x.item() if np.ndim(x) == 0 else x for x in map(np.asarray, (value, low, high))]
    return Estimate(*plain)
