"""Converters keep all values, and pickles with code are refused."""

import json
import os
import pickle
import sys
import types
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from gymnasium import spaces

from canter.datasets.convert import (
    export_minari,
    export_npz,
    import_minari,
    import_npz,
    import_pickles,
    read_pickle,
    trajectories,
)
from canter.storage.rollout_files import RolloutDataset, TrajectoryWriter, read_trajectory


def episode(k, steps, timeouts=True):
    t = np.arange(steps)
    dones = np.zeros((steps, 1), np.uint8)
    dones[-1] = 1
    arrays = {
        "observations": np.stack([np.full(steps, k), t], 1).astype(np.float32),
        "actions": (100 * k + t)[:, None].astype(np.float32),
        "rewards": (100 * k + t)[:, None].astype(np.float32),
        "dones": dones,
        "values": np.zeros((steps, 1), np.float32),
    }
    return arrays | ({"timeouts": t == steps - 1} if timeouts else {})


def documented(folder, protocol=4, wrap=False, suffix="pickle"):
    """Two trajectories as the documented saver wrote them, the first in two files."""
    for k, cuts in ((0, (0, 3, 7)), (5, (0, 4))):
        whole = episode(k, cuts[-1])
        (folder / f"trajectory_{k}").mkdir(parents=True)
        for start, end in zip(cuts[:-1], cuts[1:], strict=True):
            part = {name: array[start:end] for name, array in whole.items()}
            if wrap:
                part["observations"] = (part["observations"],)
            path = folder / f"trajectory_{k}" / f"traj_{start:06d}_{end:06d}.{suffix}"
            path.write_bytes(pickle.dumps(part, protocol=protocol))
    (folder / "metadata.json").write_text(json.dumps({"env": "old", "total_timesteps": 999}))
    return folder


# ------------------------------------------------------------------ pickles
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("wrap", [False, True])
def test_documented_pickles_of_any_protocol_are_imported(
    tmp_path, protocol, wrap
):  # the documented writer wrapped observations in a tuple
    source = documented(tmp_path / "old", protocol, wrap, "pkl" if wrap else "pickle")
    assert import_pickles(source, tmp_path / "new", file_steps=5) == 2
    first, second = (read_trajectory(tmp_path / "new" / f"trajectory_{k}") for k in (0, 1))
    np.testing.assert_array_equal(first["observations"], episode(0, 7)["observations"])
    np.testing.assert_array_equal(second["actions"], episode(5, 4)["actions"])
    assert first["timeouts"].tolist() == [False] * 6 + [True]
    metadata = json.loads((tmp_path / "new/metadata.json").read_text())
    assert (metadata["env"], metadata["total_timesteps"], metadata["total_trajectories"]) == ("old", 11, 2)
    data = RolloutDataset(tmp_path / "new", 1, device="cpu")
    assert [int(batch.reward) for batch in data] == [0, 1, 2, 3, 4, 5, 6, 500, 501, 502, 503]


class Attack:
    def __reduce__(self):
        return os.mkdir, ("stolen",)


@pytest.mark.parametrize(
    "content",
    [
        {"observations": Attack()},
        {"observations": np.array([Attack()], dtype=object)},
        [1, 2],
        {"observations": "text"},
        {"observations": torch.nn.Linear(1, 1)},
        {"observations": np.array(["text"])},
    ],
)
def test_a_pickle_with_code_is_refused_and_runs_nothing(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "traj_000000_000001.pickle").write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=r"traj_000000_000001\.pickle"):
        read_pickle(tmp_path / "traj_000000_000001.pickle")
    assert not (tmp_path / "stolen").exists()


def test_builtins_and_numpy_functions_are_out_of_reach(tmp_path):
    for name in ("builtins\neval", "numpy\nload", "numpy.testing\nrundocs", "os\nsystem", "canter\n__version__"):
        (tmp_path / "x.pickle").write_bytes(b"c" + name.encode() + b"\n(S'1'\ntR.")
        with pytest.raises(ValueError, match="no plain data"):
            read_pickle(tmp_path / "x.pickle")


def test_a_pickle_that_claims_a_huge_array_allocates_nothing(tmp_path):
    claim = b"cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(L1000000000000000L\ntS'b'\ntR."
    (tmp_path / "x.pickle").write_bytes(claim)
    with pytest.raises(ValueError, match="holds a ndarray"):
        read_pickle(tmp_path / "x.pickle")


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"hello", pickle.dumps({"a": np.zeros(99)})[:-30]])
def test_errors_name_damaged_pickles(tmp_path, content):
    (tmp_path / "x.pickle").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.pickle cannot be imported"):
        read_pickle(tmp_path / "x.pickle")


def test_a_directory_without_pickles_is_an_error(tmp_path):
    (tmp_path / "old").mkdir()
    with pytest.raises(FileNotFoundError, match="no trajectory_<k>"):
        import_pickles(tmp_path / "old", tmp_path / "new")


def test_trajectories_without_the_needed_arrays_are_named(tmp_path):
    np.savez(tmp_path / "a.npz", observations=np.zeros((3, 2)), rewards=np.zeros(3), terminated=np.zeros(3, bool))
    with pytest.raises(ValueError, match=r"a\.npz: the trajectory lacks actions"):
        import_npz([tmp_path / "a.npz"], tmp_path / "new")


