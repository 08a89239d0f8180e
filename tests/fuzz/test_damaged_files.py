"""Every kind of file that canter reads, damaged: it is noticed, or harmless, and never an error of another library.

A kind has a sound file, a reader and the errors that name the file. `is_harmless(result, sound)` says whether what was
read without an error may be used: by default it must equal what the sound file holds.
"""

import json
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from fuzz_damages import LONG, QUICK, damaged
from hypothesis import given
from safetensors.numpy import save as save_safetensors

from canter.cli.errors import UserError, user_errors
from canter.cli.runs import changed_settings, read_run
from canter.compat.checkpoints import import_state
from canter.datasets.convert import read_pickle
from canter.datasets.motion_clip import CHECKSUM, MotionClip, column_names, read_clip, write_clip
from canter.export.bundle import write_files
from canter.export.runtime import Bundle, BundleError
from canter.presets import load_preset
from canter.runners.run_config import RunPlan, parse_train_cfg
from canter.storage.rollout_files import TrajectoryFileError, TrajectoryWriter, read_chunk, read_manifest
from canter.storage.rollout_files.catalog import read_metadata
from canter.utils.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from canter.utils.plots import read_metrics
from canter.utils.reading import FileContentError, read_json, read_npz, read_yaml

RNG = np.random.default_rng(0)
CLIP = MotionClip("a", RNG.normal(size=(6, 4)).round(4), [f"velocity.{i}" for i in range(4)], 0.02, 2.0)
POSES = np.concatenate([RNG.normal(size=(6, 3)), np.tile([0.0, 0.0, 0.6, 0.8], (6, 1)), RNG.normal(size=(6, 2))], 1)
ROBOT = MotionClip("b", POSES, column_names({"root_pos": 3, "root_rot": 4, "joint_pos": 2}), 1 / 30)
PPO = parse_train_cfg({key: value for key, value in load_preset("CartPole-v1").items() if key != "task"}).to_dict()
CONFIG = {**PPO, "run": {"task": "CartPole-v1", "num_envs": 4, "total_timesteps": 64}}
WEIGHTS = {"actor.0.weight": torch.arange(12.0).reshape(3, 4), "std": torch.ones(3)}
STATE = {"model_state_dict": WEIGHTS, "iter": 3, "config": {"policy": {"class_name": "ActorCritic"}}}
STEPS = {name: RNG.normal(size=(5, 2)).astype(np.float32) for name in ("observations", "actions", "rewards", "dones")}
ARRAYS = {"rewards": np.arange(4.0), "dones": np.zeros(4, bool), "names": np.array(["hip", "knee"])}


def same(a: Any, b: Any) -> bool:
    """Whether two results are equal, arrays and tensors included."""
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[name], b[name]) for name in a)
    if isinstance(a, (np.ndarray, torch.Tensor)):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    return type(a) is type(b) and a == b


def is_finite_clip(clip: Any, sound: Any) -> bool:
    """A CSV without names has no place for a checksum: whatever is read must be a sound clip."""
    return bool(np.isfinite(clip["frames"]).all()) and len(clip["columns"]) == clip["frames"].shape[1]


def clip_content(path: Path) -> dict[str, Any]:
    clip = read_clip(path)
    facts = {"columns": clip.columns, "dt": clip.frame_duration, "weight": clip.weight}
    return {"frames": clip.frames, **facts}


def make_trajectory(path: Path) -> None:
    with TrajectoryWriter(path.parent.parent) as writer:
        writer.add(0, STEPS, 0, "terminated")


def make_dataset(path: Path) -> None:
    with TrajectoryWriter(path.parent, {"obs_segments": {"a": [2]}, "env": "CartPole-v1"}) as writer:
        for number in range(3):
            writer.add(number, STEPS, 0, "terminated")


def make_bundle(path: Path) -> None:
    port = {"shape": [2], "dtype": "float32"}
    spec = {"format": "canter-policy", "version": 1, "inputs": [{"name": "obs", **port}], "memories": []}
    spec |= {"outputs": [{"name": "actions", **port}], "training": {"task": "CartPole-v1"}, "action": {}}
    samples = save_safetensors({"input.obs": np.ones((2, 1, 2), np.float32), "resets": np.zeros((2, 1), bool)})
    path.parent.mkdir(exist_ok=True)
    write_files(path.parent, spec, {"policy.onnx": b"\x42\x7e" + bytes(126), "samples.safetensors": samples})


def make_metrics(path: Path) -> None:
    path.write_text("".join(json.dumps({"step": 64 * i, "time": 1.5, "train/loss": i / 3}) + "\n" for i in range(8)))


def bundle_content(path: Path) -> dict[str, Any]:
    bundle = Bundle(path.parent)
    return {"spec": bundle.spec, **bundle.files}


def use_config(path: Path) -> dict[str, Any]:
    """The config of a run, as far as `canter resume` gets with it before it makes the environment."""
    saved = read_run(path.parent)
    with user_errors(path):
        plan: RunPlan = parse_train_cfg({key: value for key, value in saved.config.items() if key != "run"})
        return {**plan.to_dict(), "run": saved.config["run"]}


