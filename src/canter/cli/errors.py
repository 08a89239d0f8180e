"""Errors and exit codes of commands: a user's mistake is one line and an exit code, never a traceback."""

import contextlib
import os
import select
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

USAGE, NUMERIC, STORAGE, INTERRUPTED, CLOSED_PIPE = 2, 5, 6, 130, 141


class UserError(Exception):
    """A request that cannot be fulfilled; the message names it and the way out."""


@contextlib.contextmanager
def user_errors(config: object = None) -> Iterator[None]:
    """Turn errors of a command's set-up, which come from the user's settings, into `UserError`.

    With the path of a `config` that is being used, also those that damaged settings cause anywhere.
    """
    import gymnasium

    refusals = (ValueError, TypeError, LookupError, ImportError, NotImplementedError, FileNotFoundError, MemoryError)
    where = "" if config is None else f"{config}: "
    try:
        yield
    except (*refusals, gymnasium.error.Error) as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        is_missing = config is not None and isinstance(error, KeyError) and " " not in str(text)
        raise UserError(where + (f"it lacks {text!r}" if is_missing else str(text))) from error
    except UserError as error:
        if str(config) in str(error) or config is None:
            raise
        raise UserError(f"{where}{error}") from error
    except Exception as error:
        if config is None or exit_code(error) is not None:
            raise
        raise UserError(f"{where}{type(error).__name__}: {error}; CANTER_TRACEBACK=1 shows where") from error


@contextlib.contextmanager
def short_warnings() -> Iterator[None]:
    """Print warnings of canter in one line, without the line of its code that they would name."""
    folder, usual = str(Path(__file__).parents[1]), warnings.formatwarning

    def short(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        is_own = category is UserWarning and filename.startswith(folder)
        text = f"canter: warning: {printable(str(message))}\n"
        return text if is_own else usual(message, category, filename, lineno, line)

    warnings.formatwarning = short
    try:
        yield
    finally:
        warnings.formatwarning = usual


def printable(text: str) -> str:
    """The text with escapes in place of characters that would steer a terminal; it may hold names of a stranger."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def exit_code(error: BaseException) -> int | None:
    """The exit code of an error that a user can cause; None for any other."""
    if isinstance(error, (UserError, ImportError)):
        return USAGE
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    from canter.runners.evaluation import EndlessEpisodesError
    from canter.storage.rollout_files import DatasetError, TrajectoryFileError
    from canter.utils.checkpoint import CheckpointError
    from canter.utils.files import RunLockedError
    from canter.utils.memory import is_out_of_memory
    from canter.utils.metrics import NonFiniteError
    from canter.utils.reading import FileContentError

    if isinstance(error, EndlessEpisodesError) or is_out_of_memory(error):
        return USAGE
    storage = (CheckpointError, RunLockedError, OSError, DatasetError, TrajectoryFileError, FileContentError)
    return NUMERIC if isinstance(error, NonFiniteError) else STORAGE if isinstance(error, storage) else None


def is_stdout_closed() -> bool:
    """Whether the program that reads the standard output has ended: `canter tasks | head`."""
    poll = select.poll()
    with contextlib.suppress(OSError):  # a stream of a test has no file
        poll.register(sys.stdout, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def report(error: BaseException) -> int:
    """Print an error in one line and return its exit code; raise a bug, and any error if CANTER_TRACEBACK is set."""
    if isinstance(error, BrokenPipeError) and is_stdout_closed():
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at its end
        return CLOSED_PIPE
    code = exit_code(error)
    if rank := os.environ.get("WORLD_SIZE", "1") != "1" and f"rank {os.environ.get('RANK')}: ":
        from canter.utils.distributed import RANKS, RankError

        RANKS.leave(error)
        if isinstance(error, RankError):
            code, rank = error.code, ""
            if not error.is_reporter:
                return code
    if code is None or os.environ.get("CANTER_TRACEBACK"):
        raise error
    text = "interrupted" if isinstance(error, KeyboardInterrupt) else printable(" ".join(str(error).split()))
    print(f"canter: {rank or ''}{text or type(error).__name__}", file=sys.stderr)
    return code
