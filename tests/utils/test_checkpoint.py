import hashlib
import io
import os
import random
import signal
import threading
import time
import warnings
import zipfile
from collections import Counter, OrderedDict, deque
from pathlib import Path

import numpy as np
import pytest
import torch

from canter.utils.checkpoint import (
    FINAL_NAME,
    FORMAT_VERSION,
    MARK,
    CheckpointError,
    _find_unsafe,
    check_compatible,
    find_checkpoints,
    load_checkpoint,
    newest_valid_checkpoint,
    prune_checkpoints,
    save_checkpoint,
    verify_checkpoint,
)


def small_state(number=1):
    net = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(net.weight, float(number))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {
        "model_state_dict": net.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "iter": number,
        "infos": {"note": "ok", "values": [1, 2.5, None, True], "pair": (1, "a")},
    }


def flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


def quiet_newest(directory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return newest_valid_checkpoint(directory)


def test_round_trip_is_bitwise_and_plain_torch_reads_the_file(tmp_path):
    path = tmp_path / "model_1.pt"
    state = small_state()
    save_checkpoint(path, state)
    for loaded in (load_checkpoint(path), torch.load(path, weights_only=True)):
        assert loaded["format_version"] == FORMAT_VERSION
        assert loaded["iter"] == 1
        assert loaded["infos"] == state["infos"]
        assert torch.equal(loaded["model_state_dict"]["weight"], state["model_state_dict"]["weight"])
        saved, read = state["optimizer_state_dict"]["state"][0], loaded["optimizer_state_dict"]["state"][0]
        assert torch.equal(saved["exp_avg_sq"], read["exp_avg_sq"])
        assert saved["step"] == read["step"]
    assert "format_version" not in state
    assert verify_checkpoint(path) is True


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.float64(1.0), "numpy.float64"),
        (np.ones(2), "numpy.ndarray"),
        (Path("x"), "Path"),
        (deque([1]), "deque"),
        ({1, 2}, "set"),
        (signal.SIGTERM, "Signals"),
        (b"raw", "bytes"),
        (torch.device("cpu"), "torch.device"),
    ],
)
def test_anything_but_plain_containers_is_refused_with_its_key(tmp_path, value, kind):
    with pytest.raises(TypeError, match=r"state\['infos'\]\['list'\]\[1\]") as caught:
        save_checkpoint(tmp_path / "model_1.pt", {"infos": {"list": [0, value]}})
    assert kind in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_key_that_is_not_str_or_int_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"key \(1, 2\) in state\['infos'\]"):
        save_checkpoint(tmp_path / "model_1.pt", {"infos": {(1, 2): 3}})


def test_parameters_and_ordered_dicts_become_plain(tmp_path):
    values = {"p": torch.nn.Parameter(torch.ones(2)), "o": OrderedDict(b=1), "c": Counter([7, 7])}
    save_checkpoint(tmp_path / "a.pt", values)
    loaded = load_checkpoint(tmp_path / "a.pt")
    assert type(loaded["p"]) is torch.Tensor
    assert not loaded["p"].requires_grad
    assert type(loaded["o"]) is type(loaded["c"]) is dict
    assert loaded["c"] == {7: 2}


def test_slice_is_saved_without_the_rest_of_its_storage(tmp_path):
    save_checkpoint(tmp_path / "a.pt", {"last": torch.arange(1_000_000.0)[-3:]})
    assert (tmp_path / "a.pt").stat().st_size < 10_000
    assert load_checkpoint(tmp_path / "a.pt")["last"].tolist() == [999_997.0, 999_998.0, 999_999.0]


def test_each_of_200_random_bit_flips_is_detected(tmp_path):
    path = tmp_path / "model_1.pt"
    save_checkpoint(path, small_state())
    data = path.read_bytes()
    rng = random.Random(0)
    for bit in rng.sample(range(len(data) * 8), 200):
        path.write_bytes(flip(data, bit))
        with pytest.raises(CheckpointError, match=r"model_1\.pt"):
            verify_checkpoint(path)


