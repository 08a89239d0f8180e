"""Values that make no sense are refused for every algorithm, when an object is made and when a setting changes."""

import math

import pytest
import torch

from canter.algorithms import REGISTRY, ATPPOConfig, DQNConfig, PPOConfig, SACConfig, TD3Config
from canter.algorithms.ppo import PPO
from canter.algorithms.rnd import RNDConfig
from canter.cli.__main__ import main
from canter.envs.wrap import make_env, wrap_env
from canter.modules.actor_critic import ActorCritic
from canter.modules.actor_critic_recurrent import ActorCriticRecurrent, Memory
from canter.runners import OnPolicyRunner
from canter.storage.rollout_storage import RolloutStorage

NAN, INF = math.nan, math.inf

# class, setting, value, the range in the error
NONSENSE = [
    (PPOConfig, "entropy_coef", NAN, "a number that is finite"),
    (PPOConfig, "entropy_coef", INF, "a number that is finite"),
    (PPOConfig, "clip_param", 0.0, "above 0"),
    (PPOConfig, "clip_param", NAN, "above 0"),
    (PPOConfig, "clip_param", INF, "above 0"),
    (PPOConfig, "clip_obs", 0.0, "above 0"),
    (PPOConfig, "desired_kl", -0.01, "above 0"),
    (PPOConfig, "desired_kl", 0.0, "above 0"),
    (PPOConfig, "desired_kl", NAN, "above 0"),
    (PPOConfig, "target_kl", 0.0, "above 0"),
    (PPOConfig, "gamma", 1.01, "from 0 to 1"),
    (PPOConfig, "gamma", NAN, "from 0 to 1"),
    (PPOConfig, "lam", -0.1, "from 0 to 1"),
    (PPOConfig, "lam", INF, "from 0 to 1"),
    (PPOConfig, "learning_rate", -1e-3, "of at least 0"),
    (PPOConfig, "learning_rate", INF, "of at least 0"),
    (PPOConfig, "value_loss_coef", INF, "of at least 0"),
    (PPOConfig, "max_grad_norm", -1.0, "of at least 0"),
    (PPOConfig, "max_grad_norm", NAN, "of at least 0"),
    (PPOConfig, "clip_min_std", -1.0, "of at least 0"),
    (PPOConfig, "clip_max_std", (0.5, NAN), "above 0"),
    (PPOConfig, "num_learning_epochs", 0, "whole number of at least 1"),
    (PPOConfig, "num_mini_batches", 0, "whole number of at least 1"),
    (PPOConfig, "num_steps_per_env", 0, "whole number of at least 1"),
    (PPOConfig, "max_iterations", -1, "whole number of at least 0"),
    (PPOConfig, "save_interval", -5, "whole number of at least 0"),
    (PPOConfig, "keep_checkpoints", 1, "whole number of at least 2"),
    (PPOConfig, "seed", -1, "from 0 to"),
    (PPOConfig, "seed", 2**40, "from 0 to"),
    (DQNConfig, "seed", -1, "from 0 to"),
    (DQNConfig, "tau", 0.0, "above 0 and at most 1"),
    (DQNConfig, "tau", 1.5, "above 0 and at most 1"),
    (DQNConfig, "epsilon_start", 1.5, "from 0 to 1"),
    (DQNConfig, "batch_size", 0, "whole number of at least 1"),
    (DQNConfig, "buffer_size", 0, "whole number of at least 1"),
    (DQNConfig, "max_timesteps", -1, "whole number of at least 0"),
    (DQNConfig, "network_hidden_dims", (64, 0), "whole number of at least 1"),
    (DQNConfig, "network_hidden_dims", (64.5,), "whole number of at least 1"),
    (DQNConfig, "weight_decay", NAN, "of at least 0"),
    (SACConfig, "weight_decay", -1e-4, "of at least 0"),
    (SACConfig, "actor_hidden_dims", (0,), "whole number of at least 1"),
    (SACConfig, "v_min", 20.0, "below v_max, got 20.0 and 20.0"),
    (SACConfig, "v_max", -20.0, "v_min must be below v_max"),
    (SACConfig, "min_log_std", 3.0, "at most max_log_std"),
    (SACConfig, "init_alpha", 0.0, "above 0"),
    (SACConfig, "target_entropy", NAN, "that is finite"),
    (SACConfig, "action_low", (-1.0, -INF), "that is finite"),
    (TD3Config, "exploration_noise", NAN, "of at least 0"),
    (TD3Config, "n_step", 0, "whole number of at least 1"),
    (TD3Config, "offline_gradient_steps", -1, "whole number of at least 0"),
    (ATPPOConfig, "teacher_act_prob", 1.5, "from 0 to 1"),
    (ATPPOConfig, "distillation_loss_coef", NAN, "of at least 0"),
    (ATPPOConfig, "update_times_scale", 0.0, "above 0"),
    (ATPPOConfig, "hidden_state_resample_prob", 2.0, "from 0 to 1"),
    (ATPPOConfig, "discriminator_accuracy_limit", NAN, "from 0 to 1"),
    (ATPPOConfig, "discriminator_slow_down", 0, "whole number of at least 1"),
    (ATPPOConfig, "discriminator_learning_rate", -1.0, "of at least 0"),
    (RNDConfig, "num_outputs", 0, "whole number of at least 1"),
    (RNDConfig, "weight", NAN, "that is finite"),
]


