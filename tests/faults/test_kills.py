"""kill -9 again and again, and bits that flip."""

import os
import random
import signal
import time
import warnings

import pytest

from canter.envs.torch_envs import PointRobot
from canter.utils.checkpoint import CheckpointError, find_checkpoints, load_checkpoint, newest_valid_checkpoint


@pytest.mark.slow
def test_killed_while_saving_fifty_times_and_fifty_times_resumed(world, tmp_path):
    """A training that saves in every iteration; every life continues where the last one got to."""
    (tmp_path / "disk").mkdir()
    run, rng, left = tmp_path / "disk/runs/canter/CartPole/r-seed1", random.Random(2), []

    def saved():
        return max((number for number, _ in find_checkpoints(run)), default=0) if run.exists() else 0

    first = [*world.command("rollout", "PPO"), "--keep-checkpoints", "3", "--total-timesteps", str(10**9)]
    for _ in range(50):
        before = saved()
        (process,) = world.begin(tmp_path, ["resume", str(run)] if before else first, "PPO")
        while saved() < before + 2:  # it has resumed and is saving
            assert process.is_alive(), world.said(tmp_path)
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.03))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # not even the newest is damaged
            newest = newest_valid_checkpoint(run)
        assert load_checkpoint(newest)["iter"] == saved() > before
        left.append(len(list(run.glob(".tmp-*"))))
        assert len(find_checkpoints(run)) <= 4
    assert any(left), "no kill hit a save: the experiment is not about saving"
    assert max(left) <= 1, "the next life removes what the last one left half-written"


@pytest.fixture
def saved(tmp_path, make_runner):
    """A directory with three checkpoints of a real run."""
    make_runner(PointRobot(4), tmp_path / "run", save_interval=1).learn(3)
    return tmp_path / "run"


def test_two_hundred_flipped_bits_are_two_hundred_errors(saved, make_runner):
    directory = saved
    path, rng = directory / "model_3.pt", random.Random(4)
    content = path.read_bytes()
    runner = make_runner(PointRobot(4), directory)
    for _ in range(200):
        bit = rng.randrange(8 * len(content))
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"model_3\.pt"):
            runner.load(path)
    assert runner.iteration == 0
    path.write_bytes(content)
    runner.load(path)
    assert runner.iteration == 3


def test_a_damaged_newest_checkpoint_is_skipped_loudly(saved, make_runner):
    directory = saved
    path, rng = directory / "model_3.pt", random.Random(5)
    content = path.read_bytes()
    for length in [0, *(rng.randrange(1, len(content)) for _ in range(20))]:
        path.write_bytes(content[:length])
        with pytest.warns(UserWarning, match=r"SKIPPING the damaged checkpoint .*model_3\.pt"):
            assert newest_valid_checkpoint(directory).name == "model_2.pt"
    runner = make_runner(PointRobot(4), directory)
    runner.load(directory / "model_2.pt")
    runner.learn(1)  # and writes model_3 anew
    assert newest_valid_checkpoint(directory).name == "model_3.pt"


def test_numbers_are_numbers_and_foreign_files_are_none_of_ours(saved):
    directory = saved
    for name in ("model_999999.pt", "model_1000001.pt"):
        (directory / name).write_bytes((directory / "model_3.pt").read_bytes())
    for name in ("model_best.pt", "model_1000002.pt.bak", "notes.txt"):
        (directory / name).write_text("x")
    assert newest_valid_checkpoint(directory).name == "model_1000001.pt"


@pytest.mark.parametrize("mask", [0o027, 0o077])
def test_files_get_the_mode_that_the_umask_leaves(tmp_path, make_runner, mask):
    before = os.umask(mask)
    try:
        make_runner(PointRobot(4), tmp_path / "masked", save_interval=1).learn(1)
    finally:
        os.umask(before)
    for name in ("model_1.pt", "config.yaml", "metrics.jsonl"):
        assert (tmp_path / "masked" / name).stat().st_mode & 0o777 == 0o666 & ~mask