def test_each_bit_flip_in_the_last_200_bytes_is_detected(tmp_path):
    """A flip in the end record or the checksum could make the file look like one without a checksum."""
    path = tmp_path / "model_1.pt"
    save_checkpoint(path, {"weight": torch.ones(2)})
    data = path.read_bytes()
    for bit in range((len(data) - 200) * 8, len(data) * 8):
        path.write_bytes(flip(data, bit))
        with pytest.raises(CheckpointError):
            verify_checkpoint(path)


def test_truncation_anywhere_is_detected(tmp_path):
    path = tmp_path / "model_1.pt"
    save_checkpoint(path, small_state())
    data = path.read_bytes()
    comment = len("canter-sha256:") + 64
    offsets = [0, 1, 21, len(data) - 1, len(data) - 64, len(data) - comment]
    for offset in offsets + random.Random(1).sample(range(len(data)), 20):
        path.write_bytes(data[:offset])
        with pytest.raises(CheckpointError):
            load_checkpoint(path)


def test_bytes_after_the_end_are_detected(tmp_path):
    path = tmp_path / "model_1.pt"
    save_checkpoint(path, small_state())
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(CheckpointError):
        verify_checkpoint(path)


def test_foreign_archive_is_accepted_untrusted_and_its_damage_detected(tmp_path):
    path = tmp_path / "foreign.pt"
    torch.save({"iteration": 7, "actor_state_dict": {"w": torch.arange(1000.0)}}, path)
    assert verify_checkpoint(path) is False
    assert load_checkpoint(path)["iteration"] == 7
    data = path.read_bytes()
    inside = data.index(torch.arange(1000.0).numpy().tobytes()) + 2000
    path.write_bytes(flip(data, inside * 8))
    with pytest.raises(CheckpointError, match="CRC-32"):
        load_checkpoint(path)


def test_pickle_that_runs_code_is_refused(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    torch.save({"infos": Bomb()}, tmp_path / "bomb.pt")
    with pytest.raises(CheckpointError, match=r"bomb\.pt cannot be loaded safely"):
        load_checkpoint(tmp_path / "bomb.pt")
    assert not (tmp_path / "ran").exists()


def test_compressed_bomb_is_refused_before_it_is_unpacked(tmp_path):
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10_000_000)
    with pytest.raises(CheckpointError, match="claims more content"):
        load_checkpoint(path)


@pytest.mark.parametrize("data", [b"", b"not a zip at all", b"PK\x05\x06" + b"\0" * 18])
def test_file_that_is_no_archive_is_a_checkpoint_error(tmp_path, data):
    (tmp_path / "model_1.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model_1\.pt"):
        load_checkpoint(tmp_path / "model_1.pt")


def test_the_final_checkpoint_is_the_newest_where_none_has_a_number(tmp_path):
    save_checkpoint(tmp_path / "checkpoint_best.pt", {"a": 1})
    with pytest.raises(FileNotFoundError, match=r"no checkpoint_final\.pt in .*; it also has checkpoint_best\.pt"):
        newest_valid_checkpoint(tmp_path)
    save_checkpoint(tmp_path / "checkpoint_final.pt", {"a": 2})
    assert newest_valid_checkpoint(tmp_path).name == "checkpoint_final.pt"
    save_checkpoint(tmp_path / "model_3.pt", {"a": 3})
    assert newest_valid_checkpoint(tmp_path).name == "model_3.pt"
    (tmp_path / "model_3.pt").write_bytes(b"half")
    with pytest.warns(UserWarning, match=r"SKIPPING .*model_3\.pt"):
        assert newest_valid_checkpoint(tmp_path).name == "checkpoint_final.pt"
    (tmp_path / "checkpoint_final.pt").write_bytes(b"half")
    with (
        pytest.warns(UserWarning, match="SKIPPING"),
        pytest.raises(CheckpointError, match="it also has checkpoint_best"),
    ):
        newest_valid_checkpoint(tmp_path)


