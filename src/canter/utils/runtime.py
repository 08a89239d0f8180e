"""The process that trains: its device, its random number generators, and the signals that stop it."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import numpy as np
import torch

from canter import __version__

URGENT_SECONDS = 1.0  # between two SIGINTs of a person; a terminal and a launcher send theirs together
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def resolve_device(device: torch.device | str | None = None) -> torch.device:
    """Return the device; None selects a GPU if there is one. ValueError lists the devices if it is not available."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"unknown device {device!r}; use 'cpu', 'cuda' or 'cuda:<index>'") from error
    if resolved.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (resolved.index or 0) >= count:
            available = ", ".join(["cpu", *(f"cuda:{i}" for i in range(count))])
            raise ValueError(f"device {str(device)!r} is not available; there are: {available}")
    return resolved


def describe_machine() -> dict[str, str]:
    """Return the hardware, and the versions of the software, of this process."""
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    machine = {"processor": f"{named[1] if named else platform.machine()}, {usable_cores()} cores"}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    machine |= {"system": platform.platform(), "python": platform.python_version(), "canter": __version__}
    return machine | {name: metadata.version(name) for name in ("torch", "numpy", "gymnasium")}


def usable_cores() -> int:
    """Return the number of CPU cores this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch, on every device."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be in [0, 2**32), got {seed}")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # also seeds every CUDA device, now or when CUDA starts


def rng_state() -> dict[str, Any]:
    """Return the state of every global generator, in plain containers and tensors."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    words_of_numpy = torch.from_numpy(np.asarray(keys).astype(np.int64))  # torch cannot store uint32 portably
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [str(name), words_of_numpy, int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore every global generator from `rng_state`; states of missing devices are ignored."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        for device, device_state in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(device_state.cpu(), device)


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the state of the global generators on exit."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


class StopSignal:
    """The first SIGTERM, SIGINT or SIGHUP sets `requested` and calls the user's handler; others change nothing.

    torchrun, systemd and schedulers repeat their signals while a run saves. Only a second SIGINT, at least
    `URGENT_SECONDS` after the first, ends the run at once.
    """

    requested_at: ClassVar[float | None] = None
    """Time (monotonic) of the first signal, while a run is stopping."""

    def __init__(self) -> None:
        self.requested: int | None = None  # the first signal received
        self.is_urgent = False
        self._interrupted_at = math.inf  # time of the first SIGINT
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGHUP:  # nohup ignores it
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now, before = time.monotonic(), self._before.get(number)
        is_first, is_nested = self.requested is None, isinstance(getattr(before, "__self__", None), StopSignal)
        if number == signal.SIGINT:
            self.is_urgent = now - self._interrupted_at >= URGENT_SECONDS
            self._interrupted_at = min(now, self._interrupted_at)
        if self.is_urgent:
            self.__exit__()
            signal.raise_signal(number)
            return
        if is_first:
            self.requested, StopSignal.requested_at = number, now
            if number == signal.SIGHUP:
                leave_terminal()
        # One around this one counts every signal; a handler of the user is called once.
        if callable(before) and before is not signal.default_int_handler and (is_first or is_nested):
            before(number, frame)

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before, StopSignal.requested_at = {}, None


def leave_terminal() -> None:
    """Write to nowhere instead of a terminal that is gone, where every line would be an error."""
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            if os.isatty(stream):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
