"""Presets name only existing settings, belong to an algorithm, and train."""

from dataclasses import fields
from importlib import resources

import gymnasium
import pytest

from canter.algorithms import PPO, REGISTRY, Entry, PPOConfig
from canter.cli.options import parse_train
from canter.envs import wrap_env
from canter.modules.build import POLICIES
from canter.presets import FALLBACK, has_preset, load_preset, preset_name, presets, read_presets
from canter.runners import OffPolicyRunner, OnPolicyRunner
from canter.runners.run_config import parse_train_cfg
from canter.utils.config import setting_names, settings, unused_settings

TASKS = sorted(task for task in presets() if not task.startswith("mjlab/"))


class FewEpochs(PPO):
    """PPO under another name."""


@settings
class FewEpochsConfig(PPOConfig):
    """Its settings."""

    num_learning_epochs: int = 3


@pytest.fixture
def register(monkeypatch):
    """Register `FewEpochs` under a name, for one test."""

    def entry(name="fewepochs", presets=None):
        monkeypatch.setitem(REGISTRY, name, Entry(FewEpochs, FewEpochsConfig, presets))

    return entry


@pytest.mark.parametrize("algorithm", ["ppo", "dqn", "sac", "td3"])
def test_every_file_is_the_preset_of_one_task(algorithm):
    files = list((resources.files("canter.presets") / algorithm).iterdir())
    assert files
    assert len(files) == len(presets(algorithm)), "two files are for the same task"
    assert FALLBACK in presets(algorithm)


def test_no_preset_lies_outside_the_folder_of_an_algorithm():
    names = [entry.name for entry in resources.files("canter.presets").iterdir() if entry.name.endswith(".yaml")]
    assert names == ["profiles.yaml"]


@pytest.mark.parametrize("algorithm", sorted(REGISTRY))
def test_a_preset_is_for_the_algorithm_it_is_loaded_for(algorithm):
    for task in ("CartPole-v1", "Nothing-v0"):
        assert parse_train_cfg(load_preset(task, algorithm)).algorithm == REGISTRY[algorithm].agent_class.__name__


def test_an_algorithm_without_presets_gets_the_defaults_of_its_config(register):
    register()
    preset = load_preset("CartPole-v1", "fewepochs")
    assert preset["task"] == "CartPole-v1"
    assert preset["algorithm"]["class_name"] == "FewEpochs"
    plan = parse_train_cfg(preset)
    default = FewEpochsConfig()
    assert plan.cfg.num_learning_epochs == 3
    assert {f.name: getattr(plan.cfg, f.name) for f in fields(default)} == {
        f.name: getattr(default, f.name) for f in fields(default)
    }
    assert type(preset["num_envs"]) is type(preset["total_timesteps"]) is int
    assert not has_preset("CartPole-v1", "fewepochs")


def test_a_preset_folder_may_be_a_path(register, tmp_path):
    (tmp_path / "own.yaml").write_text("task: CartPole-v1\nnum_envs: 5\nalgorithm: {num_learning_epochs: 7}\n")
    register(presets=str(tmp_path))
    preset = load_preset("CartPole-v1", "fewepochs")
    assert preset["num_envs"] == 5
    assert parse_train_cfg(preset).cfg.num_learning_epochs == 7
    assert load_preset("canter/CartPole", "fewepochs")["num_envs"] == 5
    other = load_preset("Acrobot-v1", "fewepochs")  # neither a preset for the task nor a general one
    assert parse_train_cfg(other).cfg.num_learning_epochs == 3
    assert preset_name("Acrobot-v1", "fewepochs") == FALLBACK


def test_an_algorithm_may_be_registered_under_a_name_that_is_not_its_class(register):
    register("quick")
    assert load_preset("CartPole-v1", "quick")["algorithm"]["class_name"] == "quick"
    assert type(parse_train_cfg(load_preset("CartPole-v1", "quick")).cfg) is FewEpochsConfig


@pytest.mark.parametrize(
    ("content", "message"),
    [("algorithm: {}", "does not name its task"), ("{a: [", "cannot be read"), (None, "does not exist")],
)
def test_a_preset_that_cannot_be_used_is_named(register, tmp_path, content, message):
    folder = tmp_path / "presets"
    if content is not None:
        folder.mkdir()
        (folder / "bad.yaml").write_text(content)
    register(presets=str(folder))
    with pytest.raises(ValueError, match=message):
        load_preset("CartPole-v1", "fewepochs")


@pytest.fixture
def fast(register, tmp_path):
    """Presets of a task with two profiles: of the same algorithm, and of another one."""
    profiles = "{fast: {num_envs: 64, algorithm: {gamma: 0.9}}, replay: {algorithm: {class_name: SAC, tau: 0.1}}}"
    preset = "task: Pendulum-v1\nnum_envs: 5\nalgorithm: {gamma: 0.95, lam: 0.9}\n"
    (tmp_path / "own.yaml").write_text(f"{preset}profiles: {profiles}\n")
    register(presets=str(tmp_path))


