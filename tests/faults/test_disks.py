"""Disks that fill up, become read-only or vanish during a run: real faults, no mocks."""

import contextlib
import os
import resource
import shutil
import subprocess
import warnings

import pytest

from canter.envs.torch_envs import PointRobot
from canter.runners import checkpoints
from canter.utils.checkpoint import find_checkpoints, load_checkpoint, newest_valid_checkpoint
from canter.utils.files import DiskFullError, RunMovedError
from canter.utils.logging import read_rows


@pytest.fixture
def tmpfs(tmp_path):
    """A small file system of its own; `tmpfs("remount,ro")` mounts it again with other options."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(options):
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True)
        if done.returncode:
            pytest.skip("needs the right to mount")

    mount("size=2m")
    mount.place = place
    yield mount
    subprocess.run(["umount", "-l", str(place)], check=True)


@contextlib.contextmanager
def file_size_limit(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def at(runner, actions):
    """Call `actions[n]` before iteration n + 1."""
    runner.add_callback("pre_iteration", lambda r: actions.get(r.iteration, lambda: None)())


def fill(path):
    """Write a file until the disk is full."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass


def test_a_failed_save_is_reported_and_tried_again_while_the_training_goes_on(make_runner, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "RETRY_SECONDS", 0.0)
    runner = make_runner(PointRobot(4), tmp_path, save_interval=2, log_interval=1, logger_backend=[])
    limit = contextlib.ExitStack()
    at(runner, {3: lambda: limit.enter_context(file_size_limit(64)), 5: limit.close})
    with pytest.warns(UserWarning, match="no checkpoint could be written") as caught:
        runner.learn(6)
    said = [str(w.message) for w in caught if "no checkpoint could be written" in str(w.message)]
    assert f"the newest good one is {tmp_path / 'model_2.pt'}" in said[0]
    assert "File too large" in said[0]
    # 4 was due and failed, and so did the retry after 5; that after 6 is the periodic one.
    assert [number for number, _ in find_checkpoints(tmp_path)] == [2, 6]
    assert not list(tmp_path.glob(".tmp-*"))
    # The lines that could not be written came later.
    assert [row["iteration"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_a_retry_succeeds_before_the_next_save_is_due(make_runner, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "RETRY_SECONDS", 0.0)
    runner = make_runner(PointRobot(4), tmp_path, save_interval=100, logger_backend=[])
    at(runner, {1: lambda: (tmp_path / "model_2.pt").mkdir(), 2: lambda: (tmp_path / "model_2.pt").rmdir()})
    runner.save_interval = 2
    at(runner, {2: lambda: setattr(runner, "save_interval", 100)})
    with pytest.warns(UserWarning, match=r"no checkpoint could be written .*there is no good one in"):
        runner.learn(5)
    assert [number for number, _ in find_checkpoints(tmp_path)] == [3, 5]


def test_a_full_disk_does_not_stop_the_training(make_runner, tmpfs, monkeypatch):
    monkeypatch.setattr(checkpoints, "RETRY_SECONDS", 0.0)
    run = tmpfs.place / "run"
    runner = make_runner(PointRobot(4), run, save_interval=1, log_interval=1, logger_backend="tensorboard")
    filler = tmpfs.place / "filler"
    at(runner, {2: lambda: fill(filler), 14: filler.unlink})
    with pytest.warns(UserWarning, match="disk full") as caught:
        runner.learn(20)
    said = "\n".join(str(w.message) for w in caught)
    assert "disk full: 0 bytes free" in said
    assert f"the newest good one is {run / 'model_2.pt'}" in said
    numbers = [number for number, _ in find_checkpoints(run)]
    assert numbers[:2] == [1, 2]
    assert numbers[-1] == 20
    assert load_checkpoint(run / "checkpoint_final.pt")["iter"] == 20
    assert [row["iteration"] for row in read_rows(run / "metrics.jsonl")] == [*range(1, 21)]
    assert "'jsonl' works again" in said


def test_the_last_state_is_saved_elsewhere_if_the_disk_stays_full(make_runner, tmpfs):
    runner = make_runner(PointRobot(4), tmpfs.place / "run", save_interval=1, logger_backend=[])
    at(runner, {2: lambda: fill(tmpfs.place / "filler")})
    with pytest.warns(UserWarning, match="disk full"):  # noqa: SIM117
        with pytest.raises(DiskFullError, match=r"the newest good one is .*model_2.pt; the state was saved") as caught:
            runner.learn(4)
    rescued = str(caught.value).rpartition("saved as ")[2].rstrip("'")
    assert load_checkpoint(rescued)["iter"] == 4
    os.remove(rescued)
    os.rmdir(os.path.dirname(rescued))


def test_a_read_only_disk_is_found_before_the_first_step(make_runner, tmpfs):
    class NoStep(PointRobot):
        def step(self, actions):
            raise AssertionError("the environment was stepped")

    runner = make_runner(NoStep(4), tmpfs.place / "run")
    tmpfs("remount,ro")
    with pytest.raises(OSError, match="Read-only file system"):
        runner.learn(1)


@contextlib.contextmanager
def read_only(place):
    """Mount a directory on itself, read-only, or without that right forbid writing to it; open files stay writable."""
    is_mounted = subprocess.run(["mount", "--bind", str(place), str(place)], capture_output=True).returncode == 0
    if is_mounted:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(place)], check=True)
    else:
        place.chmod(0o555)
    try:
        if os.access(place, os.W_OK):
            pytest.skip("needs the right to mount, or a user whom modes of files bind")
        yield
    finally:
        if is_mounted:
            subprocess.run(["umount", str(place)], check=True)
        else:
            place.chmod(0o755)


