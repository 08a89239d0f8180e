"""What a command ends with: a mistake of the user's is one line and an exit code, never a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

USAGE, NUMERIC, STORAGE, INTERRUPTED = 2, 5, 6, 130
TRACEBACK_VARIABLE = "CANTER_TRACEBACK"


class UserError(Exception):
    """Something the user asked for cannot be done; the message says what and the way out."""


@contextmanager
def user_errors() -> Iterator[None]:
    """Around the set-up of a command, where whatever is refused was asked for by the user."""
    import gymnasium

    refusals = (ValueError, TypeError, LookupError, ImportError, NotImplementedError, FileNotFoundError, MemoryError)
    try:
        yield
    except (*refusals, gymnasium.error.Error) as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise UserError(str(text)) from error


def exit_code(error: BaseException) -> int | None:
    """The exit code that tells a script what happened; None if the traceback is what the user needs."""
    from canter.storage.rollout_files import DatasetError, TrajectoryFileError
    from canter.utils.checkpoint import CheckpointError
    from canter.utils.files import RunLockedError
    from canter.utils.metrics import NonFiniteError

    if isinstance(error, UserError):
        return USAGE
    if isinstance(error, NonFiniteError):
        return NUMERIC
    if isinstance(error, (CheckpointError, RunLockedError, OSError, DatasetError, TrajectoryFileError)):
        return STORAGE
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return None


def report(error: BaseException) -> None:
    """One line on standard error."""
    if os.environ.get(TRACEBACK_VARIABLE):
        raise error
    text = "interrupted" if isinstance(error, KeyboardInterrupt) else " ".join(str(error).split())
    print(f"canter: {text or type(error).__name__}", file=sys.stderr)
