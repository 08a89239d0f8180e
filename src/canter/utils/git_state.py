"""Which code a run was made with: commit, dirty flag and changed files of a repository; its diff only on request."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from canter.utils.files import atomic_write

_log = logging.getLogger(__name__)
_TIMEOUT_S = 10.0
_MAX_BYTES = 1_000_000
_MAX_LINE = 500
_REMOVED = "<removed: looks like a secret>"
_SECRET = re.compile(
    r"(token|secret|passw(or)?d|api_?key|credential|authorization)\w*[\"']?\s*[:=]"
    r"|AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{20}|github_pat_|glpat-|hf_[A-Za-z0-9]{20}|sk-[A-Za-z0-9_-]{20}|xox[abprs]-"
    r"|://[^/\s:@]+:[^/\s@]+@",
    re.IGNORECASE,
)
_SECRET_FILES = [
    f":(exclude,glob,icase)**/{name}" for name in (".env*", "*.env", "*.pem", "*.key", "id_rsa*", ".netrc")
]
# A repository's own settings must not make git run programs for us.
_GIT = ["git", "--no-pager", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}"]


def store_code_state(
    log_dir: str | os.PathLike[str], repos: Iterable[str | os.PathLike[str]], with_diff: bool = False
) -> list[Path]:
    """Write `log_dir/git/<repository>.diff` for the repository around each given path; return the files written.

    What is in no repository and what git cannot tell is passed over; a file that exists is left as it is. This never
    raises.

    Args:
        log_dir: The run directory.
        repos: Files or directories inside the repositories, for example a module's `__file__`.
        with_diff: Also store the changes of tracked files, at most 1 MB, without lines that look like secrets.
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
        if path not in written and _store(root, path, with_diff):
            written.append(path)
    return written


def find_repository(path: str | os.PathLike[str]) -> Path | None:
    """The nearest directory at or above `path` that holds `.git`; None if there is none."""
    try:
        start = Path(path).resolve()
        for directory in (start, *start.parents):
            # An installed package does not belong to the project whose virtual environment it lies in.
            if directory.name in ("site-packages", "dist-packages"):
                return None
            if (directory / ".git").exists():
                return directory
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in the name, a loop of links
        _log.info("cannot look for a repository around %s: %s", path, error)
    return None


def _store(root: Path, path: Path, with_diff: bool) -> bool:
    try:
        if path.exists():
            return False
        text = _describe(root, with_diff).encode()
        atomic_write(path, lambda file: _put(file, text))
    except (OSError, subprocess.SubprocessError) as error:
        _log.info("the code state of %s is not stored: %s", root, error)
        return False
    return True


def _put(file: BinaryIO, data: bytes) -> None:
    file.write(data)


def _describe(root: Path, with_diff: bool) -> str:
    try:
        commit = _git(root, "rev-parse", "HEAD").strip()
    except subprocess.SubprocessError:
        commit = "none yet"
    status = _git(root, "status", "--porcelain")
    lines = [f"repository: {root.name}", f"commit: {commit}", f"dirty: {'yes' if status.strip() else 'no'}", ""]
    lines += ["# git status --porcelain", status.rstrip("\n")]
    if with_diff and commit != "none yet":
        diff = _git(root, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD", "--", ".", *_SECRET_FILES)
        lines += ["", "# git diff HEAD", _scrub(diff)]
    return "\n".join(lines) + "\n"


def _git(root: Path, *args: str) -> str:
    """The first megabyte of what git prints."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    with tempfile.TemporaryFile() as output:
        subprocess.run(
            [*_GIT, *args],
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
            check=True,
        )
        size = output.seek(0, os.SEEK_END)
        output.seek(0)
        text = output.read(_MAX_BYTES).decode(errors="replace")
    return text if size <= _MAX_BYTES else f"{text}\n<cut at {_MAX_BYTES} of {size} bytes>\n"


def _scrub(diff: str) -> str:
    kept = []
    in_key = False
    for line in diff.splitlines():
        in_key = in_key or ("-----BEGIN" in line and "PRIVATE KEY" in line)
        if in_key or _SECRET.search(line):
            kept.append(line[:1] + _REMOVED)
        elif len(line) > _MAX_LINE:
            kept.append(line[:_MAX_LINE] + "<cut>")
        else:
            kept.append(line)
        in_key = in_key and "-----END" not in line
    return "\n".join(kept)
