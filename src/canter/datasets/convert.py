"""Conversion of trajectories from and to other formats: the documented pickles, npz files, and Minari."""

import functools
import io
import pickle
import pickletools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from canter.storage.offline import import_minari_package
from canter.storage.rollout_files import TrajectoryWriter, get_frame_range, read_trajectory
from canter.storage.rollout_files.catalog import TrajectoryLibrary, read_metadata, trajectory_folders
from canter.utils.files import StrPath, atomic_write
from canter.utils.reading import MAX_ARRAYS, read_limited, read_npz
from canter.utils.tree import nested, tree_leaves, tree_map

FILE_STEPS = 1024
REQUIRED = ("actions", "rewards", "dones")
TOTALS = ("total_timesteps", "total_trajectories", "total_episodes", "format_version")

NamedArrays = tuple[str, dict[str, np.ndarray]]


def write_trajectories(
    target: StrPath, found: Iterable[NamedArrays], metadata: Mapping[str, Any] | None, file_steps: int
) -> int:
    """Write whole trajectories, given by name; returns their number. Error messages contain the name."""
    count = 0
    with TrajectoryWriter(target, metadata) as writer:
        for name, arrays in found:
            try:
                add_trajectory(writer, arrays, file_steps)
            except (ValueError, KeyError) as error:
                raise ValueError(f"{name}: {error}") from error
            writer.flush()
            count += 1
    return count


def add_trajectory(writer: TrajectoryWriter, arrays: Mapping[str, np.ndarray], file_steps: int) -> None:
    """Write arrays (t, ...) in files of at most `file_steps` steps; `final_...` arrays are part of the last file."""
    missing = [name for name in REQUIRED if name not in arrays]
    if missing or not any(name.startswith(("observations", "obs_")) for name in arrays):
        raise ValueError(f"the trajectory lacks {', '.join(missing or ['observations'])}; it has {list(arrays)}")
    total, number = len(arrays["rewards"]), writer.free_numbers(1)[0]
    steps = {name: array for name, array in arrays.items() if not name.startswith("final_")}
    steps["rewards"] = np.asarray(steps["rewards"], np.float32).reshape(total, 1)
    steps["dones"] = np.asarray(steps["dones"]).astype(np.uint8).reshape(total, 1)
    steps["timeouts"] = np.asarray(steps.get("timeouts", np.zeros(total))).astype(bool).reshape(total)
    final = {name: array for name, array in arrays.items() if name.startswith("final_")}
    ended = ("truncated" if steps["timeouts"][-1] else "terminated") if steps["dones"][-1, 0] else ""
    for start in range(0, total, file_steps):
        piece = {name: array[start : start + file_steps] for name, array in steps.items()}
        is_last = start + file_steps >= total
        writer.add(number, piece | (final if is_last else {}), start, ended if is_last else "")


def import_pickles(source: StrPath, target: StrPath, file_steps: int = FILE_STEPS) -> int:
    """Convert a directory of the documented pickle layout, executing nothing; returns the number of trajectories."""

    def found() -> Iterator[NamedArrays]:
        for _, folder in trajectory_folders(Path(source)):
            files = sorted(folder.glob("traj_*.p*kl*"), key=lambda path: get_frame_range(path.name))
            parts = [read_pickle(path) for path in files]
            if parts:
                names = set(parts[0]).intersection(*map(set, parts[1:]))
                yield str(folder), {name: np.concatenate([part[name] for part in parts]) for name in names}

    kept = {name: value for name, value in read_metadata(Path(source)).items() if name not in TOTALS}
    count = write_trajectories(target, found(), kept, file_steps)
    if not count:
        raise FileNotFoundError(f"there is no trajectory_<k>/traj_<start>_<end>.pickle in {source}")
    return count


def export_npz(source: StrPath, target: StrPath) -> list[Path]:
    """Write one trajectory_<k>.npz per trajectory, with the arrays by name; returns the files."""
    written = []
    for name, arrays in trajectories(source):
        written.append(Path(target) / f"{name}.npz")
        atomic_write(written[-1], functools.partial(np.savez, **arrays))  # pyright: ignore[reportArgumentType]
    return written


def import_npz(files: list[StrPath], target: StrPath, file_steps: int = FILE_STEPS) -> int:
    """Convert files of one trajectory each, with `dones` or `terminated` and `truncated`; returns their number."""

    def found() -> Iterator[NamedArrays]:
        for path in files:
            arrays = read_npz(path)
            if "rewards" in arrays and ("terminated" in arrays or "truncated" in arrays):
                no = np.zeros(len(arrays["rewards"]), bool)
                terminated, truncated = (arrays.pop(name, no).astype(bool) for name in ("terminated", "truncated"))
                arrays |= {"dones": terminated | truncated, "timeouts": truncated & ~terminated}
            yield str(path), arrays

    return write_trajectories(target, found(), None, file_steps)


def trajectories(source: StrPath) -> Iterator[NamedArrays]:
    """Name and arrays of every trajectory of a directory, with whole observations."""
    library = TrajectoryLibrary([Path(source)])
    if not library.scan():
        raise FileNotFoundError(f"there is no trajectory in {library.where}")
    for _, folder in trajectory_folders(Path(source)):
        if any(folder.iterdir()):
            yield folder.name, library.assemble(read_trajectory(folder))


