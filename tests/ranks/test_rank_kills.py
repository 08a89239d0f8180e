"""Ranks and launchers that are killed with SIGKILL; minutes in all, so run with `-m slow`."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import canter
from canter.utils.checkpoint import find_checkpoints, newest_valid_checkpoint, verify_checkpoint

pytestmark = pytest.mark.slow
NUM_KILLS = 20
TRAIN = ["train", "CartPole-v1", "--num-envs", "4", "--save-interval", "2", "--eval-interval", "0", "--no-video"]
TRAIN += ["--final-episodes", "2", "--name", "run", "--rank-timeout", "10"]


def test_no_kill_of_a_random_rank_loses_a_run(launcher, tmp_path):
    """All ranks end after every kill, and the run is in the end what it is without any."""
    draw, known, answers = random.Random(1), 0, list[float]()
    for number in range(NUM_KILLS):
        pids = launcher.start(2, tmp_path / "killed", "continued")
        if number % 5:  # after a while of training; the others while the ranks start
            wait_for(lambda: newest_number(tmp_path / "killed" / "run") > known, 120.0)
        time.sleep(draw.uniform(0.0, 1.0))
        victim = draw.randrange(2)
        begin = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        codes = launcher.wait(pids, seconds=60.0)
        answers.append(time.monotonic() - begin)
        assert codes[victim] == -9
        assert codes[1 - victim] == 1, number  # with an error, not killed by the test
        text = (tmp_path / "killed" / f"stderr{1 - victim}").read_text()
        assert "RankError" in text
        if any((tmp_path / "killed" / "run").glob("model_*.pt")):
            newest = newest_valid_checkpoint(tmp_path / "killed" / "run")
            assert verify_checkpoint(newest.with_name(f"{newest.stem}.rank1.pt"))
            iteration = torch.load(newest)["iter"]
            assert iteration >= known
            known = iteration
    assert known > 0
    resumed = launcher.run(2, tmp_path / "killed", "continued", seconds=600.0)
    whole = launcher.run(2, tmp_path / "whole", "continued", seconds=600.0)
    assert whole[0]["begin"] == 0
    assert resumed[0]["begin"] == resumed[1]["begin"] == known
    assert [rank["state"] for rank in resumed] == [rank["state"] for rank in whole]
    print(f"{NUM_KILLS} kills, continued at iteration {known}; ends after {max(answers):.1f} s at most")


def newest_number(run):
    """The iteration of the newest checkpoint; 0 without one."""
    return max((number for number, _ in find_checkpoints(run)), default=0) if run.is_dir() else 0


def start(tmp_path, *command):
    """A command with the package of this test, its output in a file."""
    environment = {**os.environ, "PYTHONPATH": str(Path(canter.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    output = (tmp_path / "output").open("w")
    return subprocess.Popen(
        [sys.executable, "-m", *command], cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.STDOUT
    )


def ranks_of(process):
    """Process ids of the ranks that a launcher has started, the first rank first."""
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    return sorted(map(int, found))


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_a_killed_rank_of_the_command_is_named_in_one_line(tmp_path):
    process = start(tmp_path, "canter", *TRAIN, "--ranks", "2", "--total-timesteps", "1000000")
    wait_for((tmp_path / "runs/CartPole-v1/run-seed1/model_2.pt").exists, 120.0)
    ranks = ranks_of(process)
    os.kill(ranks[1], signal.SIGKILL)
    assert process.wait(60.0) == 7
    lines = [line for line in (tmp_path / "output").read_text().splitlines() if line.startswith("canter:")]
    assert len(lines) == 1
    assert "SIGKILL ended rank 1" in lines[0]
    assert not any(map(is_alive, ranks))


def test_ranks_do_not_outlive_their_launcher(tmp_path):
    process = start(tmp_path, "canter", *TRAIN, "--ranks", "2", "--total-timesteps", "1000000")
    run = tmp_path / "runs/CartPole-v1/run-seed1"
    wait_for((run / "model_2.pt").exists, 120.0)
    ranks = ranks_of(process)
    assert len(ranks) == 2
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(is_alive, ranks)), 40.0)
    newest_valid_checkpoint(run)


def test_torchrun_restarts_a_run_after_a_kill(tmp_path):
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "-m")
    process = start(tmp_path, *torchrun, "canter", *TRAIN, "--total-timesteps", "10000")
    run = tmp_path / "runs/CartPole-v1/run-seed1"
    wait_for((run / "model_2.pt").exists, 120.0)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    assert process.wait(200.0) == 0, (tmp_path / "output").read_text()[-3000:]
    steps = [json.loads(line)["iteration"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 41))  # none is missing, none twice: 40 iterations of 2 * 4 * 32 steps
    assert [path.name for path in run.parent.iterdir()] == ["run-seed1"]


FAULTY = """
import os

import gymnasium
import numpy as np


class Faulty(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (3,)), gymnasium.spaces.Box(-1, 1, (1,))
    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(self, fault="", render_mode=None):
        self.fault, self.render_mode, self.num_steps = fault, render_mode, 0

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.num_steps += 1
        is_bad = self.num_steps == 20 and os.environ.get("RANK") == "1"
        if is_bad and self.fault == "exit":
            os._exit(9)
        obs = np.full(3, np.nan if is_bad and self.fault == "nan" else 0.5, np.float32)
        return obs, 1.0, False, self.num_steps % 20 == 0, {}

    def render(self):
        return np.zeros((64, 64, 3), np.uint8)


gymnasium.register("Faulty-v0", Faulty)
"""


def train_faulty(tmp_path, *flags):
    """Exit code and output of two ranks that train in an environment of the user."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    lengths = ["--num-envs", "2", "--num-steps-per-env", "16", "--total-timesteps", "320", "--final-episodes", "2"]
    process = start(tmp_path, "canter", "train", "faulty:Faulty-v0", "--ranks", "2", "--name", "run", *lengths, *flags)
    return process.wait(100.0), (tmp_path / "output").read_text()


def test_a_rank_that_ends_without_a_word_is_named(tmp_path):
    code, output = train_faulty(tmp_path, "--env-kwargs", "{fault: exit}", "--no-video")
    assert code == 7
    assert "canter: rank 1 ended by itself with exit code 9" in output


def test_the_exit_code_of_the_command_is_that_of_the_rank_with_the_error(tmp_path):
    code, output = train_faulty(tmp_path, "--env-kwargs", "{fault: nan}", "--no-video")
    assert code == 5
    assert "canter: rank 1: the environment gave NaN" in output


def test_ranks_make_films_and_a_video(tmp_path):
    code, output = train_faulty(tmp_path, "--film-interval", "2")
    assert code == 0
    run = tmp_path / "runs/faulty_Faulty-v0/run-seed1"
    assert (run / "video.mp4").is_file(), output
    assert list((run / "films").glob("*.mp4")), output
