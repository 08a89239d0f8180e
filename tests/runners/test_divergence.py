"""A policy that became NaN is named as the cause; an environment is blamed only for the results of finite actions."""

import math

import pytest
import torch

from canter.algorithms import DQNConfig, SACConfig, TD3Config
from canter.envs.torch_envs import CartPole, PointRobot
from canter.runners import OffPolicyRunner
from canter.utils.checkpoint import load_checkpoint
from canter.utils.metrics import DivergedError, NonFiniteError

SMALL = {"batch_size": 8, "learning_starts": 8, "buffer_size": 400, "device": "cpu", "log_interval": 12, "seed": 1}
NETWORKS = {"actor_hidden_dims": (8,), "critic_hidden_dims": (8,)}
CONFIGS = {
    "dqn": (CartPole, DQNConfig(**SMALL, network_hidden_dims=(8,))),
    "sac": (PointRobot, SACConfig(**SMALL, **NETWORKS)),
    "td3": (PointRobot, TD3Config(**SMALL, **NETWORKS)),
}


class Spoilt(PointRobot):
    """Pays NaN in the step `bad_step`."""

    bad_step, num_steps = 3, 0

    def step(self, actions):
        record = super().step(actions)
        is_bad, self.num_steps = self.num_steps == self.bad_step, self.num_steps + 1
        return record._replace(reward=record.reward * math.nan if is_bad else record.reward)


class Refusing(PointRobot):
    """Refuses actions that are not finite, with an error of its own."""

    def step(self, actions):
        if not actions.isfinite().all():
            raise AssertionError("the action is outside the action space")
        return super().step(actions)


class Clipping(PointRobot):
    """Hides that an action is NaN."""

    def step(self, actions):
        return super().step(actions.nan_to_num(0.0))


def off_policy_runner(kind, env_class=None):
    default, cfg = CONFIGS[kind]
    env = (env_class or default)(4, seed=0, max_episode_length=9)
    return OffPolicyRunner(env, cfg, show_progress=False)


def spoil(module, name):
    with torch.no_grad():
        dict(module.named_parameters())[name].view(-1)[0] = math.nan


@pytest.mark.parametrize("env_class", [PointRobot, Refusing, Clipping, CartPole])
def test_a_policy_with_a_nan_weight_is_named(make_runner, env_class, tmp_path):
    runner = make_runner(env_class(4, max_episode_length=7), log_dir=tmp_path)
    runner.learn(2)
    spoil(runner.policy, "actor.0.weight")
    with pytest.raises(DivergedError) as caught:
        runner.learn(3)
    text = str(caught.value)
    assert "the policy diverged in iteration 3: parameter 'actor.0.weight' is NaN or infinite" in text
    assert "Lower learning_rate (now 0.001), max_grad_norm (now 1), scale the rewards down" in text
    assert "the environment gave" not in text
    assert (caught.value.__cause__ is None) == (env_class is not Refusing)
    assert load_checkpoint(tmp_path / "checkpoint_final.pt")["iter"] == 2  # no broken policy is saved there


def test_a_huge_learning_rate_is_noticed_in_the_iteration_that_used_it(make_runner):
    runner = make_runner(Clipping(4, max_episode_length=7))
    runner.learn(1)
    runner.alg.learning_rate = 3e38
    with pytest.raises(DivergedError, match=r"in iteration 2: parameter .*learning_rate \(now 3e\+38\)"):
        runner.learn(3)
    assert runner.iteration == 1


def test_actions_that_overflow_are_the_policys(make_runner):
    runner = make_runner()
    with torch.no_grad():
        runner.policy.actor[-1].weight.fill_(3e38)
        runner.policy.actor[0].bias.fill_(10.0)
    with pytest.raises(DivergedError, match=r"in iteration 1: its actions are NaN or infinite.*The environment is not"):
        runner.learn(1)


@pytest.mark.parametrize(
    ("kind", "name"), [("dqn", "q_network.net.0.weight"), ("sac", "actor"), ("sac", "critics"), ("td3", "actor")]
)
def test_an_off_policy_network_with_a_nan_weight_is_named(kind, name):
    runner = off_policy_runner(kind)
    runner.learn(40)
    names = [n for n, p in runner.policy.named_parameters() if n.startswith(name.split(".")[0])]
    spoil(runner.policy, names[0])
    rates = "learning_rate" if kind == "dqn" else "actor_learning_rate .*critic_learning_rate"
    with pytest.raises(DivergedError, match=rf"policy diverged in iteration 1\d: parameter .*{rates} .*max_grad_norm"):
        runner.learn(40)


@pytest.mark.parametrize("is_immediate", [True, False])
def test_the_environment_is_named_where_the_actions_were_finite(make_runner, is_immediate):
    runner = make_runner(Spoilt(4, max_episode_length=7), num_steps_per_env=6)
    runner.stats.guard.is_immediate = is_immediate  # else as on a GPU, once per rollout
    with pytest.raises(NonFiniteError, match=r"environment gave NaN or infinity in 'rewards?' .* at step 3") as caught:
        runner.learn(1)
    assert not isinstance(caught.value, DivergedError)