def import_minari(dataset: Any, target: StrPath, file_steps: int = FILE_STEPS) -> int:
    """Convert a Minari dataset, given as an object or by its id; returns the number of episodes."""
    if isinstance(dataset, str):
        dataset = import_minari_package().load_dataset(dataset)

    def single(array: Any) -> np.ndarray:
        array = np.asarray(array)
        return array.astype(np.float32) if array.dtype == np.float64 else array

    def found() -> Iterator[NamedArrays]:
        for number, episode in enumerate(dataset.iterate_episodes()):
            terminated = np.asarray(episode.terminations, bool)
            truncated = np.asarray(episode.truncations, bool) & ~terminated
            arrays = {"actions": single(episode.actions), "rewards": np.asarray(episode.rewards)}
            arrays |= {"dones": terminated | truncated, "timeouts": truncated}
            for name, leaf in tree_leaves(episode.observations, "observations"):
                arrays |= {name: single(leaf)[:-1], f"final_{name}": single(leaf)[-1:]}
            yield f"episode {number}", arrays

    return write_trajectories(target, found(), {"env": str(getattr(dataset, "id", "minari"))}, file_steps)


def export_minari(
    source: StrPath,
    dataset_id: str,
    observation_space: Space | None = None,
    action_space: Space | None = None,
    **about: Any,
) -> Any:
    """Make a Minari dataset of a directory of trajectories; `about` goes to `minari.create_dataset_from_buffers`.

    Spaces that are not given are inferred from the data. A trajectory without an end gets a truncation.
    """
    minari = import_minari_package()
    from minari.data_collector import EpisodeBuffer  # pyright: ignore[reportMissingImports]

    buffers, arrays, obs = [], {}, {}
    for number, (name, arrays) in enumerate(trajectories(source)):
        dones, timeouts = arrays["dones"].reshape(-1).astype(bool), arrays["timeouts"].reshape(-1)
        terminated, truncated = dones & ~timeouts, timeouts.copy()
        truncated[-1] |= not dones[-1]
        steps: dict[str, Any] = {"terminations": terminated.tolist(), "truncations": truncated.tolist()}
        steps |= {"actions": arrays["actions"], "rewards": arrays["rewards"].reshape(-1).tolist()}
        prefixes = ("observations", "final_observations")
        obs, final = (arrays[p] if p in arrays else nested(arrays, p) for p in prefixes)
        if isinstance(final, Mapping) and not final:
            warnings.warn(f"{name} has no final observation: its last observation is repeated", stacklevel=2)
            final = tree_map(lambda leaf: leaf[-1:], obs)
        # (t + 1, ...): Minari keeps the observation after the last step too.
        observations = tree_map(lambda a, b: np.concatenate([a, b]), obs, final)
        buffers.append(EpisodeBuffer(id=number, observations=observations, **steps))
    about["observation_space"] = observation_space or space_of(obs)
    about["action_space"] = action_space or space_of(arrays["actions"])
    return minari.create_dataset_from_buffers(dataset_id, buffers, **about)


def space_of(data: Any) -> Space:
    """A space that contains the rows of arrays (t, ...)."""
    if isinstance(data, Mapping):
        return spaces.Dict({name: space_of(part) for name, part in data.items()})
    if data.dtype == np.uint8:
        return spaces.Box(0, 255, data.shape[1:], np.uint8)
    if data.dtype.kind in "iu" and data.ndim == 1:
        return spaces.Discrete(int(data.max()) + 1)
    return spaces.Box(-np.inf, np.inf, data.shape[1:], data.dtype.type)


def read_pickle(path: Path) -> dict[str, np.ndarray]:
    """The arrays of one file of the documented pickle layout; ValueError if it holds anything else."""
    try:
        pickled = read_limited(path, MAX_ARRAYS)
        # Python reserves memory for the highest place in the memo, before anything is stored there.
        if any("PUT" in step.name and int(at or 0) > len(pickled) for step, at, _ in pickletools.genops(pickled)):
            raise ValueError("it numbers more values than it has bytes")
        content = _PlainUnpickler(io.BytesIO(pickled)).load()
    except OSError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise ValueError(f"{path} cannot be imported: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a dict of arrays")
    # The documented writer had a comma too many after `observations`, which made it a tuple of one.
    plain = {n: value[0] if isinstance(value, tuple) and len(value) == 1 else value for n, value in content.items()}
    arrays: dict[str, Any] = {name: value for name, value in plain.items() if value is not None}
    for name, value in arrays.items():
        if not isinstance(name, str) or not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
            raise ValueError(f"{path}: {name!r} is no array of numbers")
    return arrays


def _bytes_from(text: str, encoding: str = "latin1") -> bytes:
    """The spelling of bytes in old protocols."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin1")


def _array_from(buffer: Any, kind: np.dtype, shape: Any = (), order: str = "C", axis_order: Any = None) -> np.ndarray:
    return np.frombuffer(buffer, dtype=kind).reshape(shape, order="F" if order == "F" else "C")


_ALLOWED: dict[tuple[str, str], Callable[..., Any] | type] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("collections", "OrderedDict"): OrderedDict,
    ("_codecs", "encode"): _bytes_from,
}
for _package in ("numpy.core", "numpy._core"):
    # An array whose state the pickle sets next; the class and size that the file names are ignored.
    _ALLOWED[f"{_package}.multiarray", "_reconstruct"] = lambda *_: np.ndarray.__new__(np.ndarray, (0,), "b")
    _ALLOWED[f"{_package}.multiarray", "scalar"] = lambda kind, content=b"": _array_from(content, kind)[()]
    _ALLOWED[f"{_package}.numeric", "_frombuffer"] = _array_from


class _PlainUnpickler(pickle.Unpickler):
    """Knows arrays and containers; any other name in a pickle is refused before it is looked up."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """One of a few names, each bound to a function of ours or of numpy."""
        if (module_name, global_name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}, which is no plain data")
        return _ALLOWED[module_name, global_name]
