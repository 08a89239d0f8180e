"""`canter distill`: from a teacher's run to a student's."""

import json

import pytest
import torch
import yaml

from canter.cli.__main__ import main
from canter.cli.runs import find_checkpoint, load_policy, read_run

SMALL = ["--no-video", "--final-episodes", "2", "--num-envs", "4", "--device", "cpu"]
PARTS = "{angle: 2, velocity: 1}"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A teacher that was hardly trained."""
    runs = tmp_path_factory.mktemp("teacher")
    code = main(
        [
            "train",
            "canter/Pendulum",
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
