"""How the time and memory of an iteration grow with a size of the work."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import torch

from canter.bench.iteration import NullEnv, Timing, Workload, null_runner, time_iterations

GIB = 2**30


class Point(NamedTuple):
    """One size, and what was measured there or why nothing was."""

    size: int
    timing: Timing | None
    left_out: str = ""


def with_envs(work: Workload, size: int) -> Workload:
    """The work with so many environments."""
    return dataclasses.replace(work, num_envs=size)


def with_width(work: Workload, size: int) -> Workload:
    """The work with three hidden layers that narrow from a width to a quarter of it."""
    return dataclasses.replace(work, hidden_dims=(size, max(1, size // 2), max(1, size // 4)))


def measure_sizes(
    work: Workload,
    sizes: Iterable[int],
    change: Callable[[Workload, int], Workload] = with_envs,
    max_seconds: float = 60.0,
    **options: Any,
) -> Iterator[Point]:
    """Measure each size in a process of its own, smallest first, until one does not fit or would take too long.

    Args:
        work: What is the same at every size.
        sizes: The sizes.
        change: Puts a size into the work.
        max_seconds: A size whose measurement would take longer, going by the one before, is left out.
        options: Those of `measure_one`.
    """
    before: Point | None = None
    reason = ""
    for size in sorted(sizes):
        if not reason and before is not None and before.timing is not None:
            expected = seconds_of(before.timing, options) * size / before.size
            if expected > max_seconds:
                reason = f"would take about {expected:.0f} s"
        point = Point(size, None, reason)
        if not reason:
            point = measured(size, change(work, size), options)
            reason = "larger than one that failed" if point.left_out else ""
        before = point
        yield point


def seconds_of(timing: Timing, options: dict[str, Any]) -> float:
    """How long the iterations of a measurement took."""
    return timing.iteration * (options.get("warm_up", 8) + options.get("iterations", 10)) / 1e3


def measured(size: int, work: Workload, options: dict[str, Any]) -> Point:
    """A point, or why there is none: no memory for it on the device, or on the host, where the system ends it."""
    try:
        return Point(size, in_fresh_process(measure_one, work, **options))
    except torch.OutOfMemoryError:
        return Point(size, None, "not enough GPU memory")
    except BrokenProcessPool:
        return Point(size, None, "not enough memory")


def in_fresh_process(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`fn(...)` where no memory is taken yet and nothing is compiled: sizes must not disturb one another."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(fn, *args, **kwargs).result()


def measure_one(
    work: Workload,
    device: str = "cpu",
    execution: str = "auto",
    precision: str = "tf32",
    warm_up: int = 8,
    iterations: int = 10,
) -> Timing:
    """Time and peak memory of an iteration, less what the environment takes."""
    env = NullEnv(work, device)
    before = memory_in_use(env.device)
    timing = time_iterations(null_runner(env, work, execution, precision), warm_up, iterations)
    return timing._replace(memory=peak_memory(env.device) - before)


def memory_in_use(device: torch.device) -> float:
    """GiB that are taken now; on a CPU, where only the peak is known, the most so far."""
    return torch.cuda.memory_allocated(device) / GIB if device.type == "cuda" else peak_memory(device)


def peak_memory(device: torch.device) -> float:
    """The most GiB taken so far: on a GPU with what captured graphs hold, on a CPU by the process; NaN if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / GIB
    try:
        import resource
    except ImportError:  # Windows
        return math.nan
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The exponent p of y ~ x**p, fitted to the larger half of the points: the smaller show fixed costs."""
    used = sorted(points)[-max(2, -(-len(points) // 2)) :]
    if len(used) < 2 or any(not (x > 0 and y > 0) for x, y in used):
        return math.nan
    xs, ys = ([math.log(value) for value in column] for column in zip(*used, strict=True))
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread if spread else math.nan
