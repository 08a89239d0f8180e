"""Settings: declared once, described, and refused where nobody declared them."""

import ast
import dataclasses
import inspect

import pytest

from canter.algorithms import imitation_settings
from canter.algorithms import settings as module
from canter.algorithms.settings import PPOConfig, PPOSettings, RunSettings

IMITATION = [getattr(imitation_settings, f"{name}Settings") for name in ("TPPO", "MotionPrior", "APPO")]


@pytest.mark.parametrize("cls", [RunSettings, PPOSettings, *IMITATION])
def test_every_setting_has_a_sentence(cls):
    source = ast.parse(inspect.getsource(inspect.getmodule(cls) or module))
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
