"""Where to compute."""

from __future__ import annotations

import os

import torch


def resolve_device(device: torch.device | str | None = None) -> torch.device:
    """The device meant; None takes a GPU if there is one. A device that is not there is an error that says what is."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"unknown device {device!r}; use 'cpu', 'cuda' or 'cuda:<index>'") from error
    if resolved.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (resolved.index or 0) >= count:
            there = ", ".join(["cpu", *(f"cuda:{i}" for i in range(count))])
            raise ValueError(f"device {str(device)!r} is not available; there are: {there}")
    return resolved


def usable_cores() -> int:
    """CPU cores this process may run on, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
