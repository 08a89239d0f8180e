"""Tiny runs, an environment whose episodes are known in advance, and comparison of checkpoints."""

import copy
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces

from canter.envs.torch_envs import PointRobot
from canter.envs.vec_env import StepRecord, VecEnv
from canter.runners import OnPolicyRunner


class Counting(VecEnv):
    """Environment i has episodes of `lengths[i]` steps; step t of an episode shows (i, t) and pays 100 * i + t.

    Args:
        ends: "terminated", "truncated" or "both".
        extras: what every step says besides, or a function of the step's number.
        can_restore: whether the state can be taken and put back.
    """

    def __init__(self, lengths=(2, 3, 5), ends="terminated", extras=None, can_restore=False, max_episode_length=10):
        self.lengths = torch.tensor(lengths)
        self.num_envs, self.device = len(lengths), torch.device("cpu")
        self.obs_space = self.critic_obs_space = spaces.Box(-np.inf, np.inf, (2,))
        self.action_space = spaces.Box(-1.0, 1.0, (1,))
        self.max_episode_length = max_episode_length
        self.ends, self.extras, self.can_restore = ends, extras or {}, can_restore
        self.num_steps = self.num_resets = 0
        self.t = torch.zeros(self.num_envs)

    def _obs(self):
        return torch.stack([torch.arange(self.num_envs).float(), self.t], 1)

    def reset(self):
        self.num_resets += 1
        self.t = torch.zeros(self.num_envs)
        return self.get_observations()

    def get_observations(self):
        obs = self._obs()
        return obs, obs

    def step(self, actions):
        self.num_steps += 1
        self.t = self.t + 1
        reward, final, done = 100.0 * torch.arange(self.num_envs) + self.t, self._obs(), self.t >= self.lengths
        self.t = self.t.masked_fill(done, 0.0)
        obs, no = self._obs(), torch.zeros_like(done)
        terminated, truncated = (done, no) if self.ends != "truncated" else (no, done)
        extras = dict(self.extras(self.num_steps) if callable(self.extras) else self.extras)
        return StepRecord(obs, obs, reward, terminated, truncated, final, final, torch.ones_like(done), extras)

    def seed(self, seed):
        pass

    def get_state(self):
        return {"t": self.t.clone()} if self.can_restore else None

    def set_state(self, state):
        self.t = state["t"].clone()


@pytest.fixture
def counting():
    return Counting


@pytest.fixture
def tiny():
    """`tiny(algorithm={...}, policy={...}, **top)`: a training dict for runs of milliseconds."""

    def make(algorithm=None, policy=None, **top):
        ppo = {"class_name": "PPO", "num_learning_epochs": 2, "num_mini_batches": 2, "execution": "eager"}
        nets = {"class_name": "ActorCritic", "actor_hidden_dims": [8], "critic_hidden_dims": [8]}
        given = {"seed": 1, "num_steps_per_env": 4, "save_interval": 0, "device": "cpu", **top}
        return {**given, "algorithm": {**ppo, **(algorithm or {})}, "policy": {**nets, **(policy or {})}}

    return make


@pytest.fixture
def make_runner(tiny):
    """`make_runner(env, algorithm={...}, log_dir=..., **cfg)`: a quiet runner; arguments of the runner go to it."""
    runners = []
    own = ("log_dir", "save_dir", "eval_env", "eval_interval", "eval_episodes", "log_interval", "run_info")

    def make(env=None, **given):
        arguments = {name: given.pop(name) for name in own if name in given}
        env = PointRobot(4, max_episode_length=7) if env is None else env
        runners.append(OnPolicyRunner(env, tiny(**given), show_progress=False, **arguments))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


@pytest.fixture(scope="session")
def resume_cases():
    spec = importlib.util.spec_from_file_location("resume_cases", Path(__file__).parent / "resume_cases.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def flat(value, name=""):
    """Every leaf of nested containers by its dotted name."""
    if isinstance(value, dict) and value:
        return {k: v for key, part in value.items() for k, v in flat(part, f"{name}.{key}").items()}
    if isinstance(value, list | tuple) and len(value) and len(value) < 50:
        return {k: v for i, part in enumerate(value) for k, v in flat(part, f"{name}.{i}").items()}
    return {name.lstrip("."): value}


def is_same(a, b):
    return torch.equal(a, b) if torch.is_tensor(a) and torch.is_tensor(b) else type(a) is type(b) and a == b


@pytest.fixture(scope="session")
def leaves():
    return flat


@pytest.fixture(scope="session")
def differing():
    """`differing(a, b)`: names under which two states (or checkpoint files) differ in any bit."""

    def names(a, b):
        a, b = (flat(x if isinstance(x, dict) else torch.load(x, weights_only=True)) for x in (a, b))
        return sorted(
            name for name in a.keys() | b.keys() if name not in a or name not in b or not is_same(a[name], b[name])
        )

    return names


@pytest.fixture
def weights():
    """`weights(runner)`: a copy of everything learned."""
    return lambda runner: copy.deepcopy({"alg": runner.alg.state_dict()})
