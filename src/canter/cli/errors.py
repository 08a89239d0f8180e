"""Errors and exit codes of commands: a user's mistake is one line and an exit code, never a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

USAGE, NUMERIC, STORAGE, INTERRUPTED = 2, 5, 6, 130
TRACEBACK_VARIABLE = "CANTER_TRACEBACK"


class UserError(Exception):
    """A request that cannot be fulfilled; the message names it and the way out."""


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn errors of a command's set-up, which come from the user's settings, into `UserError`."""
    import gymnasium

    refusals = (ValueError, TypeError, LookupError, ImportError, NotImplementedError, FileNotFoundError, MemoryError)
    try:
        yield
    except (*refusals, gymnasium.error.Error) as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise UserError(str(text)) from error


def exit_code(error: BaseException) -> int | None:
    """The exit code of an error; None for a bug, whose traceback is shown."""
    if isinstance(error, UserError):
        return USAGE
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    from canter.storage.rollout_files import DatasetError, TrajectoryFileError
    from canter.utils.checkpoint import CheckpointError
    from canter.utils.files import RunLockedError
    from canter.utils.metrics import NonFiniteError

    if isinstance(error, NonFiniteError):
        return NUMERIC
    storage_errors = (CheckpointError, RunLockedError, OSError, DatasetError, TrajectoryFileError)
    return STORAGE if isinstance(error, storage_errors) else None


def report(error: BaseException) -> None:
    """Print one line to standard error; raise the error if CANTER_TRACEBACK is set."""
    if os.environ.get(TRACEBACK_VARIABLE):
        raise error
    text = "interrupted" if isinstance(error, KeyboardInterrupt) else " ".join(str(error).split())
    print(f"canter: {text or type(error).__name__}", file=sys.stderr)
