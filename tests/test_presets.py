"""Presets say only what exists, and train."""

from importlib import resources

import gymnasium
import pytest

from canter.algorithms import REGISTRY
from canter.cli.options import preset_plan
from canter.envs import wrap_env
from canter.modules.build import POLICIES
from canter.presets import FALLBACK, has_preset, load_preset, presets
from canter.runners import OffPolicyRunner, OnPolicyRunner
from canter.runners.run_config import parse_train_cfg
from canter.utils.config import setting_names

TASKS = sorted(presets())


def test_every_file_is_the_preset_of_one_task():
    files = [entry for entry in resources.files("canter.presets").iterdir() if entry.name.endswith(".yaml")]
    assert len(files) == len(presets()), "two files are for the same task"
    assert FALLBACK in presets()


@pytest.mark.parametrize("task", TASKS)
def test_a_preset_names_only_settings_that_exist_and_fit(task):
    preset = load_preset(task)
    for name in ("num_envs", "total_timesteps"):
        assert type(preset[name]) is int
        assert preset[name] > 0
    plan = parse_train_cfg(preset)
    assert plan.algorithm == REGISTRY[preset["algorithm"]["class_name"].lower()].agent_class.__name__
    for name, value in preset["algorithm"].items():
        if name != "class_name":
            assert getattr(plan.cfg, name) == value
            assert type(value) is not str or not value[0].isdigit(), f"{name} is text, not a number: {value!r}"
    policy = POLICIES[plan.policy["class_name"]]
    assert set(plan.policy) - {"class_name"} <= setting_names(policy)
    whole = preset["num_envs"] * (1 if policy.is_recurrent else plan.cfg.num_steps_per_env)
    assert plan.cfg.num_mini_batches <= whole
    assert preset_plan(preset).to_dict() == plan.to_dict()


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
    plan = preset_plan(preset)
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
