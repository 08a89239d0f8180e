"""What must hold whatever the policy: one behaviour while collecting and learning, no leaks between episodes."""

import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from canter.algorithms.ppo import PPO
from canter.envs.wrap import wrap_env
from canter.modules.actor_critic import ActorCritic
from canter.modules.normalizer import EmpiricalNormalization
from canter.utils.metrics import EpisodeTracker

KINDS = ["mlp", "lstm", "gru", "discrete", "multi_discrete", "squashed", "lstm_discrete", "dict"]
KINDS += ["beta", "lstm_beta", "state_std"]
RECURRENT = ["lstm", "gru", "lstm_discrete", "lstm_beta"]


def behaviour_errors(alg, minibatch_step):
    """Largest |ratio - 1| and |KL| over every minibatch of every epoch, while taking the steps at learning rate 0."""
    errors = []
    for _ in range(alg.num_learning_epochs):
        for batch in alg.mini_batches():
            out = alg.policy(batch.obs, batch.critic_obs, batch.hidden, batch.trajectories)
            ratio, kl = (
                alg.loss_terms(batch, out).inter_vars["ratio"],
                alg.policy.distribution.kl(batch.old_params, out.params),
            )
            errors.append(
                torch.stack([(ratio - 1).abs().max(), kl.abs().max(), (out.value - batch.values).abs().max()])
            )
            minibatch_step(alg, batch)
    return torch.stack(errors)


