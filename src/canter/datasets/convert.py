"""Trajectories from and to other formats: the documented pickles, npz files, and Minari."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from canter.datasets.pickle_import import read_pickle
from canter.storage.rollout_files.catalog import TrajectoryLibrary, read_metadata, read_trajectory, trajectory_folders
from canter.storage.rollout_files.container import get_frame_range
from canter.storage.rollout_files.writer import TrajectoryWriter
from canter.utils.tree import nested, tree_leaves, tree_map

FILE_STEPS = 1024
REQUIRED = ("actions", "rewards", "dones")


def add_trajectory(
    writer: TrajectoryWriter, number: int, arrays: Mapping[str, np.ndarray], file_steps: int = FILE_STEPS
) -> None:
    """Write a whole trajectory (t, ...) in files of at most `file_steps` steps; `final_...` arrays go with the last."""
    missing = [name for name in REQUIRED if name not in arrays]
    if missing or not any(name.startswith(("observations", "obs_")) for name in arrays):
        raise ValueError(f"trajectory {number} lacks {', '.join(missing or ['observations'])}; it has {list(arrays)}")
    total = len(arrays["rewards"])
    steps = {name: array for name, array in arrays.items() if not name.startswith("final_")}
    steps["rewards"] = np.asarray(steps["rewards"], np.float32).reshape(total, 1)
    steps["dones"] = np.asarray(steps["dones"]).astype(np.uint8).reshape(total, 1)
    steps["timeouts"] = np.asarray(steps.get("timeouts", np.zeros(total))).astype(bool).reshape(total)
    final = {name: array for name, array in arrays.items() if name.startswith("final_")}
    for start in range(0, total, file_steps):
        end = min(total, start + file_steps)
        piece = {name: array[start:end] for name, array in steps.items()}
        ended = (
            "" if end < total or not steps["dones"][-1, 0] else "truncated" if steps["timeouts"][-1] else "terminated"
        )
        writer.add(number, piece | (final if end == total else {}), start, ended)


# ---------------------------------------------------------------------- pickles
def import_pickles(source: str | Path, target: str | Path, file_steps: int = FILE_STEPS) -> int:
    """Convert a directory of the documented pickle layout; returns how many trajectories there were.

    Nothing in the files is executed: an unpickler that knows only arrays and containers reads them.
    """
    source = Path(source)
    metadata = read_metadata(source)
    totals = ("total_timesteps", "total_trajectories", "total_episodes", "format_version")
    kept = {name: value for name, value in metadata.items() if name not in totals}
    count = 0
    with TrajectoryWriter(target, kept) as writer:
        for _, folder in trajectory_folders(source):
            files = sorted(folder.glob("traj_*.p*kl*"), key=lambda path: get_frame_range(path.name))
            parts = [read_pickle(path) for path in files]
            if not parts:
                continue
            names = set(parts[0]).intersection(*map(set, parts[1:]))
            whole = {name: np.concatenate([part[name] for part in parts]) for name in names}
            add_trajectory(writer, writer.free_numbers(1)[0], whole, file_steps)
            writer.flush()
            count += 1
    if not count:
        raise FileNotFoundError(f"there is no trajectory_<k>/traj_<start>_<end>.pickle in {source}")
    return count


# ---------------------------------------------------------------------- npz
def export_npz(source: str | Path, target: str | Path) -> list[Path]:
    """One trajectory_<k>.npz per trajectory, with the arrays by name."""
    target = Path(target)
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for name, arrays in trajectories(source):
        written.append(target / f"{name}.npz")
        np.savez(written[-1], **arrays)  # pyright: ignore[reportArgumentType]
    return written


def import_npz(files: list[str | Path], target: str | Path, file_steps: int = FILE_STEPS) -> int:
    """Convert files of one trajectory each; returns how many there were.

    They hold `observations`, `actions`, `rewards`, and `dones` or `terminated` and `truncated`.
    """
    with TrajectoryWriter(target) as writer:
        for path in map(Path, files):
            with np.load(path, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
            if "terminated" in arrays or "truncated" in arrays:
                no = np.zeros(len(arrays["rewards"]), bool)
                terminated, truncated = (arrays.pop(name, no).astype(bool) for name in ("terminated", "truncated"))
                arrays |= {"dones": terminated | truncated, "timeouts": truncated & ~terminated}
            try:
                add_trajectory(writer, writer.free_numbers(1)[0], arrays, file_steps)
            except (ValueError, KeyError) as error:
                raise ValueError(f"{path}: {error}") from error
            writer.flush()
    return len(files)


def trajectories(source: str | Path) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Name and arrays of every trajectory of a directory, observations put together."""
    library = TrajectoryLibrary([Path(source)])
    if not library.scan():
        raise FileNotFoundError(f"there is no trajectory in {library.where}")
    for _, folder in trajectory_folders(Path(source)):
        if any(folder.iterdir()):
            yield folder.name, library.assemble(read_trajectory(folder))


