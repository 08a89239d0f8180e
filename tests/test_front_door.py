"""`import canter` and what it gives: cheap to import, and one call from a task to a policy."""

import inspect
import json
import pydoc
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest

import canter
from canter.presets import load_preset
from canter.runners import Runner

SCRIPT = Path(__file__).parent / "typed" / "user_script.py"


def test_the_import_loads_no_torch_and_every_name_is_there():
    code = "import canter, sys; assert 'torch' not in sys.modules; [getattr(canter, name) for name in canter.__all__]"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert set(canter.LAZY) <= set(dir(canter))
    with pytest.raises(AttributeError, match="PPo"):
        canter.PPo  # noqa: B018


def test_a_run_is_trained_loaded_and_evaluated_by_one_call_each(tmp_path):
    settings = {"seed": 1, "algorithm": {"gamma": 0.9}}
    runner = canter.train("CartPole-v1", 512, log_dir=tmp_path / "run", settings=settings)
    assert runner.tot_timesteps == 512
    assert runner.cfg.gamma == 0.9
    assert runner.num_envs == load_preset("CartPole-v1")["num_envs"]
    from_path = canter.evaluate(tmp_path / "run", episodes=3, seed=5)
    assert from_path == canter.evaluate(canter.load(tmp_path / "run"), "CartPole-v1", episodes=3, seed=5)
    assert from_path["eval/min_reward"] >= 8  # the pole needs as many steps to fall


def test_an_environment_of_ones_own_trains_by_ppo_and_by_dqn():
    runner = canter.train(lambda: gymnasium.make("CartPole-v1"), 64, num_envs=2, settings={"num_steps_per_env": 32})
    assert runner.num_envs == 2
    small = {"algorithm": {"learning_starts": 32, "batch_size": 16}}
    assert canter.train("CartPole-v1", 64, "dqn", settings=small).tot_timesteps == 64


def test_a_runner_without_settings_has_the_tasks_preset():
    preset = load_preset("CartPole-v1")
    runner = canter.OnPolicyRunner("CartPole-v1", show_progress=False)
    assert (runner.num_envs, runner.cfg.num_steps_per_env) == (preset["num_envs"], preset["num_steps_per_env"])
    env = gymnasium.make("CartPole-v1")
    assert canter.OnPolicyRunner(env, show_progress=False).cfg.learning_rate == preset["algorithm"]["learning_rate"]


def test_a_policy_by_its_name_elsewhere_leads_to_the_page_about_that():
    with pytest.raises(TypeError, match=r"docs/migration\.md"):
        canter.PPO("MlpPolicy", gymnasium.make("CartPole-v1"))


@pytest.mark.parametrize("cls", [canter.OnPolicyRunner, canter.OffPolicyRunner])
def test_help_describes_every_parameter_of_a_runner(cls):
    text = pydoc.plain(pydoc.render_doc(cls))
    names = [name for name in inspect.signature(Runner.__init__).parameters if name != "self"]
    assert [name for name in names if f" {name}: " not in text.split("learn(", 1)[0].split("Args:", 1)[1]] == []


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["basedpyright", "mypy"])
def test_a_users_script_has_the_types_it_uses(checker, tmp_path):
    pytest.importorskip(checker)
    command = [sys.executable, "-m", checker, str(SCRIPT)]
    if checker == "mypy":
        command += ["--strict", "--follow-imports=silent"]
    else:
        settings = {"typeCheckingMode": "strict", "include": [str(SCRIPT)]}
        (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
        command[3:] = ["--project", str(tmp_path), "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_that_script_runs(tmp_path):
    subprocess.run([sys.executable, SCRIPT], cwd=tmp_path, check=True, capture_output=True)
