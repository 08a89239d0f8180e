"""`canter seeds`, and training runs in processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from canter.cli.__main__ import main
from canter.cli.run_process import RunPool, TrainingRun
from canter.cli.seeds import summarise
from canter.utils.checkpoint import load_checkpoint, newest_valid_checkpoint
from canter.utils.statistics import iqm_estimate

TINY = ["--num-envs", "4", "--num-steps-per-env", "16", "--num-mini-batches", "2", "--num-learning-epochs", "1"]
TINY += ["--final-episodes", "2", "--eval-episodes", "2", "--no-video", "--execution", "eager"]


def test_seeds_train_in_parallel_and_end_in_a_summary(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["--seeds", "2", "--seed", "5", "--jobs", "2", "--name", "n", "--total-timesteps", "256"]
    assert main(["seeds", "canter/CartPole", *flags, *TINY]) == 0
    out = capsys.readouterr().out
    folder = tmp_path / "runs/canter/CartPole"
    finals = [json.loads((folder / f"n-seed{seed}/evaluation.json").read_text())["eval/mean_reward"] for seed in (5, 6)]
    summary = json.loads((folder / "n-summary.json").read_text())
    assert summary["returns"] == {"5": finals[0], "6": finals[1]}
    estimate = iqm_estimate([np.array(finals)])
    assert summary["iqm"] == list(estimate)
    assert f"{estimate.value:.1f}, 95% interval {estimate.low:.1f} to {estimate.high:.1f}" in out
    assert (folder / "n-summary.png").is_file()
    assert not list(folder.glob("*.log"))
    machine = json.loads((folder / "n-seed5/machine.json").read_text())
    assert {"processor", "python", "canter", "torch", "numpy", "gymnasium"} <= set(machine)


def test_a_seed_that_fails_is_named_with_its_log_and_the_exit_code_is_its_own(tmp_path, capsys):
    run = TrainingRun(tmp_path / "runs" / "x-seed1", ["train", "NoSuchTask-v0"])
    run.exit_code = 2
    run.log.parent.mkdir(parents=True)
    run.log.write_text("canter: no environment is named 'NoSuchTask-v0'\n")
    assert summarise("x", {1: run}) == 2
    assert f"exit code 2: no environment is named 'NoSuchTask-v0'; see {run.log}" in capsys.readouterr().out


def test_a_summary_needs_an_evaluation(capsys):
    assert main(["seeds", "CartPole-v1", "--final-episodes", "0"]) == 2
    assert "--final-episodes 20" in capsys.readouterr().err


def test_gpus_are_taken_in_turns_and_only_those_that_are_visible(monkeypatch):
    started = []

    class Fake(TrainingRun):
        def start(self, slot, env):
            self.slot = slot
            started.append(env.get("CUDA_VISIBLE_DEVICES"))

        def poll(self):
            return False

    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    cases = (None, None, ["0", "1", "0"]), ("5,7", None, ["5", "7", "5"]), ("5,7", "cpu", ["5,7"] * 3)
    for visible, device, wanted in cases:
        started.clear()
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        RunPool(3, device).add(*(Fake(Path("x"), []) for _ in range(3)))
        assert started == wanted


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:  # a killed process whose parent does not wait is a zombie
        return file.read().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads /proc")
def test_a_run_saves_and_ends_when_its_parent_is_killed(tmp_path):
    parent = (
        "import sys, time; from pathlib import Path; from canter.cli.run_process import *\n"
        "run = TrainingRun(Path(sys.argv[1]), sys.argv[2:]); pool = RunPool(1, 'cpu'); pool.add(run)\n"
        "print(run.process.pid, flush=True); time.sleep(600)"
    )
    path = tmp_path / "runs/canter/CartPole/n-seed1"
    flags = [*TINY, "--name", "n", "--runs-dir", str(tmp_path / "runs"), "--total-timesteps", "100000000"]
    command = [sys.executable, "-c", parent, str(path), "train", "canter/CartPole", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        deadline = time.monotonic() + 90
        while not ((path / "metrics.jsonl").is_file() and (path / "metrics.jsonl").stat().st_size):
            assert time.monotonic() < deadline
            assert is_running(child), path.with_name("n-seed1.log").read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    saved = load_checkpoint(newest_valid_checkpoint(path))
    assert saved["total_timesteps"] > 0