@pytest.mark.parametrize("has_invalid_steps", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_policy_that_learns_is_the_one_that_acted(make_ppo, collect, kind, has_invalid_steps, minibatch_step):
    settings = {"learning_rate": 0.0, "num_learning_epochs": 2, "num_mini_batches": 3, "empirical_normalization": True}
    alg, env = make_ppo(kind, 6, 8, has_invalid_steps=has_invalid_steps, **settings)
    for iteration in range(3):  # from the second on, the normalisers have statistics and the memories a past
        collect(alg, env)
        assert alg.rollout.dones[:-1].any()  # episodes end inside the rollout
        errors = behaviour_errors(alg, minibatch_step)
        assert errors.shape == (6, 3)
        # A matrix product rounds its rows differently for other batch sizes, which moves a log-probability of size 8 by
        # one or two units in the last place, 4.8e-7 each; nothing else may differ.
        assert errors.max() < 2e-6
        alg.update(iteration)
    moved = [m for m in alg.policy.modules() if isinstance(m, EmpiricalNormalization)]
    assert moved
    assert all(m.count > 0 and m.mean.abs().min() > 0.1 for m in moved)


@pytest.mark.parametrize("kind", ["mlp", "discrete", "multi_discrete", "squashed", "dict", "beta", "state_std"])
def test_the_ratio_is_exactly_one_for_the_batch_that_acted(make_ppo, collect, kind):
    alg, env = make_ppo(kind, 4, 6, num_mini_batches=2, learning_rate=0.0, empirical_normalization=True)
    for iteration in range(2):
        collect(alg, env)
        for step in range(6):  # the same rows in the same order, so that nothing rounds differently
            batch = alg.rollout.take(4 * step + torch.arange(4))
            assert torch.equal(alg.compute_losses(batch).inter_vars["ratio"], torch.ones(4))
        alg.update(iteration)


@pytest.mark.parametrize("kind", RECURRENT)
def test_two_rollouts_value_what_one_of_twice_the_length_does(make_ppo, collect, noise_env, kind):
    whole, env = make_ppo(kind, 4, 12)
    collect(whole, env)
    halves, env = make_ppo(kind, 4, 6, env=noise_env(kind, 4))
    values = []
    for _ in range(2):
        collect(halves, env)
        values.append(halves.rollout.values.clone())
        halves.rollout.clear()
    assert torch.equal(torch.cat(values), whole.rollout.values)


@pytest.mark.parametrize("kind", RECURRENT)
def test_nothing_but_acting_advances_the_memories(make_ppo, collect, noise_env, kind):
    alg, env = make_ppo(kind)
    collect(alg, env, steps=3)
    before = {name: state.clone() for name, state in alg.policy.hidden(4).items()}
    record = env.step(alg.act(*env.get_observations()))
    acted = {name: state.clone() for name, state in alg.policy.hidden(4).items()}
    alg.process_step(record)  # evaluates final observations
    alg.compute_returns(record.critic_obs)
    alg.update(0)
    for name, state in alg.policy.hidden(4).items():
        ended = record.done
        assert not torch.equal(acted[name], before[name])
        assert torch.equal(state[~ended], acted[name][~ended])
        assert (state[ended] == 0).all()


def spoil_invalid_rows(storage):
    """Replace whatever steps that only reset have left behind, except that they end a trajectory."""
    bad = ~storage.valid.squeeze(-1)
    generator = torch.Generator().manual_seed(9)
    for name, data in storage.data.items():
        if name not in ("valid", "dones", "returns", "advantages") and data.is_floating_point():
            noise = 50.0 * torch.randn(data.shape, generator=generator)
            noise = noise.abs() + 0.1 if name == "sigma" else noise
            data.copy_(torch.where(bad.view(*bad.shape, *[1] * (data.dim() - 2)), noise, data))
    return int(bad.sum())


@pytest.mark.parametrize("per_batch", [False, True])
@pytest.mark.parametrize("kind", ["mlp", "lstm", "discrete", "dict"])
def test_steps_that_only_reset_change_nothing(make_ppo, collect, snapshot, differing, kind, per_batch):
    settings = {
        "num_learning_epochs": 2,
        "num_mini_batches": 2,
        "empirical_normalization": True,
        "schedule": "adaptive",
        "normalize_advantage_per_mini_batch": per_batch,
    }
    results = []
    for spoilt in (False, True):
        rnd = {} if kind == "dict" else {"rnd_cfg": {"weight": 0.1, "state_normalization": True}}
        alg, env = make_ppo(kind, 4, 8, end_prob=0.4, has_invalid_steps=True, **settings, **rnd)
        collect(alg, env)
        if spoilt:
            assert spoil_invalid_rows(alg.rollout) >= 4
        alg.compute_returns(env.get_observations()[1])
        valid = alg.rollout.valid
        returns, advantages = alg.rollout.returns[valid], alg.rollout.advantages[valid]
        if not per_batch:
            assert advantages.mean().abs() < 1e-6
            assert advantages.std() == pytest.approx(1.0, abs=1e-5)
        results.append((returns, advantages, alg.update(0), snapshot(alg)))
    clean, spoilt = results
    assert torch.equal(clean[0], spoilt[0])
    assert torch.equal(clean[1], spoilt[1])
    assert clean[2] == spoilt[2]  # losses and statistics
    assert differing(clean[3], spoilt[3]) == []  # parameters, optimizer, normalisers


class Constant(gymnasium.Env):
    """Always the same observation and reward 1, and a time limit of 5 steps."""

    observation_space = spaces.Box(-2.0, 2.0, (1,))
    action_space = spaces.Box(-1.0, 1.0, (1,))

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.ones(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.ones(1, np.float32), 1.0, False, self.t >= 5, {}


class ConstantBatch:
    """The same as an rsl_rl-style environment, which resets within the step and tells only `time_outs`."""

    num_envs, num_actions, num_obs, device, max_episode_length = 4, 1, 1, "cpu", 5

    def __init__(self):
        self.t = torch.zeros(4, dtype=torch.long)

    def get_observations(self):
        return torch.ones(4, 1)

    def step(self, actions):
        self.t += 1
        dones = self.t >= 5
        self.t[dones] = 0
        return torch.ones(4, 1), None, torch.ones(4), dones, {"time_outs": dones.clone()}


def learned_value(env, **settings):
    torch.manual_seed(0)
    policy = ActorCritic(1, 1, 1, actor_hidden_dims=(), critic_hidden_dims=())
    alg = PPO(
        policy, gamma=0.9, learning_rate=0.1, use_clipped_value_loss=False, num_learning_epochs=4, seed=1, **settings
    )
    env = wrap_env(env)
    alg.prepare(env, 12)
    tracker = EpisodeTracker(4, 12, "cpu")
    obs, critic_obs = env.reset()
    for iteration in range(40):
        for _ in range(12):
            record = env.step(alg.act(obs, critic_obs))
            alg.process_step(record)
            tracker.write(record)
            tracker.step += 1
            obs, critic_obs = record.obs, record.critic_obs
        alg.compute_returns(critic_obs)
        alg.update(iteration)
        tracker.read()
    assert set(tracker.rewbuffer) == {5.0}  # raw rewards of whole episodes: nothing bootstrapped, nothing twice
    assert set(tracker.lenbuffer) == {5.0}
    return float(policy.value(torch.ones(1, 1))[0].detach())


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_time_limit_does_not_lower_the_value_in_any_autoreset_mode(mode):  # V = 1 / (1 - 0.9)
    assert learned_value(SyncVectorEnv([Constant] * 4, autoreset_mode=mode)) == pytest.approx(10.0, abs=0.1)


def test_a_time_limit_does_not_lower_the_value_without_final_observations():
    with pytest.warns(UserWarning, match="no final observation"):
        assert learned_value(ConstantBatch()) == pytest.approx(10.0, abs=0.1)


def test_without_bootstrap_the_time_limit_does_lower_the_value():  # the measure above can tell the difference
    value = learned_value(SyncVectorEnv([Constant] * 4, autoreset_mode="SameStep"), timeout_bootstrap="none")
    assert value < 5.0


def test_ppo_learns_to_reach_a_target():
    """A point on a line moves by the action; the reward is minus its distance from the target it sees."""

    class Reach:
        num_envs, num_actions, num_obs, device, max_episode_length = 32, 1, 2, "cpu", 20

        def __init__(self):
            self.generator = torch.Generator().manual_seed(0)
            self.t = torch.zeros(32, dtype=torch.long)
            self.state = self.start()

        def start(self):
            return torch.rand(32, 2, generator=self.generator) * 4 - 2  # position, target

        def get_observations(self):
            return self.state.clone()

        def step(self, actions):
            self.t += 1
            self.state[:, 0] += 0.5 * actions[:, 0].clamp(-1, 1)
            reward = -(self.state[:, 0] - self.state[:, 1]).abs()
            dones = self.t >= 20
            final = self.state.clone()
            self.state = torch.where(dones[:, None], self.start(), self.state)
            self.t[dones] = 0
            return self.state.clone(), None, reward, dones, {"time_outs": dones, "final_observation": final}

    torch.manual_seed(0)
    env = wrap_env(Reach())
    policy = ActorCritic(2, 2, 1, actor_hidden_dims=(16,), critic_hidden_dims=(16,), init_noise_std=0.5)
    settings = {"num_learning_epochs": 5, "num_mini_batches": 4, "gamma": 0.95, "learning_rate": 1e-2}
    alg = PPO(policy, seed=0, empirical_normalization=True, **settings)
    alg.prepare(env, 20)
    obs, critic_obs = env.reset()
    for iteration in range(25):
        with torch.inference_mode():
            for _ in range(20):
                record = env.step(alg.act(obs, critic_obs))
                alg.process_step(record)
                obs, critic_obs = record.obs, record.critic_obs
            alg.compute_returns(critic_obs)
        alg.update(iteration)
    with torch.no_grad():
        position = torch.tensor([[-2.0, 1.0], [2.0, -1.0], [0.0, 0.5]])
        for _ in range(15):
            position[:, 0] += 0.5 * policy.act_inference(position)[:, 0].clamp(-1, 1)
    assert (position[:, 0] - position[:, 1]).abs().max() < 0.15


SIDE_EFFECTS = """
import logging, random, signal, sys, warnings
import numpy as np, torch, gymnasium

def state():
    return {
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "precision": torch.get_float32_matmul_precision(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": torch.is_grad_enabled(),
        "validate": torch.distributions.Distribution._validate_args,
        "random": (torch.get_rng_state().sum().item(), np.random.get_state()[1].sum(), hash(random.getstate())),
        "warnings": len(warnings.filters),
        "handlers": (len(logging.root.handlers), logging.root.level, signal.getsignal(signal.SIGINT)),
    }

before = state()
import canter.algorithms, canter.envs, canter.modules, canter.runners, canter.storage
from canter.modules.actors import MLPActor, MLPCritic
box = gymnasium.spaces.Box(-1, 1, (3,))
changed = [name for name, value in state().items() if value != before[name]]
MLPActor(box, box).get_params(torch.zeros(2, 3))
changed += ["validate"] if torch.distributions.Distribution._validate_args != before["validate"] else []
sys.exit(f"changed: {changed}" if changed else 0)
"""


@pytest.mark.slow
def test_importing_the_library_changes_nothing_global():
    done = subprocess.run([sys.executable, "-c", SIDE_EFFECTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
