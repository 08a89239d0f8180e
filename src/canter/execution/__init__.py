"""How pure tensor functions are run: eagerly, as CUDA graphs, or on a CPU as recordings. No algorithm is known here.

This is the only package that uses private names of torch, and it looks them up when they are first needed: without one
of them canter still imports and trains, eagerly where necessary.
"""

from types import FrameType
from typing import Any

ACTIVE_TRACERS: list[Any] = []
"""Tracers of the functions that run traced at present, the innermost last."""


def note_host_read(name: str) -> None:
    """Keep the functions that run at present from being replayed: they read a Python value that changes."""
    for tracer in ACTIVE_TRACERS:
        tracer.on_host_read(name)


def runs_own_code(frame: FrameType) -> bool:
    """Whether a frame runs code of canter, and not a user's."""
    return frame.f_globals.get("__name__", "").startswith("canter.")
