"""Files of a run directory: opening them for writing, atomic writes, the lock of the directory, the code's state.

A run directory may come from a stranger. Every file in one is opened for writing by `Folder`, which follows no link.
"""

import contextlib
import errno
import hashlib
import io
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PureWindowsPath
from typing import Any, BinaryIO, cast

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

StrPath = str | os.PathLike[str]

# Process ids are valid on one host only; several hosts may share the directory.
_HOST_TAG = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
_HAS_DIR_FD = os.open in os.supports_dir_fd  # not on Windows
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_TEMP_NAME = re.compile(r"\.tmp-([0-9a-f]{8})-([0-9]{1,10})-[0-9a-f]{8}")


class DiskFullError(OSError):
    """A file could not be written because the disk is full; the previous file is intact."""


class RunMovedError(OSError):
    """The run directory was moved or renamed during the run."""


class RunLockedError(RuntimeError):
    """Another process writes to this run directory."""


@contextlib.contextmanager
def whole_path(path: StrPath) -> Iterator[None]:
    """Give an OSError of a call with `dir_fd`, which names the last part of a path alone, the whole path."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


class Folder(contextlib.AbstractContextManager["Folder"]):
    """A directory that is opened once; files are opened relative to it. Missing directories are made.

    Links are followed down to `root` (the directory itself by default), which a user named; a link below it is an
    OSError.
    """

    def __init__(self, path: StrPath, root: StrPath | None = None) -> None:
        self.path = Path(path)
        at = self.path if root is None else Path(root)
        parts = self.path.relative_to(at).parts
        at.mkdir(parents=True, exist_ok=True)
        self.handle = os.open(at, _DIRECTORY) if _HAS_DIR_FD else None
        try:
            for part in parts:
                where = part if _HAS_DIR_FD else at / part
                at = at / part
                with contextlib.suppress(FileExistsError), whole_path(at):
                    os.mkdir(where, dir_fd=self.handle)
                self._check(where, at, stat.S_ISDIR, "directory")
                if self.handle is not None:
                    inner = os.open(part, _DIRECTORY | _NO_LINK, dir_fd=self.handle)
                    os.close(self.handle)
                    self.handle = inner
        except BaseException:
            self.close()
            raise

    def _check(self, where: StrPath, path: Path, is_kind: Callable[[int], bool], kind: str) -> None:
        """Refuse a name that is a link or anything else but the wanted kind of file."""
        try:
            found = os.stat(where, dir_fd=self.handle, follow_symlinks=False)
        except FileNotFoundError:
            return
        if is_kind(found.st_mode) and (kind == "directory" or found.st_nlink == 1):
            return
        if not is_kind(found.st_mode) and not stat.S_ISLNK(found.st_mode):
            raise OSError(errno.EEXIST, f"it is no {kind}; remove it", str(path))
        text = "it is a link, and nothing is written through links in a run directory; remove it"
        raise OSError(errno.ELOOP, text, str(path))

    def name(self, name: str) -> str:
        """The name of a file for calls that get `dir_fd=handle`."""
        return name if _HAS_DIR_FD else str(self.path / name)

    def append(self, name: str) -> io.FileIO:
        """Open a file for reading and appending, unbuffered; a link or a special file is an OSError."""
        self._check(self.name(name), self.path / name, stat.S_ISREG, "plain file")
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | _NO_LINK
        with whole_path(self.path / name):
            return io.FileIO(os.open(self.name(name), flags, 0o666, dir_fd=self.handle), "a+")

    def close(self) -> None:
        """Free the descriptor; may be called twice."""
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_append(path: StrPath, root: StrPath | None = None) -> io.FileIO:
    """Open a file for reading and appending; see `Folder`."""
    with Folder(Path(path).parent, root) as folder:
        return folder.append(Path(path).name)


def make_folder(path: StrPath, root: StrPath) -> None:
    """Make a directory below `root`; OSError if it, or one between the two, is a link."""
    Folder(path, root).close()


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
        at, temp = folder.handle, folder.name(temp)
        # The kernel applies the umask to 0666. Reading the umask for a chmod would change it for other threads.
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_LINK
        with whole_path(path):
            raw = _TempFile(os.open(temp, flags, 0o666, dir_fd=at), "r+b")
        try:
            with io.BufferedRandom(raw) as file:
                if isinstance(content, bytes):
                    file.write(content)
                else:
                    content(cast("BinaryIO", file))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temp, folder.name(path.name), src_dir_fd=at, dst_dir_fd=at)  # which replaces a link itself
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
        if at is not None:
            _sync_directory(at)


def _is_disk_full(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


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
        if not match or match[1] != _HOST_TAG or os.name == "nt":  # on Windows os.kill(pid, 0) ends the process
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
        if fcntl is None:
            return
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
        if not self._file.closed and fcntl is not None:
            # Explicitly, because a forked worker's copy of the descriptor would keep the lock until it is closed.
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()

    def __exit__(self, *exc: object) -> None:
        self.release()


_log = logging.getLogger(__name__)
_GIT_TIMEOUT_S = 10.0
_MAX_GIT_BYTES = 1_000_000
_MAX_DIFF_LINE = 500
_SECRET = re.compile(
    r"(token|secret|passw(or)?d|api_?key|credential|authorization)\w*[\"']?\s*[:=]"
    r"|AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{20}|github_pat_|glpat-|hf_[A-Za-z0-9]{20}|sk-[A-Za-z0-9_-]{20}|xox[abprs]-"
    r"|://[^/\s:@]+:[^/\s@]+@",
    re.IGNORECASE,
)
_SECRET_FILES = (".env*", "*.env", "*.pem", "*.key", "id_rsa*", ".netrc")


def store_code_state(log_dir: StrPath, repos: Iterable[StrPath], with_diff: bool = False) -> list[Path]:
    """Write `log_dir/git/<repository>.diff` (commit, dirty flag, changed files) for each repository; return the paths.

    `repos` are paths inside the repositories; others, and git errors, are skipped with a log message. `with_diff` also
    stores the changes of tracked files, at most 1 MB, without lines that look like secrets. Never raises.
    """
    written: list[Path] = []
    names: dict[str, Path] = {}
    for given in repos:
        root = find_repository(given)
        if root is None:
            _log.info("%s is in no git repository; its code state is not stored", given)
            continue
        name = root.name or "root"
        if names.setdefault(name, root) != root:
            name += "-" + hashlib.sha256(str(root).encode()).hexdigest()[:6]
        path = Path(log_dir) / "git" / f"{name}.diff"
        try:
            if not path.exists():
                atomic_write(path, _describe_repository(root, with_diff).encode(), root=log_dir)
                written.append(path)
        except (OSError, subprocess.SubprocessError) as error:
            _log.info("the code state of %s is not stored: %s", root, error)
    return written


def find_repository(path: StrPath) -> Path | None:
    """Return the nearest directory at or above `path` that holds `.git`, or None."""
    try:
        start = Path(path).resolve()
        for directory in (start, *start.parents):
            # An installed package does not belong to the project around its virtual environment.
            if directory.name in ("site-packages", "dist-packages"):
                return None
            if (directory / ".git").exists():
                return directory
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in the name, a loop of links
        _log.info("cannot look for a repository around %s: %s", path, error)
    return None


def _describe_repository(root: Path, with_diff: bool) -> str:
    try:
        commit = _git(root, "rev-parse", "HEAD").strip()
    except subprocess.SubprocessError:
        commit = "none yet"
    status = _git(root, "status", "--porcelain")
    lines = [f"repository: {root.name}", f"commit: {commit}", f"dirty: {'yes' if status.strip() else 'no'}", ""]
    lines += ["# git status --porcelain", status.rstrip("\n")]
    if with_diff and commit != "none yet":
        excluded = [f":(exclude,glob,icase)**/{name}" for name in _SECRET_FILES]
        diff = _git(root, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD", "--", ".", *excluded)
        lines += ["", "# git diff HEAD", _without_secrets(diff)]
    return "\n".join(lines) + "\n"


def _git(root: Path, *args: str) -> str:
    """Run git and return the first megabyte of its output."""
    # A repository's own settings must not make git run programs.
    command = ["git", "--no-pager", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", *args]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    options: Any = {"env": environment, "stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": True}
    with tempfile.TemporaryFile() as output:
        subprocess.run(command, cwd=root, stdout=output, timeout=_GIT_TIMEOUT_S, **options)
        size = output.seek(0, os.SEEK_END)
        output.seek(0)
        text = output.read(_MAX_GIT_BYTES).decode(errors="replace")
    return text if size <= _MAX_GIT_BYTES else f"{text}\n<cut at {_MAX_GIT_BYTES} of {size} bytes>\n"


def _without_secrets(diff: str) -> str:
    lines, in_key = diff.splitlines(), False
    for i, line in enumerate(lines):
        in_key = in_key or ("-----BEGIN" in line and "PRIVATE KEY" in line)
        if in_key or _SECRET.search(line):
            lines[i] = line[:1] + "<removed: looks like a secret>"
        elif len(line) > _MAX_DIFF_LINE:
            lines[i] = line[:_MAX_DIFF_LINE] + "<cut>"
        in_key = in_key and "-----END" not in line
    return "\n".join(lines)
