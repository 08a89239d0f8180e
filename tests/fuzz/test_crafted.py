"""Files whose checksums are right and whose content is not: one error that names the file, never a foreign one."""

import contextlib
import copy
import json
import re
import zlib

import pytest
import torch
import yaml
from fuzz_damages import LONG, QUICK, crafted
from hypothesis import given, settings
from test_damaged_files import make_bundle, make_trajectory

import canter
from canter.cli.__main__ import main
from canter.export.runtime import BundleError, read_spec, spec_hash
from canter.storage.rollout_files import TrajectoryFileError, read_chunk
from canter.utils.checkpoint import CheckpointError, load_checkpoint, save_checkpoint

LENGTHS = [pytest.param(QUICK, id="quick"), pytest.param(LONG, id="long", marks=pytest.mark.slow)]
FEW = [pytest.param(settings(QUICK, max_examples=6), id="few"), LENGTHS[1]]  # of what builds a runner each time
TINY = ["--num-envs", "2", "--num-steps-per-env", "4", "--num-mini-batches", "1", "--num-learning-epochs", "1"]
TINY += ["--final-episodes", "0", "--eval-interval", "0", "--no-video", "--total-timesteps", "8"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one iteration."""
    folder, threads = tmp_path_factory.mktemp("crafted"), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("canter.cli.train.plot_runs", lambda runs, path, **kwargs: path)
        assert main(["train", "canter/CartPole", *TINY, "--name", "r", "--runs-dir", str(folder)]) == 0
    yield folder / "canter" / "CartPole" / "r-seed1"
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("length", FEW)
def test_a_config_with_any_other_value_is_used_or_refused(run, length, monkeypatch, capsys):
    monkeypatch.setattr("canter.cli.train.run_to_end", lambda runner, path: runner.close() or 0)
    text = (run / "config.yaml").read_text()
    codes = set()

    @length
    @given(crafted(yaml.safe_load(text)))
    def resume(config):
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        code = main(["resume", str(run)])  # raises what is no error of a user
        message = capsys.readouterr().err
        assert code == 0 or message.startswith("canter: ")
        codes.add(code)

    try:
        resume()
    finally:
        (run / "config.yaml").write_text(text)
    assert codes <= {0, 2, 6}
    assert 2 in codes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("length", FEW)
def test_a_checkpoint_with_any_other_value_is_loaded_or_refused(run, length, monkeypatch, capsys):
    monkeypatch.setattr("canter.cli.train.run_to_end", lambda runner, path: runner.close() or 0)
    state, path = load_checkpoint(run / "checkpoint_final.pt"), run / "crafted.pt"

    @length
    @given(crafted(copy.deepcopy(state)))
    def load(content):
        save_checkpoint(path, content)
        assert main(["resume", str(run), "--checkpoint", str(path)]) in (0, 2, 6)
        with contextlib.suppress(CheckpointError, ValueError, NotImplementedError):
            canter.load(path)

    load()


@pytest.mark.parametrize("length", LENGTHS)
def test_a_bundle_with_any_other_value_is_read_or_refused(tmp_path, length):
    path = tmp_path / "bundle" / "policy.json"
    make_bundle(path)
    spec = json.loads(path.read_text())

    @length
    @given(crafted(spec))
    def read(content):
        content["sha256"] = spec_hash(content)
        path.write_text(json.dumps(content))
        try:
            read_spec(path)
        except BundleError as error:
            assert "policy.json" in str(error)  # noqa: PT017

    read()


@pytest.mark.parametrize("length", LENGTHS)
def test_a_trajectory_with_any_other_header_is_read_or_refused(tmp_path, length):
    path = tmp_path / "data/trajectory_0/traj_000000_000005.safetensors"
    make_trajectory(path)
    content = path.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")

    @length
    @given(crafted(json.loads(content[8:size])))
    def read(header):
        text = re.sub(r'("crc32": )"[0-9a-f]{8}"', r'\1"00000000"', json.dumps(header)).encode()
        data = bytearray(len(text).to_bytes(8, "little") + text + content[size:])
        place = data.find(b'"crc32": "') + len(b'"crc32": "')
        data[place : place + 8] = f"{zlib.crc32(data):08x}".encode()
        path.write_bytes(data)
        try:
            arrays = read_chunk(path)
        except TrajectoryFileError:
            return
        assert {len(array) for name, array in arrays.items() if not name.startswith("final_")} == {5}

    read()
