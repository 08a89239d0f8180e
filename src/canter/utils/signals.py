"""Ending a run politely: the first signal lets it finish what it is doing, the second ends it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopSignal:
    """While entered, SIGTERM and SIGINT only set `requested`; the user's own handlers are called too, and restored."""

    def __init__(self) -> None:
        self.requested: int | None = None
        """The first signal that came."""
        self.is_urgent = False
        """Whether a second one came."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            self.is_urgent = True
            self._restore()
            signal.raise_signal(number)
            return
        self.requested = number
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._restore()
