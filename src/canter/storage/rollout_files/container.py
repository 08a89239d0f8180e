"""File format of a piece of a trajectory: safetensors with a step range and a CRC-32 over every byte.

The CRC is a fixed-width entry of the header's metadata. It is computed with zeros in its own place, so that a changed
bit anywhere is found, the header included. Any safetensors reader can open the file.
"""

import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from canter.utils.files import atomic_write, open_read

FORMAT, VERSION, SUFFIX = "canter-trajectory", 1, ".safetensors"
MAX_SIZE = 1 << 31  # bytes
_NO_CRC = b"0" * 8
_CRC = re.compile(rb'"crc32"\s*:\s*"([0-9a-f]{8})"')
_NAME = re.compile(r"traj_([0-9]{1,18})_([0-9]{1,18})\.(safetensors|pickle|pkl)")


class TrajectoryFileError(RuntimeError):
    """A trajectory file cannot be used; the message names the file and the reason."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} {reason}")
        self.path, self.reason = path, reason


class ChunkInfo(NamedTuple):
    """Header of a file with the steps [start, end) of a trajectory."""

    path: Path
    start: int
    end: int
    ended: str  # how the episode ended in the last step: "terminated", "truncated", or "" if it continues
    size: int
    crc32: str
    schema: dict[str, str]  # dtype and shape per step, such as "F32[3]", of every array that has one row per step


def chunk_name(start: int, end: int) -> str:
    """The documented file name of steps [start, end)."""
    return f"traj_{start:06d}_{end:06d}{SUFFIX}"


def get_frame_range(filename: str) -> tuple[int, int]:
    """(start, end) in a name such as traj_000100_000200.safetensors, the end exclusive; ValueError for other names."""
    match = _NAME.fullmatch(filename)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError(f"{filename!r} is no trajectory file name; one looks like {chunk_name(100, 200)!r}")
    return int(match[1]), int(match[2])


def schema_of(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """The schema of a file with these arrays."""
    steps = {name: array for name, array in arrays.items() if not name.startswith("final_")}
    codes = {n: "BOOL" if a.dtype == bool else f"{a.dtype.kind.upper()}{8 * a.itemsize}" for n, a in steps.items()}
    return {name: f"{codes[name]}{list(array.shape[1:])}" for name, array in steps.items()}


def write_chunk(
    folder: Path, arrays: Mapping[str, np.ndarray], start: int, ended: str = "", root: Path | None = None
) -> ChunkInfo:
    """Write steps from `start` on to a file in `folder`, atomically and synced to disk; no link below `root`."""
    lengths = {name: len(array) for name, array in arrays.items() if not name.startswith("final_")}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise ValueError(f"a trajectory file needs arrays of one length above 0, got {lengths}")
    end = start + next(iter(lengths.values()))
    facts = {"format": FORMAT, "version": str(VERSION), "start": str(start), "end": str(end), "ended": ended}
    data = save({n: np.ascontiguousarray(a) for n, a in arrays.items()}, {**facts, "crc32": _NO_CRC.decode()})
    head, tail = _around_crc(data)
    crc = f"{zlib.crc32(data):08x}"
    path = folder / chunk_name(start, end)
    content = b"".join((head, crc.encode(), tail))
    atomic_write(path, lambda file: file.write(content), expected_size=len(content), root=root)
    return ChunkInfo(path, start, end, ended, len(content), crc, schema_of(arrays))


def read_chunk(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file, verified by its CRC."""
    info, data = peek_chunk(path), _whole_file(path)
    head, tail = _around_crc(data)
    crc = f"{zlib.crc32(tail, zlib.crc32(_NO_CRC, zlib.crc32(head))):08x}"
    if crc != info.crc32:
        raise TrajectoryFileError(path, f"is damaged: its CRC-32 is {crc}, not {info.crc32}")
    try:
        return load(data)
    except (SafetensorError, KeyError) as error:  # KeyError: a type that NumPy does not have
        raise TrajectoryFileError(path, f"is damaged: {error!r}") from error


def peek_chunk(path: Path) -> ChunkInfo:
    """The header of a file, checked against the file's size and name; the arrays are not read."""
    with open_read(path, path.parent) as file:
        start = file.read(1)
    try:
        with safe_open(path, "numpy") as file:
            facts = file.metadata() or {}
            parts = {name: file.get_slice(name) for name in file.keys() if not name.startswith("final_")}  # noqa: SIM118
    except SafetensorError as error:
        way_out = "is a pickle; import it with canter.datasets.convert.import_pickles"
        text = f"is truncated or damaged, or no trajectory file of canter: {error}"
        raise TrajectoryFileError(path, way_out if start == b"\x80" else text) from error
    if facts.get("format") != FORMAT:
        raise TrajectoryFileError(path, "is no trajectory file of canter: another program wrote it")
    try:
        version, start, end = int(facts["version"]), int(facts["start"]), int(facts["end"])
        schema = {name: f"{part.get_dtype()}{part.get_shape()[1:]}" for name, part in parts.items()}
        lengths = {part.get_shape()[0] for part in parts.values()}
        info = ChunkInfo(path, start, end, facts["ended"], path.stat().st_size, facts["crc32"], schema)
    except (ValueError, KeyError, IndexError) as error:
        raise TrajectoryFileError(path, f"is damaged: its metadata has no valid {error}") from error
    if version > VERSION:
        raise TrajectoryFileError(path, f"has format version {version}, this canter reads up to {VERSION}; upgrade it")
    if lengths != {end - start} or end <= start:
        raise TrajectoryFileError(path, f"is damaged: steps {start} to {end}, but arrays of length {lengths}")
    if path.name != chunk_name(start, end):
        raise TrajectoryFileError(path, f"holds steps {start} to {end}, which its name does not say")
    return info


def _whole_file(path: Path) -> bytes:
    """The bytes of a file that is not too large."""
    with open_read(path, path.parent) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_SIZE:
            raise TrajectoryFileError(path, f"has {size} bytes, more than the {MAX_SIZE} that such a file may have")
        return file.read(size)


def _around_crc(data: bytes) -> tuple[memoryview, memoryview]:
    """The bytes before and after the place of the CRC; without a place a CRC cannot match."""
    match = _CRC.search(data, 8, 8 + int.from_bytes(data[:8], "little"))
    first, last = (0, 0) if match is None else match.span(1)
    return memoryview(data)[:first], memoryview(data)[last:]
