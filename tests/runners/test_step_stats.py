"""Step statistics: episodes by their own lengths, raw rewards, extras and reward components."""

import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from canter.envs.vec_env import StepRecord
from canter.utils.metrics import ComponentSums, EpisodeTracker, StepStats


def test_buffers_keep_the_newest(make_runner, counting):
    runner = make_runner(counting((1,) * 8), num_steps_per_env=20)
    runner.learn(1)
    assert len(runner.rewbuffer) == 100
    assert list(runner.rewbuffer)[-8:] == [100.0 * i + 1 for i in range(8)]
    tracker = EpisodeTracker(3000, 1, "cpu")
    obs, no = torch.zeros(3000, 1), torch.zeros(3000).bool()
    tracker.write(StepRecord(obs, obs, torch.arange(3000.0), no, no, None, None, ~no, {}))
    tracker.step += 1
    tracker.read()
    assert (len(tracker.rframebuffer), tracker.rframebuffer[-1]) == (2000, 2999.0)


def test_an_episode_may_span_rollouts_and_calls_of_learn(make_runner, counting):
    runner = make_runner(counting((12,)), num_steps_per_env=4, algorithm={"num_mini_batches": 1})
    runner.learn(2)
    assert list(runner.lenbuffer) == []
    runner.learn(1)
    assert list(runner.lenbuffer) == [12]
    assert list(runner.rewbuffer) == [78.0]


@pytest.mark.parametrize("ends", ["truncated", "terminated"])
def test_bootstrap_values_do_not_leak_into_statistics(make_runner, counting, ends):
    runner = make_runner(counting((2, 2), ends), num_steps_per_env=4, algorithm={"gamma": 0.9})
    with torch.no_grad():  # a critic that says 5 whatever it sees
        for parameter in runner.policy.critic.parameters():
            parameter.zero_()
        runner.policy.critic[-1].bias.fill_(5.0)
    rows = []
    runner.add_callback("pre_update", lambda r: rows.append(r.alg.rollout.rewards[..., 0].clone()))
    result = runner.learn(1)
    bonus = 4.5 if ends == "truncated" else 0.0
    raw = torch.tensor([[1.0, 101.0], [2.0, 102.0], [1.0, 101.0], [2.0, 102.0]])
    torch.testing.assert_close(rows[0], raw + bonus * torch.tensor([[0.0], [1.0], [0.0], [1.0]]))
    assert list(runner.rewbuffer) == [3.0, 203.0, 3.0, 203.0]
    assert result.history[0]["rollout/mean_reward"] == 51.5
    assert result.history[0]["rollout/mean_value"] == 5.0


def rsl_env(num_envs=2, **said):
    """An rsl_rl 2.x environment in which every episode ends after each step, as `said` in its extras."""

    class Env:
        num_actions, device, max_episode_length = 1, "cpu", 1

        def seed(self, seed):
            pass

        def reset(self):
            return self.get_observations()

        def get_observations(self):
            return torch.zeros(num_envs, 3), {"observations": {}}

        def step(self, actions):
            yes = torch.ones(num_envs, dtype=torch.bool)
            extras = {name: yes if value is True else value for name, value in said.items()}
            return torch.zeros(num_envs, 3), torch.full((num_envs,), 1.0), yes, {"observations": {}, **extras}

    Env.num_envs = num_envs
    return Env()


def stored_reward(runner, value):
    with torch.no_grad():  # V(obs) = value + the first feature
        for parameter in runner.policy.critic.parameters():
            parameter.zero_()
        runner.policy.critic[0].weight[0, 0] = 1.0
        runner.policy.critic[-1].weight[0, 0] = 1.0
        runner.policy.critic[-1].bias.fill_(value)
    rows = []
    runner.add_callback("pre_update", lambda r: rows.append(r.alg.rollout.rewards.clone()))
    runner.learn(1)
    assert rows[0].unique().numel() == 1
    return rows[0].flatten()[0].item()


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"terminated": True}, 1.0),
        ({"time_outs": True, "final_observation": torch.tensor([[3.0, 0, 0]] * 2)}, 1.0 + 0.9 * 5.0),  # V = 2 + 3
        ({"truncated": True, "final_observation": torch.tensor([[3.0, 0, 0]] * 2)}, 1.0 + 0.9 * 5.0),
        ({"terminated": True, "truncated": True, "final_observation": torch.tensor([[3.0, 0, 0]] * 2)}, 1.0),
    ],
)
def test_timeouts_are_bootstrapped_from_the_final_observation(make_runner, said, expected):
    runner = make_runner(rsl_env(**said), algorithm={"gamma": 0.9}, policy={"activation": "relu"})
    assert stored_reward(runner, 2.0) == pytest.approx(expected)


