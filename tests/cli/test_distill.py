"""`canter distill`: from a teacher's run to a student's."""

import json
import sys

import pytest
import torch
import yaml

from canter.cli.__main__ import main
from canter.cli.distill import MAX_RESTARTS, Collector
from canter.cli.errors import UserError
from canter.cli.runs import find_checkpoint, load_policy, read_run

SMALL = ["--no-video", "--final-episodes", "2", "--num-envs", "4", "--device", "cpu"]
PARTS = "{angle: 2, velocity: 1}"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A teacher that was hardly trained."""
    return trained_on("canter/Pendulum", tmp_path_factory.mktemp("teacher"))


def trained_on(task, runs):
    code = main(
        [
            "train",
            task,
            "--total-timesteps",
            "64",
            "--num-steps-per-env",
            "16",
            "--name",
            "teacher",
            "--runs-dir",
            str(runs),
            "--policy.actor-hidden-dims",
            "8",
            "--policy.critic-hidden-dims",
            "8",
            "--num-mini-batches",
            "2",
            "--num-learning-epochs",
            "1",
            *SMALL,
        ]
    )
    assert code == 0
    return next(runs.rglob("config.yaml")).parent


def distill(teacher, tmp_path, *more):
    return main(
        [
            "distill",
            str(teacher),
            "--runs-dir",
            str(tmp_path),
            "--name",
            "s",
            "--total-timesteps",
            "128",
            "--num-steps-per-env",
            "16",
            *SMALL,
            *more,
        ]
    )


def test_a_student_that_sees_less_is_trained_evaluated_and_can_be_played(teacher, tmp_path, capsys):
    assert distill(teacher, tmp_path, "--segments", PARTS, "--hide", "velocity") == 0
    run = next(tmp_path.rglob("config.yaml")).parent
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["run"]["components"] == {"segments": {"angle": 2, "velocity": 1}, "actor": ["angle"]}
    assert config["algorithm"]["class_name"] == "TPPO"
    assert config["algorithm"]["using_ppo"] is False
    assert config["policy"]["class_name"] == "ActorCriticRecurrent"
    assert config["policy"]["init_noise_std"] == 0.05
    assert {"checkpoint_final.pt", "evaluation.json", "metrics.jsonl"} <= {p.name for p in run.iterdir()}
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert any("distillation_loss" in name for name in row)
    assert "teacher" in capsys.readouterr().out
    runner = load_policy(read_run(run), find_checkpoint(run, None), 3, 1, None)
    assert runner.env.num_obs == 2
    assert runner.get_inference_policy()(torch.zeros(3, 2)).shape == (3, 1)


def test_a_student_may_see_everything_and_learn_from_rewards(teacher, tmp_path):
    settings = ["--using-ppo", "--no-recurrent", "--algorithm", "{learning_rate: 1e-4, distill_target: l1}"]
    assert distill(teacher, tmp_path, *settings) == 0
    config = yaml.safe_load(next(tmp_path.rglob("config.yaml")).read_text())
    assert config["policy"]["class_name"] == "ActorCritic"
    assert config["policy"].get("init_noise_std") != 0.05
    assert config["algorithm"]["learning_rate"] == 1e-4
    assert config["algorithm"]["distill_target"] == "l1"
    assert "components" not in config["run"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hide", "velocity"], "does not name the parts"),
        (["--segments", PARTS, "--hide", "speed"], "no part 'speed'; it has angle, velocity"),
        (["--segments", "{angle: 2}", "--hide", "angle"], "2"),
        (["--total-timesteps", "0"], "--total-timesteps must be at least 1"),
        (["--algorithm", "{distil_target: l1}"], "'distill_target'"),
    ],
)
def test_mistakes_are_named_and_leave_no_directory(teacher, tmp_path, capsys, flags, message):
    assert distill(teacher, tmp_path, *flags) != 0
    assert message in capsys.readouterr().err
    assert not list(tmp_path.rglob("config.yaml"))


def test_a_teacher_of_an_asymmetric_environment_labels_what_it_observes(tmp_path, capsys):
    teacher = trained_on("canter/PointRobot", tmp_path / "t")
    assert distill(teacher, tmp_path / "s", "--hide", "velocity") == 0
    run = next((tmp_path / "s").rglob("config.yaml")).parent
    assert yaml.safe_load((run / "config.yaml").read_text())["run"]["components"] == {
        "segments": {"velocity": 2, "command": 2, "last_action": 2},
        "actor": ["command", "last_action"],
        "critic": ["velocity", "command", "last_action"],
        "own_critic": False,
    }
    runner = load_policy(read_run(run), find_checkpoint(run, None), 3, 1, None)
    obs, critic_obs = runner.env.reset()
    assert torch.equal(obs, critic_obs[:, 2:])
    assert critic_obs.shape == (3, 6)  # what the teacher was trained with
    assert "bundle" in capsys.readouterr().out
    spec = json.loads(next(run.rglob("policy.json")).read_text())
    assert [segment["name"] for segment in spec["observation"]] == ["command", "last_action"]


def test_the_default_target_suits_discrete_actions(tmp_path):
    teacher = trained_on("canter/CartPole", tmp_path / "t")
    assert distill(teacher, tmp_path / "s", "--no-bundle") == 0
    config = yaml.safe_load(next((tmp_path / "s").rglob("config.yaml")).read_text())
    assert config["algorithm"]["distill_target"] == "max_log_prob"
    assert not list((tmp_path / "s").rglob("policy.json"))


def test_a_collector_that_dies_is_started_again_and_one_that_keeps_dying_stops_the_training(tmp_path):
    command = [sys.executable, "-c", "import os; os.write(1, b'x'); os._exit(3)"]
    with Collector(command, tmp_path / "log") as collector:
        for _ in range(MAX_RESTARTS):
            collector.process.wait()
            with pytest.warns(UserWarning, match="the collector ended with exit code 3; it is started again"):
                collector.check()
        collector.process.wait()
        with pytest.raises(UserError, match=r"the collector ended 4 times with exit code 3; .*log has its output"):
            collector.check()
    assert (tmp_path / "log").read_text() == "x" * 4


def test_a_collector_that_has_collected_all_is_not_started_again(tmp_path):
    with Collector([sys.executable, "-c", ""], tmp_path / "log") as collector:
        first = collector.process
        first.wait()
        collector.check()
        assert collector.process is first
