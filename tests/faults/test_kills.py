"""kill -9 at any moment, polite signals at any moment, and bits that flip."""

import importlib.util
import os
import random
import time
import warnings
from pathlib import Path

import pytest
import torch

from canter.utils.checkpoint import CheckpointError, find_checkpoints, load_checkpoint, newest_valid_checkpoint


def number(path):
    return int(path.read_text()) if path.exists() and path.read_text() else -1


def saved_so_far(directory):
    return max((n for n, _ in find_checkpoints(directory)), default=0)


def wait_saved(directory, iteration):
    """Wait until a checkpoint of this or a later iteration is there."""
    end = time.monotonic() + 120
    while saved_so_far(directory) < iteration:
        assert time.monotonic() < end, (directory / "stderr").read_text()
        time.sleep(0.001)


def kill_and_resume(children, send, directory, times, seed):
    """Kill a training that saves in every iteration, again and again; every life continues where the last got to."""
    directory.mkdir()
    rng, lost = random.Random(seed), []
    for _ in range(times):
        before = saved_so_far(directory)
        pid = children.start(directory, 10**9)
        wait_saved(directory, before + 2)  # it has resumed and is saving
        time.sleep(rng.uniform(0.0, 0.03))
        send(pid, "SIGKILL")
        assert children.wait() == -9
        assert number(directory / "resumed_at") == before, (directory / "stderr").read_text()
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # not even the newest is damaged
            newest = newest_valid_checkpoint(directory)
        assert load_checkpoint(newest)["iter"] == saved_so_far(directory) > before
        lost.append(len(list(directory.glob(".tmp-*"))))
        assert len(find_checkpoints(directory)) <= 4
    return lost


def test_killed_while_saving_eight_times_and_eight_times_resumed(children, send, tmp_path):
    kill_and_resume(children, send, tmp_path / "run", 8, seed=1)
    # The next life removes what the last one left half-written.
    children.start(tmp_path / "run", saved_so_far(tmp_path / "run") + 1)
    assert children.wait() == 0
    assert list((tmp_path / "run").glob(".tmp-*")) == []


@pytest.mark.slow
def test_killed_while_saving_fifty_times_and_fifty_times_resumed(children, send, tmp_path):
    left = kill_and_resume(children, send, tmp_path / "run", 50, seed=2)
    assert any(left), "no kill hit a save: the experiment is not about saving"


def test_a_run_killed_in_the_middle_ends_like_one_that_was_not(children, send, tmp_path):
    directory, straight = tmp_path / "killed", tmp_path / "straight"
    children.start(straight, 40)
    assert children.wait() == 0
    pid = children.start(directory, 40, "waits17")
    children.wait_for(directory / "rollout")
    send(pid, "SIGKILL")
    assert children.wait() == -9
    children.start(directory, 40)
    assert children.wait() == 0
    assert number(directory / "resumed_at") == 17
    a, b = (torch.load(d / "model_40.pt", weights_only=True) for d in (directory, straight))
    for name, value in a["model_state_dict"].items():
        assert torch.equal(value, b["model_state_dict"][name])
    # learn(40) and learn(40 - n) after a resume write the same plan
    assert a["config"] == b["config"]
    assert torch.equal(a["resume"]["env"]["generator"], b["resume"]["env"]["generator"])


# ------------------------------------------------------------------ signals
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_to_end_finishes_the_iteration_saves_and_exits_with_its_code(children, send, tmp_path, name, code):
    directory = tmp_path / "run"
    pid = children.start(directory, 10**9, "slow")
    children.wait_for(directory / "rollout")
    send(pid, name)
    assert children.wait() == code
    assert not (directory / "returned").exists()
    assert load_checkpoint(directory / "checkpoint_final.pt")["iter"] == saved_so_far(directory) >= 1
    assert not (directory / "crash").exists()


