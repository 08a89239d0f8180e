"""Steps stored while the environments compute the next: the same results, and every step that was begun is ended."""

import contextlib

import pytest
import torch

from canter.algorithms import PPO
from canter.envs.torch_envs import PointRobot
from canter.envs.wrap import wrap_env
from canter.modules import ActorCritic
from canter.runners import OnPolicyRunner
from canter.utils.metrics import NonFiniteError


class NewRecords(PointRobot):
    """A robot whose records keep their values."""

    makes_new_records = True


class OneReward(PointRobot):
    """A robot that writes the rewards of every step to the same tensor."""

    def step(self, actions):
        record = super().step(actions)
        self.rewards = getattr(self, "rewards", torch.zeros(self.num_envs)).copy_(record.reward)
        return record._replace(reward=self.rewards)


class InTwoHalves(PointRobot):
    """A robot that is stepped in two halves, and notes when."""

    overlaps = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls, self.bad = [], None

    def send(self, actions):
        assert "send" not in self.calls[-1:], "a step was begun twice"
        self.calls.append("send")
        self.begun = actions

    def recv(self):
        self.calls.append("recv")
        record = super().step(self.begun)
        if self.calls.count("recv") == self.bad:
            record.obs[1, 2] = float("nan")
        return record


@pytest.mark.parametrize("execution", ["eager", "auto"])
def test_overlapping_steps_give_the_same_run(make_runner, differing, weights, execution):
    runners = [
        make_runner(cls(4, seed=1), algorithm={"execution": execution, "empirical_normalization": True})
        for cls in (PointRobot, InTwoHalves)
    ]
    for runner in runners:
        runner.learn(5)
    assert differing(*map(weights, runners)) == []
    for name in ("observations", "actions", "rewards", "dones", "values", "returns"):
        first, second = (runner.alg.rollout.data[name] for runner in runners)
        assert torch.equal(first, second), name
    assert list(runners[0].rewbuffer) == list(runners[1].rewbuffer)
    assert runners[1].env.calls == ["send", "recv"] * (5 * runners[1].num_steps_per_env)


def test_a_step_is_kept_between_the_halves_of_the_next(make_runner):
    runner = make_runner(InTwoHalves(4, seed=1), algorithm={"execution": "eager"})
    calls, keep, take = runner.env.calls, runner.alg.record_step, runner.stats.take
    runner.alg.record_step = lambda *step: (calls.append("keep"), keep(*step))[1]
    runner.stats.take = lambda record: (calls.append("guard"), take(record))
    runner.learn(1)
    later = ["send", "keep", "recv", "guard"] * (runner.num_steps_per_env - 1)
    assert calls == ["send", "recv", "guard", *later, "keep"]


