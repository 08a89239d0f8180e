"""Flags are made from the settings: their names, descriptions, defaults and errors."""

import dataclasses
import json
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from canter.algorithms.ppo import PPOSettings, RunSettings
from canter.cli.errors import UserError
from canter.cli.flags import parse
from canter.cli.options import (
    EnvOptions,
    TrainOptions,
    argument_sentences,
    joined_settings,
    parse_train,
    policy_options,
    settings_options,
)
from canter.cli.train import run_config
from canter.modules.actor_critic_recurrent import ActorCriticRecurrent
from canter.presets import load_preset, preset_name
from canter.utils.config import SHORT_FORMS


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
    unchanged = joined_settings(options, composed)
    assert isinstance(unchanged, composed)
    assert (unchanged.gait, unchanged.speed) == ("pace", "fast")
    parsed = joined_settings(parse(type(options), ["--speed", "medium"], "canter train", options), composed)
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


def models_file(tmp_path, class_name, distribution):
    """A file with the sections actor and critic of rsl_rl 5.x."""
    model = {"class_name": class_name, "hidden_dims": [8], "activation": "elu"}
    sections = {"actor": {**model, "distribution_cfg": distribution}, "critic": model}
    path = tmp_path / "models.json"
    path.write_text(json.dumps(sections))
    return str(path)


def test_settings_of_a_policy_that_have_no_flag_stay_as_they_are(tmp_path):
    beta = {"class_name": "BetaDistribution", "action_range": [-0.5, 2.0]}
    _, config = parse_train(["Pendulum-v1", "--config", models_file(tmp_path, "MLPModel", beta), "--gamma", "0.9"])
    assert config["policy"]["action_range"] == [-0.5, 2.0]
    gaussian = {"class_name": "GaussianDistribution", "init_std": 0.5}
    args = ["Pendulum-v1", "--config", models_file(tmp_path, "CNNModel", gaussian)]
    _, config = parse_train(args)
    assert config["policy"]["class_name"] == "RslRlModels"
    assert config["policy"]["actor_model"] == {"class_name": "CNNModel", "hidden_dims": [8], "activation": "elu"}


def test_flags_of_networks_that_rsl_rls_models_replace_are_no_flags(tmp_path):
    args = ["Pendulum-v1", "--config", models_file(tmp_path, "CNNModel", {"class_name": "GaussianDistribution"})]
    with pytest.raises(UserError, match="'--policy.actor-hidden-dims'"):
        parse_train([*args, "--policy.actor-hidden-dims", "64"])


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


def test_rollouts_of_a_few_environments_grow_until_minibatches_have_32_steps():
    with pytest.warns(UserWarning, match="rollouts of 3 instead of 64 environments have 342 steps each"):
        _, config = parse_train(["Hopper-v5", "--num-envs", "3"])
    assert config["num_steps_per_env"] == 342  # 32 minibatches of 32 steps / 3, rounded up
    with pytest.warns(UserWarning, match="rollouts of 1 instead of 16 environments have 1024 steps"):
        parse_train(["Swimmer-v5", "--num-envs=1"])


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        (["--num-envs", "3", "--num-steps-per-env", "40"], 40),
        (["--num-envs", "3", "--num-mini-batches", "2"], 32),
        (["--num-envs", "32"], 32),  # minibatches of 32 steps are large enough
        (["--num-envs", "256"], 32),
        (["--num-envs", "16", "--ranks", "4"], 32),  # together as many as the preset's
    ],
)
@pytest.mark.filterwarnings("error")
def test_rollouts_stay_as_they_are_where_minibatches_are_large_or_flags_are_given(flags, steps):
    assert parse_train(["Hopper-v5", *flags])[1]["num_steps_per_env"] == steps


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


def test_an_unknown_flag_suggests_the_nearest():
    with pytest.raises(UserError, match="--learning-rate"):
        parse_train(["CartPole-v1", "--learnin-rate", "3"])


