"""Memory of storages, networks and environments, computed before it is allocated."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from canter.storage.rollout_storage import Field

log = logging.getLogger("canter")
MAX_TENSORS = 10_000
NO_MEMORY = re.compile("can't allocate memory|could not create a primitive|can't start new thread|out of memory")
SMALL = 1 << 20  # bytes of a tensor that is not counted
# Functions whose first arguments are a shape.
FACTORIES = frozenset(
    {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}
    | {Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full}
)


class MemoryLimit(TorchFunctionMode):
    """Refuses tensors that do not fit into the free memory before they are allocated, and more than `MAX_TENSORS`.

    Objects whose sizes a loaded config decides are made within it: a stranger's config must not use up the memory.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.num_tensors = what, 0
        self.left: dict[torch.device, float] = {}  # bytes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in FACTORIES:
            self.num_tensors += 1
            if self.num_tensors > MAX_TENSORS:
                raise MemoryError(f"{self.what} would have more than {MAX_TENSORS:,} tensors; give it fewer layers")
            given = args[isinstance(args[0], Tensor) :] if args else (kwargs.get("size", ()),)
            shape = given[0] if given and not isinstance(given[0], int) else given
            dtype = kwargs.get("dtype") or (args[0].dtype if args and isinstance(args[0], Tensor) else torch.float32)
            self._take(tuple(shape), math.prod(shape) * dtype.itemsize, torch.device(kwargs.get("device") or "cpu"))
        return func(*args, **kwargs)

    def _take(self, shape: tuple[int, ...], size: int, device: torch.device) -> None:
        if size < SMALL:
            return
        if device not in self.left:
            self.left[device] = free_memory(device) or math.inf
        if size > self.left[device]:
            has = f"{device} has {readable(int(self.left[device]))} left for it"
            raise MemoryError(
                f"{self.what} needs a tensor of shape {shape}, {readable(size)}, but {has}; lower its sizes"
            )
        self.left[device] -= size


def check_memory(
    what: str, fields: Mapping[str, Field], num_rows: int, num_envs: int, device: torch.device, way_out: str
) -> int:
    """Bytes of a storage of rows of fields, logged; MemoryError with the arithmetic if they are not free."""
    parts = sorted(((math.prod(f.shape) * f.dtype.itemsize, name) for name, f in fields.items()), reverse=True)
    total = num_rows * num_envs * sum(size for size, _ in parts)
    shown = " + ".join(f"{size} {name}" for size, name in [*parts[:4], (sum(size for size, _ in parts[4:]), "others")])
    arithmetic = f"{num_rows:,} rows x {num_envs:,} environments x ({shown}) bytes = {readable(total)}"
    log.info("%s on %s: %s", what, device, arithmetic)
    if (free := free_memory(device)) is not None and total > free:
        raise MemoryError(f"the {what} does not fit: {arithmetic}, but {device} has {readable(free)} free; {way_out}")
    return total


def out_of_memory(error: Exception, place: str, device: torch.device, settings: Mapping[str, int]) -> Exception:
    """The error of an allocation that failed during training, with what is in use and the `settings` that decide it.

    `num_mini_batches` needs less memory if it is raised, the other settings if they are lowered.
    """
    free = free_memory(device)
    known = "" if free is None else f" {readable(free)} are free;"
    if device.type == "cuda":
        known = f" this process uses {readable(torch.cuda.memory_allocated(device))},{known}"
    lower = ", ".join(f"{name} (now {value})" for name, value in settings.items() if name != "num_mini_batches")
    more = settings.get("num_mini_batches")
    way_out = f"lower {lower}" + ("" if more is None else f", or raise num_mini_batches (now {more})")
    text = f"{device} ran out of memory in {place}:{known} {way_out}. The error was: {error}"
    return (torch.OutOfMemoryError if isinstance(error, torch.OutOfMemoryError) else MemoryError)(text)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory, or the address space of this process, is used up.

    On a CPU torch's allocator and oneDNN say so by a RuntimeError.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and NO_MEMORY.search(str(error)) is not None


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated; None if the system does not report them."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    with contextlib.suppress(OSError, KeyError, ValueError):
        facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(facts["MemAvailable"].split()[0]) * 1024
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def readable(size: int) -> str:
    """A number of bytes in the largest unit in which it is at least 1."""
    power = min(max(size.bit_length() - 1, 0) // 10, 4)
    return f"{size / 1024**power:,.{'1f' if power == 4 else '4g'}} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
