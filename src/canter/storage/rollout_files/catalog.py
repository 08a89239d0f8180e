"""Directories of trajectories: writing them, and reading them without damaged or foreign files.

    <save_dir>/metadata.json
    <save_dir>/manifest.jsonl                              one line per acknowledged file; can be rebuilt from the files
    <save_dir>/trajectory_<k>/traj_<start>_<end>.safetensors

A file is complete before its line is written: a crash between the two costs a line, never a step.
"""

import contextlib
import io
import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from canter.storage.rollout_files.container import (
    SUFFIX,
    ChunkInfo,
    TrajectoryFileError,
    get_frame_range,
    peek_chunk,
    read_chunk,
    schema_of,
    write_chunk,
)
from canter.utils.files import RunLock, atomic_write, open_append, remove_stale_temps, safe_join
from canter.utils.obs_layout import ObsLayout
from canter.utils.reading import FileContentError, read_json, read_limited
from canter.utils.utils import decompress_normalized_image

METADATA, MANIFEST = "metadata.json", "manifest.jsonl"
FORMAT_VERSION = 2  # from 2 on metadata.json has a CRC-32
OPTIONAL = ("values", "timeouts")  # a file may lack them where others have them
PER_STEP = {"rewards": np.float32, "dones": np.bool_, "timeouts": np.bool_}
MAX_LISTED = 20
MAX_METADATA, MAX_MANIFEST = 1 << 24, 1 << 30  # bytes
_FOLDER = re.compile(r"trajectory_([0-9]{1,9})")


class DatasetError(RuntimeError):
    """Too many files of a dataset are bad; the message names them."""


class Trajectory(NamedTuple):
    """One trajectory on disk and its files, in order of their steps."""

    path: Path
    chunks: tuple[Path, ...]
    ranges: tuple[tuple[int, int], ...]


def read_metadata(directory: Path) -> dict[str, Any]:
    """The content of metadata.json; empty if there is none."""
    path = directory / METADATA
    try:
        content = read_json(path, MAX_METADATA, directory) if path.is_file() else {}
    except FileContentError as error:
        raise TrajectoryFileError(path, f"is no metadata of trajectories: {error}") from error
    version = content.get("format_version", 0)
    if type(version) is not int or version > FORMAT_VERSION:
        raise TrajectoryFileError(path, f"has format version {version!r}; upgrade canter")
    is_checked = version > 1 or "crc32" in content
    if content.pop("crc32", None) != crc_of(content) and is_checked:
        text = "was changed: its CRC-32 does not match; to use it as it is, remove its entries crc32 and format_version"
        raise TrajectoryFileError(path, text)
    return content


def crc_of(content: Mapping[str, Any]) -> str:
    """CRC-32 of an object of JSON, however it is written."""
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def trajectory_folders(directory: Path) -> list[tuple[int, Path]]:
    """Every trajectory_<k> folder with its number, in numeric order."""
    found = [(int(m[1]), e) for e in os.scandir(directory) if (m := _FOLDER.fullmatch(e.name)) and e.is_dir()]
    return [(number, Path(entry.path)) for number, entry in sorted(found, key=lambda pair: pair[0])]


def find_trajectory(folder: Path) -> tuple[Trajectory | None, list[TrajectoryFileError]]:
    """The trajectory in a folder, None if no file is usable, and one error per unusable file."""
    named, bad = [], []
    for name in sorted(os.listdir(folder)):
        path = folder / name
        try:
            if not name.startswith("."):  # temporary files, and those of file managers
                named.append((get_frame_range(name), path))
        except ValueError:
            bad.append(TrajectoryFileError(path, "is no trajectory file: its name is not traj_<start>_<end>" + SUFFIX))
    position, chunks = 0, []
    for (start, end), path in sorted(named):
        if start != position:
            bad.append(TrajectoryFileError(path, f"begins at step {start}, but the files before it end at {position}"))
            break
        position = end
        chunks.append(((start, end), path))
    if not chunks:
        return None, bad
    ranges, paths = zip(*chunks, strict=True)
    return Trajectory(folder, paths, ranges), bad


def read_trajectory(folder: Path) -> dict[str, np.ndarray]:
    """All steps of one trajectory, (t, ...) by name, verified; with `final_observations` where they are known."""
    trajectory, bad = find_trajectory(Path(folder))
    if bad or trajectory is None:
        raise bad[0] if bad else TrajectoryFileError(Path(folder), "holds no trajectory")
    parts = [read_chunk(path) for path in trajectory.chunks]
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0] if not name.startswith("final_")}
    return whole | {name: array for name, array in parts[-1].items() if name.startswith("final_")}