def test_flags_are_grouped_in_the_help(capsys):
    with pytest.raises(SystemExit):
        parse_train(["CartPole-v1", "--algo", "atppo", "--help"])
    groups, where = {}, None
    for line in capsys.readouterr().out.splitlines():
        if heading := re.fullmatch(r"\W*((?:[\w-]+ )?options)\W*", line):
            where = heading[1]
        if flag := re.match(r"\W{1,2} ?(--[a-z][\w.-]+)", line):
            groups.setdefault(where, []).append(flag[1])
    assert {"--seed", "--log-interval", "--eval-interval"} <= set(groups["run options"])
    assert {"--gamma", "--clip-param", "--rnd-cfg", "--symmetry-cfg"} <= set(groups["algorithm options"])
    assert "--teacher-ac-path" in groups["teacher options"]
    assert "--discriminator-optimizer" in groups["motion-prior options"]
    assert "--policy.activation" in groups["policy options"]
    assert groups["environment options"] == ["--env-kwargs", "--wrappers", "--components"]
    assert "--num-envs" in groups["options"]


def test_choices_are_listed_in_the_help(capsys):
    text = help_text(capsys, "CartPole-v1", "--policy.class-name", "ActorCriticRecurrent")
    assert "--callback-errors {raise,warn}" in text
    assert "--logger-backend {jsonl,tensorboard,wandb,swanlab,trackio,mlflow}" in text
    assert "--profile" in text
    assert "--policy.rnn-type {lstm,gru}" in text
    assert "--policy.activation {elu,selu,relu," in text


@pytest.mark.parametrize(
    ("algorithm", "flag", "suggestion"),
    [
        ("ppo", "--lr", "--learning-rate"),
        ("ppo", "--lr=3e-4", "--learning-rate"),
        ("sac", "--lr", "--actor-learning-rate"),
        ("ppo", "--n-envs", "--num-envs"),
        ("ppo", "--n_epochs", "--num-learning-epochs"),
        ("ppo", "--ent-coef", "--entropy-coef"),
        ("ppo", "--gae-lambda", "--lam"),
        ("ppo", "--hidden", "--policy.actor-hidden-dims"),
        ("td3", "--hidden", "--actor-hidden-dims"),
        ("ppo", "--hidden-sizes", "--policy.actor-hidden-dims"),
        ("ppo", "--nsteps", "--num-steps-per-env"),
        ("sac", "--num-env", "--num-envs"),
        ("ppo", "--actor-hidden-dims", "--policy.actor-hidden-dims"),
        ("ppo", "--policy.net-arch", "--policy.actor-hidden-dims"),
        ("ppo", "--env", "canter train TASK"),
    ],
)
def test_short_forms_and_names_of_other_libraries_are_answered_with_the_flag(algorithm, flag, suggestion):
    with pytest.raises(UserError, match=re.escape(suggestion)):
        parse_train(["Pendulum-v1", "--algo", algorithm, flag, "3"])


def test_every_suggestion_for_a_short_form_is_a_flag_of_some_algorithm():
    known = {f.name for cls in (TrainOptions, EnvOptions) for f in dataclasses.fields(cls)}
    for algorithm in ("ppo", "dqn", "sac"):
        _, config = parse_train(["CartPole-v1", "--algo", algorithm])
        known |= config.keys() | config["algorithm"].keys() | {f"policy.{name}" for name in config["policy"]}
    assert {name for names in SHORT_FORMS.values() for name in names} <= known


