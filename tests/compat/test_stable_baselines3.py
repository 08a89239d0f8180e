"""A Stable-Baselines3 VecEnv as it is, and PettingZoo by name."""

import gymnasium
import numpy as np
import pytest
import torch

from canter.compat.stable_baselines3 import SB3Vector
from canter.envs import check_env, wrap_env
from canter.envs.gymnasium_vector import GymVectorEnvAdapter
from canter.runners import OnPolicyRunner

BOX = gymnasium.spaces.Box(-10, 10, (1,), np.float32)


class VecEnv:
    """Counts its steps; environment 0 ends at step 2, environment 1 is cut off at step 3."""

    num_envs, observation_space, action_space = 2, BOX, gymnasium.spaces.Discrete(2)

    def __init__(self):
        self.count, self.seeds = np.zeros((2, 1), np.float32), []

    def seed(self, seed=None):
        self.seeds.append(seed)

    def reset(self):
        self.count[:] = 0
        return self.count.copy()

    def step(self, actions):
        self.count += 1
        dones = (self.count == [[2], [3]])[:, 0]
        infos = [{"TimeLimit.truncated": bool(done and index)} for index, done in enumerate(dones)]
        for index in np.flatnonzero(dones):
            infos[index]["terminal_observation"] = self.count[index].copy()
            self.count[index] = 0
        return self.count.copy(), np.array([1.0, 2.0]), dones, infos

    def close(self):
        pass


VecEnv.__module__ = "stable_baselines3.common.vec_env.base_vec_env"  # as the real one is recognised


def test_ends_time_limits_and_last_observations_are_told_apart():
    env = VecEnv()
    wrapped = wrap_env(env, seed=7)
    assert isinstance(wrapped, GymVectorEnvAdapter)
    assert isinstance(wrapped.env, SB3Vector)
    assert wrapped.reset()[0].tolist() == [[0.0], [0.0]]
    assert env.seeds == [7]
    wrapped.step(torch.tensor([0, 1]))
    second, third = wrapped.step(torch.tensor([0, 1])), wrapped.step(torch.tensor([0, 1]))
    assert (second.terminated.tolist(), second.truncated.tolist()) == ([True, False], [False, False])
    assert second.final_obs[0].tolist() == [2.0]
    assert second.obs.tolist() == [[0.0], [2.0]]
    assert (third.terminated.tolist(), third.truncated.tolist()) == ([False, False], [False, True])
    assert third.final_obs[1].tolist() == [3.0]
    assert third.valid.all()
    assert check_env(VecEnv(), num_steps=6).ok


def test_ppo_learns_on_it():
    runner = OnPolicyRunner(VecEnv(), {"num_steps_per_env": 8, "seed": 1}, show_progress=False)
    runner.learn(1)
    assert runner.tot_timesteps == 16


def test_the_real_one_is_recognised():
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
    env = wrap_env(vec_env.DummyVecEnv([lambda: gymnasium.make("CartPole-v1")] * 2))
    assert env.adapter == "Stable-Baselines3"


def test_several_agents_are_refused_by_name():
    class AECEnv:
        __module__ = "pettingzoo.utils.env"

    with pytest.raises(TypeError, match="PettingZoo"):
        wrap_env(AECEnv())
