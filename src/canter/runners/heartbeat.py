"""Two processes that work together through files notice whether the other one is still there."""

import contextlib
import os
import threading
import time
import warnings
from pathlib import Path

from canter.utils.files import open_append

BEAT_SECONDS = 1.0
GONE_SECONDS = 10.0  # without a beat, after which a process counts as gone


class Heartbeat(contextlib.AbstractContextManager["Heartbeat"]):
    """Renews its own file every second, and watches that of a partner.

    The partner is there while its file changes, by the clock of this process: the clocks of two machines may differ.

    Args:
        path: File of this process; it is removed at the end.
        partner_path: File of the partner.
        partner: Name of the partner, for messages.
        stops: Whether `is_over` becomes true when the partner is gone.
    """

    def __init__(self, path: Path, partner_path: Path, partner: str, stops: bool = False) -> None:
        self.path, self.partner_path, self.partner, self.stops = path, partner_path, partner, stops
        self._was_seen = self._is_gone = False
        self._stamp: int | None = None  # of the partner's file, when it was looked at first or changed
        self._changed_at = -GONE_SECONDS
        self._end = threading.Event()

    def __enter__(self) -> "Heartbeat":
        self._beat()  # an error of it is raised
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def _run(self) -> None:
        while not self._end.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # a full disk, or a directory that is gone: the next beat may succeed
                self._beat()

    def _beat(self) -> None:
        with open_append(self.path) as file:
            file.truncate(0)
            file.write(f"{os.getpid()}\n".encode())

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def has_partner(self) -> bool:
        """Whether the partner's file changed lately. One that is found is no sign yet: the partner may be dead."""
        stamp, now = None, time.monotonic()
        with contextlib.suppress(OSError):
            stamp = self.partner_path.stat(follow_symlinks=False).st_mtime_ns
        if stamp is None:  # it removes its file when it ends
            self._changed_at = now - GONE_SECONDS
        elif stamp != self._stamp and self._stamp is not None:
            self._changed_at = now
        self._stamp = stamp
        return now - self._changed_at < GONE_SECONDS

    def is_over(self) -> bool:
        """Whether to stop because the partner is gone; says so when it leaves and when it is back."""
        is_there = self.has_partner()
        if is_there and self._is_gone:
            warnings.warn(f"the {self.partner} is back", stacklevel=2)
        if self._was_seen and not is_there and not self._is_gone:
            rest = "this process stops" if self.stops else "this process goes on without it"
            where = self.partner_path.parent
            warnings.warn(f"the {self.partner} is gone: no sign of it in {where}; {rest}", stacklevel=2)
        self._is_gone = self._was_seen and not is_there
        self._was_seen |= is_there
        return self._is_gone and self.stops
