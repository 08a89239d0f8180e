"""Files of a run directory: every one is replaced whole or not at all, inside its directory, by one process."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import re
import secrets
import shutil
import socket
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path, PureWindowsPath
from types import TracebackType
from typing import BinaryIO, cast

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# Process ids mean nothing on another host that shares the directory.
_HOST_TAG = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
_TEMP_NAME = re.compile(r"\.tmp-([0-9a-f]{8})-([0-9]{1,10})-[0-9a-f]{8}")


class DiskFullError(OSError):
    """A file could not be written for lack of space; what was there before is intact."""


class RunLockedError(RuntimeError):
    """Another process writes to this run directory."""


class _TempFile(io.FileIO):
    """Remembers how far the writer got and the first failure, which C++ writers replace with their own error."""

    reached = 0
    failure: OSError | None = None

    def write(self, data: object, /) -> int:
        self.reached = max(self.reached, self.tell() + memoryview(cast("bytes", data)).nbytes)
        try:
            return super().write(cast("bytes", data))
        except OSError as error:
            self.failure = self.failure or error
            raise


def atomic_write(path: str | os.PathLike[str], write: Callable[[BinaryIO], None], expected_size: int = 0) -> None:
    """Replace `path` by what `write` puts into the open file it is given; on any error `path` keeps what it had.

    Args:
        path: The file to replace; its directory is made if it is missing.
        write: Gets a binary file open for reading and writing.
        expected_size: Bytes the writer needs, if known; used in the message about a full disk.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.parent / f".tmp-{_HOST_TAG}-{os.getpid()}-{secrets.token_hex(4)}"
    # The kernel applies the umask to 0666 here; reading it in order to chmod would change it for other threads.
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
    raw = _TempFile(os.open(temp, flags | getattr(os, "O_BINARY", 0), 0o666), "r+b")
    try:
        with io.BufferedRandom(raw) as file:
            write(cast("BinaryIO", file))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            raw.close()
        with contextlib.suppress(OSError):
            temp.unlink()
        if _is_disk_full(raw.failure) or _is_disk_full(error):
            raise _disk_full(path, max(expected_size, raw.reached)) from error
        raise
    _sync_directory(path.parent)


def _is_disk_full(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


def _disk_full(path: Path, needed: int) -> DiskFullError:
    free = shutil.disk_usage(path.parent).free
    before = "the previous file is intact" if path.exists() else "there was no previous file"
    return DiskFullError(
        errno.ENOSPC,
        f"disk full: {free} bytes free, {needed} or more needed; {before}. Free some space and save again",
        str(path),
    )


def _sync_directory(directory: Path) -> None:
    if os.name == "nt":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems cannot sync a directory; the rename itself has happened.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def remove_stale_temps(directory: str | os.PathLike[str]) -> list[Path]:
    """Remove temporary files that processes of this host left behind when they died; return their paths."""
    removed = []
    for path in sorted(Path(directory).glob(".tmp-*")):
        match = _TEMP_NAME.fullmatch(path.name)
        if match and match[1] == _HOST_TAG and not _is_alive(int(match[2])):
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path)
    return removed


def _is_alive(pid: int) -> bool:
    if os.name == "nt":  # there os.kill(pid, 0) would end the process
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def safe_join(root: str | os.PathLike[str], name: str) -> Path:
    """`root / name`, where `name` is data and must stay inside `root`; ValueError if it would not."""
    parts = name.split("/")
    if not name or "\0" in name or "\\" in name:
        raise ValueError(f"unsafe file name {name!r}: it is empty or holds NUL or a backslash")
    if len(name.encode(errors="surrogateescape")) > 255:
        raise ValueError(f"unsafe file name {name[:40]!r}...: longer than 255 bytes")
    if name.startswith("/") or PureWindowsPath(name).is_absolute() or ".." in parts:
        raise ValueError(f"unsafe file name {name!r}: it must be relative and without '..'")
    base = Path(root)
    joined = base / name
    if not joined.resolve().is_relative_to(base.resolve()):
        raise ValueError(f"unsafe file name {name!r}: a link leads it out of {base}")
    return joined


class RunLock:
    """Holds a run directory for one writer until `release` or the end of the process, however it ends.

    Raises RunLockedError, naming the holder's process and host, if another has it.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory) / ".lock"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._handle: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            self._lock(self._handle)
        except BaseException:
            os.close(self._handle)
            self._handle = None
            raise
        _open_locks.add(self)

    def _lock(self, handle: int) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(handle, 400, 0).decode(errors="replace").strip() or "an unknown process"
            raise RunLockedError(
                f"{self.path.parent} is in use by {holder}; stop that run or choose another directory"
            ) from error
        except OSError as error:
            warnings.warn(f"cannot lock {self.path} ({error}); do not run two trainings there", stacklevel=4)
            return
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"pid {os.getpid()} on host {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        """Let another process have the directory; harmless when repeated."""
        if self._handle is not None and fcntl is not None:
            # Explicitly, as a copy of the descriptor in a worker being forked would keep the lock a little longer.
            with contextlib.suppress(OSError):
                fcntl.flock(self._handle, fcntl.LOCK_UN)
        self._close()

    def _close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


_open_locks: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _close_inherited_locks() -> None:
    # A forked worker shares the descriptor: if it outlived the run, it would keep the directory locked. It must
    # not unlock, which would take the lock from the run.
    for lock in list(_open_locks):
        lock._close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited_locks)
