"""Means of losses, statistics of episodes, the guard against NaN, and the extras of environments."""

import math

import numpy as np
import pytest
import torch
from no_host_sync import NoHostSync

from canter.envs.vec_env import StepRecord
from canter.utils.metrics import (
    EpisodeTracker,
    FiniteGuard,
    MeanMeter,
    NonFiniteError,
    ScalarAverager,
    StepStats,
    flatten_extras,
)


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


def add(tracker, reward, done, valid):
    """Write a step of N environments and count it."""
    obs = torch.zeros(len(done), 1)
    tracker.write(StepRecord(obs, obs, reward, done, torch.zeros_like(done), None, None, valid, {}))
    tracker.step += 1


def tracked(rewards, dones, valid=None, num_steps=None, tracker=None):
    """Feed (T, N) lists and read after every `num_steps`."""
    tracker = tracker or EpisodeTracker(len(rewards[0]), num_steps or len(rewards), "cpu")
    means = []
    for t, row in enumerate(rewards):
        alive = flags(*([True] * len(row) if valid is None else valid[t]))
        add(tracker, torch.tensor(row), flags(*dones[t]), alive)
        if (t + 1) % tracker.rows.shape[0] == 0:
            means.append(tracker.read())
    return tracker, means


def test_returns_and_lengths_of_episodes_that_span_rollouts():
    rewards = [[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0], [5.0, 50.0], [6.0, 60.0]]
    dones = [[0, 0], [0, 0], [0, 1], [0, 0], [1, 0], [0, 0]]
    tracker, means = tracked(rewards, dones, num_steps=2)
    assert list(tracker.rewbuffer) == [60.0, 15.0]  # env 1 after three steps, env 0 after five
    assert list(tracker.lenbuffer) == [3, 5]
    assert tracker.num_episodes == 2
    assert means == [33 / 4, 77 / 4, 121 / 4]
    assert tracker.cur_reward_sum.tolist() == [6.0, 150.0]
    assert tracker.cur_episode_length.tolist() == [1, 3]
    # rewards of steps that ended no episode, in order of time
    assert list(tracker.rframebuffer) == [1, 10, 2, 20, 3, 4, 40, 50, 6, 60]


def test_steps_that_only_reset_are_not_counted():
    rewards = [[1.0, 1.0], [1.0, 1.0], [99.0, 1.0], [1.0, 1.0]]
    dones = [[0, 0], [1, 0], [0, 0], [0, 1]]
    valid = [[1, 1], [1, 1], [0, 1], [1, 1]]
    tracker, means = tracked(rewards, dones, valid)
    assert list(tracker.rewbuffer) == [2.0, 4.0]
    assert list(tracker.lenbuffer) == [2, 4]
    assert means == [1.0]
    assert tracker.cur_reward_sum.tolist() == [1.0, 0.0]
    assert tracker.cur_episode_length.tolist() == [1, 0]
    assert list(tracker.rframebuffer) == [1.0] * 5


def test_a_rollout_without_valid_steps_has_no_mean_reward():
    _, means = tracked([[5.0]], [[0]], [[0]])
    assert math.isnan(means[0])


def test_the_buffers_keep_the_last_hundred_episodes():
    tracker = EpisodeTracker(1, 150, "cpu")
    for i in range(150):
        add(tracker, torch.tensor([float(i)]), flags(True), flags(True))
    tracker.read()
    assert list(tracker.rewbuffer) == list(range(50, 150))
    assert tracker.num_episodes == 150


def test_unfinished_episodes_can_be_dropped():
    tracker, _ = tracked([[1.0, 1.0]], [[0, 1]])
    tracker.clear_running()
    tracked([[2.0, 2.0]], [[1, 1]], tracker=tracker)
    assert list(tracker.rewbuffer) == [1.0, 2.0, 2.0]
    assert list(tracker.lenbuffer) == [1, 1, 1]


@pytest.mark.parametrize("running", [True, False])
def test_a_restored_tracker_continues(running):
    tracker, _ = tracked([[1.0, 10.0], [2.0, 20.0]], [[0, 0], [0, 1]])
    other = EpisodeTracker(2, 1, "cpu")
    other.load_state_dict(tracker.state_dict(), running=running)
    tracked([[4.0, 40.0]], [[1, 0]], tracker=other)
    assert list(other.rewbuffer) == [30.0, 7.0 if running else 4.0]
    assert list(other.lenbuffer) == [2, 3 if running else 1]
    assert other.num_episodes == 2


