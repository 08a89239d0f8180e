"""Flags are made from the settings: their names, descriptions, defaults and errors."""

import dataclasses

import pytest

from canter.algorithms.ppo import PPOSettings, RunSettings
from canter.cli.options import (
    argument_sentences,
    given,
    parse,
    parse_train,
    policy_options,
    read_yaml,
    settings_options,
)
from canter.modules.actor_critic_recurrent import ActorCriticRecurrent
from canter.presets import load_preset, preset_name


def help_text(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        parse_train([*args, "--help"])
    assert stop.value.code == 0
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_every_setting_is_a_flag_with_its_description(capsys):
    text = help_text(capsys, "CartPole-v1")
    for field in [*dataclasses.fields(RunSettings), *dataclasses.fields(PPOSettings)]:
        assert f"--{field.name.replace('_', '-')}" in text
    assert "Gradients are scaled down to this global norm." in text


@dataclasses.dataclass(kw_only=True)
class Speed:
    speed: str = "slow"
    """How fast the robot walks."""


@dataclasses.dataclass(kw_only=True)
class Gait:
    gait: str = dataclasses.field(default="trot", metadata={"choices": ("trot", "pace")})
    """Order of the feet."""
    speed: str = "fast"


def test_a_composed_config_has_flags_with_the_descriptions_of_its_parts_and_the_declared_choices(capsys):
    composed = dataclasses.make_dataclass("Composed", [], bases=(Gait, Speed), kw_only=True)
    options = settings_options(composed(gait="pace"))
    assert isinstance(options, composed)
    assert (options.gait, options.speed) == ("pace", "fast")
    parsed = parse(type(options), ["--speed", "medium"], "canter train", options)
    assert (parsed.gait, parsed.speed) == ("pace", "medium")
    with pytest.raises(SystemExit):
        parse(type(options), ["--help"], "canter train", options)
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--gait {trot,pace} Order of the feet. (default: pace)" in text
    assert "--speed STR How fast the robot walks. (default: fast)" in text


def test_every_setting_of_the_policy_is_a_flag_with_its_description(capsys):
    text = help_text(capsys, "CartPole-v1", "--policy.class-name", "ActorCriticRecurrent")
    names = {"actor_hidden_dims", "critic_hidden_dims", "activation", "init_noise_std", "noise_std_type"}
    names |= {"mu_activation", "orthogonal_init", "squash_actions", "rnn_type", "rnn_hidden_size", "rnn_num_layers"}
    for name in names:
        assert f"--policy.{name.replace('_', '-')}" in text
    assert "Width of the memories." in text
    assert "--policy.num-actions" not in text


def test_the_defaults_are_those_of_the_preset():
    preset = load_preset("Pendulum-v1")
    options, config = parse_train(["Pendulum-v1"])
    assert options.num_envs == preset["num_envs"]
    assert options.total_timesteps == preset["total_timesteps"]
    assert config["num_steps_per_env"] == preset["num_steps_per_env"]
    given_in_preset = {k: v for k, v in preset["algorithm"].items() if k != "class_name"}
    assert {name: config["algorithm"][name] for name in given_in_preset} == given_in_preset
    assert config["policy"]["actor_hidden_dims"] == list(preset["policy"]["actor_hidden_dims"])


def test_flags_win_over_the_preset_at_every_level():
    flags = [
        "--learning-rate",
        "0.5",
        "--num-envs",
        "3",
        "--policy.actor-hidden-dims",
        "7",
        "9",
        "--no-empirical-normalization",
    ]
    options, config = parse_train(["Pendulum-v1", *flags, "--rnd-cfg", "{weight: 1e-3}"])
    assert options.num_envs == 3
    assert config["algorithm"]["learning_rate"] == 0.5
    assert config["algorithm"]["empirical_normalization"] is False
    assert config["algorithm"]["rnd_cfg"] == {"weight": 0.001}
    assert config["policy"]["actor_hidden_dims"] == [7, 9]


def test_another_policy_class_keeps_the_settings_of_the_preset_that_it_has(capsys):
    _, config = parse_train(["CartPole-v1", "--policy.class-name=ActorCriticRecurrent", "--policy.rnn-type", "gru"])
    assert config["policy"]["class_name"] == "ActorCriticRecurrent"
    assert config["policy"]["rnn_type"] == "gru"
    assert config["policy"]["activation"] == load_preset("CartPole-v1")["policy"]["activation"]


def test_minibatches_of_a_recurrent_policy_are_at_most_one_per_environment():
    recurrent = ["LunarLander-v3", "--policy.class-name", "ActorCriticRecurrent"]
    _, config = parse_train([*recurrent, "--num-envs", "3"])
    assert config["algorithm"]["num_mini_batches"] <= 3
    with pytest.raises(ValueError, match="num_mini_batches=7 does not fit 3 environments"):
        parse_train([*recurrent, "--num-envs", "3", "--num-mini-batches", "7"])


def test_more_minibatches_than_steps_are_refused():
    with pytest.raises(ValueError, match="num_mini_batches=9 does not fit a rollout of 8 steps"):
        parse_train(["CartPole-v1", "--num-envs", "2", "--num-steps-per-env", "4", "--num-mini-batches", "9"])


@pytest.mark.parametrize(
    ("task", "preset"),
    [
        ("CartPole-v1", "CartPole-v1"),
        ("canter/CartPole", "CartPole-v1"),
        ("canter/Pendulum", "Pendulum-v1"),
        ("envpool/HalfCheetah-v5", "HalfCheetah-v5"),
        ("other/HalfCheetah-v5", "default"),
        ("canter/PointRobot", "default"),
        ("Taxi-v3", "default"),
    ],
)
def test_a_task_is_trained_with_the_nearest_preset(task, preset):
    assert preset_name(task) == preset


def test_an_unknown_flag_suggests_the_nearest_and_ends_with_2(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_train(["CartPole-v1", "--learnin-rate", "3"])
    assert stop.value.code == 2
    assert "--learning-rate" in capsys.readouterr().err


def test_an_unknown_policy_class_is_an_error_that_lists_them():
    with pytest.raises(ValueError, match="ActorCriticRecurrent"):
        policy_options("ActorCritc", {})


def test_the_seed_is_1_unless_given():
    assert parse_train(["CartPole-v1"])[1]["seed"] == 1
    assert parse_train(["CartPole-v1", "--seed", "None"])[1]["seed"] is None


def test_numbers_with_an_exponent_are_numbers_in_yaml_flags():
    assert read_yaml("{critic: {lr: 1e-3, name: 1e, n: [2E+4]}}") == {
        "critic": {"lr": 0.001, "name": "1e", "n": [20000.0]}
    }
    with pytest.raises(ValueError, match="is not YAML"):
        read_yaml("{a: [}")


def test_a_flag_is_found_with_dashes_underscores_and_equals_signs():
    assert given(["--a-b", "1"], "--a-b") == "1"
    assert given(["--a_b=x_y"], "--a-b") == "x_y"
    assert given(["--a-b"], "--a-b") is None
    assert given([], "--a-b") is None


def test_descriptions_that_span_lines_are_whole():
    assert argument_sentences(ActorCriticRecurrent)["rnn_type"] == '"lstm" or "gru".'
    made = type(
        "Made", (), {"__doc__": "One.\n\n    Args:\n        a: First\n            and second.\n        b: Third.\n"}
    )
    assert argument_sentences(made) == {"a": "First and second.", "b": "Third."}


def test_a_preset_file_gives_the_settings_and_the_algorithm_and_flags_override_it(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("task: X\nnum_envs: 3\nalgorithm: {class_name: SAC, gamma: 0.5, batch_size: 32}\n")
    options, config = parse_train(["Pendulum-v1", "--preset", str(file), "--batch-size", "64"])
    assert (options.task, options.num_envs, options.algorithm) == ("Pendulum-v1", 3, "sac")
    assert (config["algorithm"]["gamma"], config["algorithm"]["batch_size"]) == (0.5, 64)


def test_a_preset_file_that_is_none_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no\.yaml"):
        parse_train(["Pendulum-v1", "--preset", str(tmp_path / "no.yaml")])
    (tmp_path / "list.yaml").write_text("[1]")
    with pytest.raises(ValueError, match="does not name its task"):
        parse_train(["Pendulum-v1", "--preset", str(tmp_path / "list.yaml")])
