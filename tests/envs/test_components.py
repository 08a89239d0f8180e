"""Selected components of observations, and windows that never span two episodes."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from canter.envs import wrap_env
from canter.envs.components import ObsComponents
from canter.envs.torch_envs import TORCH_ENVS
from canter.envs.vec_env import StepRecord, VecEnv


class Counting(VecEnv):
    """Observation (100 * env + step, step); an episode ends after `lengths[env]` steps."""

    def __init__(self, lengths=(3, 5), critic=False, next_step=False):
        self.num_envs, self.device = len(lengths), torch.device("cpu")
        self.obs_space = self.critic_obs_space = spaces.Box(-np.inf, np.inf, (2,))
        if critic:
            self.critic_obs_space, self.critic_obs_segments = spaces.Box(-np.inf, np.inf, (3,)), {"all": 2, "secret": 1}
        self.action_space = spaces.Box(-1.0, 1.0, (2,))
        self.lengths, self.has_critic, self.has_invalid_steps = torch.tensor(lengths), critic, next_step
        self.t = torch.zeros(self.num_envs)
        self.was_done = torch.zeros(self.num_envs, dtype=torch.bool)

    def look(self, t):
        obs = torch.stack([100.0 * torch.arange(self.num_envs) + t, t], 1)
        return obs, torch.cat([obs, -t.unsqueeze(1)], 1) if self.has_critic else obs

    def reset(self):
        self.t = torch.zeros(self.num_envs)
        return self.look(self.t)

    def get_observations(self):
        return self.look(self.t)

    def step(self, actions):
        valid = torch.ones(self.num_envs, dtype=torch.bool)
        reached = self.t + 1
        if self.has_invalid_steps:
            valid, reached = ~self.was_done, torch.where(self.was_done, 0.0, reached)
        done = (reached >= self.lengths) & valid
        final = self.look(reached)
        self.t = reached if self.has_invalid_steps else torch.where(done, 0.0, reached)
        self.was_done = done
        zeros = torch.zeros(self.num_envs)
        return StepRecord(*self.look(self.t), zeros, done, torch.zeros_like(done), *final, valid, {})


SEGMENTS = {"who": 1, "when": 1}


def test_the_actor_sees_its_components_and_the_critic_all():
    env = ObsComponents(Counting(), SEGMENTS, actor=["who"])
    obs, critic_obs = env.reset()
    record = env.step(torch.zeros(2, 2))
    assert obs.tolist() == [[0], [100]]
    assert critic_obs.tolist() == [[0, 0], [100, 0]]
    assert record.obs.tolist() == [[1], [101]]
    assert record.critic_obs.tolist() == [[1, 1], [101, 1]]
    assert env.obs_segments == {"who": (1,)}
    assert env.critic_obs_segments == {"who": (1,), "when": (1,)}
    assert (env.num_obs, env.num_privileged_obs) == (1, 2)


def test_actor_and_critic_with_equal_components_share_one_observation():
    env = ObsComponents(Counting(), SEGMENTS)
    obs, critic_obs = env.reset()
    assert critic_obs is obs
    assert env.num_privileged_obs is None
    record = env.step(torch.zeros(2, 2))
    assert record.critic_obs is record.obs
    assert record.final_critic_obs is record.final_obs


@pytest.mark.parametrize("next_step", [False, True])
def test_a_window_begins_anew_with_every_episode(next_step):
    env = ObsComponents(Counting(next_step=next_step), SEGMENTS, actor=["who_history"], history={"who": 3})
    assert env.obs_segments == {"who_history": (3, 1)}
    assert env.reset()[0].tolist() == [[0, 0, 0], [100, 100, 100]]
    seen, final = [], []
    for _ in range(5):
        record = env.step(torch.zeros(2, 2))
        seen.append(record.obs.tolist())
        final.append(record.final_obs.tolist())
    assert seen[0] == [[0, 0, 1], [100, 100, 101]]
    assert seen[1] == [[0, 1, 2], [100, 101, 102]]
    if next_step:  # env 0 ends at 3, the next step only resets
        assert seen[2] == [[1, 2, 3], [101, 102, 103]]
        assert seen[3] == [[0, 0, 0], [102, 103, 104]]
        assert seen[4] == [[0, 0, 1], [103, 104, 105]]
    else:
        assert final[2] == [[1, 2, 3], [101, 102, 103]]
        assert seen[2] == [[0, 0, 0], [101, 102, 103]]
        assert seen[3] == [[0, 0, 1], [102, 103, 104]]
        assert final[4] == [[0, 1, 2], [103, 104, 105]]
        assert seen[4] == [[0, 1, 2], [100, 100, 100]]


@pytest.mark.parametrize("last_action", [False, True])
def test_a_last_action_of_the_environments_own_is_passed_on(last_action):
    plain = wrap_env("canter/PointRobot", num_envs=3, seed=0)
    env = ObsComponents(
        wrap_env("canter/PointRobot", num_envs=3, seed=0),
        actor=["last_action", "velocity_history"],
        history={"velocity": 2},
        last_action=last_action,
    )
    plain.reset(), env.reset()
    action = torch.tensor([[0.5, -0.25], [1.0, 0.0], [0.0, -1.0]])
    wanted, record = plain.step(action), env.step(action)
    assert torch.equal(record.obs[:, :2], wanted.obs[:, 4:6])
    assert torch.equal(record.critic_obs[:, :9], wanted.critic_obs)
    assert torch.equal(record.final_critic_obs[:, :9], wanted.final_critic_obs)


def test_the_last_action_is_within_its_bounds_and_zero_at_first():
    env = ObsComponents(Counting((2, 9)), SEGMENTS, ["last_action", "last_action_history"], history={"last_action": 2})
    assert env.obs_segments == {"last_action": (2,), "last_action_history": (2, 2)}
    assert (env.reset()[0] == 0).all()
    record = env.step(torch.tensor([[0.5, 7.0], [-7.0, 0.25]]))
    assert record.obs.tolist() == [[0.5, 1, 0, 0, 0.5, 1], [-1, 0.25, 0, 0, -1, 0.25]]
    record = env.step(torch.full((2, 2), 0.5))
    assert record.obs[0].tolist() == [0] * 6  # a new episode
    assert record.final_obs[0].tolist() == [0.5, 0.5, 0.5, 1, 0.5, 0.5]
    assert record.obs[1].tolist() == [0.5, 0.5, -1, 0.25, 0.5, 0.5]


def test_a_discrete_action_is_one_of_its_choices():
    env = ObsComponents(wrap_env("canter/CartPole", num_envs=3, seed=0), actor=["last_action"], last_action=True)
    env.reset()
    assert env.step(torch.tensor([1, 0, 1])).obs.tolist() == [[0, 1], [1, 0], [0, 1]]


def test_a_separate_critic_observation_is_kept():
    env = ObsComponents(Counting(critic=True), SEGMENTS, ["who"], history={"who": 2})
    assert env.critic_obs_segments == {"all": (2,), "secret": (1,), "who_history": (2, 1)}
    env.reset()
    record = env.step(torch.zeros(2, 2))
    assert record.critic_obs.tolist() == [[1, 1, -1, 0, 1], [101, 1, -1, 100, 101]]
    assert env.step(torch.zeros(2, 2)).extras["final_observation"]["critic_obs"].shape == (2, 5)


def test_a_state_is_continued_with_its_windows():
    def make():
        env = TORCH_ENVS["Pendulum"](2, seed=3, max_episode_length=4)
        return ObsComponents(env, {"angle": 2, "speed": 1}, ["angle_history"], history={"angle": 3})

    env, other = make(), make()
    env.reset()
    for _ in range(3):
        env.step(torch.ones(2, 1))
    other.set_state(env.get_state())
    assert torch.equal(other.get_observations()[0], env.get_observations()[0])
    for _ in range(3):
        assert torch.equal(env.step(torch.ones(2, 1)).obs, other.step(torch.ones(2, 1)).obs)


def test_returned_observations_do_not_change():
    env = ObsComponents(Counting(), SEGMENTS, ["who_history"], history={"who": 3})
    first, _ = env.reset()
    before = first.clone()
    env.step(torch.zeros(2, 2))
    assert torch.equal(first, before)


def test_names_and_sizes_that_do_not_fit_are_refused():
    with pytest.raises(KeyError, match="no segment 'wen'; it has"):
        ObsComponents(Counting(), SEGMENTS, actor=["wen"])
    with pytest.raises(KeyError, match="no segment 'then'"):
        ObsComponents(Counting(), SEGMENTS, history={"then": 3})
    with pytest.raises(ValueError, match="add up to 3 values"):
        ObsComponents(Counting(), {"who": 3})
    for steps in (0, -1, 2.5):
        with pytest.raises(ValueError, match=rf"history\['who'\] must be a whole number of .* at least 1, got {steps}"):
            ObsComponents(Counting(), SEGMENTS, history={"who": steps})
    with pytest.raises(TypeError, match="wants flat observations"):
        ObsComponents(wrap_env("canter/ImageReach", num_envs=1))
