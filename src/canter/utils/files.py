"""Files of a run directory: opened for reading and appending, replaced as a whole, and the lock of the directory.

A run directory may come from a stranger. Every file in one is opened by `Folder`, which follows no link.
"""

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import re
import secrets
import shutil
import socket
import stat
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path, PureWindowsPath
from typing import BinaryIO, cast

StrPath = str | os.PathLike[str]

# Process ids are valid on one host only; several hosts may share the directory.
_HOST_TAG = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # opening a pipe that nobody writes to would wait
_TEMP_NAME = re.compile(r"\.tmp-([0-9a-f]{8})-([0-9]{1,10})-[0-9a-f]{8}")


class DiskFullError(OSError):
    """A file could not be written because the disk is full; the previous file is intact."""


class RunMovedError(OSError):
    """The run directory was moved or renamed during the run."""


class RunLockedError(RuntimeError):
    """Another process writes to this run directory."""


class Folder(contextlib.AbstractContextManager["Folder"]):
    """A directory that is opened once; files are opened relative to it. With `make` missing directories are made.

    Links are followed down to `root` (the directory itself by default), which a user named; a link below it is an
    OSError, and so is a device, a pipe or a directory in the place of a file.
    """

    def __init__(self, path: StrPath, root: StrPath | None = None, make: bool = True) -> None:
        self.path = Path(path if root is None else root)
        parts = Path(path).relative_to(self.path).parts
        if make:
            self.path.mkdir(parents=True, exist_ok=True)
        self.handle = os.open(self.path, _DIRECTORY)
        try:
            for part in parts:
                if make:
                    with contextlib.suppress(FileExistsError), whole_path(self.path / part):
                        os.mkdir(part, dir_fd=self.handle)
                inner = self.open(part, _DIRECTORY, stat.S_ISDIR, "directory")
                os.close(self.handle)
                self.handle, self.path = inner, self.path / part
        except BaseException:
            os.close(self.handle)
            raise

    def open(
        self, name: str, flags: int, is_kind: Callable[[int], bool] = stat.S_ISREG, kind: str = "plain file"
    ) -> int:
        """A descriptor of a file; the OSError of a link, or of another kind of file, says so."""
        with whole_path(self.path / name):
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(name, dir_fd=self.handle, follow_symlinks=False)
                if not is_kind(found.st_mode) and not stat.S_ISLNK(found.st_mode):
                    raise OSError(errno.EEXIST, f"it is no {kind}; remove it")
                if stat.S_ISLNK(found.st_mode) or (flags & os.O_APPEND and found.st_nlink > 1):
                    raise OSError(errno.ELOOP, "it is a link, and no link in a run directory is followed; remove it")
            return os.open(name, flags | _FILE, 0o666, dir_fd=self.handle)

    def __exit__(self, *exc: object) -> None:
        os.close(self.handle)