@pytest.mark.parametrize("execution", ["eager", "auto"])
def test_steps_that_wait_are_stored_in_their_order(make_runner, differing, weights, monkeypatch, execution):
    algorithm = {"execution": execution, "empirical_normalization": True, "normalize_rewards": True}
    runners, orders = [], []
    for most in (0, 2, 100):
        monkeypatch.setattr("canter.runners.on_policy_runner.MAX_WAITING_STEPS", most)
        runner = make_runner(NewRecords(4, seed=1), num_steps_per_env=5, algorithm=algorithm)
        act, store, calls = runner.alg.act, runner.alg.store_waiting_steps, []
        runner.alg.act = lambda *obs, act=act, calls=calls: (calls.append("act"), act(*obs))[1]
        runner.alg.store_waiting_steps = lambda runner=runner, store=store, calls=calls: (
            calls.append(len(runner.alg.waiting_steps)),
            store(),
        )
        runner.learn(4)
        assert runner.alg.executor.iteration == (4 if execution == "auto" else 0)
        runners.append(runner)
        orders.append([call for call in calls[: len(calls) // 4] if call != 0])
    assert orders[0] == ["act", 1] * 5
    assert orders[1] == ["act", "act", "act", 3, "act", "act", 2]
    assert orders[2] == ["act"] * 5 + [5]
    for runner in runners[1:]:
        assert differing(*map(weights, (runners[0], runner))) == []
        for name in ("observations", "actions", "rewards", "dones", "values", "returns"):
            assert torch.equal(runners[0].alg.rollout.data[name], runner.alg.rollout.data[name]), name


def test_a_step_does_not_wait_where_the_next_one_may_overwrite_it(make_runner):
    rewards = []
    for cls in (PointRobot, OneReward):
        runner = make_runner(cls(4, seed=1), num_steps_per_env=5, algorithm={"gamma": 0.0})
        runner.learn(2)
        rewards.append(runner.alg.rollout.data["rewards"])
    assert torch.equal(*rewards)
    assert len(rewards[0].unique()) > 5


def test_an_interrupted_rollout_leaves_no_step_waiting(make_runner):
    runner = make_runner(NewRecords(4, seed=1), num_steps_per_env=4)
    step, runner.env.step = runner.env.step, lambda actions: 1 / 0
    with pytest.raises(ZeroDivisionError):
        runner.learn(1)
    assert (runner.alg.waiting_steps, runner.alg.max_waiting_steps) == ([], 0)
    runner.env.step = step
    runner.learn(1)
    assert runner.iteration == 1


def test_steps_on_which_the_next_actions_depend_are_not_delayed(make_runner):
    for settings in (
        {"policy": {"class_name": "ActorCriticRecurrent", "rnn_hidden_size": 4}},
        {"algorithm": {"class_name": "TPPO"}},
    ):
        with pytest.warns(UserWarning, match="no teacher") if "algorithm" in settings else contextlib.nullcontext():
            runner = make_runner(InTwoHalves(4, seed=1), **settings)
        assert not runner.alg.steps_can_wait
        runner.learn(1)
        assert runner.env.calls == []
    assert make_runner(InTwoHalves(4, seed=1)).alg.steps_can_wait


@pytest.mark.parametrize("execution", ["eager", "auto"])
def test_a_users_step_that_the_next_actions_read_is_not_delayed(execution, differing, weights):
    class Following(PPO):
        """Acts on the observation shifted by the reward of the step before."""

        def act_step(self, obs, critic_obs, hidden):
            return super().act_step(obs + self.level, critic_obs, hidden)

        def record_step(self, step, record):
            self.level.copy_(record.reward.mean().tanh())
            return super().record_step(step, record)

    runners = []
    for env_class in (PointRobot, NewRecords, InTwoHalves):
        torch.manual_seed(0)
        policy = ActorCritic(6, 9, 2, actor_hidden_dims=[8], critic_hidden_dims=[8])
        alg = Following(policy, seed=1, execution=execution)
        alg.level = torch.zeros(())
        runners.append(OnPolicyRunner(env_class(4, seed=1), alg, show_progress=False))
        runners[-1].learn(3)
    first, *others = map(weights, runners)
    for other in others:
        assert differing(first, other) == []


@pytest.mark.parametrize("at", [3, 4])  # in mid-rollout, and in its last step
def test_the_policy_never_acts_on_observations_that_are_not_finite(make_runner, at):
    runner = make_runner(InTwoHalves(4, seed=1), num_steps_per_env=4)
    runner.env.bad = at
    with pytest.raises(NonFiniteError, match=rf"'obs' \(environments 1, features 2\) at step {at - 1}"):
        runner.learn(1)
    assert runner.env.calls == ["send", "recv"] * at
    runner.learn(2)
    assert runner.iteration == 2


def test_an_error_ends_the_step_that_was_begun(make_runner):
    runner = make_runner(InTwoHalves(4, seed=1))

    def fail(*step):
        raise KeyError("no such field")

    runner.alg.record_step = fail
    with pytest.raises(KeyError, match="no such field"):
        runner.learn(1)
    assert runner.env.calls == ["send", "recv"] * 2


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