@pytest.mark.parametrize("ends", [True, False], ids=["for a while", "to the end"])
def test_a_disk_that_becomes_read_only_during_a_run_does_not_stop_it(make_runner, tmp_path, monkeypatch, ends):
    monkeypatch.setattr(checkpoints, "RETRY_SECONDS", 0.0)
    run, fault = tmp_path / "run", contextlib.ExitStack()
    runner = make_runner(PointRobot(4), run, save_interval=2, log_interval=1, logger_backend="tensorboard")
    at(runner, {3: lambda: fault.enter_context(read_only(run)), **({5: fault.close} if ends else {})})
    ended = contextlib.nullcontext() if ends else pytest.raises(OSError, match="last checkpoint could not be written")
    with fault, pytest.warns(UserWarning, match="no checkpoint could be written") as caught, ended as error:
        runner.learn(8)
    said = [str(w.message) for w in caught if "no checkpoint could be written" in str(w.message)]
    assert len(said) == (2 if ends else 5)  # 4 was due, the others are retries
    assert all("Read-only file system" in text or "Permission denied" in text for text in said)
    assert all(f"the newest good one is {run / 'model_2.pt'}" in text for text in said)
    assert [number for number, _ in find_checkpoints(run)] == ([2, 6, 8] if ends else [2])
    assert not list(run.glob(".tmp-*"))
    assert [row["iteration"] for row in read_rows(run / "metrics.jsonl")] == [*range(1, 9)]
    if not ends:
        rescued = str(error.value).rpartition("saved as ")[2].rstrip("'")
        assert load_checkpoint(rescued)["iter"] == 8
        os.remove(rescued)
        os.rmdir(os.path.dirname(rescued))


def test_a_moved_run_directory_ends_the_run_and_the_state_is_saved_where_it_is_now(make_runner, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    runner = make_runner(PointRobot(4), old, save_interval=2, logger_backend=[])
    at(runner, {3: lambda: old.rename(new)})
    with pytest.raises(
        RunMovedError, match=r"old was moved to .*new during the run.*model_4.pt; continue with: canter"
    ):
        runner.learn(9)
    assert not old.exists()
    assert newest_valid_checkpoint(new).name == "model_4.pt"
    assert [row["iteration"] for row in read_rows(new / "metrics.jsonl")] == [1, 2, 3, 4]
    resumed = make_runner(PointRobot(4), new, logger_backend=[])
    resumed.load(new / "model_4.pt")
    resumed.learn(1)
    assert resumed.iteration == 5


def test_a_deleted_run_directory_is_made_again_with_all_that_is_needed_to_resume(make_runner, tmp_path):
    run = tmp_path / "run"
    runner = make_runner(PointRobot(4), run, save_interval=2, logger_backend="tensorboard")

    def delete():
        while run.exists():  # TensorBoard's thread may write another file meanwhile
            shutil.rmtree(run, ignore_errors=True)

    at(runner, {3: delete})
    with pytest.warns(UserWarning, match="was deleted during the run; it is made again"):
        runner.learn(4)
    assert (run / "config.yaml").is_file()
    assert [number for number, _ in find_checkpoints(run)] == [4]
    assert list(run.glob("events.*"))


def test_a_changed_working_directory_changes_nothing(make_runner, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = make_runner(PointRobot(4), "run", save_interval=1, logger_backend=[])
    (tmp_path / "elsewhere").mkdir()
    at(runner, {1: lambda: os.chdir(tmp_path / "elsewhere")})
    runner.learn(2)
    assert [number for number, _ in find_checkpoints(tmp_path / "run")] == [1, 2]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_the_best_checkpoint_is_not_worth_the_run(make_runner, tmp_path):
    from canter.cli.train import keep_best

    runner = make_runner(PointRobot(4), tmp_path, eval_interval=1, eval_episodes=4, logger_backend=[])
    keep_best(runner, tmp_path)
    (tmp_path / "checkpoint_best.pt").mkdir()
    with pytest.warns(UserWarning, match="the best checkpoint was not kept"):
        runner.learn(1)
    (tmp_path / "checkpoint_best.pt").rmdir()
    runner.alg.policy.actor[-1].bias.data += 0.01
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        runner.learn(1)
    assert load_checkpoint(tmp_path / "checkpoint_best.pt")["iter"] == 2