# ---------------------------------------------------------------------- Minari
def import_minari(dataset: Any, target: str | Path, file_steps: int = FILE_STEPS) -> int:
    """Convert a Minari dataset, given itself or by its id; returns how many episodes there were."""
    if isinstance(dataset, str):
        dataset = _minari().load_dataset(dataset)
    count = 0
    with TrajectoryWriter(target, {"env": str(getattr(dataset, "id", "minari"))}) as writer:
        for episode in dataset.iterate_episodes():
            terminated = np.asarray(episode.terminations, bool)
            truncated = np.asarray(episode.truncations, bool) & ~terminated
            arrays = {"actions": np.asarray(episode.actions), "rewards": np.asarray(episode.rewards)}
            arrays |= {"dones": terminated | truncated, "timeouts": truncated}
            for name, leaf in tree_leaves(episode.observations, "observations"):
                leaf = np.asarray(leaf)
                leaf = leaf.astype(np.float32) if leaf.dtype == np.float64 else leaf
                arrays |= {name: leaf[:-1], f"final_{name}": leaf[-1:]}
            if arrays["actions"].dtype == np.float64:
                arrays["actions"] = arrays["actions"].astype(np.float32)
            add_trajectory(writer, writer.free_numbers(1)[0], arrays, file_steps)
            writer.flush()
            count += 1
    return count


def export_minari(
    source: str | Path,
    dataset_id: str,
    observation_space: spaces.Space | None = None,
    action_space: spaces.Space | None = None,
    **about: Any,
) -> Any:
    """Make a Minari dataset of a directory of trajectories; `about` goes to `minari.create_dataset_from_buffers`.

    Spaces that are not given are taken from the data. A trajectory that was cut off ends with a truncation.
    """
    minari = _minari()
    from minari.data_collector import EpisodeBuffer  # pyright: ignore[reportMissingImports]

    buffers, last = [], {}
    for number, (name, arrays) in enumerate(trajectories(source)):
        last = arrays
        dones, timeouts = arrays["dones"].reshape(-1).astype(bool), arrays["timeouts"].reshape(-1)
        terminated, truncated = dones & ~timeouts, timeouts.copy()
        truncated[-1] |= not dones[-1]
        buffers.append(
            EpisodeBuffer(
                id=number,
                observations=_with_final(arrays, name),
                actions=arrays["actions"],  # pyright: ignore[reportArgumentType]
                rewards=arrays["rewards"].reshape(-1).tolist(),
                terminations=terminated.tolist(),
                truncations=truncated.tolist(),
            )
        )
    observation_space = observation_space or space_of(_observations(last))
    action_space = action_space or space_of(last["actions"])
    return minari.create_dataset_from_buffers(
        dataset_id, buffers, observation_space=observation_space, action_space=action_space, **about
    )


def _observations(arrays: Mapping[str, np.ndarray], prefix: str = "observations") -> Any:
    return arrays[prefix] if prefix in arrays else nested(arrays, prefix)  # pyright: ignore[reportArgumentType]


def _with_final(arrays: Mapping[str, np.ndarray], name: str) -> Any:
    """(t + 1, ...): Minari keeps the observation after the last step too."""
    steps, final = _observations(arrays), _observations(arrays, "final_observations")
    if isinstance(final, Mapping) and not final:
        warnings.warn(f"{name} does not say where it ended: its last observation is repeated", stacklevel=4)
        final = tree_map(lambda leaf: leaf[-1:], steps)
    return tree_map(lambda a, b: np.concatenate([a, b]), steps, final)


def space_of(data: Any) -> spaces.Space:
    """A space that arrays (t, ...) of data fit."""
    if isinstance(data, Mapping):
        return spaces.Dict({name: space_of(part) for name, part in data.items()})
    if data.dtype == np.uint8:
        return spaces.Box(0, 255, data.shape[1:], np.uint8)
    if data.dtype.kind in "iu" and data.ndim == 1:
        return spaces.Discrete(int(data.max()) + 1)
    return spaces.Box(-np.inf, np.inf, data.shape[1:], data.dtype.type)


def _minari() -> Any:
    try:
        import minari  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("Minari datasets need Minari: pip install 'canter[minari]'") from error
    return minari
