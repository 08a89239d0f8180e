"""Tiny policies, a noisy environment and ready-made PPOs that many tests share."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from no_host_sync import NoHostSync

from canter.algorithms.ppo import PPO
from canter.envs.vec_env import StepRecord, VecEnv
from canter.modules.actor_critic import ActorCritic
from canter.modules.actor_critic_recurrent import ActorCriticRecurrent
from canter.modules.actors import MLPActor, MLPCritic
from canter.modules.build import build_pair

torch.set_num_threads(1)

NUM_OBS, NUM_CRITIC_OBS = 3, 5
VECTOR = spaces.Box(-np.inf, np.inf, (NUM_OBS,))
CRITIC_VECTOR = spaces.Box(-np.inf, np.inf, (NUM_CRITIC_OBS,))
NESTED = spaces.Dict({"joints": spaces.Box(-np.inf, np.inf, (2,)), "base": spaces.Dict({"vel": VECTOR})})
REACH = spaces.Box(-2.0, 2.0, (2,))

# policy kind -> observation space, critic's, action space
SPACES = {
    "mlp": (VECTOR, CRITIC_VECTOR, REACH),
    "lstm": (VECTOR, CRITIC_VECTOR, REACH),
    "gru": (VECTOR, CRITIC_VECTOR, REACH),
    "discrete": (VECTOR, CRITIC_VECTOR, spaces.Discrete(4)),
    "multi_discrete": (VECTOR, CRITIC_VECTOR, spaces.MultiDiscrete([3, 2])),
    "squashed": (VECTOR, CRITIC_VECTOR, REACH),
    "lstm_discrete": (VECTOR, CRITIC_VECTOR, spaces.Discrete(4)),
    "beta": (VECTOR, CRITIC_VECTOR, REACH),
    "lstm_beta": (VECTOR, CRITIC_VECTOR, REACH),
    "state_std": (VECTOR, CRITIC_VECTOR, REACH),
    "dict": (NESTED, NESTED, REACH),
}


class NoiseEnv(VecEnv):
    """Random observations, rewards and episode ends that ignore the actions."""

    def __init__(self, kind="mlp", num_envs=4, end_prob=0.25, has_invalid_steps=False, seed=0):
        self.obs_space, self.critic_obs_space, self.action_space = SPACES[kind]
        self.num_envs, self.device, self.end_prob = num_envs, torch.device("cpu"), end_prob
        self.has_invalid_steps = has_invalid_steps
        self.generator = torch.Generator().manual_seed(seed)
        self.was_done = torch.zeros(num_envs, dtype=torch.bool)
        self.current = self.draw()

    def uniform(self):
        return torch.rand(self.num_envs, generator=self.generator)

    def sample(self, space):
        if isinstance(space, spaces.Dict):
            return {name: self.sample(part) for name, part in space.spaces.items()}
        return 3.0 * torch.randn(self.num_envs, *space.shape, generator=self.generator) + 1.0

    def draw(self):
        obs = self.sample(self.obs_space)
        return obs, obs if self.critic_obs_space is self.obs_space else self.sample(self.critic_obs_space)

    def reset(self):
        return self.current

    def get_observations(self):
        return self.current

    def step(self, actions):
        reward = torch.randn(self.num_envs, generator=self.generator)
        done, is_timeout = self.uniform() < self.end_prob, self.uniform() < 0.5
        valid = torch.ones_like(done)
        self.current = final = self.draw()
        if self.has_invalid_steps:
            valid = ~self.was_done
            done, reward = done & valid, reward * valid
            self.was_done = done
        else:
            final = self.draw()
        return StepRecord(*self.current, reward, done & ~is_timeout, done & is_timeout, *final, valid, {})


def build_policy(kind="mlp", **settings):
    obs_space, critic_space, action_space = SPACES[kind]
    if kind == "dict":
        cfg = {"hidden_dims": [8]}
        return build_pair(obs_space, critic_space, action_space, MLPActor, MLPCritic, cfg, cfg)
    num_actions = {"Discrete": 4, "MultiDiscrete": 5}.get(type(action_space).__name__, 2)
    settings = {"actor_hidden_dims": (8,), "critic_hidden_dims": (8,), "action_space": action_space} | settings
    settings |= {"action_distribution": "beta"} if kind.endswith("beta") else {}
    settings |= {"state_dependent_std": True} if kind == "state_std" else {}
    if kind.startswith(("lstm", "gru")):
        settings = {"rnn_hidden_size": 8, "rnn_type": kind.partition("_")[0]} | settings
        return ActorCriticRecurrent(NUM_OBS, NUM_CRITIC_OBS, num_actions, **settings)
    if kind == "squashed":
        settings["squash_actions"] = True
    return ActorCritic(NUM_OBS, NUM_CRITIC_OBS, num_actions, **settings)


@pytest.fixture
def minibatch_step():
    """`minibatch_step(alg, batch)`: one gradient step on a minibatch; its losses and statistics."""

    def step(alg, batch):
        terms = alg.compute_losses(batch)
        return alg.optimizer_step(terms, alg.weighted_sum(terms.losses))

    return step


@pytest.fixture
def policy_output():
    """`policy_output(alg, batch)`: the policy's pass over a minibatch."""
    return lambda alg, b: alg.policy(b.obs, b.critic_obs, b.hidden, b.trajectories, b.random_masks)