@pytest.mark.parametrize(("config", "name", "value", "limits"), NONSENSE)
def test_a_config_refuses_nonsense_when_made_and_when_assigned_to(config, name, value, limits):
    needed = {"num_states": 3} if config is RNDConfig else {}
    with pytest.raises(ValueError, match=limits):
        config(**needed, **{name: value})
    made = config(**needed)
    before = getattr(made, name)
    with pytest.raises(ValueError, match=limits):
        setattr(made, name, value)
    assert getattr(made, name) == before


def test_no_float_setting_of_any_algorithm_takes_nan():
    for entry in REGISTRY.values():
        made = entry.config_class()
        names = [name for name, value in vars(made).items() if type(value) is float]
        assert names
        for name in names:
            with pytest.raises(ValueError, match=f"{name} must be"):
                setattr(made, name, NAN)


@pytest.mark.parametrize(
    ("name", "value"), [("entropy_coef", NAN), ("clip_param", 0.0), ("desired_kl", -1.0), ("learning_rate", INF)]
)
def test_a_running_algorithm_keeps_its_setting_when_nonsense_is_assigned(name, value):
    alg = PPO(ActorCritic(3, 2))
    before = getattr(alg, name)
    with pytest.raises(ValueError, match=f"{name} must be"):
        setattr(alg, name, value)
    with pytest.raises(ValueError, match=f"{name} must be"):
        setattr(alg.cfg, name, value)
    assert getattr(alg, name) == before


def test_sensible_extremes_are_accepted():
    assert PPOConfig(max_grad_norm=INF, gamma=1.0, lam=0.0, learning_rate=0.0, seed=0).max_grad_norm == INF
    assert PPOConfig(clip_min_std=0.1, clip_max_std=0.1).clip_max_std == 0.1
    assert SACConfig(v_min=30.0, v_max=50.0).v_min == 30.0  # both beyond the defaults
    assert DQNConfig(tau=1.0, network_hidden_dims=()).network_hidden_dims == ()
    assert ATPPOConfig(teacher_act_prob="exp").teacher_act_prob == "exp"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ActorCritic(3, 2, actor_hidden_dims=[64, 0]), "actor_hidden_dims"),
        (lambda: ActorCritic(3, 2, init_noise_std=NAN), "init_noise_std must be positive"),
        (lambda: ActorCritic(3, 2, init_noise_std=INF), "init_noise_std must be positive and finite"),
        (lambda: ActorCriticRecurrent(3, 2, rnn_hidden_size=0), "size of a layer must be"),
        (lambda: Memory(3, hidden_size=0), "rnn_hidden_size must be a whole number of at least 1"),
        (lambda: ActorCriticRecurrent(3, 2, rnn_num_layers=-1), "rnn_num_layers must be"),
        (lambda: wrap_env("CartPole-v1", num_envs=0), "num_envs must be a whole number of at least 1, got 0"),
        (lambda: wrap_env("CartPole-v1", num_envs="4"), "num_envs must be a whole number of at least 1, got '4'"),
        (lambda: wrap_env("CartPole-v1", num_envs=2.5), "num_envs must be a whole number of at least 1, got 2.5"),
        (lambda: make_env("canter/CartPole", num_envs=-3), "num_envs must be a whole number of at least 1, got -3"),
    ],
)
def test_networks_and_environments_refuse_nonsense(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("length", [-1, NAN, INF])
def test_a_training_has_a_length_of_at_least_0(length):
    env = make_env("canter/CartPole", num_envs=2)
    runner = OnPolicyRunner(env, {"policy": {"actor_hidden_dims": [4], "critic_hidden_dims": [4]}}, device="cpu")
    with pytest.raises(ValueError, match="length of the training must be a whole number of at least 0"):
        runner.learn(length)
    with pytest.raises(ValueError, match="length of the training must be a whole number of at least 0"):
        runner.learn(total_timesteps=length)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--entropy-coef", "nan"], "entropy_coef must be a number that is finite, got nan"),
        (["--clip-param", "0"], "clip_param must be a number above 0"),
        (["--seed", "-1"], "seed must be a whole number from 0 to"),
        (["--gamma", "1.5"], "gamma must be a number from 0 to 1"),
        (["--policy.actor-hidden-dims", "0"], "actor_hidden_dims"),
        (["--algo", "sac", "--v-min", "5", "--v-max", "5"], "v_min must be below v_max"),
        (["--threads", "1000000"], "--threads must be at most"),
        (["--total-timesteps", "-5"], "--total-timesteps must be at least 1"),
        (["--num-envs", "0"], "--num-envs must be at least 1"),
    ],
)
def test_the_command_line_refuses_nonsense_in_one_line(flags, message, tmp_path, capsys):
    assert main(["train", "Pendulum-v1", "--runs-dir", str(tmp_path), *flags]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert not list(tmp_path.rglob("config.yaml"))


def test_a_rollout_that_does_not_fit_is_refused_with_the_arithmetic_before_it_is_allocated():
    with pytest.raises(MemoryError, match=r"rollout does not fit: 24 rows x 10,000,000 environments x \(.*\) bytes "):
        RolloutStorage(10_000_000, 24, (235,), None, (12,))
    with pytest.raises(MemoryError, match=r"= [\d.,]+ [GT]iB, but cpu has .*free; make num_envs or num_steps"):
        RolloutStorage(10_000_000, 24, (235,), None, (12,), torch.device("cpu"))