def test_directory_and_list_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="is a directory$"):
        load_checkpoint(tmp_path)
    (tmp_path / "model_7.pt").touch()
    with pytest.raises(CheckpointError, match=r"is a directory; name a file: .*model_7\.pt"):
        load_checkpoint(tmp_path)
    torch.save([1, 2], tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="holds a list"):
        load_checkpoint(tmp_path / "a.pt")
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "missing.pt")


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, "2", None])
def test_future_format_is_refused(tmp_path, version):
    torch.save({"format_version": version}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=f"format version {version!r}"):
        load_checkpoint(tmp_path / "a.pt")


def test_discovery_sorts_by_number_and_ignores_foreign_names(tmp_path):
    for name in ("model_1000000.pt", "model_999999.pt", "model_7.pt"):
        save_checkpoint(tmp_path / name, {})
    for name in (
        "model_best.pt",
        "model_8.pt.tmp",
        ".tmp-model_9.pt",
        "model_-5.pt",
        "checkpoint_final.pt",
        "model_.pt",
    ):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "model_2000000.pt").mkdir()
    with pytest.warns(UserWarning, match=r"model_2000000\.pt is named like a checkpoint but is not a file"):
        found = find_checkpoints(tmp_path)
    assert [number for number, _ in found] == [7, 999_999, 1_000_000]
    assert quiet_newest(tmp_path).name == "model_1000000.pt"


def test_newest_skips_damaged_files_with_a_warning(tmp_path):
    for number in (1, 2, 3, 4):
        save_checkpoint(tmp_path / f"model_{number}.pt", {"iter": number})
    (tmp_path / "model_4.pt").write_bytes(b"")
    (tmp_path / "model_3.pt").write_bytes(flip((tmp_path / "model_3.pt").read_bytes(), 4001))
    with pytest.warns(UserWarning, match="SKIPPING") as caught:
        assert newest_valid_checkpoint(tmp_path) == tmp_path / "model_2.pt"
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 2
    assert "model_4.pt" in texts[0]
    assert "model_3.pt" in texts[1]


def test_no_checkpoint_and_no_valid_checkpoint_are_different_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="no model_"):
        newest_valid_checkpoint(tmp_path)
    (tmp_path / "model_3.pt").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="none of 1 checkpoints"):
        quiet_newest(tmp_path)


