"""Options of PPO and its policies in whole runs: losses by hand, files, continuing, and that they learn."""

import pytest
import torch

from canter.envs.torch_envs import CartPole, Pendulum, PointRobot
from canter.runners import OnPolicyRunner

FLIP = {"velocity": [1, -1], "command": [1, -1], "last_action": [1, -1]}
ROBOT = {"obs": FLIP, "critic_obs": {**FLIP, "true_velocity": [1, -1], "friction": "same"}, "actions": [1, -1]}
RNN = {"class_name": "ActorCriticRecurrent", "rnn_hidden_size": 6}
# name -> settings of the policy and of the algorithm
OPTIONS = {
    "beta": ({"action_distribution": "beta"}, {}),
    "beta_lstm": ({**RNN, "action_distribution": "beta"}, {}),
    "state_std": ({"state_dependent_std": True, "noise_std_type": "log"}, {"clip_max_std": 1.5}),
    "running": ({}, {"value_normalization": "running"}),
    "popart": ({}, {"value_normalization": "popart"}),
    "popart_lstm": (RNN, {"value_normalization": "popart"}),
    "symmetry": ({}, {"symmetry_cfg": {**ROBOT, "mirror_loss_coef": 0.1}}),
    "symmetry_gru": ({**RNN, "rnn_type": "gru"}, {"symmetry_cfg": ROBOT}),
    "all": (
        {**RNN, "action_distribution": "beta"},
        {"value_normalization": "popart", "symmetry_cfg": {**ROBOT, "mirror_loss_coef": 0.1}},
    ),
}


def make_runner(name, log_dir=None, execution="auto"):
    policy, algorithm = OPTIONS[name]
    cfg = {
        "seed": 5,
        "num_steps_per_env": 5,
        "max_iterations": 4,
        "save_interval": 0,
        "algorithm": {
            "num_mini_batches": 2,
            "num_learning_epochs": 2,
            "schedule": "adaptive",
            "empirical_normalization": True,
            "execution": execution,
            **algorithm,
        },
        "policy": {"actor_hidden_dims": [8], "critic_hidden_dims": [8], **policy},
    }
    return OnPolicyRunner(PointRobot(4, max_episode_length=7), cfg, log_dir=log_dir, device="cpu", show_progress=False)


def weights(runner):
    return runner.alg.policy.state_dict()


@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_from_a_training_dict_continues_exactly_from_its_file(name, tmp_path):
    whole = make_runner(name, tmp_path, "eager")
    whole.learn(2)
    half = {key: value.clone() for key, value in weights(whole).items()}
    whole.learn(2)
    whole.close()
    resumed = make_runner(name, execution="eager")
    resumed.load(tmp_path / "model_2.pt")
    assert all(torch.equal(value, half[key]) for key, value in weights(resumed).items())
    resumed.learn(2)
    for key, value in weights(whole).items():
        assert torch.equal(value, weights(resumed)[key]), key
        assert torch.isfinite(value).all()
    assert any(not torch.equal(value, half[key]) for key, value in weights(whole).items())


@pytest.mark.parametrize("name", OPTIONS)
def test_recorded_steps_learn_what_eager_ones_do(name):
    recorded, eager = make_runner(name, execution="graph"), make_runner(name, execution="eager")
    for runner in (recorded, eager):
        runner.learn(5)
    for key, value in weights(eager).items():
        torch.testing.assert_close(weights(recorded)[key], value, msg=key, rtol=1e-4, atol=1e-5)


def test_a_value_is_learned_in_units_of_its_spread(make_ppo, collect, policy_output):
    alg, env = make_ppo(value_normalization="running", clip_param=0.1)
    alg.policy.value_normalizer.update(torch.tensor([[80.0], [120.0]]))  # mean 100, std 20
    collect(alg, env)
    (batch,) = alg.mini_batches()
    batch.values, batch.returns = torch.full_like(batch.values, 90.0), torch.full_like(batch.returns, 130.0)
    out = policy_output(alg, batch)
    out = out._replace(value=torch.full_like(out.value, 110.0))
    # In units of 20: old -0.5, new 0.5, return 1.5; the clipped step ends at -0.4.
    assert alg.loss_terms(batch, out).losses["value_loss"].item() == pytest.approx((1.5 + 0.4) ** 2, rel=1e-4)
    alg.use_clipped_value_loss = False
    assert alg.loss_terms(batch, out).losses["value_loss"].item() == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("kind", ["mlp", "lstm", "beta"])
def test_statistics_of_values_stand_still_until_the_rollout_is_learned(make_ppo, collect, kind, policy_output):
    alg, env = make_ppo(kind, value_normalization="popart", num_learning_epochs=2, num_mini_batches=2)
    normalizer = alg.policy.value_normalizer
    for iteration in range(3):
        before = normalizer.mean
        collect(alg, env)
        for batch in alg.mini_batches():
            torch.testing.assert_close(policy_output(alg, batch).value, batch.values, atol=1e-5, rtol=1e-5)
        assert torch.equal(normalizer.mean, before)
        returns = alg.rollout.returns.clone()
        alg.update(iteration)
        assert not torch.equal(normalizer.mean, before)
    assert (normalizer.mean - returns.mean()).abs() < 3 * returns.std()