def test_a_profile_of_a_preset_replaces_some_of_its_settings(fast):
    preset = load_preset("Pendulum-v1", "fewepochs", "fast")
    assert (preset["num_envs"], preset["algorithm"]) == (64, {"class_name": "FewEpochs", "gamma": 0.9, "lam": 0.9})
    plain = load_preset("Pendulum-v1", "fewepochs")
    assert (plain["num_envs"], plain["algorithm"]["gamma"], "profiles" in plain) == (5, 0.95, False)


def test_a_profile_may_use_another_algorithm_with_its_own_preset(fast):
    preset = load_preset("Pendulum-v1", "fewepochs", "replay")
    own = load_preset("Pendulum-v1", "sac")
    assert preset == {**own, "algorithm": {**own["algorithm"], "tau": 0.1}}
    _, config = parse_train(["Pendulum-v1", "--algo", "fewepochs", "--profile", "replay", "--gamma", "0.8"])
    assert config["algorithm"]["class_name"] == "SAC"
    assert (config["algorithm"]["tau"], config["algorithm"]["gamma"]) == (0.1, 0.8)


def test_an_unknown_profile_is_an_error_that_lists_those_of_the_task_and_of_the_algorithm(fast):
    with pytest.raises(ValueError, match="Pendulum-v1 .*'quick'.* fast, replay"):
        load_preset("Pendulum-v1", "fewepochs", "quick")
    with pytest.raises(ValueError, match="'quick'.* massive"):
        load_preset("Pendulum-v1", "sac", "quick")


def test_a_preset_may_have_the_profiles_of_another_task(tmp_path):
    (tmp_path / "a.yaml").write_text("task: Second-v0\nprofiles: First-v0\n")
    (tmp_path / "b.yaml").write_text("task: First-v0\nprofiles: {fast: {num_envs: 64}}\n")
    assert read_presets(tmp_path)["Second-v0"]["profiles"] == {"fast": {"num_envs": 64}}
    (tmp_path / "c.yaml").write_text("task: Third-v0\nprofiles: Frist-v0\n")
    read_presets.cache_clear()
    with pytest.raises(ValueError, match="preset of Third-v0 has the profiles of 'Frist-v0', which has none in"):
        read_presets(tmp_path)


def test_the_velocity_tasks_of_mjlab_have_the_same_profile_fast():
    tasks = [name for name in presets() if name.startswith("mjlab/Mjlab-Velocity-")]
    assert len(tasks) == 4
    for task in tasks:
        assert presets()[task]["profiles"] == presets()["mjlab/Mjlab-Velocity-Flat-Unitree-Go1"]["profiles"]
        assert presets()[task]["profiles"]["fast"]["num_envs"] == 16384


def test_a_preset_of_an_mjlab_task_adds_to_the_settings_that_mjlab_registers(monkeypatch):
    registered = {"num_steps_per_env": 24, "max_iterations": 300, "algorithm": {"class_name": "PPO", "gamma": 0.98}}
    monkeypatch.setattr("canter.envs.mjlab.mjlab_training_dict", lambda task: {**registered, "experiment": task})
    preset = load_preset("mjlab/Mjlab-Velocity-Flat-Unitree-Go1")
    assert (preset["num_envs"], preset["max_iterations"], preset["algorithm"]["gamma"]) == (4096, 300, 0.98)
    assert preset["experiment"] == "Mjlab-Velocity-Flat-Unitree-Go1"
    assert preset["total_timesteps"] == presets()[preset["task"]]["total_timesteps"]
    other = load_preset("mjlab/Mjlab-Cartpole-Balance")
    assert (other["num_envs"], other["total_timesteps"], other["algorithm"]["gamma"]) == (4096, 1_000_000, 0.98)


def test_an_unknown_algorithm_is_an_error_that_lists_them():
    with pytest.raises(ValueError, match="'ppo'"):
        load_preset("CartPole-v1", "pppo")


@pytest.mark.parametrize("task", TASKS)
def test_a_preset_names_only_settings_that_exist_and_fit(task):
    preset = load_preset(task)
    for name in ("num_envs", "total_timesteps"):
        assert type(preset[name]) is int
        assert preset[name] > 0
    plan = parse_train_cfg(preset)
    assert unused_settings(plan.cfg) == {}
    assert plan.algorithm == REGISTRY[preset["algorithm"]["class_name"].lower()].agent_class.__name__
    for name, value in preset["algorithm"].items():
        if name != "class_name":
            assert getattr(plan.cfg, name) == value
            assert type(value) is not str or not value[0].isdigit(), f"{name} is text, not a number: {value!r}"
    policy = POLICIES[plan.policy["class_name"]]
    assert set(plan.policy) - {"class_name"} <= setting_names(policy)
    whole = preset["num_envs"] * (1 if policy.is_recurrent else plan.cfg.num_steps_per_env)
    assert plan.cfg.num_mini_batches <= whole


