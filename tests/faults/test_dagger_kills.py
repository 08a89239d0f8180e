"""DAgger as two live processes, a collector and a trainer, and kill -9 to either at any moment."""

import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from canter.storage.rollout_files import read_chunk, read_manifest
from canter.utils.checkpoint import find_checkpoints, load_checkpoint, newest_valid_checkpoint

CHILD = Path(__file__).parent / "dagger_child.py"
PATIENCE = 240.0


class Pair:
    """A collector and a trainer that share two directories."""

    def __init__(self, folder):
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.server = subprocess.Popen([sys.executable, str(CHILD)], stdin=-1, stdout=-1, text=True, env=env)
        self.data, self.run = folder / "data", folder / "run"
        self.run.mkdir()
        self.pids = {}

    def start(self, role):
        self.server.stdin.write(f"{role}\t{self.data}\t{self.run}\n")
        self.server.stdin.flush()
        self.pids[role] = int(self.server.stdout.readline())

    def kill(self, role):
        os.kill(self.pids[role], signal.SIGKILL)
        while self.is_alive(role):
            time.sleep(0.001)

    def is_alive(self, role):
        try:
            os.kill(self.pids[role], 0)
        except ProcessLookupError:
            return False
        return True

    def said(self, role):
        path = self.run / f"{role}.stderr"
        return path.read_text() if path.exists() else ""

    def steps(self):
        """Acknowledged steps by file."""
        return {entry["file"]: entry["end"] - entry["start"] for entry in read_manifest(self.data)}

    def iteration(self):
        return max((number for number, _ in find_checkpoints(self.run)), default=0)

    def wait(self, is_done, what):
        end = time.monotonic() + PATIENCE
        while not is_done():
            for role in self.pids:
                assert self.is_alive(role), f"the {role}er ended by itself: {self.said(role)}"
            assert time.monotonic() < end, f"{what} did not happen: {self.said('train')} {self.said('collect')}"
            time.sleep(0.003)

    def wait_for_progress(self, steps=0, iterations=0):
        first_steps, first_iteration = sum(self.steps().values()), self.iteration()
        self.wait(
            lambda: (
                sum(self.steps().values()) >= first_steps + steps and self.iteration() >= first_iteration + iterations
            ),
            f"{steps} steps and {iterations} iterations",
        )

    def close(self):
        for role in self.pids:
            if self.is_alive(role):
                self.kill(role)
        self.server.stdin.close()
        self.server.wait(timeout=120)


@pytest.fixture
def pair(tmp_path):
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    made = Pair(tmp_path)
    yield made
    made.close()


def check_data(pair, before):
    """Nothing that was acknowledged is lost, and no file that a reader could find is torn."""
    after = pair.steps()
    assert before.items() <= after.items()
    for name, steps in after.items():
        assert len(read_chunk(pair.data / name)["rewards"]) == steps
    for path in pair.data.glob("trajectory_*/traj_*"):
        read_chunk(path)


def check_run(pair, before):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # not even the newest is damaged
        newest = newest_valid_checkpoint(pair.run)
    assert load_checkpoint(newest)["iter"] >= before


def kill_and_resume(pair, times, seed):
    rng = random.Random(seed)
    pair.start("train")
    pair.wait(lambda: (pair.run / "config.yaml").exists(), "the trainer's config")
    pair.start("collect")
    pair.wait_for_progress(steps=24, iterations=2)
    for _ in range(times):
        victim = rng.choice(["train", "collect"])
        pair.wait_for_progress(**({"iterations": 1} if victim == "train" else {"steps": 12}))
        time.sleep(rng.uniform(0.0, 0.05))
        steps, iteration = pair.steps(), pair.iteration()
        pair.kill(victim)
        check_data(pair, steps)
        check_run(pair, iteration)
        if victim == "train":
            saved = pair.iteration()
            (pair.run / "resumed_at").unlink()
            pair.start("train")
            pair.wait(lambda: (pair.run / "resumed_at").exists(), "resuming")
            pair.wait(lambda: (pair.run / "resumed_at").read_text() != "", "resuming")
            assert int((pair.run / "resumed_at").read_text()) == saved
        else:
            pair.start("collect")
        pair.wait_for_progress(steps=12, iterations=1)
    assert pair.said("train") == ""
    assert pair.said("collect") == ""
    return pair


def test_either_may_be_killed_and_both_resume(pair):
    kill_and_resume(pair, 3, seed=1)


@pytest.mark.slow
def test_twenty_kills_and_nothing_torn_lost_or_stuck(pair):
    kill_and_resume(pair, 20, seed=2)
    pair.kill("collect")
    pair.kill("train")
    assert sum(pair.steps().values()) >= 20 * 12
