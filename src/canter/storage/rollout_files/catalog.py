"""A directory of trajectories and how everything in it is found again.

    <save_dir>/metadata.json
    <save_dir>/manifest.jsonl                              one line per acknowledged file; rebuildable from the files
    <save_dir>/trajectory_<k>/traj_<start>_<end>.safetensors

A file is in place before its line is: a crash between the two costs a line, never a step.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from canter.storage.rollout_files.container import (
    SUFFIX,
    ChunkInfo,
    TrajectoryFileError,
    get_frame_range,
    peek_chunk,
    read_chunk,
)
from canter.utils.files import atomic_write

METADATA, MANIFEST = "metadata.json", "manifest.jsonl"
FORMAT_VERSION = 1
OPTIONAL = ("values", "timeouts")  # a file may lack them where others have them
_FOLDER = re.compile(r"trajectory_([0-9]{1,9})")


class Trajectory(NamedTuple):
    """One trajectory on disk and its files, in order of their steps."""

    path: Path
    chunks: tuple[Path, ...]
    ranges: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        """Steps in all files."""
        return self.ranges[-1][1]


def read_metadata(directory: Path) -> dict[str, Any]:
    """What metadata.json says; nothing if there is none."""
    path = directory / METADATA
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise TrajectoryFileError(path, f"cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise TrajectoryFileError(path, f"holds a {type(content).__name__}, not an object")
    if content.get("format_version", 0) > FORMAT_VERSION:
        raise TrajectoryFileError(path, f"has format version {content['format_version']}; upgrade canter")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file, whole or not at all."""

    def write(file: BinaryIO) -> None:
        file.write((json.dumps(content, indent=2) + "\n").encode())

    atomic_write(path, write)


def trajectory_folders(directory: Path) -> list[tuple[int, Path]]:
    """Every trajectory_<k> folder with its number, in numeric order."""
    found = [(int(m[1]), e) for e in os.scandir(directory) if (m := _FOLDER.fullmatch(e.name)) and e.is_dir()]
    return [(number, Path(entry.path)) for number, entry in sorted(found, key=lambda pair: pair[0])]


def find_trajectory(folder: Path) -> tuple[Trajectory | None, list[TrajectoryFileError]]:
    """The trajectory in a folder, None where there is no usable one, and what is wrong with its files."""
    named, bad = [], []
    for name in sorted(os.listdir(folder)):
        if name.startswith("."):
            continue  # temporary files, and what file managers leave
        path = folder / name
        try:
            named.append((*get_frame_range(name), path))
        except ValueError:
            bad.append(TrajectoryFileError(path, "is no trajectory file: its name is not traj_<start>_<end>" + SUFFIX))
    position, chunks = 0, []
    for start, end, path in sorted(named):
        if start != position:
            bad.append(TrajectoryFileError(path, f"begins at step {start}, but the files before it end at {position}"))
            break
        position = end
        chunks.append((path, (start, end)))
    if not chunks:
        return None, bad
    paths, ranges = zip(*chunks, strict=True)
    return Trajectory(folder, paths, ranges), bad


def read_trajectory(folder: Path) -> dict[str, np.ndarray]:
    """All steps of one trajectory, (t, ...) by name, verified; and `final_observations` where they are known."""
    trajectory, bad = find_trajectory(Path(folder))
    if bad:
        raise bad[0]
    if trajectory is None:
        raise TrajectoryFileError(Path(folder), "holds no trajectory")
    parts = [read_chunk(path).arrays for path in trajectory.chunks]
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0] if not name.startswith("final_")}
    return whole | {name: array for name, array in parts[-1].items() if name.startswith("final_")}


def rebuild_manifest(directory: Path) -> list[ChunkInfo]:
    """Write manifest.jsonl anew from the files that are there; returns their headers."""
    infos = []
    for _, folder in trajectory_folders(directory):
        trajectory, _ = find_trajectory(folder)
        with contextlib.suppress(TrajectoryFileError):  # what follows a damaged file continues nothing
            infos.extend(map(peek_chunk, () if trajectory is None else trajectory.chunks))
    lines = "".join(manifest_line(directory, info) for info in infos)

    def write(file: BinaryIO) -> None:
        file.write(lines.encode())

    atomic_write(directory / MANIFEST, write)
    return infos


def read_manifest(directory: Path) -> list[dict[str, Any]]:
    """The acknowledged files, one entry each; a last line that a crash cut short is none."""
    path = directory / MANIFEST
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]


def manifest_line(directory: Path, info: ChunkInfo) -> str:
    """How a file is acknowledged."""
    name = info.path.relative_to(directory).as_posix()
    facts = {"file": name, "start": info.start, "end": info.end, "ended": info.ended}
    return json.dumps({**facts, "bytes": info.size, "crc32": info.crc32}) + "\n"


def problem_with(path: Path, read: Callable[[Path], Any] = read_chunk) -> TrajectoryFileError | None:
    """What is wrong with a file that `read` is tried on; None if nothing is."""
    try:
        read(path)
    except TrajectoryFileError as error:
        return error
    except OSError as error:
        return TrajectoryFileError(path, f"cannot be read: {error}")
    return None


Schema = Mapping[str, tuple[str, tuple[int, ...]]]


def check_schema(path: Path, given: Schema, wanted: Schema) -> None:
    """Refuse arrays that are not those of the other files; what is optional may be absent."""
    names = [n for n in sorted(given.keys() | wanted.keys()) if n not in OPTIONAL and given.get(n) != wanted.get(n)]
    if names:
        differing = [f"{n} is {_kind(given.get(n))}, not {_kind(wanted.get(n))}" for n in names]
        raise TrajectoryFileError(path, f"does not fit the other files: {'; '.join(differing)}")


def _kind(entry: tuple[str, Sequence[int]] | None) -> str:
    return "absent" if entry is None else f"{entry[0]}{list(entry[1])}"
