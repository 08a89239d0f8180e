"""The runtime: torch is not needed, memories are kept, and a bundle that is not as it was written is refused."""

import json
import struct
import subprocess
import sys

import numpy as np
import pytest

from canter.export import runtime
from canter.export.runtime import Bundle, BundleError, Policy, difference, read_safetensors, spec_hash

FILES = ["README.md", "policy.c", "policy.h", "policy.onnx", "policy.ts", "runtime.py", "samples.safetensors"]


def rewrite(bundle, change):
    """Change policy.json and give it the right hash, as somebody who knows the format would."""
    path = bundle / "policy.json"
    spec = json.loads(path.read_text())
    change(spec)
    spec["sha256"] = spec_hash(spec)
    path.write_text(json.dumps(spec))


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_is_refused(bundle, name):
    content = bytearray((bundle / name).read_bytes())
    content[len(content) // 2] ^= 1
    (bundle / name).write_bytes(content)
    with pytest.raises(BundleError, match=rf"{name} was changed: its SHA-256 is not the one in policy.json"):
        Policy(bundle)


def test_a_changed_description_is_refused(bundle):
    path = bundle / "policy.json"
    path.write_text(path.read_text().replace('"control_period": 0.02', '"control_period": 0.03'))
    with pytest.raises(BundleError, match="was changed: its own SHA-256 does not match"):
        Bundle(bundle)


def test_a_missing_file_and_a_missing_bundle_are_named(bundle, tmp_path):
    (bundle / "policy.ts").unlink()
    with pytest.raises(BundleError, match=r"policy.ts is missing; copy the whole bundle, or export it again"):
        Bundle(bundle)
    with pytest.raises(BundleError, match="is no bundle: it has no policy.json"):
        Bundle(tmp_path)


def test_resets_of_another_number_of_rows_are_refused(made):
    policy = Policy(made["lstm"][1].path)
    policy.predict(np.zeros((3, 7)))
    with pytest.raises(ValueError, match="dones has 5 entries, but the last observations had 3 rows"):
        policy.reset(np.zeros(5))
    policy.reset(np.ones(3))
    assert not any(state.any() for state in policy.state.values())


def test_samples_that_do_not_match_are_refused(bundle, made):
    samples = dict(Bundle(bundle).samples)
    samples["output.actions"] = samples["output.actions"] + np.float32(1e-3)
    from safetensors.numpy import save

    content = save(samples)
    (bundle / "samples.safetensors").write_bytes(content)
    import hashlib

    rewrite(
        bundle, lambda spec: spec["files"]["samples.safetensors"].update(sha256=hashlib.sha256(content).hexdigest())
    )
    with pytest.raises(BundleError, match=r"policy.onnx differs from the recorded samples by 0\.00\d+"):
        Policy(bundle)
    assert Policy(bundle, check=False).predict(np.zeros(7)).shape == (2,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(version=3), "has format version 3, this canter reads 1 and 2"),
        (lambda s: s.update(format="other"), "does not describe a policy of canter"),
        (lambda s: s["files"].update({"../../etc/passwd": {"sha256": "0"}}), "files must be some of"),
        (lambda s: s["files"].pop("policy.onnx"), "files must be some of"),
        (lambda s: s["files"].update({"policy.c": {}}), "the file policy.c has no sha256"),
        (lambda s: s["inputs"][0].update(shape=[-1]), "inputs 'obs' has no proper shape"),
        (lambda s: s["inputs"][0].update(shape=[True]), "inputs 'obs' has no proper shape"),
        (lambda s: s["inputs"][0].update(dtype="object"), "inputs 'obs' has no known dtype"),
        (lambda s: s["outputs"][0].update(name="a b"), "outputs has an entry without a proper name"),
        (lambda s: s["outputs"][0].update(name="first"), "the first output must be actions"),
        (lambda s: s.update(memories=None), "memories must be a list"),
        (lambda s: s["observation"][0].update(width=4), "segments of the observation are"),
        (lambda s: s.update(control_period="fast"), "control_period must be a number of seconds"),
        (lambda s: s.update(training=[]), "training must be an object"),
    ],
)
def test_a_description_of_the_wrong_structure_is_refused(bundle, change, message):
    rewrite(bundle, change)
    with pytest.raises(BundleError, match=message):
        Bundle(bundle)


def test_numbers_that_json_does_not_have_are_refused(bundle):
    path = bundle / "policy.json"
    path.write_text(path.read_text().replace('"control_period": 0.02', '"control_period": NaN'))
    with pytest.raises(BundleError, match="NaN is not a number"):
        Bundle(bundle)


