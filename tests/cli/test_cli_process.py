"""The command in a process of its own, as users run it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import imageio.v2 as imageio
import pytest

from canter.cli.__main__ import main
from canter.utils.checkpoint import load_checkpoint

CANTER = [sys.executable, "-m", "canter.cli"]
SMALL = ["--num-envs", "4", "--num-steps-per-env", "32", "--num-mini-batches", "2", "--num-learning-epochs", "1"]
SMALL += ["--execution", "eager"]


def canter(*args, cwd):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run([*CANTER, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def test_training_ends_with_paths_that_exist_and_a_video_of_the_policy(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "CartPole-v1", *SMALL, "--total-timesteps", "500"]) == 0
    out, errors = capsys.readouterr()
    assert errors == ""
    rows = dict(re.findall(r"^  (\w+) +(.+)$", out, re.MULTILINE))
    assert re.fullmatch(r"\S+ ± \S+ over 20 episodes without noise", rows["return"])
    for name in ("run", "curve", "video", "checkpoint"):
        assert (tmp_path / rows[name]).exists(), name
    assert re.fullmatch(r"runs/CartPole-v1/\d{8}-\d{6}-seed1", rows["run"])
    assert load_checkpoint(tmp_path / rows["checkpoint"])["total_timesteps"] == 512
    assert len(imageio.mimread(tmp_path / rows["video"], memtest=False)) > 1


def test_help_does_not_import_torch(tmp_path):
    probe = "import sys; from canter.cli.__main__ import main; main(['--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "train TASK" in done.stdout


def test_importing_canter_leaves_torch_threads_alone():
    probe = "import torch; n = torch.get_num_threads(); import canter.cli.train, canter.cli.play, canter.runners; "
    probe += "assert torch.get_num_threads() == n"
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    assert subprocess.run([sys.executable, "-c", probe], env=env, timeout=60).returncode == 0


@pytest.mark.slow
def test_the_documented_way_through_every_command(tmp_path):
    name = ["--name", "way", "--total-timesteps", "2000", "--no-video"]
    run = "runs/canter/CartPole/way-seed1"
    assert canter("train", "canter/CartPole", *SMALL, *name, cwd=tmp_path).returncode == 0
    assert "mean reward" in canter("eval", run, "--episodes", "4", cwd=tmp_path).stdout
    assert canter("resume", run, "--total-timesteps", "500", cwd=tmp_path).returncode == 0
    assert Path(tmp_path, canter("plot", run, cwd=tmp_path).stdout.strip()).is_file()
    assert canter("play", run, "--video", "film.mp4", cwd=tmp_path).returncode == 0
    assert len(imageio.mimread(tmp_path / "film.mp4", memtest=False)) > 1
    assert canter("tasks", cwd=tmp_path).returncode == 0
    assert canter("check-env", "canter/CartPole", cwd=tmp_path).returncode == 0
    assert canter("train", "CartPole-v1", "--gama", "1", cwd=tmp_path).returncode == 2


def test_a_warning_is_one_line_and_that_of_a_users_module_names_its_place(tmp_path):
    module = """import warnings
import gymnasium
warnings.warn('a warning of mine')
gymnasium.register('Mine-v0', 'gymnasium.envs.classic_control:CartPoleEnv')
"""
    (tmp_path / "mine.py").write_text(module)
    flags = [*SMALL, "--total-timesteps", "128", "--no-video", "--final-episodes", "0", "--desired-kl", "0.5"]
    done = canter("train", "mine:Mine-v0", *flags, "--schedule", "fixed", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    own, place, code = done.stderr.splitlines()[-1], *done.stderr.splitlines()[:2]
    assert re.fullmatch("canter: warning: desired_kl=0.5 has no effect with schedule='fixed'", own)
    assert re.fullmatch(r".*/mine.py:3: UserWarning: a warning of mine", place)
    assert code.strip() == "warnings.warn('a warning of mine')"