@contextlib.contextmanager
def whole_path(path: StrPath) -> Iterator[None]:
    """Give an OSError of a call with `dir_fd`, which names the last part of a path alone, the whole path."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def open_read(path: StrPath, root: StrPath | None = None) -> io.FileIO:
    """Open a plain file for reading, unbuffered. Links below `root`, or to a file without it, are OSErrors or followed.

    With `root` the file is one of a run directory; see `Folder`. Without it a user named the file, which may be a link.
    """
    path = Path(path) if root is not None else Path(os.path.realpath(path))
    with Folder(path.parent, root, make=False) as folder:
        return io.FileIO(folder.open(path.name, os.O_RDONLY), "r")


def open_append(path: StrPath, root: StrPath | None = None) -> io.FileIO:
    """Open a file for reading and appending, unbuffered; see `Folder`."""
    with Folder(Path(path).parent, root) as folder:
        return io.FileIO(folder.open(Path(path).name, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+")


def make_folder(path: StrPath, root: StrPath) -> None:
    """Make a directory below `root`; OSError if it, or one between the two, is a link."""
    with Folder(path, root):
        pass


class _TempFile(io.FileIO):
    """Remembers the highest position written and the first failure, which C++ writers replace with their own error."""

    reached = 0
    failure: OSError | None = None

    def write(self, data: object, /) -> int:
        self.reached = max(self.reached, self.tell() + memoryview(cast("bytes", data)).nbytes)
        try:
            return super().write(cast("bytes", data))
        except OSError as error:
            self.failure = self.failure or error
            raise


def atomic_write(
    path: StrPath, content: bytes | Callable[[BinaryIO], object], expected_size: int = 0, root: StrPath | None = None
) -> None:
    """Replace the file `path` completely, or leave it unchanged on any error; a missing directory is created.

    A function as `content` writes into a file open for reading too; `expected_size` is for the error of a full disk;
    links below `root` are errors, see `Folder`.
    """
    path = Path(path)
    temp = f".tmp-{_HOST_TAG}-{os.getpid()}-{secrets.token_hex(4)}"
    with Folder(path.parent, root) as folder:
        at = folder.handle
        # The kernel applies the umask to 0666. Reading the umask for a chmod would change it for other threads.
        with whole_path(path):
            raw = _TempFile(folder.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL), "r+b")
        try:
            with io.BufferedRandom(raw) as file:
                if isinstance(content, bytes):
                    file.write(content)
                else:
                    content(cast("BinaryIO", file))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temp, path.name, src_dir_fd=at, dst_dir_fd=at)  # which replaces a link itself
        except BaseException as error:
            with contextlib.suppress(OSError):
                raw.close()
            with contextlib.suppress(OSError):
                os.unlink(temp, dir_fd=at)
            if not (_is_disk_full(raw.failure) or _is_disk_full(error)):
                if raw.failure is not None and isinstance(error, Exception):
                    raise OSError(raw.failure.errno, raw.failure.strerror, str(path)) from error
                raise
            free, needed = shutil.disk_usage(path.parent).free, max(expected_size, raw.reached)
            before = "the previous file is intact" if path.exists() else "there was no previous file"
            text = f"disk full: {free} bytes free, {needed} or more needed; {before}. Free some space and save again"
            raise DiskFullError(errno.ENOSPC, text, str(path)) from error
        _sync_directory(at)


def _is_disk_full(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _sync_directory(handle: int) -> None:
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems cannot sync a directory; the rename itself has happened.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def remove_stale_temps(directory: StrPath) -> list[Path]:
    """Remove the temporary files of dead processes of this host; return their paths."""
    removed = []
    for path in sorted(Path(directory).glob(".tmp-*")):
        match = _TEMP_NAME.fullmatch(path.name)
        if not match or match[1] != _HOST_TAG:
            continue
        try:
            os.kill(int(match[2]), 0)
        except (ProcessLookupError, OverflowError):
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path)
        except PermissionError:
            pass
    return removed


def safe_join(root: StrPath, name: str) -> Path:
    """Return `root / name`; ValueError if the untrusted `name` leads out of `root`."""
    if not name or "\0" in name or "\\" in name:
        raise ValueError(f"unsafe file name {name!r}: it is empty or holds NUL or a backslash")
    if len(name.encode(errors="surrogateescape")) > 255:
        raise ValueError(f"unsafe file name {name[:40]!r}...: longer than 255 bytes")
    if name.startswith("/") or PureWindowsPath(name).is_absolute() or ".." in name.split("/"):
        raise ValueError(f"unsafe file name {name!r}: it must be relative and without '..'")
    joined = Path(root, name)
    if not joined.resolve().is_relative_to(Path(root).resolve()):
        raise ValueError(f"unsafe file name {name!r}: a link leads it out of {root}")
    return joined


class RunLock(contextlib.AbstractContextManager["RunLock"]):
    """Locks a run directory until `release` or the end of the process; RunLockedError names the holder's process."""

    def __init__(self, directory: StrPath) -> None:
        self.path = Path(directory) / ".lock"
        self._file = open_append(self.path)
        # A forked worker that outlives the run would keep the directory locked through its copy of the descriptor. It
        # must close, not unlock: unlocking would release the run's lock.
        os.register_at_fork(after_in_child=self._file.close)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.truncate(0)
            self._file.write(f"pid {os.getpid()} on host {socket.gethostname()}\n".encode())
        except BlockingIOError as error:
            self._file.seek(0)
            holder = self._file.read(400).decode(errors="replace").strip() or "an unknown process"
            self._file.close()
            message = f"{self.path.parent} is in use by {holder}; stop that run or choose another directory"
            raise RunLockedError(message) from error
        except OSError as error:
            warnings.warn(f"cannot lock {self.path} ({error}); do not run two trainings there", stacklevel=2)

    def find_directory(self) -> Path | None:
        """Where the locked directory is now, which may have been moved; None if it or the lock was deleted."""
        own = os.fstat(self._file.fileno())
        with contextlib.suppress(OSError):
            if os.path.samestat(own, os.stat(self.path)):
                return self.path.parent
        if own.st_nlink == 0:
            return None
        with contextlib.suppress(OSError):  # only Linux knows the new place
            return Path(os.readlink(f"/proc/self/fd/{self._file.fileno()}")).parent
        return None

    def release(self) -> None:
        """Unlock the directory; may be called twice."""
        if not self._file.closed:
            # Explicitly, because a forked worker's copy of the descriptor would keep the lock until it is closed.
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()

    def __exit__(self, *exc: object) -> None:
        self.release()
