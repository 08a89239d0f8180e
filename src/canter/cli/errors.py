"""Errors and exit codes of commands: a user's mistake is one line and an exit code, never a traceback."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

USAGE, NUMERIC, STORAGE, INTERRUPTED = 2, 5, 6, 130


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


def report(error: BaseException) -> int:
    """Print an error in one line and return its exit code; raise a bug, and any error if CANTER_TRACEBACK is set."""
    code = USAGE if isinstance(error, UserError) else INTERRUPTED if isinstance(error, KeyboardInterrupt) else None
    if rank := os.environ.get("WORLD_SIZE", "1") != "1" and f"rank {os.environ.get('RANK')}: ":
        from canter.utils.distributed import RANKS, RankError

        RANKS.leave(error)
        if isinstance(error, RankError):
            code, rank = error.code, ""
            if not error.is_told:
                return code
    if code is None:
        from canter.storage.rollout_files import DatasetError, TrajectoryFileError
        from canter.utils.checkpoint import CheckpointError
        from canter.utils.files import RunLockedError
        from canter.utils.metrics import NonFiniteError

        storage = (CheckpointError, RunLockedError, OSError, DatasetError, TrajectoryFileError)
        code = NUMERIC if isinstance(error, NonFiniteError) else STORAGE if isinstance(error, storage) else None
    if code is None or os.environ.get("CANTER_TRACEBACK"):
        raise error
    text = "interrupted" if isinstance(error, KeyboardInterrupt) else " ".join(str(error).split())
    print(f"canter: {rank or ''}{text or type(error).__name__}", file=sys.stderr)
    return code
