"""The null environment, timings of its iterations, and their growth with the size."""

import math
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace

import pytest
import torch

from canter import bench
from canter.bench import (
    NullEnv,
    Point,
    Timing,
    Workload,
    measure_one,
    measure_sizes,
    null_runner,
    peak_memory,
    slope,
    time_iterations,
    with_envs,
    with_width,
)
from canter.modules import ActorCriticRecurrent

SMALL = Workload(num_envs=6, num_steps_per_env=4, num_obs=3, num_critic_obs=5, num_actions=2, hidden_dims=(8,))


def test_the_null_environment_has_the_sizes_of_the_workload():
    env = NullEnv(SMALL, "cpu")
    obs, critic_obs = env.reset()
    assert (obs.shape, critic_obs.shape, env.num_actions) == ((6, 3), (6, 5), 2)
    record = env.step(torch.zeros(6, 2))
    assert record.reward.shape == (6,)
    assert record.valid.all()
    assert not record.terminated.any()


def test_an_episode_is_cut_off_once_in_a_thousand_steps_one_environment_after_the_other():
    env = NullEnv(SMALL, "cpu")
    ended = [(t, n) for t in range(1, 1001) for n in env.step(torch.zeros(6, 2)).truncated.nonzero().flatten().tolist()]
    assert ended == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (1000, 0)]


def test_consecutive_observations_differ_and_return_after_eight_steps():
    env = NullEnv(SMALL, "cpu")
    seen = [env.step(torch.zeros(6, 2)).obs for _ in range(9)]
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[8])


def test_two_null_environments_give_the_same_steps():
    one, other = (NullEnv(SMALL, "cpu").step(torch.zeros(6, 2)) for _ in range(2))
    assert torch.equal(one.obs, other.obs)
    assert torch.equal(one.reward, other.reward)


@pytest.mark.parametrize("rnn_type", [None, "lstm", "gru"])
def test_the_runner_has_the_sizes_of_the_workload(rnn_type, recwarn):
    work = Workload(**{**vars(SMALL), "rnn_type": rnn_type, "rnn_hidden_size": 7, "num_learning_epochs": 3})
    runner = null_runner(NullEnv(work, "cpu"), work, "eager")
    assert runner.steps_per_iteration() == 24
    assert (runner.cfg.num_learning_epochs, runner.cfg.num_mini_batches) == (3, 4)
    assert isinstance(runner.policy, ActorCriticRecurrent) == (rnn_type is not None)
    assert not recwarn.list  # such as that the environment could not be seeded


def test_timing_runs_the_warm_up_and_the_measured_iterations():
    runner = null_runner(NullEnv(SMALL, "cpu"), SMALL, "eager")
    timing = time_iterations(runner, warm_up=2, iterations=3)
    assert runner.iteration == 5
    assert timing.num_steps == 24
    assert 0 < timing.collect < 5000
    assert 0 < timing.learn < 5000
    assert timing.ready > 0
    assert math.isnan(timing.memory)


def test_the_median_of_the_iterations_is_taken(monkeypatch):
    runner = null_runner(NullEnv(SMALL, "cpu"), SMALL, "eager")
    times = iter([9.0, 9.0, 1.0, 7.0, 2.0])  # the first two warm up
    run = runner.run_iteration

    def timed():
        seconds = next(times)
        return {**run(), "time/collection": seconds, "time/learning": 2 * seconds}

    monkeypatch.setattr(runner, "run_iteration", timed)
    timing = time_iterations(runner, warm_up=2, iterations=3)
    assert (timing.collect, timing.learn) == (2000.0, 4000.0)


def test_the_rate_is_steps_over_the_whole_iteration():
    timing = Timing(collect=15.0, learn=35.0, ready=1.0, num_steps=200)
    assert timing.iteration == 50.0
    assert timing.rate == 4000.0


@pytest.fixture
def fake(monkeypatch):
    """Measurements that take a millisecond per environment, in this process; gives the sizes that were measured."""
    seen = []

    def in_this_process(fn, work, **options):
        seen.append(work.num_envs)
        return Timing(0.0, float(work.num_envs), 0.0, work.num_envs)

    monkeypatch.setattr(bench, "in_new_process", in_this_process)
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
    assert with_envs(SMALL, 9).num_envs == 9
    assert with_width(SMALL, 64).hidden_dims == (64, 32, 16)
    assert with_width(SMALL, 2).hidden_dims == (2, 1, 1)
    assert SMALL.num_envs == 6


def test_sizes_are_measured_smallest_first(fake):
    points = list(measure_sizes(SMALL, [8, 2, 4]))
    assert [point.size for point in points] == fake == [2, 4, 8]
    assert points[2].timing.iteration == 8.0


def test_a_size_that_would_take_too_long_is_left_out_with_all_that_are_larger(fake):
    # 10 + 2 iterations of 100 ms are 1.2 s; of 1000 ms 12 s, which is too long.
    points = list(measure_sizes(SMALL, [10, 100, 1000, 1001], max_seconds=11.9, warm_up=2, iterations=10))
    assert fake == [10, 100]
    assert points[2] == Point(1000, None, "would take about 12 s")
    assert points[3].left_out
    assert points[3].timing is None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"), BrokenProcessPool("killed")])
def test_a_size_that_does_not_fit_into_memory_ends_the_series_but_not_the_program(monkeypatch, error):
    def fail(fn, work, **options):
        if work.num_envs > 2:
            raise error
        return Timing(1.0, 1.0, 0.0, 2)

    monkeypatch.setattr(bench, "in_new_process", fail)
    points = list(measure_sizes(SMALL, [2, 4, 8]))
    assert points[0].timing is not None
    assert "memory" in points[1].left_out
    assert points[2].left_out == "larger than one that failed"


def test_a_wrong_setting_is_not_taken_for_a_lack_of_memory(monkeypatch):
    def fail(fn, work, **options):
        raise ValueError("execution must be one of ...")

    monkeypatch.setattr(bench, "in_new_process", fail)
    with pytest.raises(ValueError, match="execution"):
        list(measure_sizes(SMALL, [2]))


def test_one_measurement_gives_time_and_memory():
    timing = measure_one(SMALL, execution="eager", warm_up=1, iterations=1)
    assert timing.num_steps == 24
    assert timing.iteration > 0
    assert timing.memory >= 0


@pytest.mark.parametrize(("platform", "two_gib"), [("linux", 2 * 2**20), ("darwin", 2 * 2**30)])
def test_peak_memory_is_in_gib_whatever_the_system_counts_in(monkeypatch, platform, two_gib):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=two_gib))
    monkeypatch.setattr(bench.sys, "platform", platform)
    assert peak_memory(torch.device("cpu")) == 2.0


@pytest.mark.slow
def test_every_size_is_measured_in_a_process_of_its_own():
    points = list(measure_sizes(SMALL, [2, 4], execution="eager", warm_up=1, iterations=1))
    assert all(point.timing is not None and point.timing.memory > 0 for point in points)