@pytest.fixture
def make_policy():
    """`make_policy(kind, **settings)`: a seeded policy."""

    def make(kind="mlp", **settings):
        torch.manual_seed(0)
        return build_policy(kind, **settings)

    return make


@pytest.fixture
def noise_env():
    """The class of noisy environments."""
    return NoiseEnv


@pytest.fixture
def make_ppo(make_policy):
    """`make_ppo(kind, num_envs, num_steps, **settings)`: a seeded PPO with storage, and an environment for it."""

    def make(kind="mlp", num_envs=4, num_steps=6, env=None, policy=None, end_prob=0.25, has_invalid_steps=False, **cfg):
        env = env or NoiseEnv(kind, num_envs, end_prob, has_invalid_steps)
        alg = PPO(make_policy(kind) if policy is None else policy, **{"seed": 3, **cfg})
        alg.prepare(env, num_steps)
        return alg, env

    return make


@pytest.fixture
def collect():
    """`collect(alg, env)`: fill the storage and compute the returns, as a runner does."""

    def fill(alg, env, steps=None):
        with torch.inference_mode():
            obs, critic_obs = env.get_observations()
            for _ in range(alg.rollout.num_transitions_per_env if steps is None else steps):
                record = env.step(alg.act(obs, critic_obs))
                alg.process_step(record)
                obs, critic_obs = record.obs, record.critic_obs
            alg.compute_returns(critic_obs)

    return fill


@pytest.fixture
def run_without_waiting(collect):
    """`run_without_waiting(alg, env)`: an iteration to make ready, then one that may not wait for the device."""

    def run(alg, env):
        collect(alg, env)
        alg.update(0)  # constants go to the device and optimizer state is made here
        obs, critic_obs = env.get_observations()
        for _ in range(alg.rollout.num_transitions_per_env):
            with NoHostSync():
                actions = alg.act(obs, critic_obs)
            record = env.step(actions)
            with NoHostSync():
                alg.process_step(record)
            obs, critic_obs = record.obs, record.critic_obs
        with NoHostSync():
            alg.compute_returns(critic_obs)
        for minibatch in alg.sample_minibatches()[0]:  # a recurrent pass reads its trajectory counts once, here
            with NoHostSync():
                alg.learn_step(*minibatch)

    return run


@pytest.fixture
def snapshot():
    """`snapshot(alg)`: copies of every tensor of the algorithm's state by dotted name."""

    def take(alg):
        leaves = {}

        def walk(name, value):
            if isinstance(value, dict):
                for key, part in value.items():
                    walk(f"{name}.{key}", part)
            elif isinstance(value, list):
                walk(name, dict(enumerate(value)))
            else:
                leaves[name] = value.detach().clone() if torch.is_tensor(value) else value

        walk("", alg.state_dict())
        return leaves

    return take


def _same(a, b):
    return torch.is_tensor(b) and torch.equal(a, b) if torch.is_tensor(a) else a == b


@pytest.fixture
def differing():
    """`differing(a, b)`: names under which two snapshots differ in any bit."""
    return lambda a, b: sorted(name for name in a.keys() | b.keys() if name not in a or not _same(a[name], b.get(name)))
