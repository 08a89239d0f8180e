"""Means of losses, statistics of episodes, and the guard against NaN."""

import math

import pytest
import torch

from canter.execution.guard import NoHostSync
from canter.utils.metrics import EpisodeTracker, FiniteGuard, MeanMeter, NonFiniteError


def test_means_are_over_every_set_of_scalars():
    meter = MeanMeter()
    assert meter.means() == {}
    with NoHostSync():
        for i in range(4):
            meter.add({"a": torch.full((), float(i)), "b": torch.full((), 10.0 * i, requires_grad=True)})
    means = meter.means()
    assert (means["a"], means["b"]) == (1.5, 15.0)
    assert float(meter.averages()["a"]) == 1.5
    assert not meter.averages()["b"].requires_grad


def flags(*values):
    return torch.tensor(values, dtype=torch.bool)


def tracked(rewards, dones, valid=None, num_steps=None, tracker=None):
    """Feed (T, N) lists and read after every `num_steps`."""
    tracker = tracker or EpisodeTracker(len(rewards[0]), num_steps or len(rewards), "cpu")
    means = []
    for t, row in enumerate(rewards):
        alive = flags(*([True] * len(row) if valid is None else valid[t]))
        tracker.add(torch.tensor(row), flags(*dones[t]), alive)
        if (t + 1) % tracker.rewards.shape[0] == 0:
            means.append(tracker.read())
    return tracker, means


def test_returns_and_lengths_of_episodes_that_span_rollouts():  # C18
    rewards = [[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0], [5.0, 50.0], [6.0, 60.0]]
    dones = [[0, 0], [0, 0], [0, 1], [0, 0], [1, 0], [0, 0]]
    tracker, means = tracked(rewards, dones, num_steps=2)
    assert list(tracker.rewbuffer) == [60.0, 15.0]  # env 1 after three steps, env 0 after five
    assert list(tracker.lenbuffer) == [3, 5]
    assert tracker.num_episodes == 2
    assert means == [33 / 4, 77 / 4, 121 / 4]
    assert tracker.cur_reward_sum.tolist() == [6.0, 150.0]
    assert tracker.cur_episode_length.tolist() == [1, 3]
    # rewards of steps that ended nothing, in order of time
    assert list(tracker.rframebuffer) == [1, 10, 2, 20, 3, 4, 40, 50, 6, 60]


def test_steps_that_only_reset_are_not_counted():  # peers 4.2
    rewards = [[1.0, 1.0], [1.0, 1.0], [99.0, 1.0], [1.0, 1.0]]
    dones = [[0, 0], [1, 0], [0, 0], [0, 1]]
    valid = [[1, 1], [1, 1], [0, 1], [1, 1]]
    tracker, means = tracked(rewards, dones, valid)
    assert list(tracker.rewbuffer) == [2.0, 4.0]
    assert list(tracker.lenbuffer) == [2, 4]
    assert means == [1.0]
    assert tracker.cur_reward_sum.tolist() == [1.0, 0.0]
    assert list(tracker.rframebuffer) == [1.0] * 5


def test_a_rollout_in_which_nothing_counted_has_no_mean():
    _, means = tracked([[5.0]], [[0]], [[0]])
    assert math.isnan(means[0])


def test_the_buffers_keep_the_last_hundred_episodes():
    tracker = EpisodeTracker(1, 150, "cpu")
    for i in range(150):
        tracker.add(torch.tensor([float(i)]), flags(True), flags(True))
    tracker.read()
    assert list(tracker.rewbuffer) == list(range(50, 150))
    assert tracker.num_episodes == 150


def test_adding_a_step_never_waits():
    tracker = EpisodeTracker(2, 3, "cpu")
    row = torch.ones(2), flags(True, False), flags(True, True)
    with NoHostSync():
        tracker.add(*row)


def test_running_episodes_can_be_forgotten():
    tracker, _ = tracked([[1.0, 1.0]], [[0, 1]])
    tracker.clear_running()
    tracked([[2.0, 2.0]], [[1, 1]], tracker=tracker)
    assert list(tracker.rewbuffer) == [1.0, 2.0, 2.0]
    assert list(tracker.lenbuffer) == [1, 1, 1]


@pytest.mark.parametrize("running", [True, False])
def test_a_restored_tracker_goes_on(running):
    tracker, _ = tracked([[1.0, 10.0], [2.0, 20.0]], [[0, 0], [0, 1]])
    other = EpisodeTracker(2, 1, "cpu")
    other.load_state_dict(tracker.state_dict(), running=running)
    tracked([[4.0, 40.0]], [[1, 0]], tracker=other)
    assert list(other.rewbuffer) == [30.0, 7.0 if running else 4.0]
    assert list(other.lenbuffer) == [2, 3 if running else 1]
    assert other.num_episodes == 2


def test_a_trackers_state_is_plain():
    tracker, _ = tracked([[1.0, 10.0], [2.0, 20.0]], [[0, 0], [0, 1]])

    def check(value):
        if isinstance(value, dict):
            assert all(check(v) for v in value.values())
        elif isinstance(value, list):
            assert all(check(v) for v in value)
        else:
            assert type(value) in (int, float)
        return True

    assert check(tracker.state_dict())


BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("bad", BAD)
def test_on_a_cpu_a_bad_value_is_named_at_once(bad):
    guard = FiniteGuard(torch.device("cpu"))
    obs = torch.zeros(3, 5)
    guard.check(17, obs=obs, reward=torch.zeros(3))
    obs[2, 4] = bad
    with pytest.raises(NonFiniteError, match=r"NaN or infinity in 'obs' \(environments 2, features 4\) at step 17"):
        guard.check(17, obs=obs, reward=torch.zeros(3))
    with pytest.raises(NonFiniteError, match=r"in 'reward' \(environments 0\) at step 3"):
        guard.check(3, obs=None, reward=torch.tensor([bad, 0.0]))


def test_large_finite_values_and_integers_pass():
    guard = FiniteGuard(torch.device("cpu"))
    guard.check(0, obs={"big": torch.full((4, 2), 3e38), "image": torch.full((4, 2), 255, dtype=torch.uint8)})


def test_opposite_infinities_do_not_cancel():
    guard = FiniteGuard(torch.device("cpu"))
    with pytest.raises(NonFiniteError, match="environments 0, 1"):
        guard.check(0, reward=torch.tensor([math.inf, -math.inf]))


def test_a_nested_leaf_is_named():
    guard = FiniteGuard(torch.device("cpu"))
    with pytest.raises(NonFiniteError, match="'obs.body.q'"):
        guard.check(0, obs={"body": {"q": torch.tensor([[math.nan]])}})


def test_many_environments_are_shortened():
    guard = FiniteGuard(torch.device("cpu"))
    with pytest.raises(NonFiniteError, match=r"environments 0, 1, 2, 3, 4, 5, 6, 7 and 92 more\)"):
        guard.check(0, reward=torch.full((100,), math.nan))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_elsewhere_a_rollout_is_looked_at_once_and_its_first_bad_step_named(bad):
    guard = FiniteGuard(torch.device("cuda"))  # the tensors here are the CPU's, the way of looking is the GPU's
    rollout = {"observations": torch.zeros(4, 3, 2), "reward": torch.zeros(4, 3), "images": torch.zeros(4, 3).byte()}
    guard.check(0, obs=torch.tensor([[math.nan]]))
    guard.read(100, rollout)
    rollout["observations"][2, 1, 1] = bad
    rollout["observations"][3, 0, 0] = bad
    with pytest.raises(NonFiniteError, match=r"'observations' \(environments 1, features 1\) at step 102"):
        guard.read(100, rollout)
