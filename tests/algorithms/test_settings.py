"""Settings: declared once, described, and refused where nobody declared them."""

import ast
import dataclasses
import inspect

import pytest

from canter.algorithms import SAC, TD3, DQNConfig, SACConfig, TD3Config
from canter.algorithms.algorithm import AlgorithmSettings, CommonRunSettings
from canter.algorithms.estimation import EstimatorSettings
from canter.algorithms.motion_prior import MotionPriorSettings
from canter.algorithms.ppo import PPO, PPOConfig, PPOSettings, RunSettings
from canter.algorithms.rnd import RNDConfig, RNDSettings
from canter.algorithms.symmetry import SymmetryConfig, SymmetrySettings
from canter.algorithms.teacher import TeacherSettings
from canter.envs import ImageReach, wrap_env
from canter.modules.actor_critic import ActorCritic
from canter.runners import OffPolicyRunner, OnPolicyRunner
from canter.utils.config import unused_settings

EXTENSIONS = [EstimatorSettings, MotionPriorSettings, RNDConfig, RNDSettings, SymmetryConfig, SymmetrySettings]


@pytest.mark.parametrize(
    "cls", [CommonRunSettings, RunSettings, AlgorithmSettings, PPOSettings, TeacherSettings, *EXTENSIONS]
)
def test_every_setting_has_a_sentence(cls):
    source = ast.parse(inspect.getsource(inspect.getmodule(cls)))
    body = next(n for n in source.body if getattr(n, "name", "") == cls.__name__).body
    for declared, follows in zip(body, [*body[1:], None], strict=True):
        if isinstance(declared, ast.AnnAssign):
            assert isinstance(follows, ast.Expr), declared.target.id
            assert follows.value.value.endswith("."), declared.target.id


def test_a_run_has_the_settings_of_the_run_and_of_the_algorithm():
    names = {f.name for f in dataclasses.fields(PPOConfig)}
    assert names == {f.name for cls in (RunSettings, PPOSettings) for f in dataclasses.fields(cls)}
    assert {"extra_log_keys", "logger_backend", "logger_kwargs", "log_interval", "save_interval", "device"} <= names


def test_the_config_of_a_run_keeps_its_own_defaults():
    cfg = PPOConfig()
    assert (cfg.num_learning_epochs, cfg.num_mini_batches, cfg.gamma, cfg.learning_rate) == (5, 4, 0.99, 3e-4)
    assert (cfg.schedule, cfg.clip_param, cfg.lam) == ("adaptive", 0.2, 0.95)


@pytest.mark.parametrize(
    ("cfg", "names"),
    [
        (PPOConfig(clip_obs=5.0, min_obs_std=0.1), ["min_obs_std", "clip_obs"]),
        (PPOConfig(clip_obs=5.0, empirical_normalization=True), []),
        (PPOConfig(clip_obs=5.0, critic_obs_normalization=True), []),
        (PPOConfig(schedule="linear", desired_kl=0.02), ["desired_kl"]),
        (PPOConfig(schedule="adaptive", desired_kl=0.02), []),
        (DQNConfig(priority_exponent=0.5, importance_exponent=1.0), ["priority_exponent", "importance_exponent"]),
        (DQNConfig(priority_exponent=0.5, prioritized_replay=True), []),
        (DQNConfig(buffer_size=500, buffer_steps_per_env=10, clip_obs=5.0), ["clip_obs", "buffer_size"]),
        (DQNConfig(offline_gradient_steps=7), ["offline_gradient_steps"]),
        (SACConfig(v_min=-5.0, v_max=5.0), ["v_min", "v_max"]),
        (SACConfig(v_min=-5.0, num_atoms=11), []),
        (SACConfig(auto_alpha=False, target_entropy=-1.0), ["target_entropy"]),
        (SACConfig(auto_alpha=False, alpha_learning_rate=1e-3, init_alpha=0.1), ["alpha_learning_rate"]),
        (TD3Config(target_noise=0.0, target_noise_clip=0.3), ["target_noise_clip"]),
        (MotionPriorSettings(discriminator_optimizer="shared", discriminator_weight_decay=0.0), ["weight_decay"]),
        (MotionPriorSettings(amp_preload=10, amp_num_frames=3), ["amp_num_frames", "amp_preload"]),
        (TeacherSettings(lr_scheduler={"gamma": 0.9}), ["lr_scheduler"]),
    ],
)
def test_settings_without_effect_are_found(cfg, names):
    assert sorted(name.removeprefix("discriminator_") for name in unused_settings(cfg)) == sorted(names)