def rebuild_manifest(directory: Path) -> list[ChunkInfo]:
    """Write manifest.jsonl from the existing files; returns their headers."""
    infos = []
    for _, folder in trajectory_folders(directory):
        trajectory, _ = find_trajectory(folder)
        with contextlib.suppress(TrajectoryFileError):  # files after a damaged one do not continue the trajectory
            infos.extend(map(peek_chunk, () if trajectory is None else trajectory.chunks))
    atomic_write(directory / MANIFEST, "".join(manifest_line(directory, info) for info in infos).encode())
    return infos


def read_manifest(directory: Path) -> list[dict[str, Any]]:
    """One entry per acknowledged file, checked; a last line that a crash cut short is ignored."""
    path = directory / MANIFEST
    lines = read_limited(path, MAX_MANIFEST, directory).splitlines(keepends=True) if path.is_file() else []
    if lines and not lines[-1].endswith(b"}\n"):
        lines.pop()
    return [_manifest_entry(path, number, line) for number, line in enumerate(lines, 1)]


def _manifest_entry(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
        if entry.pop("line_crc32", None) not in (None, crc_of(entry)):  # None: written by an earlier version
            raise ValueError("its CRC-32 does not match")
        kinds = {"file": str, "start": int, "end": int, "ended": str, "bytes": int, "crc32": str}
        if {name: type(value) for name, value in entry.items()} != kinds:
            raise ValueError(f"it does not have {', '.join(kinds)}")
        safe_join(path.parent, entry["file"])
        return entry
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        way_out = "delete the file: the next writer makes it from the trajectories"
        raise TrajectoryFileError(path, f"has a damaged line {number} ({error}); {way_out}") from error


def manifest_line(directory: Path, info: ChunkInfo) -> str:
    """The manifest entry of a file."""
    facts = {"file": info.path.relative_to(directory).as_posix(), "start": info.start, "end": info.end}
    entry = {**facts, "ended": info.ended, "bytes": info.size, "crc32": info.crc32}
    return json.dumps({**entry, "line_crc32": crc_of(entry)}) + "\n"


def check_schema(path: Path, given: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Raise if names, dtypes or shapes differ from those of the other files; optional arrays may be absent."""
    pairs = [(n, given.get(n, "absent"), wanted.get(n, "absent")) for n in sorted({*given, *wanted} - {*OPTIONAL})]
    if differing := [f"{name} is {found}, not {other}" for name, found, other in pairs if found != other]:
        raise TrajectoryFileError(path, f"does not fit the other files: {'; '.join(differing)}")


class TrajectoryLibrary:
    """Finds the trajectories of several directories and reads their files; bad files are reported and left out.

    If more than `max_bad_fraction` of the files are bad, DatasetError is raised.
    """

    def __init__(self, directories: Sequence[Path], max_bad_fraction: float = 0.0) -> None:
        if not directories:
            raise ValueError("data_dir is empty: name at least one directory")
        if not 0.0 <= max_bad_fraction <= 1.0:
            raise ValueError(f"max_bad_fraction must be from 0 to 1, got {max_bad_fraction}")
        self.directories, self.max_bad_fraction = list(directories), max_bad_fraction
        self.metadata: dict[str, Any] = {}
        self.schema: dict[str, str] | None = None
        self.bad: dict[Path, TrajectoryFileError] = {}
        self.gone: set[Path] = set()
        self.longest_file = 0
        self._good: set[Path] = set()
        self._all: list[Path] = []

    @property
    def where(self) -> str:
        """The directories, for messages."""
        return ", ".join(f"{d}{'' if d.is_dir() else ' (no such directory)'}" for d in self.directories)

    def name_of(self, trajectory: Trajectory) -> str:
        """A name that does not depend on where the directories are: number of the directory, and folder."""
        return f"{self.directories.index(trajectory.path.parent)}/{trajectory.path.name}"

    def scan(self) -> list[Trajectory]:
        """Every usable trajectory, the least recently changed first."""
        found: list[tuple[float, Trajectory]] = []
        self._all, fresh_bad, metadata = [], [], []
        for directory in filter(Path.is_dir, self.directories):
            metadata.append(read_metadata(directory))
            for _, folder in trajectory_folders(directory):
                try:
                    changed = folder.stat().st_mtime
                    trajectory, bad = find_trajectory(folder)
                except FileNotFoundError:
                    continue  # removed in the meantime
                chunks = () if trajectory is None else trajectory.chunks
                self._all += [*chunks, *(error.path for error in bad)]
                unknown = [path for path in chunks if path not in self._good and path not in self.bad]
                bad += filter(None, (_problem(path, self._check_header) for path in unknown))
                fresh_bad += bad
                if trajectory is not None and not bad and self.is_usable(trajectory):
                    found.append((changed, trajectory))
        self.metadata = next(filter(None, metadata), {})
        for name in ("obs_segments", "obs_disassemble_mapping"):
            if any(m and m.get(name) != self.metadata.get(name) for m in metadata):
                raise DatasetError(f"the directories {self.where} do not agree on {name} in their metadata.json")
        self._report(fresh_bad)
        return [trajectory for _, trajectory in sorted(found, key=lambda pair: pair[0])]

    def _check_header(self, path: Path) -> None:
        info = peek_chunk(path)
        self.schema = info.schema if self.schema is None else self.schema
        check_schema(path, info.schema, self.schema)
        self._good.add(path)
        self.longest_file = max(self.longest_file, info.end - info.start)

    def load(self, path: Path) -> dict[str, np.ndarray] | None:
        """The verified arrays of one file, with whole observations; None, with a warning, if it cannot be used."""
        try:
            arrays = read_chunk(path)
        except FileNotFoundError:
            warnings.warn(f"{path} has been removed; its trajectory is left out", stacklevel=3)
            self.gone.add(path)
            return None
        except TrajectoryFileError as error:
            self._report([error])
            return None
        if bad := not_finite(arrays):
            self._report([TrajectoryFileError(path, f"holds NaN or infinity in {bad!r}")])
            return None
        arrays = self.assemble(arrays) if "observations" not in arrays else arrays
        steps = len(arrays["rewards"])
        flat = {n: arrays[n].reshape(steps).astype(kind) for n, kind in PER_STEP.items() if n in arrays}
        return {"timeouts": np.zeros(steps, np.bool_), **arrays, **flat}

    def is_usable(self, trajectory: Trajectory) -> bool:
        """Whether none of its files is known to be bad or removed."""
        return not any(path in self.bad or path in self.gone for path in trajectory.chunks)

    def assemble(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """`obs_<component>` arrays concatenated to `observations` in the order of the segments, images as floats."""
        parts = {name[4:]: array for name, array in arrays.items() if name.startswith("obs_")}
        if not parts:
            return dict(arrays)
        segments = self.metadata.get("obs_segments")
        if segments is None or set(segments) != set(parts):
            known = f"metadata.json has the segments {list(segments or [])}"
            raise DatasetError(f"the files of {self.where} hold the components {sorted(parts)}, but {known}")
        for name in parts.keys() & (self.metadata.get("obs_disassemble_mapping") or {}):
            parts[name] = decompress_normalized_image(parts[name])
        whole = [parts[name].reshape(len(parts[name]), -1) for name in ObsLayout(segments).shapes]
        rest = {name: array for name, array in arrays.items() if not name.startswith("obs_")}
        return {**rest, "observations": np.concatenate(whole, axis=1)}

    def _report(self, found: Sequence[TrajectoryFileError]) -> None:
        """Record bad files: a warning that names the new ones; DatasetError that names all if there are too many."""
        fresh = {error.path: error for error in found if error.path not in self.bad}
        if not fresh:
            return
        self.bad |= fresh
        is_error = len(self.bad) > self.max_bad_fraction * max(1, len(self._all))
        if is_error:
            others = [_problem(path, read_chunk) for path in self._all if path not in self.bad]
            self.bad |= {error.path: error for error in others if error is not None}
        listed = list(map(str, (self.bad if is_error else fresh).values()))
        more = [f"and {len(listed) - MAX_LISTED} more"] if len(listed) > MAX_LISTED else []
        lines = "\n  ".join(["", *listed[:MAX_LISTED], *more])
        count = f"{len(self.bad)} of {len(self._all)} files are bad"
        if is_error:
            raise DatasetError(f"{count} (max_bad_fraction={self.max_bad_fraction:g}):{lines}")
        warnings.warn(f"{count} and left out, these are new:{lines}", stacklevel=3)


def not_finite(arrays: Mapping[str, np.ndarray]) -> str | None:
    """Name of the first array with NaN or infinity."""
    floats = ((name, array) for name, array in arrays.items() if array.dtype.kind == "f")
    return next((name for name, array in floats if not np.isfinite(array).all()), None)


def _problem(path: Path, read: Callable[[Path], Any]) -> TrajectoryFileError | None:
    """The error that reading a file raises; None if it can be read."""
    try:
        read(path)
    except TrajectoryFileError as error:
        return error
    except OSError as error:
        return TrajectoryFileError(path, f"cannot be read: {error}")
    return None


class TrajectoryWriter(contextlib.AbstractContextManager["TrajectoryWriter"]):
    """Adds trajectories to a directory, new or existing; RunLockedError if another process writes to it.

    `metadata` is stored in metadata.json beside the totals; `num_threads` files are written at once.
    """

    def __init__(
        self, directory: str | os.PathLike[str], metadata: Mapping[str, Any] | None = None, num_threads: int = 8
    ) -> None:
        self.directory = Path(directory)
        self._lock: RunLock | None = RunLock(self.directory)
        try:
            self._drop_pending()
            for folder in (self.directory, *(folder for _, folder in trajectory_folders(self.directory))):
                remove_stale_temps(folder)
            infos = rebuild_manifest(self.directory)
            self.metadata = {**read_metadata(self.directory), **(metadata or {}), "format_version": FORMAT_VERSION}
        except BaseException:
            self._lock.release()
            raise
        self.num_steps = sum(info.end - info.start for info in infos)
        self.num_trajectories = len({info.path.parent for info in infos})
        self.num_episodes = sum(bool(info.ended) for info in infos)
        self.schema = infos[0].schema if infos else None
        self._pool = ThreadPoolExecutor(num_threads)
        self._writes: list[Future[ChunkInfo]] = []
        self._unlisted: list[ChunkInfo] = []

    def _drop_pending(self) -> None:
        for folder in self.directory.glob(".pending_trajectory_*"):
            shutil.rmtree(folder, ignore_errors=True)

    def free_numbers(self, count: int) -> list[int]:
        """Numbers for new trajectories: of empty folders first, then after the highest."""
        folders = trajectory_folders(self.directory)
        empty = [number for number, folder in folders if not any(folder.iterdir())][:count]
        first = 1 + max((number for number, _ in folders), default=-1)
        return empty + list(range(first, first + count - len(empty)))

    def folder(self, number: int, is_pending: bool = False) -> Path:
        """Folder of trajectory `number`, or the one until it is published, which readers ignore."""
        return self.directory / f"{'.pending_' if is_pending else ''}trajectory_{number}"

    def add(self, number: int, arrays: Mapping[str, np.ndarray], start: int, ended: str = "") -> None:
        """Write a piece of a trajectory in the background, until `flush`. The arrays must not change."""
        self._check(arrays)
        place = (self.folder(number), arrays, start, ended, self.directory)
        self._writes.append(self._pool.submit(write_chunk, *place))

    def add_pending(self, number: int, arrays: Mapping[str, np.ndarray], start: int, ended: str = "") -> None:
        """Write a piece of a trajectory that `publish` keeps or `discard` drops."""
        self._check(arrays)
        write_chunk(self.folder(number, is_pending=True), arrays, start, ended, self.directory)

    def _check(self, arrays: Mapping[str, np.ndarray]) -> None:
        schema = schema_of(arrays)
        if bad := not_finite(arrays):
            raise ValueError(f"{bad!r} of a trajectory holds NaN or infinity; it is not written to {self.directory}")
        self.schema = self.schema or schema
        check_schema(self.directory, schema, self.schema)

    def publish(self, number: int) -> None:
        """Keep a pending trajectory: all of its files appear at once."""
        self.folder(number).mkdir(exist_ok=True)  # an empty folder is replaced, a full one is an error
        os.replace(self.folder(number, is_pending=True), self.folder(number))
        for path in sorted(self.folder(number).glob("traj_*")):
            self._count(peek_chunk(path))

    def discard(self, number: int) -> None:
        """Drop a pending trajectory."""
        shutil.rmtree(self.folder(number, is_pending=True), ignore_errors=True)

    def _count(self, info: ChunkInfo) -> None:
        self.num_steps += info.end - info.start
        self.num_trajectories += info.start == 0
        self.num_episodes += bool(info.ended)
        self._unlisted.append(info)

    def flush(self) -> None:
        """Wait for all writes, list them in the manifest and update metadata.json."""
        writes, self._writes = self._writes, []
        for write in writes:
            self._count(write.result())
        with io.BufferedWriter(open_append(self.directory / MANIFEST)) as file:
            file.writelines(manifest_line(self.directory, info).encode() for info in self._unlisted)
            file.flush()
            os.fsync(file.fileno())
        self._unlisted = []
        totals = {"total_timesteps": self.num_steps, "total_trajectories": self.num_trajectories}
        content = {**self.metadata, **totals, "total_episodes": self.num_episodes}
        content["crc32"] = crc_of(json.loads(json.dumps(content)))
        atomic_write(self.directory / METADATA, (json.dumps(content, indent=2) + "\n").encode())

    def close(self) -> None:
        """Flush, remove empty folders and release the directory; harmless when repeated."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        try:
            self.flush()
            for _, folder in trajectory_folders(self.directory):
                if not any(folder.iterdir()):
                    folder.rmdir()
            self._drop_pending()
        finally:
            self._pool.shutdown()
            lock.release()

    def __exit__(self, *error: object) -> None:
        self.close()