def test_settings_of_a_file_are_between_preset_and_flags(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("{algorithm: {gamma: 0.5, lam: 5e-1}, num_envs: 3, save_interval: 7}")
    options, config = parse_train(["CartPole-v1", "--config", str(file), "--lam", "0.25"])
    preset = load_preset("CartPole-v1")
    assert (options.num_envs, options.total_timesteps) == (3, preset["total_timesteps"])
    assert (config["algorithm"]["gamma"], config["algorithm"]["lam"], config["save_interval"]) == (0.5, 0.25, 7)
    assert config["algorithm"]["num_learning_epochs"] == preset["algorithm"]["num_learning_epochs"]


def test_the_config_of_a_run_gives_task_algorithm_policy_and_environment(tmp_path):
    given = ["Pendulum-v1", "--algo", "sac", "--num-envs", "2", "--env-kwargs", "{g: 5.0}", "--tau", "0.25"]
    options, config = parse_train(given)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(run_config(options, config)))
    again, same = parse_train(["--config", str(tmp_path / "config.yaml")])
    assert (again.task, again.algorithm, again.num_envs) == ("Pendulum-v1", "sac", 2)
    assert again.environment.env_kwargs == {"g": 5.0}
    assert run_config(again, same) == run_config(options, config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "no mapping of settings"),
        ("{a: [}", "is not YAML"),
        ("{algorithm: {gama: 1}}", "'gamma'"),
        ("{nonsense: 1}", "nonsense"),
    ],
)
def test_a_bad_config_file_is_an_error_that_names_the_problem(tmp_path, text, message):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises((ValueError, TypeError), match=message):
        parse_train(["CartPole-v1", "--config", str(tmp_path / "a.yaml")])
    with pytest.raises(FileNotFoundError, match="no such file"):
        parse_train(["CartPole-v1", "--config", str(tmp_path / "b.yaml")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("algorithm: [1, 2]", "algorithm must be a mapping such as algorithm: {class_name: sac}, got [1, 2]"),
        ("algorithm: sac", "algorithm must be a mapping such as algorithm: {class_name: sac}, got 'sac'"),
        ("algorithm: {class_name: 3}", "algorithm.class_name must be a name such as sac, got 3"),
        ("run: 3", "run must be a mapping such as run: {num_envs: 8}, got 3"),
        ("task: 3", "task must be a name such as CartPole-v1, got 3"),
        ("1: 3", "the name of a setting must be text, got 1"),
        ("num_envs: four", "num_envs must be a whole number of at least 1, got 'four'; write num_envs: 8"),
        ("num_envs: 4.5", "num_envs must be a whole number of at least 1, got 4.5"),
        ("num_envs: null", "num_envs must be a whole number of at least 1, got None"),
        ("run: {total_timesteps: x}", "total_timesteps must be a whole number of at least 1, got 'x'"),
        ("a: [1", "at line 1, column 4"),
    ],
)
def test_a_value_of_the_wrong_kind_in_a_config_file_is_an_error_with_file_key_and_value(tmp_path, text, message):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        parse_train(["CartPole-v1", "--config", str(tmp_path / "a.yaml")])
    assert str(tmp_path / "a.yaml") in str(error.value)


def test_a_config_file_may_have_empty_sections_and_lengths_with_an_exponent(tmp_path):
    (tmp_path / "a.yaml").write_text("{algorithm: null, run: null, policy: null, total_timesteps: 1e5}")
    options, _ = parse_train(["CartPole-v1", "--config", str(tmp_path / "a.yaml")])
    assert (options.algorithm, options.total_timesteps, type(options.total_timesteps)) == ("ppo", 100_000, int)


def test_evaluation_can_be_switched_off_and_is_a_tenth_of_the_run_by_default():
    intervals = [
        run_config(*parse_train(["CartPole-v1", *flags]))["eval_interval"] for flags in ([], ["--eval-interval", "0"])
    ]
    assert intervals == [39, None]  # 391 iterations of 256 steps


def test_an_unknown_policy_class_is_an_error_with_the_nearest():
    with pytest.raises(ValueError, match="'ActorCritic'"):
        policy_options("ActorCritc", {})


@pytest.mark.parametrize("flags", [["--restart-workers"], ["--worker-timeout", "5"]])
def test_flags_of_workers_without_workers_are_said_to_have_no_effect(flags):
    with pytest.warns(UserWarning, match=f"^{flags[0]} has no effect without workers; add --workers N$"):
        parse_train(["CartPole-v1", *flags])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parse_train(["CartPole-v1", "--workers", "2", *flags])


def test_the_seed_is_1_unless_given():
    assert parse_train(["CartPole-v1"])[1]["seed"] == 1
    assert parse_train(["CartPole-v1", "--seed", "None"])[1]["seed"] is None


def test_descriptions_that_span_lines_are_whole():
    assert argument_sentences(ActorCriticRecurrent)["rnn_type"] == '"lstm" or "gru".'
    made = type(
        "Made", (), {"__doc__": "One.\n\n    Args:\n        a: First\n            and second.\n        b: Third.\n"}
    )
    assert argument_sentences(made) == {"a": "First and second.", "b": "Third."}


