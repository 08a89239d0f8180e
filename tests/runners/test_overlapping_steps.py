"""Environments that step in two halves, or overwrite what they returned: the rollout is the same."""

import pytest
import torch

from canter.envs.torch_envs import PointRobot
from canter.envs.wrap import wrap_env
from canter.utils.metrics import NonFiniteError


class InTwoHalves(PointRobot):
    """A robot that can be stepped in two halves, and overwrites its rewards."""

    overlaps = True
    bad = -1

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps, self.rewards = 0, torch.zeros(self.num_envs)

    def step(self, actions):
        record = super().step(actions)
        self.steps += 1
        if self.steps == self.bad:
            record.obs[1, 2] = float("nan")
        return record._replace(reward=self.rewards.copy_(record.reward))


@pytest.mark.parametrize("execution", ["eager", "auto"])
def test_records_that_are_overwritten_give_the_same_run(make_runner, differing, weights, execution):
    runners = [
        make_runner(cls(4, seed=1), algorithm={"execution": execution, "empirical_normalization": True})
        for cls in (PointRobot, InTwoHalves)
    ]
    for runner in runners:
        runner.learn(5)
    assert differing(*map(weights, runners)) == []
    for name in ("observations", "actions", "rewards", "env_rewards", "dones", "values", "returns"):
        first, second = (runner.alg.rollout.data[name] for runner in runners)
        assert torch.equal(first, second), name
    assert list(runners[0].rewbuffer) == list(runners[1].rewbuffer)


def test_an_interrupted_rollout_begins_anew(make_runner):
    runner = make_runner(PointRobot(4, seed=1), num_steps_per_env=4)
    step, runner.env.step = runner.env.step, lambda actions: 1 / 0
    with pytest.raises(ZeroDivisionError):
        runner.learn(1)
    runner.env.step = step
    runner.learn(1)
    assert runner.iteration == 1


@pytest.mark.parametrize("at", [3, 4])  # in mid-rollout, and in its last step
def test_the_policy_never_acts_on_observations_that_are_not_finite(make_runner, at):
    runner = make_runner(InTwoHalves(4, seed=1), num_steps_per_env=4)
    runner.env.bad = at
    with pytest.raises(NonFiniteError, match=rf"'obs' \(environments 1, features 2\) at step {at - 1}"):
        runner.learn(1)
    assert runner.env.steps == at
    runner.learn(2)
    assert runner.iteration == 2


def test_envpool_learns_the_same_either_way(make_runner, differing, weights):
    pytest.importorskip("envpool")
    runners = []
    for overlaps in (True, False):
        env = wrap_env("envpool/CartPole-v1", num_envs=3, seed=1)
        env.overlaps = overlaps
        runners.append(make_runner(env, num_steps_per_env=30))
        runners[-1].learn(4)
    assert differing(*map(weights, runners)) == []
    assert runners[0].rewbuffer