# ------------------------------------------------------------------ npz
def test_npz_export_and_import_restore_the_trajectories(tmp_path):
    import_pickles(documented(tmp_path / "old"), tmp_path / "new")
    files = export_npz(tmp_path / "new", tmp_path / "npz")
    assert [path.name for path in files] == ["trajectory_0.npz", "trajectory_1.npz"]
    assert import_npz(files, tmp_path / "again") == 2
    for k in (0, 1):
        a, b = (read_trajectory(tmp_path / where / f"trajectory_{k}") for where in ("new", "again"))
        assert a.keys() == b.keys()
        for name, array in a.items():
            np.testing.assert_array_equal(array, b[name])


def test_npz_with_terminated_and_truncated(tmp_path):
    base = {"observations": np.zeros((3, 2), np.float32), "actions": np.arange(3), "rewards": np.ones(3)}
    no, last = np.zeros(3, bool), np.arange(3) == 2
    np.savez(tmp_path / "a.npz", **base, terminated=last, truncated=last)
    np.savez(tmp_path / "b.npz", **base, terminated=no, truncated=last)
    import_npz([tmp_path / "a.npz", tmp_path / "b.npz"], tmp_path / "new")
    a, b = (read_trajectory(tmp_path / "new" / f"trajectory_{k}") for k in (0, 1))
    assert (a["dones"][-1, 0], a["timeouts"][-1]) == (1, False)  # terminated wins
    assert (b["dones"][-1, 0], b["timeouts"][-1]) == (1, True)


# ------------------------------------------------------------------ Minari
@dataclass
class Buffer:
    id: int = None
    observations: object = None
    actions: object = None
    rewards: list = None
    terminations: list = None
    truncations: list = None


class Dataset:
    """What Minari gives back of buffers."""

    def __init__(self, name, buffers, **about):
        self.id, self.buffers, self.about = name, buffers, about

    def iterate_episodes(self):
        for b in self.buffers:
            arrays = {n: np.asarray(getattr(b, n)) for n in ("actions", "rewards", "terminations", "truncations")}
            yield types.SimpleNamespace(id=b.id, observations=b.observations, infos={}, **arrays)


@pytest.fixture
def minari(tmp_path, monkeypatch):
    """Minari itself where it is installed, else a stand-in with its interface."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    try:
        import minari
    except ImportError:
        minari = types.ModuleType("minari")
        minari.create_dataset_from_buffers = lambda name, buffers, **about: Dataset(name, buffers, **about)
        collector = types.ModuleType("minari.data_collector")
        collector.EpisodeBuffer = Buffer
        monkeypatch.setitem(sys.modules, "minari", minari)
        monkeypatch.setitem(sys.modules, "minari.data_collector", collector)
    return minari


@pytest.mark.filterwarnings("ignore:.*code_permalink.*", "ignore:.*author.*", "ignore:.*env.*", "ignore:.*algorithm.*")
def test_minari_export_and_import_restore_the_trajectories(tmp_path, minari):
    with TrajectoryWriter(tmp_path / "data") as writer:
        for k, (steps, ended) in enumerate(((4, "terminated"), (6, "truncated"))):
            arrays = episode(k, steps, timeouts=False)
            arrays["timeouts"] = np.arange(steps) == (steps - 1 if ended == "truncated" else -1)
            writer.add(k, {**arrays, "final_observations": np.array([[k, steps]], np.float32)}, 0, ended)
    made = export_minari(tmp_path / "data", "canter/test-v0")
    (first, second) = made.iterate_episodes()
    assert first.observations[:, 1].tolist() == [0, 1, 2, 3, 4]  # the final one too
    assert (first.terminations[-1], first.truncations[-1]) == (True, False)
    assert (second.terminations[-1], second.truncations[-1]) == (False, True)
    assert import_minari(made, tmp_path / "again", file_steps=3) == 2
    for k in (0, 1):
        a, b = (read_trajectory(tmp_path / where / f"trajectory_{k}") for where in ("data", "again"))
        for name in ("observations", "actions", "rewards", "dones", "timeouts", "final_observations"):
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.mark.filterwarnings("ignore:.*code_permalink.*", "ignore:.*author.*", "ignore:.*env.*", "ignore:.*algorithm.*")
def test_minari_gets_a_truncation_where_a_trajectory_was_cut_off(tmp_path, minari):
    with TrajectoryWriter(tmp_path / "data") as writer:
        arrays = episode(0, 4) | {"actions": np.array([0, 2, 1, 0])}
        arrays["dones"][-1], arrays["timeouts"][-1] = 0, False
        writer.add(0, arrays, 0)
    with pytest.warns(UserWarning, match="has no final observation"):
        made = export_minari(tmp_path / "data", "canter/cut-v0", action_space=spaces.Discrete(3))
    (only,) = made.iterate_episodes()
    assert (only.terminations[-1], only.truncations[-1]) == (False, True)
    assert only.observations[:, 1].tolist() == [0, 1, 2, 3, 3]


def test_without_minari_the_error_names_the_install_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(ImportError, match=r"canter\[minari\]"):
        import_minari("canter/test-v0", tmp_path)


def test_exports_contain_whole_observations_with_images(tmp_path):
    metadata = {"obs_segments": {"camera": [1], "t": [1]}, "obs_disassemble_mapping": {"camera": "normalized_image"}}
    with TrajectoryWriter(tmp_path / "data", metadata) as writer:
        arrays = episode(0, 3)
        del arrays["observations"]
        writer.add(
            0, {**arrays, "obs_camera": np.full((3, 1), 255, np.uint8), "obs_t": np.zeros((3, 1), np.float32)}, 0
        )
    ((name, whole),) = trajectories(tmp_path / "data")
    assert name == "trajectory_0"
    assert whole["observations"].tolist() == [[1.0, 0.0]] * 3