def test_sigint_finishes_the_iteration_saves_and_returns(children, send, tmp_path):
    directory = tmp_path / "run"
    pid = children.start(directory, 10**9, "slow")
    children.wait_for(directory / "rollout")
    send(pid, "SIGINT")
    assert children.wait() == 0
    assert number(directory / "returned") == load_checkpoint(directory / "checkpoint_final.pt")["iter"] >= 1


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_during_a_save_lets_it_complete(children, send, tmp_path, name):
    directory = tmp_path / "run"
    pid = children.start(directory, 10**9, "slow_save")
    children.wait_for(directory / "saving")
    send(pid, name)
    assert children.wait() == (143 if name == "SIGTERM" else 0)
    assert saved_so_far(directory) == load_checkpoint(directory / "checkpoint_final.pt")["iter"] == 1


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 1), ("SIGTERM", -15)])
def test_a_second_signal_ends_the_run_at_once(children, send, tmp_path, name, code):
    directory = tmp_path / "run"
    pid = children.start(directory, 10**9, "waits1")
    children.wait_for(directory / "rollout")
    before = saved_so_far(directory)
    assert before == 1
    begin = time.monotonic()
    send(pid, name)
    children.wait_for(directory / "signalled")  # else two pending signals are one, on a busy machine
    send(pid, name)
    assert children.wait() == code
    assert time.monotonic() - begin < 60  # the run would wait for 300 s
    assert saved_so_far(directory) == before
    assert not (directory / "crash").exists()
    assert not (directory / "checkpoint_final.pt").exists()
    assert newest_valid_checkpoint(directory).name == f"model_{before}.pt"


def test_the_users_own_handler_is_called_too(children, send, tmp_path):
    directory = tmp_path / "run"
    pid = children.start(directory, 10**9, "handler")
    wait_saved(directory, 1)
    send(pid, "SIGTERM")
    assert children.wait() == 143
    assert (directory / "user_handler").exists()


# ------------------------------------------------------------------ damaged files
@pytest.fixture
def saved(tmp_path):
    """A directory with three checkpoints of a real run, and the runner."""
    spec = importlib.util.spec_from_file_location("child", Path(__file__).parent / "child.py")
    child = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(child)
    child.make_runner(tmp_path / "run").learn(3)
    return tmp_path / "run", child


def test_two_hundred_flipped_bits_are_two_hundred_errors(saved):
    directory, child = saved
    path, rng = directory / "model_3.pt", random.Random(4)
    content = path.read_bytes()
    runner = child.make_runner(directory)
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


def test_a_damaged_newest_checkpoint_is_skipped_loudly(saved):
    directory, child = saved
    path, rng = directory / "model_3.pt", random.Random(5)
    content = path.read_bytes()
    for length in [0, *(rng.randrange(1, len(content)) for _ in range(20))]:
        path.write_bytes(content[:length])
        with pytest.warns(UserWarning, match=r"SKIPPING the damaged checkpoint .*model_3\.pt"):
            assert newest_valid_checkpoint(directory).name == "model_2.pt"
    runner = child.make_runner(directory)
    runner.load(directory / "model_2.pt")
    runner.learn(1)  # and writes model_3 anew
    assert newest_valid_checkpoint(directory).name == "model_3.pt"


def test_numbers_are_numbers_and_foreign_files_are_none_of_ours(saved):
    directory, _ = saved
    for name in ("model_999999.pt", "model_1000001.pt"):
        (directory / name).write_bytes((directory / "model_3.pt").read_bytes())
    for name in ("model_best.pt", "model_1000002.pt.bak", "notes.txt"):
        (directory / name).write_text("x")
    assert newest_valid_checkpoint(directory).name == "model_1000001.pt"


@pytest.mark.parametrize("mask", [0o027, 0o077])
def test_files_get_the_mode_that_the_umask_leaves(tmp_path, saved, mask):
    directory, child = saved
    before = os.umask(mask)
    try:
        child.make_runner(tmp_path / "masked").learn(1)
    finally:
        os.umask(before)
    for name in ("model_1.pt", "config.yaml", "metrics.jsonl"):
        assert (tmp_path / "masked" / name).stat().st_mode & 0o777 == 0o666 & ~mask
