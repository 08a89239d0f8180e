"""What users hang into an iteration."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from canter.runners.trials import StopTraining

EVENTS = ("pre_iteration", "post_iteration", "pre_rollout", "post_rollout", "pre_update", "post_update")


class Callbacks:
    """Functions by event, run in the order they were added.

    Args:
        errors: What an exception in one does: "raise", or "warn" and go on.
    """

    def __init__(self, errors: str = "raise") -> None:
        if errors not in ("raise", "warn"):
            raise ValueError(f"callback_errors must be 'raise' or 'warn', got {errors!r}")
        self.errors = errors
        self.by_event: dict[str, list[Callable[..., None]]] = {event: [] for event in EVENTS}

    def add(self, event: str, fn: Callable[..., None]) -> None:
        """Call `fn(runner)` at a `pre_*` event, `fn(runner, stats)` at a `post_*` event."""
        if event not in self.by_event:
            raise ValueError(f"unknown event {event!r}; events are {', '.join(EVENTS)}")
        self.by_event[event].append(fn)

    def fire(self, event: str, runner: Any, *stats: Mapping[str, float]) -> None:
        """Run the callbacks of an event."""
        for fn in self.by_event[event]:
            self._call(fn, event, runner, *stats)

    def _call(self, fn: Callable[..., None], event: str, *args: Any) -> None:
        try:
            fn(*args)
        except Exception as error:
            if self.errors == "raise" or isinstance(error, StopTraining):
                raise
            warnings.warn(f"the {event} callback {fn!r} failed: {error!r}", stacklevel=3)
