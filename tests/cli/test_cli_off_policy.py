"""Off-policy runs from the command line: train, resume, eval, the policy of play, and errors."""

import json

import pytest
import yaml

from canter.cli.__main__ import main
from canter.cli.errors import UserError
from canter.cli.options import parse_train
from canter.cli.runs import find_checkpoint, load_policy, read_run
from canter.utils.checkpoint import load_checkpoint
from canter.utils.logging import read_rows

TINY = ["--num-envs", "2", "--learning-starts", "20", "--batch-size", "8", "--log-interval", "20", "--no-video"]
TINY += ["--final-episodes", "2", "--eval-episodes", "2", "--buffer-size", "500", "--name", "r", "--execution", "eager"]
NETS = {"dqn": ["--network-hidden-dims", "8"], "sac": ["--actor-hidden-dims", "8", "--critic-hidden-dims", "8"]}
NETS["td3"] = NETS["sac"]
TASKS = {"dqn": "canter/CartPole", "sac": "canter/PointRobot", "td3": "canter/PointRobot"}


def run_of(tmp_path, monkeypatch, algo, *flags):
    monkeypatch.setattr("canter.cli.train.plot_runs", lambda runs, path, **kwargs: path)
    profile = ["--profile", "classic"] if algo != "dqn" else []
    args = ["train", TASKS[algo], "--algo", algo, *profile, *TINY, *NETS[algo], "--runs-dir", str(tmp_path), *flags]
    code = main([*args, "--total-timesteps", "100"])
    return code, tmp_path / TASKS[algo] / "r-seed1"


@pytest.mark.parametrize("algo", list(TASKS))
def test_a_run_is_trained_resumed_evaluated_and_played(algo, tmp_path, monkeypatch, capsys):
    code, run = run_of(tmp_path, monkeypatch, algo, "--save-replay-buffer", "--eval-interval", "10")
    assert code == 0
    rows = list(read_rows(run / "metrics.jsonl"))
    assert [row["step"] for row in rows if "rollout/mean_reward" in row] == [20, 40, 60, 80, 100]
    assert [row["step"] for row in rows if "eval/mean_reward" in row] == list(range(10, 101, 10))
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["algorithm"]["class_name"] == algo.upper()
    assert config["eval_interval"] == 10
    assert json.loads((run / "evaluation.json").read_text())["step"] == 100
    capsys.readouterr()
    assert main(["eval", str(run), "--episodes", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["step"] == 100
    assert main(["resume", str(run), "--total-timesteps", "40"]) == 0
    final = load_checkpoint(run / "checkpoint_final.pt")
    assert final["total_timesteps"] == final["timesteps"] == final["num_stored"] == 140
    saved = read_run(run)
    runner = load_policy(saved, find_checkpoint(run, None), 1, 0, None)
    assert runner.alg.replay is None, "to play, no replay is allocated"
    runner.close()


def test_every_setting_is_a_flag_of_its_algorithm_alone():
    _, config = parse_train(["Pendulum-v1", "--algo", "sac", "--batch-size", "32", "--init-alpha", "0.5"])
    assert config["algorithm"]["batch_size"] == 32
    assert config["algorithm"]["init_alpha"] == 0.5
    assert config["algorithm"]["actor_learning_rate"] == 1e-3, "the preset's"
    with pytest.raises(UserError, match="--num-mini-batches"):
        parse_train(["Pendulum-v1", "--batch-size", "32"])
    with pytest.raises(UserError, match="'--num-steps-per-env'"):
        parse_train(["Pendulum-v1", "--algo", "sac", "--num-steps-per-env", "4"])


def test_a_profile_replaces_the_preset_s_settings():
    _, config = parse_train(["Pendulum-v1", "--algo", "sac", "--profile", "massive", "--gamma", "0.9"])
    algorithm = config["algorithm"]
    assert (algorithm["num_atoms"], algorithm["batch_size"], algorithm["gamma"]) == (101, 8192, 0.9)
    assert algorithm["actor_learning_rate"] == 3e-4
    with pytest.raises(ValueError, match="'massive'"):
        parse_train(["CartPole-v1", "--algo", "dqn", "--profile", "massive"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["canter/PointRobot", "--algo", "dqn"], "DQN needs Discrete actions, got Box"),
        (["canter/CartPole", "--algo", "sac"], "SAC needs a Box of actions, got Discrete"),
        (["canter/CartPole", "--algo", "dqnn"], "'dqn'"),
        (["canter/CartPole", "--algo", "dqn", "--buffer-size", "10000000000000"], "the replay buffer does not fit"),
        (["canter/CartPole", "--algo", "dqn", "--buffer-size", "32"], "batch_size=128 is more than the replay"),
    ],
)
def test_an_impossible_run_is_refused_and_leaves_no_directory(args, message, tmp_path, capsys):
    assert main(["train", *args, "--runs-dir", str(tmp_path / "runs"), "--no-video"]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("runs/**/config.yaml"))
