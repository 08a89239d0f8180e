"""Settings: declared once, described, and refused where nobody declared them."""

import ast
import dataclasses
import inspect

import pytest

from canter.algorithms.algorithm import AlgorithmSettings, CommonRunSettings
from canter.algorithms.estimation import EstimatorSettings
from canter.algorithms.motion_prior import MotionPriorSettings
from canter.algorithms.ppo import PPO, PPOConfig, PPOSettings, RunSettings
from canter.algorithms.rnd import RNDConfig, RNDSettings
from canter.algorithms.symmetry import SymmetryConfig, SymmetrySettings
from canter.algorithms.teacher import TeacherSettings
from canter.modules.actor_critic import ActorCritic

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


def test_an_unknown_setting_is_refused():
    with pytest.raises(TypeError, match="PPOConfig has no setting 'num_epochs'; did you mean 'num_learning_epochs'"):
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