def test_other_inputs_than_described_are_refused(bundle, made):
    import hashlib

    content = (made["lstm"][1].path / "policy.onnx").read_bytes()
    (bundle / "policy.onnx").write_bytes(content)
    rewrite(bundle, lambda spec: spec["files"]["policy.onnx"].update(sha256=hashlib.sha256(content).hexdigest()))
    with pytest.raises(BundleError, match=r"policy.onnx has the inputs \['obs', 'memory_a_in'\]"):
        Policy(bundle)


def header_of(header, data=b""):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 16,
        header_of([]),
        header_of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"),
        header_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}, b"12345678"),
        header_of({"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}, b"1234"),
        header_of({"a": {"dtype": "PICKLE", "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
        header_of({"a": {"shape": [1]}}),
    ],
)
def test_damaged_samples_are_an_error_and_never_a_crash(content):
    with pytest.raises(BundleError, match=r"samples.safetensors is damaged"):
        read_safetensors(content)


def test_single_batched_flat_and_dict_observations_agree(made):
    policy, obs = Policy(made["mlp"][1].path), np.random.default_rng(0).normal(size=(3, 7))
    batch = policy.predict(obs)
    assert batch.shape == (3, 2)
    assert np.allclose(policy.predict(obs[1]), batch[1], atol=1e-7)
    parts = {"base": obs[:, :3], "joints": obs[:, 3:].reshape(3, 2, 2)}
    assert np.array_equal(policy.predict(parts), batch)
    assert np.allclose(policy.predict({name: part[1] for name, part in parts.items()}), batch[1], atol=1e-7)
    with pytest.raises(ValueError, match=r"obs has shape \(3, 8\); the policy wants \(7,\)"):
        policy.predict(np.zeros((3, 8)))
    with pytest.raises(ValueError, match=r"has the parts \['base', 'legs'\]"):
        policy.predict({"base": obs[:, :3], "legs": obs[:, 3:]})


def test_a_reset_clears_the_memory_of_finished_rows_alone(made):
    policy, obs = Policy(made["lstm"][1].path), np.ones((2, 7))
    first = policy.predict(obs)
    policy.predict(obs)
    policy.reset([True, False])
    third = policy.predict(obs)
    assert np.allclose(third[0], first[0], atol=1e-7)
    assert not np.allclose(third[1], first[1], atol=1e-7)
    policy.reset()
    assert np.array_equal(policy.predict(obs), first)


def test_differences_are_relative_above_one_and_infinite_if_not_finite():
    assert difference(np.array([100.001]), np.array([100.0])) == pytest.approx(1e-5, rel=1e-3)
    assert difference(np.array([0.001]), np.array([0.0])) == 0.001
    assert difference(np.array([np.nan]), np.array([0.0])) == np.inf
    assert difference(np.zeros(2), np.zeros(3)) == np.inf


BLOCK = "import sys; sys.modules.update(torch=None, safetensors=None, onnx=None, gymnasium=None)\n"


def test_a_bundle_runs_where_torch_cannot_be_imported(made):
    code = BLOCK + "from canter.export.runtime import Policy\nimport numpy as np\n"
    code += "print(Policy(sys.argv[1]).predict(np.zeros(7)).tolist())"
    command = [sys.executable, "-c", code, str(made["mlp"][1].path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == pytest.approx(Policy(made["mlp"][1].path).predict(np.zeros(7)).tolist())


def test_the_copy_in_the_bundle_needs_neither_canter_nor_torch(made, tmp_path):
    code = BLOCK.replace("torch=None", "torch=None, canter=None") + "sys.path.insert(0, sys.argv[1])\n"
    code += "import runtime\nsys.argv = ['runtime.py']\nsys.exit(runtime.main())"
    command = [sys.executable, "-c", code, str(made["lstm"][1].path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "policy.onnx: largest difference" in done.stdout


def test_reading_a_bundle_never_runs_its_files(bundle, monkeypatch):
    """A policy.ts, policy.c or runtime.py of any content is hashed and nothing else."""
    import hashlib

    for name in ("policy.ts", "policy.c", "runtime.py"):
        content = b"raise SystemExit('run')"
        (bundle / name).write_bytes(content)
        rewrite(bundle, lambda s, n=name, c=content: s["files"][n].update(sha256=hashlib.sha256(c).hexdigest()))
    monkeypatch.setattr(subprocess, "run", None)
    assert Policy(bundle).predict(np.zeros(7)).shape == (2,)


def test_main_reports_a_refused_bundle(bundle, monkeypatch, capsys):
    (bundle / "policy.onnx").write_bytes(b"")
    monkeypatch.setattr(sys, "argv", ["runtime.py", str(bundle)])
    assert runtime.main() == 6
    assert "policy.onnx was changed" in capsys.readouterr().err