def test_prune_keeps_the_newest_and_refuses_to_keep_one(tmp_path):
    for number in (9, 10, 11, 100):
        save_checkpoint(tmp_path / f"model_{number}.pt", {})
    (tmp_path / "checkpoint_final.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="at least 2"):
        prune_checkpoints(tmp_path, 1)
    assert [path.name for path in prune_checkpoints(tmp_path, 2)] == ["model_9.pt", "model_10.pt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_final.pt", "model_100.pt", "model_11.pt"]


def test_prune_never_deletes_the_newest_valid(tmp_path):
    for number in (1, 2, 3, 4):
        save_checkpoint(tmp_path / f"model_{number}.pt", {})
    for number in (3, 4):
        (tmp_path / f"model_{number}.pt").write_bytes(b"torn")
    prune_checkpoints(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model_2.pt", "model_3.pt", "model_4.pt"]
    (tmp_path / "model_2.pt").write_bytes(b"torn")
    with pytest.warns(UserWarning, match="none is deleted"):
        assert prune_checkpoints(tmp_path, 2) == []


def test_failed_deletion_only_warns(tmp_path, monkeypatch):
    for number in (1, 2, 3, 4):
        save_checkpoint(tmp_path / f"model_{number}.pt", {})
    real = Path.unlink

    def stubborn(self, *args, **kwargs):
        if self.name == "model_1.pt":
            raise PermissionError("immutable")
        real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "unlink", stubborn)
    with pytest.warns(UserWarning, match=r"cannot delete the old checkpoint .*model_1\.pt: immutable"):
        assert [path.name for path in prune_checkpoints(tmp_path, 2)] == ["model_2.pt"]


def test_every_mismatch_is_listed_at_once():
    current = {"a.weight": torch.zeros(128, 4), "a.bias": torch.zeros(128), "std": torch.zeros(2)}
    loaded = {"a.weight": torch.zeros(64, 4), "std": torch.zeros(2), "extra": torch.zeros(3)}
    with pytest.raises(RuntimeError) as caught:
        check_compatible(current, loaded, "ActorCritic")
    assert str(caught.value).splitlines() == [
        "the checkpoint does not fit ActorCritic (3 tensors); nothing was loaded:",
        "  missing a.bias, want (128,)",
        "  unexpected extra, got (3,)",
        "  shape of a.weight: want (128, 4), got (64, 4)",
    ]
    check_compatible(current, {name: value.clone() for name, value in current.items()}, "ActorCritic")


def test_reader_never_sees_an_incomplete_file(tmp_path):
    path = tmp_path / "model_1.pt"
    save_checkpoint(path, {"iter": 0, "weight": torch.zeros(20_000)})
    seen, stop = [], threading.Event()

    def write():
        number = 0
        while not stop.is_set():
            number += 1
            save_checkpoint(path, {"iter": number, "weight": torch.full((20_000,), float(number))})

    writer = threading.Thread(target=write)
    writer.start()
    try:
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            loaded = load_checkpoint(path)
            assert (loaded["weight"] == loaded["iter"]).all()
            seen.append(loaded["iter"])
    finally:
        stop.set()
        writer.join()
    assert len(set(seen)) > 3
    assert seen == sorted(seen)


def test_full_disk_inside_the_archive_writer_is_a_disk_full_error(tmp_path, monkeypatch):
    import errno

    from canter.utils import files

    real = files._TempFile.write

    def write(self, data):
        if self.tell() > 100_000:
            self.failure = OSError(errno.ENOSPC, "No space left on device")
            raise self.failure
        return real(self, data)

    path = tmp_path / "model_1.pt"
    save_checkpoint(path, {"iter": 1})
    monkeypatch.setattr(files._TempFile, "write", write)
    with pytest.raises(files.DiskFullError, match=r"disk full.*800\d{3} or more needed; the previous file is intact"):
        save_checkpoint(path, {"weight": torch.zeros(200_000)})
    monkeypatch.undo()
    assert load_checkpoint(path)["iter"] == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["model_1.pt"]


def test_saving_stores_the_same_values_as_torch_save(tmp_path):
    state = {"a": torch.arange(7, dtype=torch.float64), "b": torch.ones(2, 3).t(), "c": torch.tensor(True)}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    want = torch.load(buffer, weights_only=True)
    save_checkpoint(tmp_path / "a.pt", state)
    got = load_checkpoint(tmp_path / "a.pt")
    for name in state:
        assert torch.equal(got[name], want[name])
        assert got[name].dtype == want[name].dtype


def with_mark(path):
    """Give any archive the checksum that canter writes."""
    content = path.read_bytes()
    content = content[:-2] + (len(MARK) + 64).to_bytes(2, "little") + MARK
    path.write_bytes(content + hashlib.sha256(content).hexdigest().encode())


def test_a_checksum_does_not_switch_off_the_size_check(tmp_path):
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10_000_000)
    with_mark(path)
    with pytest.raises(CheckpointError, match="claims more content"):
        load_checkpoint(path)


@pytest.mark.parametrize("has_mark", [False, True])
@pytest.mark.parametrize("call", [(bytearray, 1 << 40), (torch.UntypedStorage, 1 << 40), (torch.Tensor, 1 << 40)])
def test_a_pickle_that_reserves_memory_is_refused_before_it_is_run(tmp_path, call, has_mark):
    class Bomb:
        def __reduce__(self):
            return call[0], (call[1],)

    torch.save({"a": Bomb()}, tmp_path / "a.pt")
    if has_mark:
        with_mark(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=rf"cannot be loaded safely: it asks for .*{call[0].__name__}"):
        load_checkpoint(tmp_path / "a.pt")


def test_a_storage_that_is_named_in_the_memo_cannot_be_called_either():
    named = b"\x80\x02ctorch.storage\nUntypedStorage\nq\x01X\x01\x00\x00\x000"
    assert _find_unsafe(named + b".") is None
    assert _find_unsafe(named + b"h\x01X\x01\x00\x00\x000.") is None
    assert _find_unsafe(named + b"h\x01J\x00\x00\x00\x40\x85R.") == "torch.storage.UntypedStorage"
    assert _find_unsafe(named + b"0.") == "the operation POP"