def test_the_state_of_a_tracker_is_plain():
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


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_on_a_device_a_rollout_is_checked_once_and_its_first_bad_step_is_named(bad):
    guard = FiniteGuard(torch.device("cuda"))  # tensors on the CPU, checked as on a GPU
    rollout = {"observations": torch.zeros(4, 3, 2), "reward": torch.zeros(4, 3), "images": torch.zeros(4, 3).byte()}
    guard.check(0, obs=torch.tensor([[math.nan]]))
    guard.read(100, rollout)
    rollout["observations"][2, 1, 1] = bad
    rollout["observations"][3, 0, 0] = bad
    with pytest.raises(NonFiniteError, match=r"'observations' \(environments 1, features 1\) at step 102"):
        guard.read(100, rollout)


def test_final_observations_are_checked_only_in_rows_that_ended():
    guard = FiniteGuard(torch.device("cpu"))
    final = torch.tensor([[0.0], [math.nan], [math.inf]])
    guard.check(0, flags(True, False, False), final_obs=final, final_critic_obs={"a": final})
    with pytest.raises(NonFiniteError, match=r"'final_obs' \(environments 2, features 0\) at step 4"):
        guard.check(4, flags(True, False, True), final_obs=final)
    with pytest.raises(NonFiniteError, match=r"'obs' \(environments 1, 2"):
        guard.check(4, flags(True, False, False), obs=final)


def test_extras_without_a_logged_key_are_not_flattened(monkeypatch):
    def record(**extras):
        obs, no = torch.zeros(2, 1), flags(False, False)
        return StepRecord(obs, obs, torch.zeros(2), no, no, None, None, ~no, extras)

    calls = []
    monkeypatch.setattr("canter.utils.metrics.flatten_extras", lambda *given: calls.append(given) or {})
    stats = StepStats(2, 4, torch.device("cpu"), ("log",))
    stats.take(record(time_outs=flags(True, False)))
    assert calls == []
    stats.take(record(log={"x": 1.0}))
    assert len(calls) == 1
    assert stats.tracker.step == 2


def test_entries_of_one_info_per_environment_are_logged():
    obs, no = torch.zeros(3, 1), flags(False, False, False)
    infos = [{"height": 1.0, "episode": {"r": 4.0}, "note": "a"}, {"height": np.float32(3.0)}, {"is_success": True}]
    record = StepRecord(obs, obs, torch.zeros(3), no, no, None, None, ~no, {"infos": infos})
    stats = StepStats(3, 4, torch.device("cpu"), ("episode", "height", "note", "is_success", "absent"))
    stats.take(record)
    assert stats.extras.take() == {"extra/episode/r": 4.0, "extra/height": 2.0, "extra/is_success": 1.0}


def test_entries_of_the_info_of_a_vector_environment_are_logged():
    obs, no = torch.zeros(2, 1), flags(False, False)
    ended = {"r": np.array([0.0, 7.0]), "l": np.array([0, 3])}
    infos = {"episode": ended, "_episode": np.array([False, True]), "height": np.array([1.0, 3.0]), "other": "text"}
    record = StepRecord(obs, obs, torch.zeros(2), no, no, None, None, ~no, {"infos": infos})
    stats = StepStats(2, 4, torch.device("cpu"), ("episode", "height"))
    stats.take(record)
    assert stats.extras.take() == {"extra/episode/r": 7.0, "extra/episode/l": 3.0, "extra/height": 2.0}


# ---------------------------------------------------------------------- extras
EXTRAS = {
    "episode": {"rew": torch.tensor([1.0, 3.0]), "count": 4},
    "log": {"/robot/height_mean": torch.tensor(0.5), "deep": {"x": True}},
    "reward_components": {"velocity": torch.tensor([2.0, 4.0]), "bad_max": torch.tensor([2.0, 9.0])},
    "time_outs": torch.tensor([True, False, False, False]),
    "final_observation": torch.ones(2, 3),
}


