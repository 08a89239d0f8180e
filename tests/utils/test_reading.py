import io
import os
import struct
import time
import tracemalloc
import zipfile

import numpy as np
import pytest

from canter.utils.reading import FileContentError, parse_yaml, read_json, read_limited, read_npz, read_yaml

LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
MERGES = "a0: &a0 {k: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40))


@pytest.mark.parametrize("text", [LAUGHS, MERGES], ids=["nested aliases", "merged aliases"])
def test_aliases_that_multiply_are_refused_before_they_are_read(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    start = time.monotonic()
    with pytest.raises(FileContentError, match=r"config\.yaml cannot be read: with its aliases it has more"):
        read_yaml(tmp_path / "config.yaml")
    assert time.monotonic() - start < 5.0


def test_aliases_that_repeat_a_little_are_read(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "dims: &dims [64, 64]\nactor: {hidden: *dims}\ncritic: {hidden: *dims, <<: {b: 1}}\n"
    )
    assert read_yaml(tmp_path / "a.yaml")["critic"] == {"hidden": [64, 64], "b": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [*a]", "stands for nothing, or for what contains it"),
        ("[" * 100 + "]" * 100, "nested more than 64 deep"),
        ("a: 2020-99-99", "month must be"),
        ("a: !!python/object/apply:os.system [x]", "could not determine a constructor"),
        ("- 1", "holds a list, not named values"),
        ("a: [", "expected"),
        ("\xff", "cannot be read"),
    ],
)
def test_a_text_that_is_no_config_is_named(tmp_path, text, message):
    (tmp_path / "config.yaml").write_text(text, encoding="latin-1")
    with pytest.raises(FileContentError, match=rf"(?s)config\.yaml .*{message}"):
        read_yaml(tmp_path / "config.yaml")


def test_every_value_of_yaml_counts_once(monkeypatch):
    monkeypatch.setattr("canter.utils.reading.MAX_VALUES", 10)
    assert parse_yaml("a: {b: [1, 2]}\nc: x") == {"a": {"b": [1, 2]}, "c": "x"}
    assert parse_yaml("[1, 2, 3, 4, 5, 6, 7, 8, 9]")  # nine numbers and their list
    with pytest.raises(ValueError, match="more than 10 values"):
        parse_yaml("[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]")


def test_json_that_nests_too_deep_is_named(tmp_path):
    (tmp_path / "a.json").write_text("[" * 200_000)
    with pytest.raises(FileContentError, match=r"a\.json cannot be read"):
        read_json(tmp_path / "a.json")


def test_files_that_are_too_large_or_no_files_are_refused_unread(tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(FileContentError, match="has 1099511627776 bytes, more than the 1048576"):
        read_limited(tmp_path / "large")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is no plain file"):
        read_limited(tmp_path / "pipe")


def npz_with(path, header, data=b"", compression=zipfile.ZIP_STORED):
    text = header.encode().ljust(117) + b"\n"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("a.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data)


def test_an_array_that_claims_more_than_it_has_is_refused_before_it_is_allocated(tmp_path):
    npz_with(tmp_path / "a.npz", "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000,)}", b"\0" * 64)
    tracemalloc.start()
    try:
        with pytest.raises(FileContentError, match=r"a\.npy has 64 bytes, and its header says float64 of shape"):
            read_npz(tmp_path / "a.npz")
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_an_archive_that_unpacks_to_more_than_the_limit_is_refused(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", a=np.zeros(1_000_000))
    assert (tmp_path / "a.npz").stat().st_size < 20_000
    with pytest.raises(FileContentError, match="unpacks to 8000128 bytes, more than the 1000000"):
        read_npz(tmp_path / "a.npz", 1_000_000)
    assert read_npz(tmp_path / "a.npz")["a"].shape == (1_000_000,)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.arange(6).reshape(2, 3).T,
        np.array(["a", "bc"]),
        np.zeros((0, 3)),
        np.float64(2.5),
        np.array([True, False]),
    ],
)
def test_arrays_are_read_as_numpy_reads_them(tmp_path, array):
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", a=array)
        found, expected = read_npz(tmp_path / "a.npz")["a"], np.load(tmp_path / "a.npz")["a"]
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert (found == expected).all()
        assert found.flags.writeable


def test_objects_pickles_and_other_files_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.array([{}], dtype=object))
    with pytest.raises(FileContentError, match="says object"):
        read_npz(tmp_path / "a.npz")
    (tmp_path / "b.npz").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(FileContentError, match="not a zip file"):
        read_npz(tmp_path / "b.npz")
    with zipfile.ZipFile(tmp_path / "c.npz", "w") as archive:
        archive.writestr("x.py", "")
    with pytest.raises(FileContentError, match="other files than arrays"):
        read_npz(tmp_path / "c.npz")
    with pytest.raises(FileNotFoundError):
        read_npz(tmp_path / "none.npz")
    buffer = io.BytesIO()
    np.savez(buffer, a=np.zeros(3))
    damaged = bytearray(buffer.getvalue())
    damaged[damaged.find(b"\x93NUMPY") + 130] ^= 1
    (tmp_path / "d.npz").write_bytes(damaged)
    with pytest.raises(FileContentError, match="CRC-32"):
        read_npz(tmp_path / "d.npz")
