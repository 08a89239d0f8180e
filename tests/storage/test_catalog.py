"""Directories of trajectories: one writer, acknowledged files, and a manifest that can be rebuilt."""

import json
import os

import numpy as np
import pytest

from canter.storage.rollout_files.catalog import (
    MANIFEST,
    METADATA,
    DatasetError,
    TrajectoryLibrary,
    TrajectoryWriter,
    find_trajectory,
    read_manifest,
    read_metadata,
    read_trajectory,
    rebuild_manifest,
)
from canter.storage.rollout_files.container import TrajectoryFileError, write_chunk
from canter.utils import files
from canter.utils.files import RunLockedError


def test_totals_and_lines_are_those_of_the_files(record):
    directory = record({0: (0, 4, 9), 1: (0, 3)})
    metadata = read_metadata(directory)
    assert (metadata["total_timesteps"], metadata["total_trajectories"], metadata["total_episodes"]) == (12, 2, 2)
    assert metadata["format_version"] == 2
    entries = read_manifest(directory)
    assert [(e["file"], e["start"], e["end"]) for e in entries] == [
        ("trajectory_0/traj_000000_000004.safetensors", 0, 4),
        ("trajectory_0/traj_000004_000009.safetensors", 4, 9),
        ("trajectory_1/traj_000000_000003.safetensors", 0, 3),
    ]
    assert all((directory / e["file"]).stat().st_size == e["bytes"] for e in entries)


def test_the_manifest_is_rebuilt_from_the_files_alone(record):
    directory = record({0: (0, 4, 9), 1: (0, 3)})
    before = (directory / MANIFEST).read_text()
    (directory / MANIFEST).unlink()
    rebuild_manifest(directory)
    assert (directory / MANIFEST).read_text() == before


def test_a_line_cut_short_by_a_crash_is_no_line_and_is_repaired(record, make_steps):
    directory = record({0: (0, 4)})
    with (directory / MANIFEST).open("a") as file:
        file.write('{"file": "trajectory_1/tr')
    assert len(read_manifest(directory)) == 1
    with TrajectoryWriter(directory) as writer:
        writer.add(1, make_steps(1, 0, 2), 0)
        writer.flush()
        assert [e["end"] for e in read_manifest(directory)] == [4, 2]


def test_a_file_whose_line_was_lost_is_counted_by_the_next_writer(tmp_path, make_steps):
    writer = TrajectoryWriter(tmp_path)
    writer.add(0, make_steps(0, 0, 7), 0, "terminated")
    writer._pool.shutdown()
    writer._lock.release()  # as if killed: no flush, no metadata
    assert read_manifest(tmp_path) == []
    assert not (tmp_path / METADATA).exists()
    again = TrajectoryWriter(tmp_path)
    assert (again.num_steps, again.num_trajectories, again.num_episodes) == (7, 1, 1)
    assert len(read_manifest(tmp_path)) == 1
    again.close()


def test_temporary_files_of_dead_processes_are_removed_and_never_read(record):
    directory = record({0: (0, 4)})
    temp = directory / "trajectory_0" / f".tmp-{files._HOST_TAG}-999999999-0123abcd"
    temp.write_bytes(b"half")
    trajectory, bad = find_trajectory(directory / "trajectory_0")
    assert len(trajectory.chunks) == 1
    assert bad == []
    TrajectoryWriter(directory).close()
    assert not temp.exists()


def test_a_second_writer_in_a_directory_is_refused(tmp_path):
    with TrajectoryWriter(tmp_path), pytest.raises(RunLockedError, match="in use by pid"):
        TrajectoryWriter(tmp_path)
    TrajectoryWriter(tmp_path).close()


def test_free_numbers_are_those_of_empty_folders_then_new_ones(record):
    directory = record({0: (0, 4), 3: (0, 4)})
    (directory / "trajectory_1").mkdir()
    with TrajectoryWriter(directory) as writer:
        assert writer.free_numbers(3) == [1, 4, 5]


