"""Nothing is written through a link of a run directory, whoever put it there."""

import os
import subprocess
import sys

import numpy as np
import pytest

from canter.runners.run_log import store_code
from canter.storage.rollout_files import TrajectoryWriter
from canter.utils.checkpoint import save_checkpoint
from canter.utils.files import Folder, RunLock, atomic_write, make_folder, open_append, open_read
from canter.utils.logging import Logger

STEPS = {name: np.zeros((2, 1), np.float32) for name in ("observations", "actions", "rewards", "dones")}


@pytest.fixture
def precious(tmp_path):
    """A file outside the run directory that must not change."""
    path = tmp_path / "precious"
    path.write_text("mine\n")
    yield path
    assert path.read_text() == "mine\n"


@pytest.fixture
def outside(tmp_path):
    """A directory outside the run directory in which nothing may appear."""
    path = tmp_path / "outside"
    path.mkdir()
    yield path
    assert list(path.iterdir()) == []


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.mark.parametrize(
    ("make", "reason"),
    [(os.symlink, "is a link"), (os.link, "is a link"), (os.mkfifo, "no plain"), (os.mkdir, "no plain")],
)
@pytest.mark.parametrize(("name", "use"), [(".lock", RunLock), ("metrics.jsonl", lambda run: Logger(None, run))])
def test_a_file_that_is_no_file_of_the_run_is_not_opened_for_writing(run, precious, make, reason, name, use):
    make(*([precious] if make in (os.symlink, os.link) else []), run / name)
    with pytest.raises(OSError, match=rf"{reason}.*remove it.*{name}"):
        use(run)


def test_a_link_to_nothing_creates_no_file(run, tmp_path):
    (run / "metrics.jsonl").symlink_to(tmp_path / "new")
    with pytest.raises(OSError, match="is a link"):
        Logger(None, run)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("make", [os.symlink, os.mkfifo, os.mkdir])
def test_a_file_of_a_run_is_read_through_no_link_and_from_no_pipe(run, tmp_path, precious, make):
    make(*([precious] if make is os.symlink else []), run / "config.yaml")
    with pytest.raises(OSError, match="remove it"):
        open_read(run / "config.yaml", run)
    (tmp_path / "named.yaml").symlink_to(precious)  # which the user chose
    with open_read(tmp_path / "named.yaml") as file:
        assert file.read() == b"mine\n"
    (run / "films").symlink_to(tmp_path)
    with pytest.raises(OSError, match="is a link"):
        open_read(run / "films" / "precious", run)


def test_an_atomic_write_replaces_a_link_itself(run, precious):
    (run / "config.yaml").symlink_to(precious)
    atomic_write(run / "config.yaml", b"new")
    assert (run / "config.yaml").read_bytes() == b"new"
    assert not (run / "config.yaml").is_symlink()


def test_the_code_state_is_not_written_into_a_linked_folder(run, outside, tmp_path):
    repository = tmp_path / "code"
    subprocess.run(["git", "init", "-q", str(repository)], check=True)
    store_code(tmp_path / "other", [str(repository)], True, Logger(None, None))
    assert (tmp_path / "other" / "git" / "code.diff").is_file()
    (run / "git").symlink_to(outside)
    store_code(run, [str(repository)], True, Logger(None, None))


def test_the_status_beside_a_diff_is_not_written_through_a_link(run, precious, monkeypatch):
    (run / "git").mkdir()
    (run / "git" / "code.diff").write_bytes(b"commit: x\n\n# git diff HEAD\n+secret\n")
    (run / "git" / "code.status").symlink_to(precious)
    monkeypatch.setattr("canter.runners.run_log.store_code_state", lambda *_: [run / "git" / "code.diff"])
    store_code(run, [], True, Logger(None, None))
    assert (run / "git" / "code.status").read_bytes() == b"commit: x\n"


def test_a_checkpoint_is_not_written_into_a_linked_folder_of_the_run(run, outside):
    (run / "crash").symlink_to(outside)
    with pytest.raises(OSError, match="is a link"):
        save_checkpoint(run / "crash" / "model_1.pt", {}, root=run)


def test_trajectories_are_not_written_into_a_linked_folder(run, outside):
    (run / "trajectory_0").symlink_to(outside)  # an empty folder, which a writer fills first
    writer = TrajectoryWriter(run)
    writer.add(0, STEPS, 0)
    with pytest.raises(OSError, match="is a link"):
        writer.flush()
    (run / "trajectory_0").unlink()
    writer.close()


def test_a_manifest_is_not_appended_through_a_link(run, precious):
    writer = TrajectoryWriter(run)
    writer.add(0, STEPS, 0)
    (run / "manifest.jsonl").unlink()
    (run / "manifest.jsonl").symlink_to(precious)
    with pytest.raises(OSError, match="is a link"):
        writer.flush()
    (run / "manifest.jsonl").unlink()
    writer.close()


def test_folders_are_made_below_the_root_and_links_above_it_are_followed(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")  # the user's own, and above the run
    atomic_write(tmp_path / "runs" / "a" / "git" / "x.diff", b"1", root=tmp_path / "runs" / "a")
    assert (tmp_path / "disk/a/git/x.diff").read_bytes() == b"1"
    with open_append(tmp_path / "runs" / "log") as file:
        file.write(b"1")
    assert (tmp_path / "disk/log").read_bytes() == b"1"


def test_a_linked_folder_is_refused_at_any_depth(run, outside):
    (run / "a").mkdir()
    (run / "a" / "b").symlink_to(outside)
    with pytest.raises(OSError, match="is a link"):
        make_folder(run / "a" / "b" / "c", run)


def test_a_folder_leaves_no_descriptor_open(run):
    before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    for _ in range(3):
        make_folder(run / "a" / "b", run)
        open_append(run / "x", run).close()
        with pytest.raises(OSError):
            Folder(run / "x" / "y", run)
    assert len(os.listdir("/proc/self/fd") if before else []) == len(before)


@pytest.mark.parametrize("backend", ["wandb", "swanlab"])
def test_services_get_no_linked_folder(run, outside, backend, monkeypatch):
    class Service:
        def init(self, **settings):
            raise AssertionError("reached")

    monkeypatch.setitem(sys.modules, backend, Service())
    (run / backend).symlink_to(outside)
    with pytest.raises(OSError, match="is a link"):
        Logger(backend, run)


def test_settings_of_wandb_in_a_run_directory_are_refused(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    (run / "wandb").mkdir()
    (run / "wandb" / "settings").write_text("[default]\nbase_url = https://example.invalid\n")
    with pytest.raises(ValueError, match=r"wandb/settings has settings of W&B.*remove the file"):
        Logger("wandb", run)
