"""Writing trajectories to a directory."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from canter.storage.rollout_files.catalog import (
    FORMAT_VERSION,
    MANIFEST,
    METADATA,
    check_schema,
    find_trajectory,
    manifest_line,
    read_metadata,
    rebuild_manifest,
    trajectory_folders,
)
from canter.storage.rollout_files.container import ChunkInfo, peek_chunk, schema_of, write_bytes, write_chunk
from canter.utils.files import RunLock, remove_stale_temps

_PENDING = re.compile(r"\.pending_trajectory_[0-9]+")


class TrajectoryWriter:
    """Adds trajectories to a directory, new or existing; one process at a time.

    Args:
        directory: Created if it is missing; RunLockedError if another process writes to it.
        metadata: Stored in metadata.json beside the totals.
        num_threads: Files written at once; most of the time is spent waiting for the disk.
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
        for entry in self.directory.iterdir():
            if _PENDING.fullmatch(entry.name):
                shutil.rmtree(entry, ignore_errors=True)

    def free_numbers(self, count: int) -> list[int]:
        """Numbers for new trajectories: of empty folders first, then after the highest."""
        folders = trajectory_folders(self.directory)
        empty = [number for number, folder in folders if not any(folder.iterdir())][:count]
        first = 1 + max((number for number, _ in folders), default=-1)
        return empty + list(range(first, first + count - len(empty)))

    def folder(self, number: int) -> Path:
        """Folder of trajectory `number`."""
        return self.directory / f"trajectory_{number}"

    def pending_folder(self, number: int) -> Path:
        """Folder of trajectory `number` until it is published; readers ignore it."""
        return self.directory / f".pending_trajectory_{number}"

    def add(self, number: int, arrays: Mapping[str, np.ndarray], start: int, ended: str = "") -> None:
        """Write a piece of a trajectory in the background, until `flush`. The arrays must not change."""
        self._check(arrays)
        self._writes.append(self._pool.submit(write_chunk, self.folder(number), arrays, start, ended))

    def add_pending(self, number: int, arrays: Mapping[str, np.ndarray], start: int, ended: str = "") -> None:
        """Write a piece of a trajectory that `publish` keeps or `discard` drops."""
        self._check(arrays)
        write_chunk(self.pending_folder(number), arrays, start, ended)

    def _check(self, arrays: Mapping[str, np.ndarray]) -> None:
        schema = schema_of(arrays)
        self.schema = self.schema or schema
        check_schema(self.directory, schema, self.schema)

    def publish(self, number: int) -> None:
        """Keep a pending trajectory: all of its files appear at once."""
        self.folder(number).mkdir(exist_ok=True)  # an empty folder is replaced, a full one is an error
        os.replace(self.pending_folder(number), self.folder(number))
        for path in find_trajectory(self.folder(number))[0].chunks:  # pyright: ignore[reportOptionalMemberAccess]
            self._count(peek_chunk(path))

    def discard(self, number: int) -> None:
        """Drop a pending trajectory."""
        shutil.rmtree(self.pending_folder(number), ignore_errors=True)

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
        if self._unlisted:
            lines = "".join(manifest_line(self.directory, info) for info in self._unlisted)
            with (self.directory / MANIFEST).open("a", encoding="utf-8") as file:
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
            self._unlisted = []
        self.write_metadata()

    def write_metadata(self) -> None:
        """Write metadata.json with the current totals."""
        totals = {"total_timesteps": self.num_steps, "total_trajectories": self.num_trajectories}
        content = {**self.metadata, **totals, "total_episodes": self.num_episodes}
        write_bytes(self.directory / METADATA, (json.dumps(content, indent=2) + "\n").encode())

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

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
