"""The state of the code that a run was trained with: commit, changed files and, on request, their diff."""

import hashlib
import logging
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from canter.utils.files import StrPath, atomic_write

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
