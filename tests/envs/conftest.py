"""Environments whose every observation says which environment, episode and step it is from."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from canter.envs import records


@pytest.fixture(autouse=True)
def forget_warnings():
    records._warned.clear()
    records._disagreements.clear()


class Scripted(gymnasium.Env):
    """Observation (env, episode, step), reward 100 * env + step; odd episodes are cut off, even ones terminate."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,))
    action_space = spaces.Discrete(2)

    def __init__(self, index=0, length=3):
        self.index, self.length, self.episode, self.t = index, length, -1, 0
        self.seeds, self.actions = [], []

    def _obs(self):
        return np.array([self.index, self.episode, self.t], np.float32)

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        self.episode += 1
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        self.actions.append(action)
        self.t += 1
        end = self.t >= self.length
        return (
            self._obs(),
            100.0 * self.index + self.t,
            end and self.episode % 2 == 0,
            end and self.episode % 2 == 1,
            {},
        )


@pytest.fixture
def scripted():
    return Scripted


@pytest.fixture
def staggered():
    """Functions that make three scripted environments of lengths 2, 3 and 5."""
    return [lambda i=i, length=length: Scripted(i, length) for i, length in enumerate((2, 3, 5))]


class Batched:
    """A batched tensor environment: obs 100 * env + step, critic obs its negative; env i lives i + 2 steps."""

    num_envs, num_actions, device, max_episode_length = 3, 2, "cpu", 10

    def __init__(self):
        self.t = torch.zeros(self.num_envs)
        self.lengths = torch.arange(self.num_envs) + 2
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long)
        self.num_resets = self.num_gets = 0

    @property
    def obs(self):
        return (100 * torch.arange(self.num_envs) + self.t).unsqueeze(1).repeat(1, 4)

    @property
    def critic(self):
        return -self.obs[:, :2]

    def advance(self):
        """Step; returns reward, done, obs and critic obs before the reset."""
        self.t += 1
        done = self.t >= self.lengths
        final = self.obs, self.critic
        reward = 100.0 * torch.arange(self.num_envs) + self.t
        self.t[done] = 0
        return reward, done, final


class Legacy(Batched):
    """rsl_rl 1.x."""

    def reset(self):
        self.num_resets += 1
        self.t.zero_()
        return self.obs, self.critic

    def step(self, actions):
        reward, done, _ = self.advance()
        return self.obs, self.critic, reward, done, {"time_outs": done}


class Second(Batched):
    """rsl_rl 2.x and st_rl."""

    def get_observations(self):
        self.num_gets += 1
        return self.obs, {"observations": {"critic": self.critic}}

    def step(self, actions):
        reward, done, _ = self.advance()
        return self.obs, reward, done.long(), {"observations": {"critic": self.critic}, "time_outs": done}


class Third(Batched):
    """rsl_rl 3.x and later, with plain dicts."""

    names = ("policy", "critic")

    def groups(self, obs, critic):
        return dict(zip(self.names, (obs, critic), strict=True))

    def get_observations(self):
        self.num_gets += 1
        return self.groups(self.obs, self.critic)

    def step(self, actions):
        reward, done, final = self.advance()
        extras = {"time_outs": done, "final_obs": self.groups(*final)}
        return self.groups(self.obs, self.critic), reward, done.long(), extras


@pytest.fixture
def batched():
    return Batched


@pytest.fixture
def legacy():
    return Legacy


@pytest.fixture
def second():
    return Second


@pytest.fixture
def third():
    return Third


@pytest.fixture
def transitions():
    """Per environment, the valid transitions of a run: (obs, reward, terminated, truncated, next obs)."""

    def collect(env, num_steps):
        obs, _ = env.reset()
        out = [[] for _ in range(env.num_envs)]
        for _ in range(num_steps):
            record = env.step(torch.zeros(env.num_envs, dtype=torch.long))
            for i in range(env.num_envs):
                if record.valid[i]:
                    after = record.final_obs[i] if record.done[i] else record.obs[i]
                    ends = (bool(record.terminated[i]), bool(record.truncated[i]))
                    out[i].append((obs[i].tolist(), float(record.reward[i]), *ends, after.tolist()))
            obs = record.obs
        return out

    return collect