def test_actions_that_became_nan_through_the_environment_do_not_acquit_it(make_runner):
    """As on a GPU: from the NaN observation on, the stored actions are NaN too."""

    class Blind(Spoilt):
        def step(self, actions):
            record = super().step(actions.nan_to_num(0.0))
            return record._replace(obs=record.obs * math.nan) if self.num_steps > self.bad_step else record

    runner = make_runner(Blind(4, max_episode_length=50), num_steps_per_env=8)
    runner.stats.guard.is_immediate = False
    with pytest.raises(NonFiniteError, match="the environment gave") as caught:
        runner.learn(1)
    assert not isinstance(caught.value, DivergedError)
    assert runner.actions.isnan().all()


def test_a_diverged_policy_is_named_once_per_rollout_too(make_runner):
    runner = make_runner(PointRobot(4, max_episode_length=7))
    runner.stats.guard.is_immediate = False
    spoil(runner.policy, "actor.0.weight")
    with pytest.raises(DivergedError, match=r"actor\.0\.weight"):
        runner.learn(1)


@pytest.mark.parametrize("log_interval", [1, 2])
def test_a_run_that_ends_with_an_infinite_loss_is_an_error_with_its_state_in_crash(make_runner, tmp_path, log_interval):
    runner = make_runner(log_dir=tmp_path, log_interval=log_interval)
    runner.alg.loss_weights["value_loss"] = math.inf  # every update is skipped, so that all parameters are finite
    with pytest.raises(DivergedError, match="total_loss is inf at the end of the run"):
        runner.learn(2)
    assert load_checkpoint(tmp_path / "crash" / "model_2.pt")["iter"] == 2
    assert not (tmp_path / "checkpoint_final.pt").exists()


def test_a_run_that_ends_with_noise_without_bounds_is_an_error(make_runner):
    runner = make_runner()

    def widen(runner):
        runner.policy.std.data.fill_(1e30)

    runner.add_callback("pre_iteration", widen)
    with pytest.raises(DivergedError, match="noise|infinite"):
        runner.learn(2)


def test_a_run_whose_updates_are_all_skipped_stops(make_runner):
    runner = make_runner()
    runner.learn(3)
    before = {name: value.clone() for name, value in runner.policy.state_dict().items()}
    runner.alg.loss_weights["value_loss"] = math.inf
    with pytest.raises(DivergedError) as caught:
        runner.learn(50)
    text = str(caught.value)
    assert "diverged in iteration 13: every update of the last 10 reports was skipped" in text
    assert "the first such metric is 'total_loss'" in text
    assert "Lower learning_rate (now 0.001)" in text
    assert all(torch.equal(value, before[name]) for name, value in runner.policy.state_dict().items())


def test_a_few_skipped_updates_in_between_do_not_stop_a_run(make_runner):
    runner = make_runner()

    def spoil_most(runner):
        runner.alg.loss_weights["value_loss"] = 1.0 if runner.iteration % 8 == 7 else math.inf

    runner.add_callback("pre_iteration", spoil_most)
    runner.learn(24)
    assert runner.iteration == 24


@pytest.mark.parametrize("kind", ["dqn", "sac", "td3"])
def test_an_off_policy_run_whose_updates_are_all_skipped_stops(kind):
    runner = off_policy_runner(kind)
    real = runner.alg.batches

    def spoilt(count):
        return (batch._replace(rewards=batch.rewards * math.nan) for batch in real(count))

    runner.alg.batches = spoilt
    with pytest.raises(DivergedError, match=r"every update of the last 10 reports was skipped"):
        runner.learn(2000)


@pytest.mark.parametrize(("kind", "value"), [("scalar", -3.0), ("scalar", 0.0), ("log", -50.0)])
def test_noise_that_collapses_stays_positive_and_is_reported_once(make_runner, monkeypatch, kind, value):
    monkeypatch.setattr("canter.runners.health.MAX_QUIET", 3)
    policy = {"class_name": "ActorCritic", "actor_hidden_dims": [4], "critic_hidden_dims": [4], "noise_std_type": kind}
    slow = {"class_name": "PPO", "learning_rate": 1e-8, "schedule": "fixed"}  # else it grows again
    runner = make_runner(PointRobot(4), algorithm=slow, policy=policy, log_interval=1)
    (runner.policy.std if kind == "scalar" else runner.policy.log_std).data.fill_(value)
    with pytest.warns(UserWarning, match=r"noise collapsed: .* for 3 reports now, .*raise clip_min_std") as caught:
        history = runner.learn(6).history
    assert sum("collapsed" in str(w.message) for w in caught) == 1
    assert all(1e-16 < row["policy/mean_noise_std"] < 1e-4 for row in history)
    # With such small noise the square of the gradient's norm overflows on some processors; the step is skipped then.
    names = [name for name in history[0] if name.startswith("train/") and name != "train/grad_norm"]
    assert all(math.isfinite(row[name]) for row in history for name in names)
