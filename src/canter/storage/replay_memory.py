"""What a replay buffer costs, said and checked before it is allocated."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping

import torch

from canter.storage.fields import Field

log = logging.getLogger("canter")


def check_memory(fields: Mapping[str, Field], num_rows: int, num_envs: int, device: torch.device) -> int:
    """The bytes that rings of these fields take, logged; MemoryError with the arithmetic if they are not free."""
    per_row = {name: math.prod(field.shape) * field.dtype.itemsize for name, field in fields.items()}
    total = num_rows * num_envs * sum(per_row.values())
    parts = sorted(per_row.items(), key=lambda part: -part[1])
    shown = " + ".join(f"{size} {name}" for name, size in parts[:4])
    rest = sum(size for _, size in parts[4:])
    arithmetic = f"{num_rows:,} rows x {num_envs:,} environments x ({shown} + {rest} others) bytes = {readable(total)}"
    free = free_memory(device)
    log.info("replay buffer on %s: %s", device, arithmetic)
    if free is not None and total > free:
        raise MemoryError(
            f"the replay buffer does not fit: {arithmetic}, but {device} has {readable(free)} free; make buffer_size "
            "smaller, or observations (images as uint8)"
        )
    return total


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated; None where the system does not tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + held
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            facts = dict(line.split(":", 1) for line in file)
        return int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def readable(size: int) -> str:
    """Bytes in the largest unit that leaves a number of at least 1."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.4g} {unit}"
        size /= 1024  # type: ignore[assignment]
    return f"{size:,.1f} TiB"