def test_a_preset_file_gives_the_settings_and_the_algorithm_and_flags_override_it(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("task: X\nnum_envs: 3\nalgorithm: {class_name: SAC, gamma: 0.5, batch_size: 32}\n")
    options, config = parse_train(["Pendulum-v1", "--config", str(file), "--batch-size", "64"])
    assert (options.task, options.num_envs, options.algorithm) == ("Pendulum-v1", 3, "sac")
    assert (config["algorithm"]["gamma"], config["algorithm"]["batch_size"]) == (0.5, 64)


def test_a_preset_file_that_is_none_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no\.yaml"):
        parse_train(["Pendulum-v1", "--config", str(tmp_path / "no.yaml")])
    (tmp_path / "list.yaml").write_text("[1]")
    with pytest.raises(ValueError, match="is no mapping of settings"):
        parse_train(["Pendulum-v1", "--config", str(tmp_path / "list.yaml")])


def test_a_setting_of_the_preset_is_dropped_where_a_flag_leaves_it_without_effect(tmp_path):
    assert load_preset("Other-v0")["algorithm"]["clip_obs"] == 10.0
    assert parse_train(["Other-v0"])[1]["algorithm"]["clip_obs"] == 10.0
    assert parse_train(["Other-v0", "--no-empirical-normalization"])[1]["algorithm"]["clip_obs"] is None
    off = ["Other-v0", "--no-empirical-normalization"]
    assert parse_train([*off, "--clip-obs", "5"])[1]["algorithm"]["clip_obs"] == 5.0  # training warns of it
    (tmp_path / "mine.yaml").write_text("algorithm: {clip_obs: 7.0}")
    assert parse_train([*off, "--config", str(tmp_path / "mine.yaml")])[1]["algorithm"]["clip_obs"] == 7.0


MJLAB = Path(__file__).parents[1] / "runners" / "rsl_rl" / "mjlab_configs.json"
GO1 = "Mjlab-Velocity-Flat-Unitree-Go1"


@pytest.fixture
def mjlab_settings(monkeypatch):
    """mjlab's registry with the settings of its tasks, from a file."""
    settings = json.loads(MJLAB.read_text())
    kinds = {name: dataclasses.make_dataclass("Cfg", list(values)) for name, values in settings.items()}
    tasks = SimpleNamespace(list_tasks=lambda: list(settings), load_rl_cfg=lambda name: kinds[name](**settings[name]))
    monkeypatch.setitem(sys.modules, "mjlab", SimpleNamespace(tasks=tasks))
    monkeypatch.setitem(sys.modules, "mjlab.tasks", SimpleNamespace(registry=tasks))
    monkeypatch.setitem(sys.modules, "mjlab.tasks.registry", tasks)


def another(value, kind):
    """A value that differs from the default of a flag, as text, and as it is in the config; None if there is none."""
    if isinstance(value, bool):
        return not value
    if "bool" in kind:
        return True
    if isinstance(value, int) and not isinstance(value, bool):
        return value + 1
    if isinstance(value, float):
        return value / 2 if value else 0.25
    if value is None and "int" in kind:
        return 2
    return 0.25 if value is None and "float" in kind else None


CHOSEN = {"schedule": "linear", "optimizer_class_name": "AdamW", "policy.activation": "tanh", "device": "cpu"}
CHOSEN |= {"policy.actor_activation": "relu", "policy.critic_activation": "relu", "policy.noise_std_type": "log"}
CHOSEN |= {"num_mini_batches": 3, "min_lr": 1e-6, "clip_max_std": 2.0, "policy.action_distribution": "beta"}


def another_flag(name, owner):
    """The flag of a setting with another value than the preset's, and that value; None for one without."""
    path, _, field = name.rpartition(".")
    declared = next(f for f in dataclasses.fields(owner) if f.name == field)
    kind = str(getattr(declared.type, "__origin__", declared.type))  # without what is said to the parser
    wanted = CHOSEN.get(name, another(getattr(owner, field), kind))
    if wanted is None:
        return None
    words = name.replace("_", "-")
    flag = [f"--{words}", str(wanted)]
    if isinstance(wanted, bool) and "None" not in kind:
        flag = [f"--{words}" if wanted else f"--{path + '.' if path else ''}no-{field.replace('_', '-')}"]
    return flag, wanted


@pytest.mark.usefixtures("mjlab_settings")
@pytest.mark.filterwarnings("ignore")
def test_every_flag_beats_the_settings_that_mjlab_registers():
    options, _ = parse_train([f"mjlab/{GO1}"])
    names = [f.name for f in dataclasses.fields(options.settings)]
    names += [f"policy.{f.name}" for f in dataclasses.fields(options.policy) if f.name != "class_name"]
    walked = []
    for name in names:
        owner = options.policy if name.startswith("policy.") else options.settings
        found = another_flag(name, owner)
        if found is None:
            continue
        flag, wanted = found
        try:
            _, config = parse_train([f"mjlab/{GO1}", *flag])
        except (ValueError, TypeError):  # a number out of a setting's range
            continue
        section = config["policy"] if name.startswith("policy.") else {**config["algorithm"], **config}
        assert section[name.removeprefix("policy.")] == wanted, name
        walked.append(name)
    registered = {"learning_rate", "gamma", "lam", "entropy_coef", "desired_kl", "max_grad_norm", "value_loss_coef"}
    registered |= {"clip_param", "num_mini_batches", "num_learning_epochs", "schedule", "max_iterations", "seed"}
    registered |= {"num_steps_per_env", "save_interval", "empirical_normalization", "critic_obs_normalization"}
    registered |= {"upload_model", "policy.activation", "policy.init_noise_std", "policy.noise_std_type"}
    assert registered <= set(walked)
    assert len(walked) > 45


@pytest.mark.usefixtures("mjlab_settings")
@pytest.mark.parametrize(
    ("flags", "iterations"),
    [
        ([], 10_000),
        (["--total-timesteps", "1000"], None),
        (["--total-timesteps=1000", "--num-envs", "8"], None),
        (["--max-iterations", "7"], 7),
        (["--total-timesteps", "40960", "--max-iterations", "7", "--num-envs", "64"], 7),
        (["--total-timesteps", "4096", "--max-iterations", "7", "--num-envs", "64"], 3),  # 64 * 24 steps each
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_total_timesteps_is_the_length_of_a_run_whatever_is_registered(flags, iterations, tmp_path):
    assert parse_train([f"mjlab/{GO1}", *flags])[1]["max_iterations"] == iterations
    file = tmp_path / "c.yaml"
    file.write_text("max_iterations: 20\nnum_envs: 4096\n")
    found = parse_train([f"mjlab/{GO1}", "--config", str(file), *flags])[1]["max_iterations"]
    assert found == (iterations if flags else 20)


@pytest.mark.usefixtures("mjlab_settings")
@pytest.mark.filterwarnings("ignore")
def test_a_file_and_flags_beat_the_networks_and_the_length_that_mjlab_registers(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("total_timesteps: 5000\npolicy: {actor_hidden_dims: [16]}\nalgorithm: {gamma: 0.5}\n")
    options, config = parse_train([f"mjlab/{GO1}", "--config", str(file), "--policy.activation", "tanh"])
    assert (options.total_timesteps, config["max_iterations"]) == (5000, None)
    assert config["policy"]["actor_hidden_dims"] == [16]
    assert config["policy"]["critic_hidden_dims"] == [512, 256, 128]  # as registered
    assert (config["algorithm"]["gamma"], config["algorithm"]["lam"]) == (0.5, 0.95)
    used = [config["policy"][name] or config["policy"]["activation"] for name in PARTS]
    assert used == ["tanh", "tanh"]
    _, config = parse_train([f"mjlab/{GO1}", "--policy.activation", "tanh", "--policy.critic-activation", "relu"])
    assert [config["policy"][name] or config["policy"]["activation"] for name in PARTS] == ["tanh", "relu"]
    _, config = parse_train([f"mjlab/{GO1}", "--no-empirical-normalization"])
    assert config["algorithm"]["critic_obs_normalization"] is None  # as the actor's
    assert config["obs_groups"] == {"actor": ["actor"], "critic": ["critic"]}


PARTS = ("actor_activation", "critic_activation")
