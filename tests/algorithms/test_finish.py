"""A finished rollout by hand: time limits, order of rewards, returns. The discount is 1/2, a value its observation."""

import pytest
import torch
from torch import nn

from canter.algorithms import PPO, Extension
from canter.envs.vec_env import StepRecord
from canter.modules import ActorCritic

RUNNING, TERMINATED, CUT_OFF = (False, False), (True, False), (False, True)


class Reads(nn.Module):
    """A critic whose value is its observation."""

    def forward(self, x):
        return x


def finished(steps, last=10.0, execution="eager", iterations=1, **settings):
    """PPO after a rollout of one environment; `steps` are observation, reward, end, and final observation or None."""
    policy = ActorCritic(1, 1, 1, actor_hidden_dims=(), critic_hidden_dims=())
    policy.critic = Reads()
    settings = {"normalize_advantage_per_mini_batch": True, "gamma": 0.5, "lam": 1.0} | settings
    alg = PPO(policy, seed=1, execution=execution, **settings)
    alg.init_storage(1, len(steps), [1], [None], [1])
    for _ in range(iterations):
        alg.rollout.clear()
        for obs, reward, (terminated, truncated), final in steps:
            alg.act(torch.tensor([[obs]]))
            final = None if final is None else torch.tensor([[final]])
            ends = (torch.tensor([flag]) for flag in (terminated, truncated))
            unseen = torch.tensor([[1000.0]])  # the first of the next episode: its value must appear nowhere
            every = torch.ones(1, dtype=torch.bool)
            alg.process_step(StepRecord(unseen, unseen, torch.tensor([reward]), *ends, final, final, every, {}))
        alg.compute_returns(torch.tensor([[last]]))
    return alg


EPISODES = [(1.0, 1.0, RUNNING, None), (2.0, 2.0, CUT_OFF, 8.0), (3.0, 3.0, CUT_OFF, None), (4.0, 4.0, TERMINATED, 9.0)]
EPISODES += [(5.0, 5.0, RUNNING, None)]


@pytest.mark.parametrize("execution", ["eager", "auto"])
@pytest.mark.parametrize(
    ("lam", "returns"),
    [
        (1.0, [1 + 0.5 * 6, 2 + 0.5 * 8, 3 + 0.5 * 3, 4, 5 + 0.5 * 10]),
        (0.0, [1 + 0.5 * 2, 2 + 0.5 * 8, 3 + 0.5 * 3, 4, 5 + 0.5 * 10]),
    ],
)
def test_returns_bootstrap_where_an_episode_was_cut_off_and_only_there(execution, lam, returns):
    alg = finished(EPISODES, lam=lam, execution=execution, iterations=4)
    assert alg.rollout.returns.flatten().tolist() == returns
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert alg.rollout.advantages.flatten().tolist() == [a - b for a, b in zip(returns, values, strict=True)]
    assert alg.rollout.rewards.flatten().tolist() == [1.0, 6.0, 4.5, 4.0, 5.0]
    assert alg.rollout.env_rewards.flatten().tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert bool(alg.used_current_value)


@pytest.mark.parametrize(
    ("mode", "rewards"),
    [
        ("none", [1.0, 2.0, 3.0, 4.0, 5.0]),
        ("current_value", [1.0, 3.0, 4.5, 4.0, 5.0]),
        ("auto", [1.0, 6.0, 4.5, 4.0, 5.0]),
    ],
)
def test_every_way_to_value_a_time_limit(mode, rewards):
    assert finished(EPISODES, timeout_bootstrap=mode).rollout.rewards.flatten().tolist() == rewards


class Doubled(Extension):
    """Doubles rewards before they are scaled, and adds 100 after."""

    name = "doubled"

    def reward(self, rewards, rollout):
        return 2.0 * rewards

    def bonus(self, rollout):
        return torch.full_like(rollout.column("rewards"), 100.0)


def test_rewards_are_changed_then_scaled_then_increased_then_bootstrapped():
    steps = [(0.0, 4.0, RUNNING, None), (0.0, 1.0, CUT_OFF, 8.0)]
    plain = finished(steps, normalize_rewards=True, timeout_bootstrap="none").rollout.rewards.flatten()
    alg = finished(steps, normalize_rewards=True, extensions=[Doubled()])
    # A scale undoes the factor, but for its bound of 10: one environment has no spread in the first step.
    wanted = [10.0 + 100.0, float(plain[1]) + 100.0 + 0.5 * 8.0]
    torch.testing.assert_close(alg.rollout.rewards.flatten(), torch.tensor(wanted))
    assert alg.rollout.env_rewards.flatten().tolist() == [4.0, 1.0]


def test_a_rollout_is_finished_once():
    alg = finished(EPISODES)
    before = alg.rollout.rewards.clone()
    alg.compute_returns(torch.tensor([[10.0]]))
    assert torch.equal(alg.rollout.rewards, before)
