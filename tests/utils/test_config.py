"""Strict settings: what nobody declared is an error that suggests the nearest."""

import dataclasses

import pytest
from torch import nn

from canter.algorithms import PPOConfig
from canter.utils.config import (
    build,
    setting,
    settings,
    unknown_name,
    unused_settings,
)


@settings
class Walk:
    """Settings to test with."""

    speed: float = 1.0
    step_height: float = 0.1
    num_steps_per_env: int = 24


@settings
class Run(Walk):
    """More of them."""

    speed: float = 3.0
    _secret: int = dataclasses.field(default=1, init=False)


def test_an_unknown_setting_names_its_owner_and_the_nearest():
    with pytest.raises(TypeError, match=r"'speed'"):
        Run(spede=1.0)
    with pytest.raises(TypeError, match="Walk has no setting 'colour'; it has num_steps_per_env, speed, step_height"):
        Walk(colour="red")


@pytest.mark.parametrize(("typo", "name"), [("step_heigth", "step_height"), ("num_step_per_env", "num_steps_per_env")])
def test_assigning_to_a_near_miss_of_a_setting_is_an_error_with_the_setting(typo, name):
    for cfg in (Walk(), Run()):
        with pytest.raises(AttributeError, match=rf"'{name}'"):
            setattr(cfg, typo, 1)
        assert not hasattr(cfg, typo)


def test_attributes_that_are_no_typos_of_a_setting_may_be_assigned():
    class Sprint(Walk):
        step_heights = None

    cfg = Sprint()
    for name in ("colour", "_step_heigth", "step_height_2", "step_height0", "step_heights"):
        setattr(cfg, name, 7)
        assert getattr(cfg, name) == 7


def test_the_spelling_of_another_library_is_understood():  # table 0.1
    with pytest.raises(TypeError, match="'num_steps_per_env'"):
        Walk(num_steps=8)
    # where the other library's word has no counterpart among the owner's settings, the nearest or all are named
    assert "'clip_param'" in unknown_name("setting", "clip_range", ["clip_param", "gamma"])
    assert unknown_name("setting", "clip_range", ["lam", "gamma"], "DQN").endswith("it has gamma, lam")
    assert "'policy.activation'" in unknown_name("setting", "activation", ["policy.activation", "gamma"])
    assert "'Num-Envs'" in unknown_name("flag", "num_env", ["Num-Envs"])  # neither case nor dashes matter
    assert unknown_name("flag", "qqq", ["gamma"], otherwise="see --help").endswith("; see --help")


def test_a_changed_setting_that_others_leave_without_effect_is_named_with_them():
    @settings
    class Jump:
        """Settings of which one depends on two others, of which one may be missing."""

        runs: bool = False
        hops: int | None = None
        length: float = setting(1.0, unused_if={name: lambda value: not value for name in ("runs", "hops", "flies")})

    @settings
    class Leap(Jump):
        """The same with another default."""

        length: float = 2.0

    assert unused_settings(Jump(length=3.0)) == {"length": "runs=False and hops=None"}
    assert unused_settings(Jump(length=3.0, hops=1)) == unused_settings(Jump()) == {}
    assert unused_settings(Leap(length=3.0)) == {"length": "runs=False and hops=None"}
    assert unused_settings(Leap()) == unused_settings(Leap(length=1.0)) == {}  # the defaults of both


class Base(nn.Module):
    def __init__(self, width, *, depth=2, **kwargs):
        super().__init__()
        self.width, self.depth = width, depth


class Wide(Base):
    def __init__(self, *args, gain=1.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.gain = gain


def test_building_by_name_is_strict():
    registry = {"Base": Base, "Wide": Wide}
    made = build(registry, "Wide", {"width": 3, "gain": 2.0, "other": None})
    assert (type(made), made.width, made.gain, made.depth) == (Wide, 3, 2.0, 2)
    with pytest.raises(TypeError, match="'gain'"):
        build(registry, "Wide", {"width": 3, "gian": 2.0})
    with pytest.raises(KeyError, match="'Wide'"):
        build(registry, "Wode", {})
    with pytest.raises(KeyError, match="Base, Wide"):
        build(registry, "Transformer", {})


@pytest.mark.parametrize(
    ("given", "kept"), [({"learning_rate": "1e-4"}, 1e-4), ({"learning_rate": 1}, 1), ({"learning_rate": 0.5}, 0.5)]
)
def test_a_number_may_come_as_text_which_is_how_yaml_reads_1e_minus_4(given, kept):
    assert PPOConfig(**given).learning_rate == kept


def test_a_whole_number_may_come_as_a_float():
    assert PPOConfig(num_mini_batches="8").num_mini_batches == 8
    assert isinstance(PPOConfig(max_iterations=1e3).max_iterations, int)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("learning_rate", "fast", "float"),
        ("learning_rate", True, "float"),
        ("num_mini_batches", 2.5, "int"),
        ("empirical_normalization", 1, "bool"),
        ("schedule", 3, "str"),
        ("gamma", None, "float"),
        ("num_steps_per_env", [24], "int"),
        ("extra_log_keys", "is_success", r"tuple\[str, ...\]"),
        ("extra_log_keys", ["x", 3], r"tuple\[str, ...\]"),
    ],
)
def test_a_setting_of_the_wrong_kind_is_an_error_that_names_it(name, value, kind):
    with pytest.raises(TypeError, match=rf"PPOConfig: {name} must be {kind}, got "):
        PPOConfig(**{name: value})