@pytest.mark.parametrize("task", [task for task in TASKS if task != FALLBACK])
def test_a_preset_trains_an_iteration_of_its_task(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where MuJoCo leaves its log
    preset = load_preset(task)
    try:
        env = wrap_env(task, num_envs=2)
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        pytest.skip(str(error))
    preset["num_steps_per_env"] = 4
    preset["algorithm"] |= {"num_mini_batches": 2, "num_learning_epochs": 1}
    runner = OnPolicyRunner(env, preset, show_progress=False)
    before = {name: value.clone() for name, value in runner.policy.state_dict().items() if "normalizer" not in name}
    runner.learn(1)
    assert runner.tot_timesteps == 8
    assert any((value != runner.policy.state_dict()[name]).any() for name, value in before.items())
    runner.close()


def test_a_task_without_a_preset_gets_a_copy_of_the_general_settings():
    preset = load_preset("Nothing-v0")
    assert not has_preset("Nothing-v0")
    assert not has_preset(FALLBACK)
    assert preset["task"] == "Nothing-v0"
    preset["algorithm"]["learning_rate"] = -1
    assert load_preset("Nothing-v0")["algorithm"]["learning_rate"] > 0


OFF_POLICY = [(algorithm, task) for algorithm in ("dqn", "sac", "td3") for task in sorted(presets(algorithm))]


@pytest.mark.parametrize(("algorithm", "task"), OFF_POLICY)
def test_an_off_policy_preset_names_only_settings_that_exist(algorithm, task):
    preset = load_preset(task, algorithm)
    plan = parse_train_cfg(preset)
    assert unused_settings(plan.cfg) == {}
    assert plan.algorithm == REGISTRY[algorithm].agent_class.__name__ == preset["algorithm"]["class_name"]
    assert type(preset["num_envs"]) is type(preset["total_timesteps"]) is int
    for name, value in preset["algorithm"].items():
        if name not in ("class_name", "profile"):
            assert getattr(plan.cfg, name) == (tuple(value) if isinstance(value, list) else value)
            assert type(value) is not str or not value[0].isdigit(), f"{name} is text, not a number: {value!r}"


@pytest.mark.parametrize(("algorithm", "task"), [pair for pair in OFF_POLICY if pair[1] != FALLBACK])
def test_an_off_policy_preset_learns_from_a_few_steps_of_its_task(algorithm, task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where MuJoCo leaves its log
    preset = load_preset(task, algorithm)
    try:
        env = wrap_env(task, "cpu", num_envs=2)
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        pytest.skip(str(error))
    small = {"learning_starts": 4, "batch_size": 4, "buffer_size": 100, "train_freq": 1, "gradient_steps": 1}
    preset["algorithm"] |= {**small, "buffer_steps_per_env": 50}
    runner = OffPolicyRunner(env, preset, device="cpu", show_progress=False)
    runner.learn(12)
    assert runner.alg.num_updates == 5
    runner.close()


def test_a_task_has_the_presets_of_each_algorithm():
    assert load_preset("Pendulum-v1", "sac")["algorithm"]["class_name"] == "SAC"
    assert load_preset("Pendulum-v1")["algorithm"]["class_name"] == "PPO"
    assert has_preset("CartPole-v1", "dqn")
    assert not has_preset("Acrobot-v1", "dqn")
    assert load_preset("Acrobot-v1", "dqn")["algorithm"]["class_name"] == "DQN"


def test_a_preset_may_set_arguments_of_the_environment_and_flags_replace_them():
    task = "envpool/Go1JoystickFlatTerrain-v1"
    options, _ = parse_train([task])
    assert options.environment.env_kwargs == load_preset(task)["run"]["env_kwargs"]
    options, _ = parse_train([task, "--env-kwargs", "{pose_scale: 0.5}"])
    assert options.environment.env_kwargs == {"pose_scale": 0.5}


def test_a_misspelt_task_is_told_the_preset_it_most_likely_means():
    with pytest.warns(UserWarning, match="'CartPole-v1'"):
        load_preset("CartPol-v1")
    load_preset("Nothing-v0")
    load_preset("canter/CartPol")


def test_algorithms_of_other_libraries_are_answered_with_where_they_are():
    with pytest.raises(ValueError, match="'A2C'.*Stable-Baselines3"):
        load_preset("CartPole-v1", "A2C")
