"""Disks and directories that fail or vanish during a run; see `fault_table` for full and read-only ones."""

import contextlib
import os
import resource
import shutil
import warnings

import pytest

from canter.envs.torch_envs import PointRobot
from canter.runners import checkpoints
from canter.utils.checkpoint import find_checkpoints, load_checkpoint, newest_valid_checkpoint
from canter.utils.files import RunMovedError
from canter.utils.logging import read_rows


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

    at(runner, {3: lambda: shutil.rmtree(run)})
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
