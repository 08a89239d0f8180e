import math

import pytest
import torch

from canter.bench.iteration import NullEnv, Timing, Workload, null_runner, time_iterations
from canter.modules import ActorCriticRecurrent

SMALL = Workload(num_envs=6, num_steps_per_env=4, num_obs=3, num_critic_obs=5, num_actions=2, hidden_dims=(8,))


def test_the_null_environment_has_the_sizes_asked_for():
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
def test_the_runner_does_the_work_described(rnn_type, recwarn):
    work = Workload(**{**vars(SMALL), "rnn_type": rnn_type, "rnn_hidden_size": 7, "num_learning_epochs": 3})
    runner = null_runner(NullEnv(work, "cpu"), work, "eager")
    assert runner.steps_per_iteration() == 24
    assert (runner.cfg.num_learning_epochs, runner.cfg.num_mini_batches) == (3, 4)
    assert isinstance(runner.policy, ActorCriticRecurrent) == (rnn_type is not None)
    assert not recwarn.list  # such as that the environment could not be seeded


def test_timing_an_iteration_trains_as_long_as_it_says():
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
