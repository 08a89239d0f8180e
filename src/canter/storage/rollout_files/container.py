"""File format of a piece of a trajectory: safetensors with a step range and a CRC-32 over every byte.

The CRC is a fixed-width entry of the header's metadata. It is computed with zeros in its own place, so that a changed
bit anywhere is found, the header included. Any safetensors reader can open the file.
"""

import json
import math
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save

from canter.utils.files import atomic_write, open_read

FORMAT, VERSION, SUFFIX = "canter-trajectory", 1, ".safetensors"
MAX_HEADER, MAX_SIZE = 1 << 20, 1 << 31  # bytes
_PROBE = 1 << 12
_NO_CRC = "0" * 8
_CRC = re.compile(rb'"crc32"\s*:\s*"([0-9a-f]{8})"')
_NAME = re.compile(r"traj_([0-9]{1,18})_([0-9]{1,18})\.(safetensors|pickle|pkl)")
KINDS = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "?",
}


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
    entries: dict[str, Any]  # dtype, shape and offsets of every array, as in safetensors

    @property
    def schema(self) -> dict[str, str]:
        """Dtype and shape per step, such as "F32[3]", of every array that has one row per step."""
        return {n: f"{e['dtype']}{e['shape'][1:]}" for n, e in self.entries.items() if not n.startswith("final_")}


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
    codes = {np.dtype(kind): code for code, kind in KINDS.items()}
    return {n: f"{codes[a.dtype]}{list(a.shape[1:])}" for n, a in arrays.items() if not n.startswith("final_")}


def write_chunk(
    folder: Path, arrays: Mapping[str, np.ndarray], start: int, ended: str = "", root: Path | None = None
) -> ChunkInfo:
    """Write steps from `start` on to a file in `folder`, atomically and synced to disk; no link below `root`."""
    lengths = {name: len(array) for name, array in arrays.items() if not name.startswith("final_")}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise ValueError(f"a trajectory file needs arrays of one length above 0, got {lengths}")
    end = start + next(iter(lengths.values()))
    facts = {"format": FORMAT, "version": str(VERSION), "start": str(start), "end": str(end), "ended": ended}
    data = bytearray(save({n: np.ascontiguousarray(a) for n, a in arrays.items()}, {**facts, "crc32": _NO_CRC}))
    place = _crc_place(data)
    crc = f"{zlib.crc32(data):08x}"
    data[place : place + 8] = crc.encode()
    path = folder / chunk_name(start, end)
    atomic_write(path, lambda file: file.write(data), expected_size=len(data), root=root)
    return _info(path, memoryview(data), len(data))


def read_chunk(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file, views of one buffer, verified by its CRC."""
    with open_read(path, path.parent) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_SIZE:
            raise TrajectoryFileError(path, f"has {size} bytes, more than the {MAX_SIZE} that such a file may have")
        data = memoryview(bytearray(size))
        data = data[: file.readinto(data)]
    info = _info(path, data, len(data))
    place = _crc_place(data)
    crc = zlib.crc32(data[place + 8 :], zlib.crc32(_NO_CRC.encode(), zlib.crc32(data[:place])))
    if f"{crc:08x}" != info.crc32:
        raise TrajectoryFileError(path, f"is damaged: its CRC-32 is {crc:08x}, not {info.crc32}")
    first, arrays = 8 + int.from_bytes(data[:8], "little"), {}
    try:
        for name, entry in info.entries.items():
            (begin, end), shape, kind = entry["data_offsets"], tuple(entry["shape"]), np.dtype(KINDS[entry["dtype"]])
            if not 0 <= begin <= end or end - begin != math.prod(shape) * kind.itemsize:
                raise ValueError(f"an array of shape {shape} does not fit its place")
            arrays[name] = np.frombuffer(data, kind, math.prod(shape), first + begin).reshape(shape)
    except (ValueError, KeyError, TypeError) as error:
        raise TrajectoryFileError(path, f"is damaged: {error}") from error
    return arrays


def peek_chunk(path: Path) -> ChunkInfo:
    """The header of a file, checked against the file's size; the arrays are not read."""
    with open_read(path, path.parent) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(_PROBE)  # most headers are shorter
        length = min(8 + int.from_bytes(start[:8], "little"), 8 + MAX_HEADER)
        if length > len(start):
            start += file.read(length - len(start))
    return _info(path, memoryview(start), size)


def _header(path: Path, data: memoryview, size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and array entries at the beginning of `data`, checked against the size of the file."""
    if size == 0:
        raise TrajectoryFileError(path, "is empty")
    if bytes(data[:2]) in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        raise TrajectoryFileError(path, "is a pickle; import it with canter.datasets.convert.import_pickles")
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER:
        raise TrajectoryFileError(path, f"is no trajectory file of canter ({size} bytes)")
    if 8 + length > size:
        raise TrajectoryFileError(path, f"is truncated: {size} bytes, and its header alone has {8 + length}")
    try:
        entries = json.loads(bytes(data[8 : 8 + length]))
        facts = entries.pop("__metadata__", {})
        is_ours = facts.get("format") == FORMAT
        whole = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise TrajectoryFileError(path, "is damaged, or no trajectory file of canter: it has no header") from error
    if not is_ours:
        raise TrajectoryFileError(path, "is no trajectory file of canter: another program wrote it")
    if size != whole:
        raise TrajectoryFileError(path, f"is {'truncated' if size < whole else 'damaged'}: {size} of {whole} bytes")
    return facts, entries


def _info(path: Path, data: memoryview, size: int) -> ChunkInfo:
    facts, entries = _header(path, data, size)
    try:
        version, start, end = int(facts["version"]), int(facts["start"]), int(facts["end"])
        lengths = {entry["shape"][0] for name, entry in entries.items() if not name.startswith("final_")}
        info = ChunkInfo(path, start, end, str(facts["ended"]), size, str(facts["crc32"]), entries)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise TrajectoryFileError(path, f"is damaged: its metadata has no valid {error}") from error
    if version > VERSION:
        raise TrajectoryFileError(path, f"has format version {version}, this canter reads up to {VERSION}; upgrade it")
    if lengths != {end - start} or end <= start:
        raise TrajectoryFileError(path, f"is damaged: steps {start} to {end}, but arrays of length {lengths}")
    if path.name != chunk_name(start, end):
        raise TrajectoryFileError(path, f"holds steps {start} to {end}, which its name does not say")
    return info


def _crc_place(data: bytearray | memoryview) -> int:
    match = _CRC.search(data, 8, 8 + int.from_bytes(data[:8], "little"))
    return 0 if match is None else match.start(1)  # at 0 the CRC cannot match