def test_a_pending_trajectory_is_seen_only_when_it_is_published(tmp_path, make_steps):
    with TrajectoryWriter(tmp_path) as writer:
        for number in (0, 1):
            writer.add_pending(number, make_steps(number, 0, 4), 0)
            writer.add_pending(number, make_steps(number, 4, 6), 4, "truncated")
        writer.discard(0)
        assert not (tmp_path / "trajectory_1").exists()
        assert writer.num_steps == 0
        writer.publish(1)
        assert (writer.num_steps, writer.num_episodes) == (6, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", MANIFEST, METADATA, "trajectory_1"]
    assert [e["end"] for e in read_manifest(tmp_path)] == [4, 6]


def test_closing_twice_is_harmless_and_leaves_no_empty_folder(tmp_path, make_steps):
    writer = TrajectoryWriter(tmp_path)
    writer.add(0, make_steps(0, 0, 4), 0)
    writer.folder(1).mkdir()
    writer.close()
    before = (tmp_path / METADATA).read_bytes()
    writer.close()
    assert (tmp_path / METADATA).read_bytes() == before
    assert not (tmp_path / "trajectory_1").exists()


def test_a_whole_trajectory_is_its_files_in_order(record):
    whole = read_trajectory(record({2: (0, 4, 9, 11)}) / "trajectory_2")
    np.testing.assert_array_equal(whole["rewards"][:, 0], 200 + np.arange(11))
    assert whole["dones"][:, 0].tolist() == [0] * 10 + [1]


def test_a_gap_between_files_is_named(record):
    folder = record({0: (0, 4, 9, 11)}) / "trajectory_0"
    os.remove(folder / "traj_000004_000009.safetensors")
    with pytest.raises(TrajectoryFileError, match="begins at step 9, but the files before it end at 4"):
        read_trajectory(folder)


def test_metadata_that_is_no_object_is_named(tmp_path):
    (tmp_path / METADATA).write_text(json.dumps([1]))
    with pytest.raises(TrajectoryFileError, match=r"metadata\.json holds a list"):
        read_metadata(tmp_path)
    (tmp_path / METADATA).write_text("{")
    with pytest.raises(TrajectoryFileError, match="cannot be read"):
        read_metadata(tmp_path)


def test_other_arrays_than_those_in_the_directory_are_refused_with_the_difference(record, make_steps):
    directory = record({0: (0, 4)})
    with (
        TrajectoryWriter(directory) as writer,
        pytest.raises(TrajectoryFileError, match=r"actions is absent, not F32\[1"),
    ):
        writer.add(1, {n: a for n, a in make_steps(1, 0, 2).items() if n != "actions"}, 0)


def test_flush_raises_the_error_of_a_failed_write(tmp_path, make_steps):
    writer = TrajectoryWriter(tmp_path)
    (tmp_path / "trajectory_0").write_text("in the way")
    writer.add(0, make_steps(0, 0, 2), 0)
    with pytest.raises(FileExistsError):
        writer.flush()
    writer.close()
    assert read_manifest(tmp_path) == []


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_infinity_are_not_written(tmp_path, make_steps, value):
    arrays = make_steps(0, 0, 3)
    arrays["observations"][1, 0] = value
    with (
        TrajectoryWriter(tmp_path) as writer,
        pytest.raises(ValueError, match="'observations' of a trajectory holds NaN or infinity; it is not written"),
    ):
        writer.add(0, arrays, 0)
    assert read_manifest(tmp_path) == []


def test_recorded_nan_is_a_bad_file(record, make_steps):
    directory = record({0: (0, 4)})
    arrays = make_steps(1, 0, 4, terminated=True)
    arrays["observations"][2, 0] = np.nan
    write_chunk(directory / "trajectory_1", arrays, 0, "terminated")
    path = next((directory / "trajectory_1").iterdir())
    library = TrajectoryLibrary([directory])
    library.scan()
    with pytest.raises(DatasetError, match=r"trajectory_1.*holds NaN or infinity in 'observations'"):
        library.load(path)
    tolerant = TrajectoryLibrary([directory], max_bad_fraction=0.5)
    tolerant.scan()
    with pytest.warns(UserWarning, match="holds NaN or infinity"):
        assert tolerant.load(path) is None
