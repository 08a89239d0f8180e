import errno
import os
import subprocess
import sys
import threading

import pytest

from canter.utils.files import (
    DiskFullError,
    RunLock,
    RunLockedError,
    atomic_write,
    make_folder,
    open_append,
    remove_stale_temps,
    safe_join,
)


def put(content):
    return lambda file: file.write(content)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("write", [lambda p: atomic_write(p, b"x"), open_append, lambda p: make_folder(p, p.parent)])
def test_a_place_that_cannot_be_written_is_named_with_its_whole_path(tmp_path, monkeypatch, write):
    def refuse(path, *args, dir_fd=None, **kwargs):
        if dir_fd is not None:
            raise OSError(errno.EROFS, "Read-only file system", path)
        return os_open(path, *args, **kwargs)

    os_open = os.open
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(OSError, match="Read-only") as caught:
        write(tmp_path / "name")
    assert caught.value.filename == str(tmp_path / "name")


def test_failed_write_keeps_the_old_file_and_removes_its_own_temp(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"old")

    def fail(file):
        file.write(b"half of the n")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        atomic_write(path, fail)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.txt"]


def test_target_is_never_half_written_while_writing(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"old")
    seen = []

    def write(file):
        file.write(b"n" * 100_000)
        file.flush()
        seen.append((path.read_bytes(), names(tmp_path)))

    atomic_write(path, write)
    content, files = seen[0]
    assert content == b"old"
    temp = next(name for name in files if name != "a.txt")
    assert temp.startswith(".tmp-")
    assert f"-{os.getpid()}-" in temp
    assert not temp.endswith(".pt")


def test_file_and_directory_are_synced_before_and_after_the_rename(tmp_path, monkeypatch):
    events = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(handle):
        kind = "directory" if os.path.isdir(f"/proc/self/fd/{handle}") else "file"
        events.append(f"sync {kind}")
        real_fsync(handle)

    monkeypatch.setattr(os, "fsync", fsync)

    def replace(*names, **at):
        events.append("replace")
        real_replace(*names, **at)

    monkeypatch.setattr(os, "replace", replace)
    atomic_write(tmp_path / "a", put(b"x"))
    assert events == ["sync file", "replace", "sync directory"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600), (0o002, 0o664)])
def test_mode_is_0666_without_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        atomic_write(tmp_path / "a", put(b"x"))
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_error_gives_path_and_bytes(tmp_path, monkeypatch, code):
    path = tmp_path / "model_2.pt"
    path.write_bytes(b"old")

    def full(handle):
        raise OSError(code, "no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError) as caught:
        atomic_write(path, put(b"x" * 50), expected_size=7_000_000)
    text = str(caught.value)
    assert "disk full" in text
    assert str(path) in text
    assert "7000000" in text
    assert "previous file is intact" in text
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["model_2.pt"]


def test_full_disk_error_is_raised_even_if_the_writer_hides_the_cause(tmp_path, monkeypatch):
    import resource

    def write(file):
        try:
            file.write(b"x" * 300_000)
            file.flush()
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598") from None

    # A file size limit makes a real write fail, with another errno.
    monkeypatch.setattr("canter.utils.files._is_disk_full", lambda e: isinstance(e, OSError) and e.errno == errno.EFBIG)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(DiskFullError, match="300000 or more needed; there was no previous file"):
            atomic_write(tmp_path / "a", write)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == []


def test_other_errors_are_not_reported_as_a_full_disk(tmp_path, monkeypatch):
    def denied(handle):
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(os, "fsync", denied)
    with pytest.raises(OSError, match="broken disk") as caught:
        atomic_write(tmp_path / "a", put(b"x"))
    assert not isinstance(caught.value, DiskFullError)
    assert names(tmp_path) == []


def dead_pid():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_only_temps_of_dead_processes_of_this_host_are_removed(tmp_path):
    made = []
    atomic_write(tmp_path / "a", lambda file: made.append(next(tmp_path.glob(".tmp-*")).name))
    mine = made[0]
    dead = mine.replace(f"-{os.getpid()}-", f"-{dead_pid()}-")
    other_host = dead.replace(dead.split("-")[1], "0" * 8)
    for name in (mine, dead, other_host, ".tmp-notes"):
        (tmp_path / name).write_bytes(b"")
    assert [path.name for path in remove_stale_temps(tmp_path)] == [dead]
    assert names(tmp_path) == sorted([mine, other_host, ".tmp-notes", "a"])


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../x", "a/../../x", "a\0b", "a\\b", "", "x" * 256, "é" * 128, "C:/x", ".."],
)
def test_safe_join_refuses_names_that_could_leave(tmp_path, name):
    with pytest.raises(ValueError, match="unsafe file name"):
        safe_join(tmp_path, name)


@pytest.mark.parametrize("name", ["model_5.pt", "git/canter.diff", "запуск/実験.txt", "x" * 255, "a..b"])
def test_safe_join_accepts_names_that_stay(tmp_path, name):
    assert safe_join(tmp_path, name) == tmp_path / name


def test_safe_join_refuses_a_link_that_leads_out(tmp_path):
    root = tmp_path / "run"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="a link leads it out"):
        safe_join(root, "link/x")


def test_second_writer_is_refused_with_pid_and_host_of_the_first(tmp_path):
    import socket

    with RunLock(tmp_path), pytest.raises(RunLockedError) as caught:
        RunLock(tmp_path)
    assert f"pid {os.getpid()} on host {socket.gethostname()}" in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_released_lock_can_be_taken_and_names_the_new_holder(tmp_path):
    first = RunLock(tmp_path)
    first.release()
    first.release()
    with RunLock(tmp_path):
        assert (tmp_path / ".lock").read_text().startswith(f"pid {os.getpid()} on host ")


def test_lock_is_released_when_its_holder_is_killed(tmp_path):
    code = f"from canter.utils.files import RunLock as L; lock = L({str(tmp_path)!r}); print(1, flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline()
    with pytest.raises(RunLockedError, match=f"pid {child.pid} "):
        RunLock(tmp_path)
    child.kill()
    child.wait()
    child.stdout.close()
    child.stdin.close()
    RunLock(tmp_path).release()


def test_forked_worker_neither_frees_nor_keeps_the_lock(tmp_path):
    lock = RunLock(tmp_path)
    from_child, to_parent = os.pipe()
    from_parent, to_child = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(to_child)
        os.write(to_parent, b"x")
        os.read(from_parent, 1)  # until the parent has closed its end
        os._exit(0)
    try:
        os.read(from_child, 1)
        with pytest.raises(RunLockedError):
            RunLock(tmp_path)
        lock._file.close()  # as at the end of the process: closed without unlocking
        RunLock(tmp_path).release()
    finally:
        for handle in (from_child, to_parent, from_parent, to_child):
            os.close(handle)
        os.waitpid(pid, 0)


def test_threads_may_write_the_same_file_at_once(tmp_path):
    path = tmp_path / "a"
    threads = [threading.Thread(target=lambda i=i: atomic_write(path, put(b"%d" % i * 1000))) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(path.read_bytes())) == 1
    assert names(tmp_path) == ["a"]