def test_without_a_final_observation_the_value_before_the_step_counts_with_one_warning(make_runner):
    runner = make_runner(rsl_env(time_outs=True), algorithm={"gamma": 0.9}, policy={"activation": "relu"})
    with pytest.warns(UserWarning, match="gave no final observation"):
        assert stored_reward(runner, 2.0) == pytest.approx(1.0 + 0.9 * 2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        runner.learn(2)


def test_a_critic_without_its_own_final_observation_is_no_crash(make_runner):
    class Privileged:
        num_envs, num_actions, device = 2, 1, "cpu"

        def seed(self, seed):
            pass

        def reset(self):
            return self.get_observations()

        def get_observations(self):
            return torch.zeros(2, 3), {"observations": {"critic": torch.zeros(2, 4)}}

        def step(self, actions):
            extras = {"observations": {"critic": torch.zeros(2, 4)}, "time_outs": torch.ones(2, dtype=torch.bool)}
            extras["final_observation"] = torch.zeros(2, 3)  # the actor's only
            return torch.zeros(2, 3), torch.ones(2), torch.ones(2, dtype=torch.bool), extras

    with pytest.warns(UserWarning, match="final observation"):
        make_runner(Privileged()).learn(1)


# ------------------------------------------------------------------ extras
def extras_env(counting, **said):
    return counting((2, 3), extras=lambda step: {name: value(step) for name, value in said.items()})


def test_only_episode_and_log_are_logged_unless_listed(make_runner, counting):
    said = {
        "log": lambda step: {"/robot/height_mean": float(step), "text": "no", "none": None},
        "episode": lambda step: {"rew_tracking": torch.tensor([1.0, 3.0])},
        "reward_components": lambda step: {"velocity": torch.ones(2)},
        "time_outs": lambda step: torch.ones(2),
    }
    history = make_runner(extras_env(counting, **said), num_steps_per_env=4).learn(1).history[0]
    extra = {name: value for name, value in history.items() if name.startswith(("extra/", "reward_components/"))}
    assert extra == {"extra/log/robot/height_mean": 2.5, "extra/episode/rew_tracking": 2.0}
    silent = make_runner(extras_env(counting, **said), extra_log_keys=[]).learn(1).history[0]
    assert not [name for name in silent if name.startswith("extra/")]


def test_listed_extras_are_flattened_and_payloads_skipped(make_runner, counting):
    said = {
        "reward_components": lambda step: {"legs": {"velocity": torch.tensor([0.0, 1.0])}, "/robot/h": 2},
        "final_observation": lambda step: torch.ones(2),
        "camera": lambda step: torch.ones(2, 4, 4),
        "falls": lambda step: torch.tensor([True, False]),
    }
    keys = ["reward_components", "final_observation", "camera", "falls", "absent"]
    history = make_runner(extras_env(counting, **said), extra_log_keys=keys).learn(1).history[0]
    extra = {name: value for name, value in history.items() if name.startswith("extra/")}
    assert extra == {
        "extra/reward_components/legs/velocity": 0.5,
        "extra/reward_components/robot/h": 2.0,
        "extra/falls": 0.5,
    }


def test_extras_are_averaged_over_all_steps_since_the_last_log(make_runner, counting):
    env = extras_env(counting, log=lambda step: {"step": float(step)})
    runner = make_runner(env, num_steps_per_env=4, log_interval=2)
    history = runner.learn(4).history
    assert [row["extra/log/step"] for row in history] == [4.5, 12.5]


def test_reward_components_are_summed_over_each_episode(make_runner, counting):
    said = {"reward_components": lambda step: {"alive": torch.tensor([1.0, 10.0]), "bad": torch.ones(2, 3)}}
    runner = make_runner(extras_env(counting, **said), num_steps_per_env=5, extra_log_keys=["reward_components"])
    history = runner.learn(2).history
    # lengths 2 and 3: in the first 5 steps env 0 ends twice with 2, env 1 once with 30; then 3 times and twice
    assert history[0]["reward_components/alive"] == pytest.approx((2 + 2 + 30) / 3)
    assert history[1]["reward_components/alive"] == pytest.approx((2 + 2 + 2 + 30 + 30) / 5)
    assert "reward_components/bad" not in history[0]
    assert history[0]["extra/reward_components/alive"] == 5.5


def test_components_of_unfinished_episodes_are_dropped_at_a_reset(make_runner, counting):
    said = {"reward_components": lambda step: {"alive": torch.tensor([1.0, 10.0])}}
    runner = make_runner(extras_env(counting, **said), num_steps_per_env=4, extra_log_keys=["reward_components"])
    runner.learn(1)  # environment 1 is in the first step of its second episode
    runner.eval(1)  # which resets
    assert runner.learn(1).history[0]["reward_components/alive"] == pytest.approx((2 + 2 + 30) / 3)


def test_component_sums_leave_out_steps_that_only_reset():
    sums = ComponentSums()
    yes, no = torch.tensor([True, True]), torch.tensor([False, False])
    sums.add({"a": torch.tensor([1.0, 2.0])}, no, yes)
    sums.add({"a": torch.tensor([100.0, 100.0])}, no, no)
    assert sums.take() == {}
    sums.add({"a": torch.tensor([1.0, 2.0])}, torch.tensor([True, False]), yes)
    assert sums.take() == {"reward_components/a": 2.0}
    assert sums.running["a"].tolist() == [0.0, 4.0]
    assert sums.take() == {}


def test_statistics_travel_with_and_without_the_episodes_under_way():
    stats = StepStats(2, 4, torch.device("cpu"), ("reward_components",))
    stats.tracker.cur_reward_sum[:] = [3.0, 4.0]
    stats.tracker.rewbuffer.append(7.0)
    stats.components.running = {"a": torch.tensor([1.0, 2.0])}
    for running in (True, False):
        other = StepStats(2, 4, torch.device("cpu"), ())
        other.tracker.step = 3
        other.load_state_dict(stats.state_dict(), running)
        assert other.tracker.cur_reward_sum.tolist() == ([3.0, 4.0] if running else [0.0, 0.0])
        assert list(other.tracker.rewbuffer) == [7.0]
        assert list(other.components.running) == (["a"] if running else [])
        assert other.tracker.step == 0


# ------------------------------------------------------------------ autoreset modes
class Numbered(gymnasium.Env):
    """Environment `index` has episodes of index + 2 steps that pay 10 * index + t."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,))
    action_space = spaces.Discrete(2)

    def __init__(self, index):
        self.index = index

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.array([self.index, 0], np.float32), {}

    def step(self, action):
        self.t += 1
        obs = np.array([self.index, self.t], np.float32)
        return obs, 10.0 * self.index + self.t, self.t >= self.index + 2, False, {}


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_episode_statistics_are_the_same_in_every_autoreset_mode(make_runner, mode):  # NEXT_STEP end to end
    envs = SyncVectorEnv([lambda i=i: Numbered(i) for i in range(3)], autoreset_mode=mode)
    runner = make_runner(envs, num_steps_per_env=30, algorithm={"empirical_normalization": True})
    history = runner.learn(2).history
    pairs = set(zip(runner.rewbuffer, runner.lenbuffer, strict=True))
    assert pairs == {(3.0, 2), (36.0, 3), (90.0, 4)}
    is_next_step = mode is AutoresetMode.NEXT_STEP
    assert runner.alg.rollout.has_invalid_steps == is_next_step
    if is_next_step:  # episodes of 2, 3 and 4 steps take one step more to reset
        assert runner.stats.tracker.num_episodes == 60 // 3 + 60 // 4 + 60 // 5
        assert int(runner.policy.obs_normalizer.count) == 180 - 20 - 15 - 12
    else:
        assert runner.stats.tracker.num_episodes == 30 + 20 + 15
        assert int(runner.policy.obs_normalizer.count) == 180
    assert history[0]["rollout/mean_reward"] == pytest.approx(expected_mean(mode), rel=1e-6)
    envs.close()


def expected_mean(mode):
    """Mean reward of the steps of the first 30 that took an action."""
    rewards = []
    for index in range(3):
        period = index + 3 if mode is AutoresetMode.NEXT_STEP else index + 2
        rewards += [10.0 * index + t % period + 1 for t in range(30) if t % period < index + 2]
    return sum(rewards) / len(rewards)
