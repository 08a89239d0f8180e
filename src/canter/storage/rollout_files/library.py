"""What a dataset can read: the trajectories of some directories, in order of age, without the files that are bad."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from canter.storage.rollout_files.catalog import (
    Trajectory,
    check_schema,
    find_trajectory,
    problem_with,
    read_metadata,
    trajectory_folders,
)
from canter.storage.rollout_files.container import TrajectoryFileError, peek_chunk, read_chunk
from canter.utils.obs_layout import ObsLayout
from canter.utils.utils import decompress_normalized_image

PER_STEP = {"rewards": np.float32, "dones": np.bool_, "timeouts": np.bool_}
LISTED = 20


class DatasetError(RuntimeError):
    """Too many files of a dataset are bad; the message names them all."""


class TrajectoryLibrary:
    """Finds trajectories and reads their files; nothing that is damaged, cut short or foreign gets through.

    Args:
        directories: Where to look.
        max_bad_fraction: DatasetError if more of the files than this are bad.
    """

    def __init__(self, directories: Sequence[Path], max_bad_fraction: float = 0.0) -> None:
        if not directories:
            raise ValueError("data_dir is empty: name at least one directory")
        if not 0.0 <= max_bad_fraction <= 1.0:
            raise ValueError(f"max_bad_fraction must be from 0 to 1, got {max_bad_fraction}")
        self.directories, self.max_bad_fraction = list(directories), max_bad_fraction
        self.metadata: dict[str, Any] = {}
        self.schema: dict[str, Any] | None = None
        self.bad: dict[Path, TrajectoryFileError] = {}
        self.gone: set[Path] = set()
        self.num_files = 0
        self.longest_file = 0
        self._good: set[Path] = set()
        self._all: list[Path] = []

    @property
    def where(self) -> str:
        """The directories, for messages; those that are not there are called so."""
        return ", ".join(f"{d}{'' if d.is_dir() else ' (no such directory)'}" for d in self.directories)

    def name_of(self, trajectory: Trajectory) -> str:
        """What a trajectory is called wherever its directories lie: the number of its directory, and its folder."""
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
                    continue  # it has just been removed
                fresh_bad += bad
                self._all += [
                    error.path for error in bad if error.path not in (trajectory.chunks if trajectory else ())
                ]
                if trajectory is not None:
                    self._all += trajectory.chunks
                    fresh_bad += (errors := self._check_headers(trajectory))
                    if not errors and not bad and self.is_usable(trajectory):
                        found.append((changed, trajectory))
        self._take_metadata(metadata)
        self.num_files = len(self._all)
        self._report(fresh_bad)
        found.sort(key=lambda pair: pair[0])
        return [trajectory for _, trajectory in found]

    def _check_headers(self, trajectory: Trajectory) -> list[TrajectoryFileError]:
        unknown = [path for path in trajectory.chunks if path not in self._good and path not in self.bad]
        return [problem for path in unknown if (problem := problem_with(path, self._check_header)) is not None]

    def _check_header(self, path: Path) -> None:
        info = peek_chunk(path)
        self.schema = info.schema if self.schema is None else self.schema
        check_schema(path, info.schema, self.schema)
        self._good.add(path)
        self.longest_file = max(self.longest_file, info.end - info.start)

    def _take_metadata(self, metadata: Sequence[dict[str, Any]]) -> None:
        given = [m for m in metadata if m]
        self.metadata = given[0] if given else {}
        for name in ("obs_segments", "obs_disassemble_mapping"):
            if any(m.get(name) != self.metadata.get(name) for m in given):
                raise DatasetError(f"the directories {self.where} do not agree on {name} in their metadata.json")

    def load(self, path: Path) -> dict[str, np.ndarray] | None:
        """The arrays of one file, verified: flat rewards, dones and timeouts, and observations put together.

        None if the file cannot be used, which the user has then been told.
        """
        try:
            arrays = read_chunk(path).arrays
        except FileNotFoundError:
            warnings.warn(f"{path} has been removed; its trajectory is left out", stacklevel=4)
            self.gone.add(path)
            return None
        except TrajectoryFileError as error:
            self._report([error])
            return None
        arrays = self.assemble(arrays) if "observations" not in arrays else arrays
        steps = len(arrays["rewards"])
        flat = {n: arrays[n].reshape(steps).astype(kind) for n, kind in PER_STEP.items() if n in arrays}
        return {"timeouts": np.zeros(steps, np.bool_), **arrays, **flat}

    def is_usable(self, trajectory: Trajectory) -> bool:
        """Whether no file of it is known to be bad or gone."""
        return not any(path in self.bad or path in self.gone for path in trajectory.chunks)

    def assemble(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """`obs_<component>` arrays joined to `observations` in the order of the segments, images as floats again."""
        parts = {name[4:]: array for name, array in arrays.items() if name.startswith("obs_")}
        if not parts:
            return dict(arrays)
        segments = self.metadata.get("obs_segments")
        if segments is None or set(segments) != set(parts):
            raise DatasetError(
                f"the files of {self.where} hold the components {sorted(parts)}, but metadata.json has the segments "
                f"{list(segments or [])}"
            )
        images = self.metadata.get("obs_disassemble_mapping") or {}
        whole = [
            (decompress_normalized_image(parts[name]) if name in images else parts[name]).reshape(len(parts[name]), -1)
            for name in ObsLayout(segments).shapes
        ]
        rest = {name: array for name, array in arrays.items() if not name.startswith("obs_")}
        return {**rest, "observations": np.concatenate(whole, axis=1)}

    def _report(self, fresh: Sequence[TrajectoryFileError]) -> None:
        """Note bad files; DatasetError that names all there are if they are too many, a warning otherwise."""
        fresh = [error for error in fresh if error.path not in self.bad]
        if not fresh:
            return
        self.bad |= {error.path: error for error in fresh}
        if len(self.bad) > self.max_bad_fraction * max(1, self.num_files):
            others = [path for path in self._all if path not in self.bad]
            self.bad |= {path: problem for path in others if (problem := problem_with(path)) is not None}
            raise DatasetError(
                f"{len(self.bad)} of {self.num_files} files are bad (max_bad_fraction={self.max_bad_fraction:g}):\n  "
                + "\n  ".join(map(str, self._listed(list(self.bad.values()))))
            )
        warnings.warn(
            f"{len(self.bad)} of {self.num_files} files are bad and left out, these are new:\n  "
            + "\n  ".join(map(str, self._listed(fresh))),
            stacklevel=4,
        )

    @staticmethod
    def _listed(errors: Sequence[TrajectoryFileError]) -> list[Any]:
        more = [f"and {len(errors) - LISTED} more"] if len(errors) > LISTED else []
        return [*errors[:LISTED], *more]