def test_content_that_grows_when_it_is_copied_is_refused(tmp_path):
    torch.save({"a": torch.zeros(1).expand(1 << 40)}, tmp_path / "view.pt")
    with pytest.raises(CheckpointError, match="expands to more than"):
        load_checkpoint(tmp_path / "view.pt")
    laughs = ["ha"]
    for _ in range(60):
        laughs = [laughs, laughs]
    torch.save({"a": laughs}, tmp_path / "laughs.pt")
    with pytest.raises(CheckpointError, match="expands to more than"):
        load_checkpoint(tmp_path / "laughs.pt")
    loop = []
    loop.append(loop)
    torch.save({"a": loop}, tmp_path / "loop.pt")
    with pytest.raises(CheckpointError, match="expands to more than"):
        load_checkpoint(tmp_path / "loop.pt")


def test_all_that_torch_saves_of_plain_data_is_loaded(tmp_path):
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.uint16)
    content = {str(kind): torch.ones(3, dtype=kind) for kind in kinds}
    content |= {"p": torch.nn.Parameter(torch.ones(2)), "size": torch.Size([1]), "set": {1}, "bytes": b"ab", "n": 2**70}
    content |= {"module": torch.nn.Linear(2, 2).state_dict(), "device": torch.device("cpu"), "dtype": torch.float32}
    torch.save(content, tmp_path / "a.pt")
    assert load_checkpoint(tmp_path / "a.pt").keys() == content.keys()


def test_only_the_bound_of_a_normalizer_may_be_missing():
    plain, bounded = ({"net.weight": torch.zeros(2)} for _ in range(2))
    bounded["obs_normalizer.normalizer_clip"] = torch.tensor(10.0)
    check_compatible(plain, bounded, "ActorCritic")
    check_compatible(bounded, plain, "ActorCritic")
    with pytest.raises(CheckpointError, match=r"missing net\.clip"):
        check_compatible({**plain, "net.clip": torch.zeros(())}, plain, "ActorCritic")


EVIL = b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x01\x85R."  # reserves 4 GiB


@pytest.mark.parametrize("has_mark", [False, True])
@pytest.mark.parametrize(
    "names", [("a/DATA.PKL",), ("a/data.pkl",), ("b/data.pkl",), ("a/data.pkl/",), ("a/constants.pkl",), ("a/data/x",)]
)
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_archive_that_torch_may_read_in_another_way_is_refused(tmp_path, names, has_mark, is_first):
    torch.save({"x": 1}, tmp_path / "sound.pt")
    with zipfile.ZipFile(tmp_path / "sound.pt") as archive:
        members = [(name.replace(name.split("/")[0], "a", 1), archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(tmp_path / "odd.pt", "w") as archive:
        evil = [(name, EVIL) for name in names]
        for name, content in evil + members if is_first else members + evil:
            archive.writestr(name, content)
    if has_mark:
        with_mark(tmp_path / "odd.pt")
    with pytest.raises(CheckpointError, match=r"odd\.pt is damaged: it"):
        load_checkpoint(tmp_path / "odd.pt")


def test_an_archive_behind_other_bytes_is_refused(tmp_path):
    torch.save({"x": 1}, tmp_path / "sound.pt")
    (tmp_path / "odd.pt").write_bytes(b"x" * 64 + (tmp_path / "sound.pt").read_bytes())
    with pytest.raises(CheckpointError, match="does not begin with its members"):
        load_checkpoint(tmp_path / "odd.pt")


def test_a_link_in_a_directory_is_no_checkpoint_of_it_and_one_that_is_named_is(tmp_path):
    save_checkpoint(tmp_path / "elsewhere.pt", {"x": 1})
    save_checkpoint(tmp_path / "model_1.pt", {"x": 2})
    for name in ("model_2.pt", FINAL_NAME):
        (tmp_path / name).symlink_to(tmp_path / "elsewhere.pt")
    with pytest.warns(UserWarning, match="model_2.pt is named like a checkpoint but is not a file of its own"):
        assert newest_valid_checkpoint(tmp_path).name == "model_1.pt"
    assert load_checkpoint(tmp_path / "model_2.pt")["x"] == 1
