"""Probabilities and weights that fall with the learning iteration."""

import math
from collections.abc import Callable

Schedule = Callable[[float], float]

DECAYS: dict[str, Callable[[float, float], float]] = {
    "linear": lambda x, scale: 1.0 - x / scale,
    "exp": lambda x, scale: (1.0 - 1.0 / scale) ** x,
    "tanh": lambda x, scale: 0.5 * (1.0 - math.tanh((x - scale) / scale)),
}


def GET_PROB_FUNC(option: str | float | Schedule, iteration_scale: float) -> Schedule:  # noqa: N802 (documented name)
    """A function of the iteration: a named decay, a constant, or the callable itself."""
    if callable(option):
        return option
    if not isinstance(option, str):
        constant = float(option)
        return lambda _: constant
    if option not in DECAYS:
        raise ValueError(f"unknown schedule {option!r}; known are {', '.join(DECAYS)}, a number or a callable")
    if iteration_scale <= 0:
        raise ValueError(f"iteration_scale must be positive, got {iteration_scale}")
    decay = DECAYS[option]
    return lambda x: min(1.0, max(0.0, decay(x, iteration_scale)))
