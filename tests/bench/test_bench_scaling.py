import math
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace

import pytest
import torch

from canter.bench import scaling
from canter.bench.iteration import Timing, Workload
from canter.bench.scaling import Point, measure_one, measure_sizes, peak_memory, slope, with_envs, with_width

WORK = Workload(num_envs=4, num_steps_per_env=3, num_obs=3, num_critic_obs=5, num_actions=2, hidden_dims=(8,))


@pytest.fixture
def fake(monkeypatch):
    """Measurements that take a millisecond per environment, in this process; gives the sizes that were measured."""
    seen = []

    def in_this_process(fn, work, **options):
        seen.append(work.num_envs)
        return Timing(0.0, float(work.num_envs), 0.0, work.num_envs)

    monkeypatch.setattr(scaling, "in_fresh_process", in_this_process)
    return seen


def test_the_exponent_of_a_power_law_is_found():
    assert slope([(x, 5 * x**1.5) for x in (1.0, 10.0, 100.0)]) == pytest.approx(1.5)


def test_the_smaller_half_does_not_count():
    points = [(1, 100.0), (2, 100.0), (4, 100.0), (64, 64.0), (128, 128.0), (256, 256.0)]
    assert slope(points[::-1]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "points", [[], [(4, 2.0)], [(4, 2.0), (4, 3.0)], [(4, 0.0), (8, 1.0)], [(4, math.nan), (8, 1)]]
)
def test_too_little_to_fit_is_not_a_number(points):
    assert math.isnan(slope(points))


def test_a_size_is_a_number_of_environments_or_a_width():
    assert with_envs(WORK, 9).num_envs == 9
    assert with_width(WORK, 64).hidden_dims == (64, 32, 16)
    assert with_width(WORK, 2).hidden_dims == (2, 1, 1)
    assert WORK.num_envs == 4


def test_sizes_are_measured_smallest_first(fake):
    points = list(measure_sizes(WORK, [8, 2, 4]))
    assert [point.size for point in points] == fake == [2, 4, 8]
    assert points[2].timing.iteration == 8.0


def test_a_size_that_would_take_too_long_is_left_out_with_all_that_are_larger(fake):
    # 10 + 2 iterations of 100 ms are 1.2 s; of 1000 ms 12 s, which is too long.
    points = list(measure_sizes(WORK, [10, 100, 1000, 1001], max_seconds=11.9, warm_up=2, iterations=10))
    assert fake == [10, 100]
    assert points[2] == Point(1000, None, "would take about 12 s")
    assert points[3].left_out
    assert points[3].timing is None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"), BrokenProcessPool("killed")])
def test_what_does_not_fit_into_memory_ends_the_series_but_not_the_program(monkeypatch, error):
    def fail(fn, work, **options):
        if work.num_envs > 2:
            raise error
        return Timing(1.0, 1.0, 0.0, 2)

    monkeypatch.setattr(scaling, "in_fresh_process", fail)
    points = list(measure_sizes(WORK, [2, 4, 8]))
    assert points[0].timing is not None
    assert "memory" in points[1].left_out
    assert points[2].left_out == "larger than one that failed"


def test_a_mistake_is_not_taken_for_a_lack_of_memory(monkeypatch):
    def fail(fn, work, **options):
        raise ValueError("execution must be one of ...")

    monkeypatch.setattr(scaling, "in_fresh_process", fail)
    with pytest.raises(ValueError, match="execution"):
        list(measure_sizes(WORK, [2]))


def test_one_measurement_gives_time_and_memory():
    timing = measure_one(WORK, execution="eager", warm_up=1, iterations=1)
    assert timing.num_steps == 12
    assert timing.iteration > 0
    assert timing.memory >= 0


@pytest.mark.parametrize(("platform", "two_gib"), [("linux", 2 * 2**20), ("darwin", 2 * 2**30)])
def test_peak_memory_is_in_gib_whatever_the_system_counts_in(monkeypatch, platform, two_gib):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=two_gib))
    monkeypatch.setattr(scaling.sys, "platform", platform)
    assert peak_memory(torch.device("cpu")) == 2.0


@pytest.mark.slow
def test_every_size_is_measured_in_a_process_of_its_own():
    points = list(measure_sizes(WORK, [2, 4], execution="eager", warm_up=1, iterations=1))
    assert all(point.timing is not None and point.timing.memory > 0 for point in points)
