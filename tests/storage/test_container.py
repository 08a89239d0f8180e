"""Trajectory files: every damaged, shortened or foreign file is detected."""

import json
import os
import random
import re
import tracemalloc

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from canter.storage.rollout_files.container import (
    TrajectoryFileError,
    chunk_name,
    get_frame_range,
    peek_chunk,
    read_chunk,
    write_chunk,
)


def arrays(steps=5, first=0):
    index = np.arange(first, first + steps)
    return {
        "observations": np.stack([index, 10 * index], 1).astype(np.float32),
        "obs_camera": (index[:, None, None] * np.ones((1, 2, 3))).astype(np.uint8),
        "actions": index[:, None].astype(np.int64),
        "rewards": index[:, None].astype(np.float32),
        "dones": (index[:, None] == 4).astype(np.uint8),
        "timeouts": index == 3,
    }


def test_reading_returns_the_written_arrays(tmp_path):
    info = write_chunk(tmp_path, arrays(), 0, "terminated")
    assert info.path.name == "traj_000000_000005.safetensors"
    read = read_chunk(info.path)
    assert info == peek_chunk(info.path)
    assert (info.start, info.end, info.ended) == (0, 5, "terminated")
    for name, array in arrays().items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)


def test_any_safetensors_reader_can_open_a_file(tmp_path):
    info = write_chunk(tmp_path, arrays(), 64)
    np.testing.assert_array_equal(load_file(info.path)["observations"], arrays()["observations"])
    assert info.path.name == "traj_000064_000069.safetensors"


def test_every_flipped_bit_is_found(tmp_path):
    path = write_chunk(tmp_path, arrays(), 0).path
    content, rng = path.read_bytes(), random.Random(3)
    header = 8 + int.from_bytes(content[:8], "little")
    bits = [*range(64), *(rng.randrange(8 * header) for _ in range(150))]
    bits += [rng.randrange(8 * header, 8 * len(content)) for _ in range(100)]
    for bit in bits:
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(changed)
        with pytest.raises(TrajectoryFileError, match=re.escape(path.name)):
            read_chunk(path)


def test_every_shortened_file_is_found_by_its_header_alone(tmp_path):
    path = write_chunk(tmp_path, arrays(), 0).path
    content = path.read_bytes()
    for length in (0, 1, 7, 8, 50, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(TrajectoryFileError, match="damaged"):
            peek_chunk(path)
    path.write_bytes(content + b"x")
    with pytest.raises(TrajectoryFileError, match="damaged"):
        peek_chunk(path)


def test_files_of_other_programs_are_named_in_the_error(tmp_path):
    path = tmp_path / chunk_name(0, 5)
    save_file(arrays(), path)
    with pytest.raises(TrajectoryFileError, match="another program wrote it"):
        read_chunk(path)
    path.write_text("step,reward\n0,1\n" * 100)
    with pytest.raises(TrajectoryFileError, match="no trajectory file of canter"):
        read_chunk(path)
    path.write_bytes(b"\x80\x04\x95" + bytes(100))
    with pytest.raises(TrajectoryFileError, match="is a pickle; import it"):
        read_chunk(path)
    path.write_bytes((2**40).to_bytes(8, "little") + bytes(100))  # a header that says it is a terabyte
    with pytest.raises(TrajectoryFileError, match="no trajectory file of canter"):
        peek_chunk(path)


def test_a_file_moved_to_another_name_is_refused(tmp_path):
    path = write_chunk(tmp_path, arrays(), 0).path
    moved = path.rename(tmp_path / chunk_name(5, 10))
    with pytest.raises(TrajectoryFileError, match="which its name does not say"):
        peek_chunk(moved)


def test_a_newer_format_is_refused(tmp_path):
    path = write_chunk(tmp_path, arrays(), 0).path
    path.write_bytes(path.read_bytes().replace(b'"version":"1"', b'"version":"2"'))
    with pytest.raises(TrajectoryFileError, match="format version 2.*upgrade"):
        peek_chunk(path)


def test_arrays_of_different_lengths_are_refused(tmp_path):
    with pytest.raises(ValueError, match="one length"):
        write_chunk(tmp_path, {**arrays(), "rewards": np.zeros((4, 1))}, 0)
    with pytest.raises(ValueError, match="one length above 0"):
        write_chunk(tmp_path, arrays(0), 0)
    assert list(tmp_path.iterdir()) == []


def test_wrong_offsets_cannot_reach_outside_the_file(tmp_path):
    path = write_chunk(tmp_path, {"rewards": np.zeros((5, 1), np.float32)}, 0).path
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["rewards"] |= {"shape": [5, 1000]}
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(TrajectoryFileError):
        read_chunk(path)


@pytest.mark.parametrize("suffix", ["pkl", "pickle", "safetensors"])
def test_the_frame_range_is_in_the_name(suffix):
    assert get_frame_range(f"traj_100_200.{suffix}") == (100, 200)


@pytest.mark.parametrize("make", ["sparse", "link", "pipe"])
def test_a_sparse_file_a_link_and_a_pipe_are_refused_before_anything_is_reserved(tmp_path, make):
    info = write_chunk(tmp_path / "t", {"rewards": np.zeros(4, np.float32)}, 0)
    if make == "sparse":
        steps = 1 << 30
        path = tmp_path / "t" / f"traj_000000_{steps}.safetensors"
        entry = {"dtype": "F32", "shape": [steps], "data_offsets": [0, 4 * steps]}
        facts = {"format": "canter-trajectory", "version": "1", "start": "0", "end": str(steps), "ended": ""}
        header = json.dumps({"__metadata__": {**facts, "crc32": "0" * 8}, "rewards": entry}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(path, 8 + len(header) + 4 * steps)
        assert peek_chunk(path).end == steps  # its header fits
        tracemalloc.start()
        with pytest.raises(TrajectoryFileError, match="more than the"):
            read_chunk(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()
        return
    path = info.path.with_name("traj_000000_000009.safetensors")
    path.symlink_to(info.path) if make == "link" else os.mkfifo(path)
    with pytest.raises(OSError, match="remove it"):
        read_chunk(path)
