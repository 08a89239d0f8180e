"""The report on which functions are replayed, before a run."""

import re
from types import SimpleNamespace

import pytest

from canter.algorithms import PPO, DQNConfig, Extension
from canter.envs.dummy import DummyVecEnv
from canter.envs.torch_envs import CartPole
from canter.modules import ActorCritic
from canter.runners import OffPolicyRunner, OnPolicyRunner, check_policy


class Branching(ActorCritic):
    """A user's policy that reads values."""

    def actor_features(self, obs, ctx):
        if obs[..., 0].mean() > 0:
            obs = obs * 2
        return super().actor_features(obs, ctx)


class Peek(Extension):
    """A user's extension that reads a value."""

    name = "peek"

    def losses(self, terms, batch, out):
        terms.stats["mean"] = out.mean.new_full((), out.mean.mean().item())


LATE = SimpleNamespace()


class Late(Extension):
    """A user's extension with a weight that changes late."""

    name = "late"

    def begin(self, storage):
        self.alg.loss_weights["late"] = 1.0

    def begin_update(self, iteration):
        vars(LATE)["weight"] = 1.0 if iteration < 5 else 2.0

    def losses(self, terms, batch, out):
        terms.losses["late"] = vars(LATE)["weight"] * out.mean.square().mean()


def how(report):
    return {function.name: function.how for function in report.functions}


def test_a_policy_without_host_reads_is_recorded_as_a_whole():
    report = check_policy(ActorCritic(5, 7, 2))
    assert {*how(report).values()} == {"recorded"}
    assert {"act", "learn"} <= how(report).keys()
    assert report.ok
    assert "Every function is replayed." in str(report)


def test_a_branch_is_named_with_its_line_and_the_policy_stays_as_it_was():
    policy = Branching(5, 7, 2)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    report = check_policy(policy)
    assert how(report)["act"] == how(report)["learn"] == "eager"
    assert not report.ok
    assert re.search(rf"because .* reads values on the host at {re.escape(__file__)}:\d+", str(report))
    assert all(value.equal(before[name]) for name, value in policy.state_dict().items())


def test_an_extension_is_checked_with_the_policy():
    report = check_policy(ActorCritic(5, 7, 2), extensions=[Peek()])
    assert how(report)["learn"] == "eager"
    assert how(report)["act"] == "recorded"


def test_a_number_that_changes_in_the_sixth_iteration_is_found():
    vars(LATE)["weight"] = 1.0
    report = check_policy(ActorCritic(5, 7, 2), extensions=[Late()])
    assert how(report)["learn"] == "recorded"
    assert "recorded 2 times" in str(report)


def test_a_runner_is_checked_with_its_own_algorithm():
    cfg = DQNConfig(learning_starts=64, batch_size=16, buffer_size=1000, seed=0)
    report = check_policy(OffPolicyRunner(CartPole(4), cfg=cfg, device="cpu"))
    assert how(report) == dict.fromkeys(("explore", "insert", "learn"), "recorded")


def test_an_eager_runner_and_surplus_settings_are_refused():
    env = DummyVecEnv(4, 5, 2)
    runner = OnPolicyRunner(env, agent=PPO(ActorCritic(5, 5, 2), env=env, execution="eager"))
    with pytest.raises(ValueError, match="execution='eager' runs every function eagerly"):
        check_policy(runner)
    with pytest.raises(ValueError, match="a runner has its settings; leave out gamma"):
        check_policy(runner, gamma=0.9)