@dataclass
class Kind:
    """One kind of file."""

    name: str
    make: Callable[[Path], Any]
    read: Callable[[Path], Any]
    errors: type[Exception] | tuple[type[Exception], ...]
    is_harmless: Callable[[Any, Any], bool] = lambda result, sound: same(result, sound)


KINDS = [
    Kind("model_1.pt", lambda path: save_checkpoint(path, STATE), load_checkpoint, CheckpointError),
    Kind(
        "rsl_rl/model_1.pt",
        lambda path: torch.save({**STATE, "infos": None}, path),
        lambda path: import_state(load_checkpoint(path)),
        CheckpointError,
    ),
    # Anyone may edit it; `canter resume` names the settings that are not the checkpoint's.
    Kind(
        "config.yaml",
        lambda path: path.write_text(yaml.safe_dump(CONFIG)),
        use_config,
        UserError,
        lambda result, sound: same(result, sound) or bool(changed_settings(result, sound)),
    ),
    Kind(
        "config.json",
        lambda path: path.write_text(json.dumps(CONFIG)),
        read_json,
        FileContentError,
        lambda result, sound: isinstance(result, dict),
    ),
    Kind(
        "preset.yaml",
        lambda path: path.write_text(yaml.safe_dump(CONFIG)),
        read_yaml,
        FileContentError,
        lambda result, sound: isinstance(result, dict),
    ),
    Kind("clip.npz", lambda path: write_clip(path, CLIP), clip_content, FileContentError),
    Kind("clip.txt", lambda path: write_clip(path, CLIP), clip_content, FileContentError),
    Kind("clip.csv", lambda path: write_clip(path, CLIP), clip_content, FileContentError),
    Kind(
        "plain/clip.csv",
        lambda path: write_clip(path, ROBOT, with_names=False),
        lambda path: vars(read_clip(path)),
        FileContentError,
        is_finite_clip,
    ),
    Kind("arrays.npz", lambda path: np.savez(path, **ARRAYS), read_npz, FileContentError),
    Kind("small/arrays.npz", lambda path: np.savez_compressed(path, **ARRAYS), read_npz, FileContentError),
    Kind(
        "traj_000000_000010.pickle",
        lambda path: path.write_bytes(pickle.dumps(STEPS)),
        read_pickle,
        ValueError,
        lambda result, sound: all(isinstance(array, np.ndarray) for array in result.values()),
    ),
    Kind("data/trajectory_0/traj_000000_000005.safetensors", make_trajectory, read_chunk, TrajectoryFileError),
    # A last line that is cut short is what a crash leaves.
    Kind(
        "many/manifest.jsonl",
        make_dataset,
        lambda path: read_manifest(path.parent),
        (TrajectoryFileError, FileContentError),
        lambda result, sound: result == sound[: len(result)],
    ),
    Kind("many/metadata.json", make_dataset, lambda path: read_metadata(path.parent), TrajectoryFileError),
    # A damaged row is left out of a plot, or shows a wrong point in it.
    Kind(
        "metrics.jsonl",
        make_metrics,
        read_metrics,
        (),
        lambda result, sound: all(np.isfinite(values).all() for _, values in result.values()),
    ),
    Kind("bundle/policy.json", make_bundle, bundle_content, BundleError),
    Kind("bundle/policy.onnx", make_bundle, bundle_content, BundleError),
    Kind("bundle/samples.safetensors", make_bundle, bundle_content, BundleError),
]


def try_damages(kind: Kind, folder: Path, how_many: Any) -> Counter[str]:
    """Read a file of this kind with many damages; counts those that were noticed and those that were harmless."""
    path = folder / kind.name
    path.parent.mkdir(parents=True, exist_ok=True)
    kind.make(path)
    content, sound, found = path.read_bytes(), kind.read(path), Counter()

    @how_many
    @given(damaged(content))
    def read_damaged(damage: bytes) -> None:
        path.write_bytes(damage)
        try:
            result = kind.read(path)
        except kind.errors as error:
            found["noticed" if path.name in str(error) else f"without a name: {error}"] += 1
            return
        assert kind.is_harmless(result, sound), result
        found["harmless"] += 1

    read_damaged()
    path.write_bytes(content)
    return found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_damaged_file_is_noticed_or_harmless(kind, tmp_path):
    found = try_damages(kind, tmp_path, QUICK)
    assert found.keys() <= {"noticed", "harmless"}
    assert found.total() >= 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_300_damages_of_a_file_are_noticed_or_harmless(kind, tmp_path, record_property):
    found = try_damages(kind, tmp_path, LONG)
    record_property("found", dict(found))
    print(f"{kind.name}: {dict(found)}")
    assert found.keys() <= {"noticed", "harmless"}
    assert found.total() >= 300


def test_the_checksum_of_a_text_clip_may_be_removed_by_hand(tmp_path):
    write_clip(tmp_path / "a.txt", CLIP)
    content = json.loads((tmp_path / "a.txt").read_text())
    content["Frames"][0][0] = 1.25
    (tmp_path / "a.txt").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="a.txt: it was changed.*remove that entry"):
        read_clip(tmp_path / "a.txt")
    del content[CHECKSUM]
    (tmp_path / "a.txt").write_text(json.dumps(content))
    assert read_clip(tmp_path / "a.txt").frames[0, 0] == 1.25