def test_popart_keeps_the_values_that_the_update_arrived_at(make_ppo, collect):
    alg, env = make_ppo(value_normalization="popart")
    collect(alg, env)
    obs = torch.randn(20, 5)
    moved = []

    class Watched(type(alg)):
        def _update_normalizers(self):
            moved.append(self.policy.value(obs)[0])
            super()._update_normalizers()
            moved.append(self.policy.value(obs)[0])

    alg.__class__ = Watched
    alg.update(0)
    torch.testing.assert_close(*moved, atol=1e-5, rtol=1e-5)


def test_files_with_and_without_statistics_of_values_do_not_mix(make_ppo):
    off, on = make_ppo()[0], make_ppo(value_normalization="popart")[0]
    with pytest.raises(ValueError, match="has statistics for value_normalizer.* set value_normalization='running'"):
        off.load_state_dict(on.state_dict())
    with pytest.raises(ValueError, match="lacks statistics for value_normalizer.* set value_normalization='off'"):
        on.load_state_dict(off.state_dict())
    running = make_ppo(value_normalization="running")[0]
    on.policy.value_normalizer.update(torch.tensor([[80.0], [120.0]]))
    running.load_state_dict(on.state_dict())  # the same statistics, used otherwise
    assert running.policy.value_normalizer.mean.item() == 100.0


def test_an_unknown_value_normalization_is_refused(make_ppo):
    with pytest.raises(ValueError, match="value_normalization must be one of off, running, popart, got 'pop'"):
        make_ppo(value_normalization="pop")


def test_large_rewards_are_valued_right_with_popart_and_not_without():
    """The rewards of Pendulum a thousandfold: a plain critic cannot follow at this learning rate."""

    class Loud(Pendulum):
        def dynamics(self, state, action):
            state, reward, terminated = super().dynamics(state, action)
            return state, 1000.0 * reward, terminated

    def error(value_normalization):
        cfg = {
            "seed": 0,
            "num_steps_per_env": 8,
            "algorithm": {
                "num_learning_epochs": 5,
                "num_mini_batches": 2,
                "gamma": 0.9,
                "learning_rate": 2e-3,
                "value_normalization": value_normalization,
                "use_clipped_value_loss": False,
            },
            "policy": {"actor_hidden_dims": [16], "critic_hidden_dims": [32]},
        }
        runner = OnPolicyRunner(Loud(16), cfg, device="cpu", show_progress=False)
        runner.learn(30)
        with torch.inference_mode():
            runner.collect()
        storage = runner.alg.rollout
        return float((storage.values - storage.returns).square().mean() / storage.returns.var())

    assert error("popart") < 0.3
    assert error("off") > 1.0


PENDULUM = {
    "num_steps_per_env": 32,
    "algorithm": {
        "num_learning_epochs": 10,
        "num_mini_batches": 8,
        "gamma": 0.95,
        "learning_rate": 1e-3,
        "schedule": "fixed",
        "use_clipped_value_loss": False,
        "value_loss_coef": 0.5,
        "normalize_rewards": True,
        "max_grad_norm": 0.5,
    },
    "policy": {
        "actor_hidden_dims": [64, 64],
        "critic_hidden_dims": [64, 64],
        "activation": "tanh",
        "orthogonal_init": True,
    },
}
SWING = {"obs": {"obs": [1, -1, -1]}, "actions": [-1], "mirror_loss_coef": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "algorithm"),
    [
        ({}, {}),
        ({"action_distribution": "beta"}, {}),
        ({"state_dependent_std": True, "noise_std_type": "log"}, {}),
        ({}, {"value_normalization": "popart", "normalize_rewards": False}),
        ({}, {"value_normalization": "running", "normalize_rewards": False}),
        ({}, {"symmetry_cfg": SWING}),
        ({"action_distribution": "beta"}, {"symmetry_cfg": SWING, "value_normalization": "popart"}),
    ],
    ids=["plain", "beta", "state_std", "popart", "running", "symmetry", "all"],
)
def test_pendulum_is_swung_up_with_every_option(policy, algorithm):
    cfg = {
        **PENDULUM,
        "seed": 1,
        "algorithm": {**PENDULUM["algorithm"], **algorithm},
        "policy": {**PENDULUM["policy"], **policy},
    }
    runner = OnPolicyRunner(Pendulum(64), cfg, device="cpu", eval_env=Pendulum(20, seed=7), show_progress=False)
    runner.learn(total_timesteps=250_000)
    assert runner.eval(20)["eval/mean_reward"] > -300


@pytest.mark.slow
def test_cartpole_is_balanced_with_mirrored_choices():
    mirror = {"obs": {"obs": [-1, -1, -1, -1]}, "actions": {"permutation": [1, 0]}, "mirror_loss_coef": 0.1}
    cfg = {
        "seed": 1,
        "num_steps_per_env": 64,
        "algorithm": {
            "num_learning_epochs": 8,
            "num_mini_batches": 4,
            "gamma": 0.99,
            "learning_rate": 1e-3,
            "symmetry_cfg": mirror,
            "value_normalization": "popart",
        },
        "policy": {"actor_hidden_dims": [64], "critic_hidden_dims": [64], "activation": "tanh"},
    }
    runner = OnPolicyRunner(CartPole(32), cfg, device="cpu", eval_env=CartPole(10, seed=7), show_progress=False)
    runner.learn(total_timesteps=80_000)
    assert runner.eval(10)["eval/mean_reward"] > 450
