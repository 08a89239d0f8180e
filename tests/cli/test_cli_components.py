"""A policy that estimates unobserved components, from the command line."""

import imageio.v2 as imageio
import pytest
import torch
import yaml

from canter.cli.__main__ import main
from canter.cli.runs import find_checkpoint, load_policy, read_run

SHOWN = "{segments: {angle: 2, speed: 1}, actor: [angle_history], critic: [angle, speed], history: {angle: 3}}"
POLICY = ("--policy.class-name", "StateAc", "--policy.estimator-target-components", "speed", "--policy.append-estimate")
OTHERS = ("--algorithm", "estimatorppo", "--estimator-loss-coef", "0.5")


def test_an_estimator_policy_trains_evaluates_and_plays_with_its_components(train, tmp_path, capsys):
    code, run = train("canter/Pendulum", "--components", SHOWN, *POLICY, *OTHERS)
    assert code == 0
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["run"]["components"]["actor"] == ["angle_history"]
    assert config["algorithm"]["class_name"] == "EstimatorPPO"
    assert config["algorithm"]["estimator_loss_coef"] == 0.5
    saved = read_run(run)
    policy = load_policy(saved, find_checkpoint(run, None), 2, 1, "cpu").alg.policy
    assert policy.obs_segments == {"angle_history": (3, 2)}
    policy.act(torch.randn(2, 6))
    assert policy.get_estimated_state().shape == (2, 1)
    assert main(["eval", str(run), "--episodes", "1"]) == 0
    video = tmp_path / "film.mp4"
    assert main(["play", str(run), "--video", str(video), "--seconds", "0.2"]) == 0
    assert imageio.get_reader(video).get_data(0).ndim == 3


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ("{segments: {angle: 2, speed: 1}, actor: [angel]}", "no segment 'angel'; it has"),
        ("{segments: {angle: 2}}", "add up to 2 values"),
        ("{segment: {angle: 2}}", "segment"),
    ],
)
def test_components_that_do_not_fit_are_named(train, capsys, components, message):
    code, _ = train("canter/Pendulum", "--components", components)
    assert code != 0
    assert message in capsys.readouterr().err


def test_arguments_and_wrappers_of_the_environment_are_kept_with_the_run(train, tmp_path, capsys):
    wrappers = "[RescaleAction: {min_action: -0.5, max_action: 0.5}]"
    code, run = train("Pendulum-v1", "--env-kwargs", "{g: 5.0}", "--wrappers", wrappers)
    assert code == 0
    section = yaml.safe_load((run / "config.yaml").read_text())["run"]
    assert section["env_kwargs"] == {"g": 5.0}
    saved = read_run(run)
    env = load_policy(saved, find_checkpoint(run, None), 2, 1, "cpu").env
    assert env.action_space.high.tolist() == [0.5]
    assert [single.unwrapped.g for single in env.envs] == [5.0, 5.0]
    assert main(["eval", str(run), "--episodes", "1"]) == 0
    code, again = train("Pendulum-v1", "--config", str(run / "config.yaml"), name="again")
    assert code == 0
    assert yaml.safe_load((again / "config.yaml").read_text())["run"]["wrappers"] == section["wrappers"]


def test_a_wrapper_that_does_not_exist_is_one_line_and_leaves_no_run(train, tmp_path, capsys):
    code, run = train("Pendulum-v1", "--wrappers", "RescaleActions")
    assert code == 2
    assert "'RescaleAction'" in capsys.readouterr().err
    assert not run.exists()