def test_only_the_listed_keys_are_taken():
    assert flatten_extras(EXTRAS, ("episode", "log")) == {
        "extra/episode/rew": 2.0,
        "extra/episode/count": 4.0,
        "extra/log/robot/height_mean": 0.5,
        "extra/log/deep/x": 1.0,
    }
    assert flatten_extras(EXTRAS, ()) == {}
    assert flatten_extras({}, ("episode",)) == {}


def test_listed_keys_are_flattened_with_means_fractions_and_extremes():
    assert flatten_extras(EXTRAS, ("reward_components", "time_outs")) == {
        "extra/reward_components/velocity": 3.0,
        "extra/reward_components/bad_max": 9.0,
        "extra/time_outs": 0.25,
    }


def test_observations_and_entries_without_numbers_are_skipped():
    extras = {
        "final_observation": torch.ones(2),
        "log": {
            "final_obs": torch.ones(2),
            "observations": {"policy": torch.ones(4)},
            "matrix": torch.ones(2, 2),
            "name": "x",
            "none": None,
            "object": object(),
            "empty": torch.ones(0),
            "list": [1.0, 2.0],
            "words": np.array(["a"]),
            "kept": np.array([1, 2, 6]),
            "scalar": np.float32(2.5),
            "one": torch.tensor([7]),
        },
    }
    want = {"extra/log/kept": 3.0, "extra/log/scalar": 2.5, "extra/log/one": 7.0}
    assert flatten_extras(extras, ("final_observation", "log")) == want


def test_mask_beside_an_entry_picks_the_environments_that_count():
    extras = {
        "episode": {"r": np.array([0.0, 8.0, 4.0]), "_r": np.array([False, True, True])},
        "log": {"x": torch.tensor([1.0, 2.0]), "low_min": torch.tensor([1.0, 2.0])},
        "_log": torch.tensor([False, True]),
    }
    want = {"extra/episode/r": 6.0, "extra/log/x": 2.0, "extra/log/low_min": 2.0}
    assert flatten_extras(extras, ("episode", "log")) == want


def test_flattening_and_gathering_read_nothing_from_the_device():
    class NoRead(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func is not torch.ops.aten._local_scalar_dense.default, "a value was read"
            return func(*args, **(kwargs or {}))

    averager = ScalarAverager()
    with NoRead():
        for _ in range(70):
            averager.add(flatten_extras(EXTRAS, ("episode", "log", "reward_components")))
    assert averager.take()["extra/reward_components/velocity"] == 3.0


@pytest.mark.gpu
def test_cuda_extras_are_gathered_without_waiting():
    extras = {"log": {"x": torch.arange(8.0, device="cuda"), "y_max": torch.arange(8.0, device="cuda")}}
    averager = ScalarAverager()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(70):
            averager.add(flatten_extras(extras, ("log",)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert averager.take() == {"extra/log/x": 3.5, "extra/log/y_max": 7.0}


def test_average_leaves_out_nan_and_takes_extremes_by_suffix():
    averager = ScalarAverager()
    averager.add({"a": torch.tensor(1.0), "n": torch.tensor(math.nan), "v_max": torch.tensor(5.0), "h": 2.0})
    averager.add({"a": torch.tensor(4.0), "n": torch.tensor(math.nan), "v_max": torch.tensor(3.0), "h": 4.0})
    averager.add({"a": torch.tensor(math.nan), "v_min": torch.tensor(3.0), "h": torch.tensor(9.0)})
    averager.add({"v_min": 2.0})
    assert averager.take() == {"a": 2.5, "v_max": 5.0, "h": 5.0, "v_min": 2.0}
    assert averager.take() == {}


def test_average_survives_many_steps_and_overwritten_tensors():
    averager = ScalarAverager()
    buffer = torch.tensor(0.0)
    for step in range(200):
        buffer.fill_(step)
        averager.add({"a": buffer, "a_max": buffer, "a_min": buffer})
    assert averager.take() == {"a": 99.5, "a_max": 199.0, "a_min": 0.0}


def test_extreme_over_no_environment_is_no_observation():
    extras = {"log": {"x_max": torch.tensor([3.0, 4.0]), "y": torch.tensor([1.0, 2.0])}, "_log": torch.zeros(2).bool()}
    averager = ScalarAverager()
    averager.add(flatten_extras(extras, ("log",)))
    assert averager.take() == {}
