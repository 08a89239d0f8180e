"""Commands in processes of their own, and environments that misbehave on request."""

import os

import pytest
import torch
from fault_table import World


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture
def tiny():
    """`tiny(algorithm={...}, **top)`: a training dict for runs of milliseconds."""

    def make(algorithm=None, policy=None, **top):
        ppo = {"class_name": "PPO", "num_learning_epochs": 2, "num_mini_batches": 2}
        nets = {"class_name": "ActorCritic", "actor_hidden_dims": [8], "critic_hidden_dims": [8]}
        given = {"num_steps_per_env": 4, "save_interval": 0, "device": "cpu", **top}
        return {**given, "algorithm": {**ppo, **(algorithm or {})}, "policy": {**nets, **(policy or {})}}

    return make


class RslEnv:
    """An rsl_rl 2.x environment whose answers can be spoilt.

    Step t of an episode shows (env, t, 0); episodes last `length` steps and are cut off by a time limit.

    Args:
        spoil: `spoil(step, answer)` changes the answer (a dict of obs, critic, reward, done, final, extras) in place.
        reuse: write every answer into the same buffers.
    """

    num_actions, device = 2, "cpu"

    def __init__(self, num_envs=4, length=5, spoil=None, reuse=False, dtype=torch.float32):
        self.num_envs, self.max_episode_length, self.spoil, self.reuse = num_envs, length, spoil, reuse
        self.t, self.num_steps, self.dtype = torch.zeros(num_envs), 0, dtype
        self.buffers = {}

    def _obs(self, width=3):
        obs = torch.zeros(self.num_envs, width, dtype=self.dtype)
        obs[:, 0], obs[:, 1] = torch.arange(self.num_envs), self.t
        return obs

    def _give(self, name, value):
        if not self.reuse:
            return value
        return self.buffers.setdefault(name, value.clone()).copy_(value)

    def get_observations(self):
        return self._give("obs", self._obs()), {"observations": {"critic": self._give("critic", self._obs(4))}}

    def step(self, actions):
        self.num_steps += 1
        self.t = self.t + 1
        done = self.t >= self.max_episode_length
        final, final_critic = self._obs(), self._obs(4)
        reward = 100.0 * torch.arange(self.num_envs) + self.t
        self.t = self.t.masked_fill(done, 0.0)
        answer = {"obs": self._obs(), "critic": self._obs(4), "reward": reward, "done": done}
        answer |= {"final": final, "final_critic": final_critic, "extras": {"time_outs": done.clone()}}
        if self.spoil is not None:
            self.spoil(self.num_steps, answer)
        given = {name: self._give(name, answer[name]) for name in ("obs", "critic", "reward", "done")}
        extras = {"observations": {"critic": given["critic"]}, **answer["extras"]}
        if answer["final"] is not None:
            extras |= {"final_obs": answer["final"], "final_critic_obs": answer["final_critic"]}
        return given["obs"], given["reward"], given["done"], extras

    def reset(self):
        return self.get_observations()

    def seed(self, seed):
        pass


@pytest.fixture
def rsl_env():
    return RslEnv


@pytest.fixture
def make_runner(tiny):
    """`make_runner(env, **cfg)`: a quiet runner; `log_dir` goes to it."""
    from canter.runners import OnPolicyRunner

    def make(env, log_dir=None, **given):
        return OnPolicyRunner(env, tiny(**given), log_dir=log_dir, show_progress=False)

    return make