def test_training_warns_of_a_setting_without_effect():
    policy = {"actor_hidden_dims": [4], "critic_hidden_dims": [4]}
    cfg = {"num_steps_per_env": 4, "policy": policy, "algorithm": {"clip_obs": 5.0}}
    runner = OnPolicyRunner(wrap_env("canter/CartPole", num_envs=2), cfg, device="cpu", show_progress=False)
    reason = "empirical_normalization=False and critic_obs_normalization=None"
    with pytest.warns(UserWarning, match=f"clip_obs=5.0 has no effect with {reason}"):
        runner.learn(1)


@pytest.mark.parametrize("name", ["empirical_normalization", "critic_obs_normalization"])
def test_normalisation_of_images_alone_is_a_warning(name):
    cfg = {"num_steps_per_env": 4, "num_mini_batches": 1, "value_normalization": "running", name: True}
    runner = OnPolicyRunner(ImageReach(2), cfg, device="cpu", show_progress=False)
    with pytest.warns(UserWarning, match=f"{name}=True has no effect: images and whole numbers are not normalised"):
        runner.learn(1)


def test_an_unknown_setting_is_refused():
    with pytest.raises(TypeError, match="'num_learning_epochs'"):
        PPOConfig(num_epochs=3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": 1.5}, "gamma must be a number from 0 to 1, got 1.5"),
        ({"lam": float("nan")}, "lam must be a number from 0 to 1, got nan"),
        ({"clip_param": -0.1}, "clip_param must be a number above 0"),
        ({"num_learning_epochs": 0}, "num_learning_epochs must be a whole number of at least 1"),
        ({"schedule": "cosine"}, "schedule must be one of fixed, constant, linear, adaptive, got 'cosine'"),
    ],
)
def test_a_value_out_of_range_is_refused_by_settings_config_and_assignment(settings, message):
    for cls in (PPOSettings, PPOConfig):  # the second changes defaults and keeps ranges
        with pytest.raises(ValueError, match=message):
            cls(**settings)
    alg, (name, value) = PPO(ActorCritic(1, 1)), *settings.items()
    before = getattr(alg, name)
    with pytest.raises(ValueError, match=message):
        setattr(alg, name, value)
    assert getattr(alg, name) == before


def test_an_algorithm_changes_only_its_own_copy_of_the_config():
    cfg = PPOConfig(gamma=0.9)
    alg = PPO(ActorCritic(1, 1), cfg=cfg)
    alg.gamma = 0.5
    assert (alg.gamma, alg.cfg.gamma, cfg.gamma) == (0.5, 0.5, 0.9)
    assert float(alg.live.gamma) == 0.5
    with pytest.raises(ValueError, match="give gamma in cfg, not beside it"):
        PPO(ActorCritic(1, 1), cfg=cfg, gamma=0.8)


def test_a_setting_that_something_was_built_from_cannot_change():
    alg = PPO(ActorCritic(1, 1))
    with pytest.raises(AttributeError, match="PPO was built with optimizer_class_name='Adam'; make a new PPO"):
        alg.optimizer_class_name = "SGD"


def test_assigning_to_a_near_miss_of_a_setting_of_an_algorithm_is_an_error_with_the_setting(make_ppo):
    alg, _ = make_ppo()
    alg.learnin_rate = 1
    with pytest.raises(AttributeError, match="'learning_rate'"):
        alg.sync_settings()  # which the next rollout does
    alg.learning_rate_before = alg.learning_rate0 = 7  # a user's own
    assert (alg.learning_rate_before, alg.learning_rate0) == (7, 7)


def test_an_algorithm_of_ones_own_may_have_attributes_with_names_like_those_of_settings(make_ppo):
    class Mine(PPO):
        """A user's algorithm."""

    alg, _ = make_ppo()
    mine = Mine(alg.policy, cfg=alg.cfg)
    mine.learning_rates = [1, 2]
    assert mine.learning_rates == [1, 2]


@pytest.mark.parametrize(("agent", "cfg"), [(SAC, DQNConfig()), (TD3, SACConfig()), (SAC, PPOConfig())])
def test_the_config_of_another_algorithm_is_refused(agent, cfg):
    name = agent.__name__
    match = f"{name} does not have settings of {type(cfg).__name__}: .*a config such as {name}Config"
    with pytest.raises(ValueError, match=match):
        agent("canter/Pendulum", cfg)
    with pytest.raises(ValueError, match=match):
        OffPolicyRunner("canter/Pendulum", cfg, algorithm=name)


@pytest.mark.parametrize("cfg", [{"gamma": 0.9}, "Pendulum-v1", SACConfig])
def test_a_cfg_that_is_no_config_object_is_named(cfg):
    with pytest.raises(TypeError, match=r"the cfg of SAC is a config object such as SACConfig\(\), got "):
        SAC("canter/Pendulum", cfg)
