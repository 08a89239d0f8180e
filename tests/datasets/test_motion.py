"""Motion clips: times, interpolation of rotations, joints by name, file formats and errors."""

import json
import math
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from canter.datasets import CLIPS
from canter.datasets.motion_clip import (
    DOCUMENTED,
    MotionClip,
    column_names,
    multiply,
    read_clip,
    rotation_vector,
    write_clip,
)
from canter.datasets.motion_loader import AMPLoader, slerp

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "docs/make_clips.py"))
BIPED_JOINTS, QUADRUPED_JOINTS, write_clips = (SCRIPT[n] for n in ("BIPED_JOINTS", "QUADRUPED_JOINTS", "write_clips"))


def ramp(num_frames=5, dt=0.1, weight=1.0, first=0.0, name="ramp"):
    """Column `v.0` grows by one a second."""
    return MotionClip(name, first + np.arange(num_frames)[:, None] * dt, ["v.0"], dt, weight)


def turning(rate, num_frames=11, dt=0.1, flip=False):
    """A root that turns about z at `rate` rad/s and drives at 1 m/s, seen at a coarse rate."""
    time = np.arange(num_frames) * dt
    rotation = np.stack([0 * time, 0 * time, np.sin(rate * time / 2), np.cos(rate * time / 2)], 1)
    if flip:
        rotation[::2] *= -1
    position = np.stack([np.sin(rate * time) / rate, (1 - np.cos(rate * time)) / rate, 0 * time], 1)
    columns = column_names({"root_pos": 3, "root_rot": 4})
    return MotionClip("turning", np.concatenate([position, rotation], 1), columns, dt)


def loader(*clips, dt=0.1, **given):
    return AMPLoader("cpu", dt, motion_files=list(clips), **given)


# ------------------------------------------------------------------ time base
@pytest.mark.parametrize("time", [0.0, 0.03, 0.1, 0.25, 0.4])
def test_a_ramp_has_the_value_of_the_time(time):  # p * n would give time * n / (n - 1)
    assert loader(ramp()).get_frame_at_time(0, time).item() == pytest.approx(time, abs=1e-6)


def test_frames_beyond_the_ends_are_the_ends():
    data = loader(ramp(), ramp(first=50.0, name="other"))
    assert data.get_frame_at_time(0, 99.0).item() == pytest.approx(0.4)
    assert data.get_frame_at_time(1, -1.0).item() == pytest.approx(50.0)
    assert data.get_frame_at_time(1, 0.4).item() == pytest.approx(50.4)


def test_a_clip_lasts_one_interval_less_than_its_frames():
    assert ramp(5, 0.1).duration == pytest.approx(0.4)


@pytest.mark.parametrize("dt", [0.02, 0.05, 0.13])
def test_pairs_are_the_policys_interval_apart_not_the_clips(dt):
    data = loader(ramp(30, 0.1), dt=dt, seed=1)
    ((s, s_next),) = data.feed_forward_generator(1, 500)
    assert s.shape == s_next.shape == (500, 1)
    assert torch.allclose(s_next - s, torch.full_like(s, dt), atol=1e-5)
    assert s.min() < 0.1
    assert s_next.max() > 2.5


def test_the_blend_is_between_the_frames_around_the_moment():  # rounding the lower index extrapolates
    saw = MotionClip("saw", np.array([[0.0], [1.0], [0.0], [1.0]]), ["v.0"], 1.0)
    data = loader(saw, dt=1.0)
    for time, value in ((0.75, 0.75), (1.25, 0.75), (1.75, 0.25), (2.6, 0.6)):
        assert data.get_frame_at_time(0, time).item() == pytest.approx(value, abs=1e-6)


def test_pairs_have_two_frames_of_one_clip():
    data = loader(ramp(4, 0.1), ramp(40, 0.1, first=100.0, name="b"), dt=0.1, seed=0)
    ((s, s_next),) = data.feed_forward_generator(1, 5000)
    assert torch.allclose(s_next - s, torch.full_like(s, 0.1), atol=1e-4)


def test_moments_are_uniform_over_the_clip():
    data = loader(ramp(101, 0.01), dt=0.01, seed=3)
    ((s, _),) = data.feed_forward_generator(1, 20000)
    counts = torch.histc(s, 10, 0.0, 0.98)
    assert (counts - 2000).abs().max() < 250


def test_clips_are_drawn_by_weight():
    a, b = ramp(5, 0.1, weight=1.0), ramp(50, 0.1, weight=3.0, first=100.0, name="b")
    for data in (loader(a, b, seed=0), loader(ramp(5), ramp(50, first=100.0, name="b"), weights=[2, 6], seed=0)):
        share = (data.get_full_frame_batch(8000) > 50).float().mean().item()
        assert share == pytest.approx(0.75, abs=0.02)
        assert data.weights.tolist() == pytest.approx([0.25, 0.75])


def test_windows_are_frames_in_order_oldest_first():
    window = loader(ramp(40, 0.1), dt=0.05, seed=0).expert_features(100, 3)
    assert window.shape == (100, 3)
    assert torch.allclose(window[:, 1:] - window[:, :-1], torch.full((100, 2), 0.05), atol=1e-5)


def test_preloaded_pairs_are_the_only_ones_served():
    data = loader(ramp(40, 0.1), preload_transitions=True, num_preload_transitions=7, seed=0)
    drawn = torch.cat([s for s, _ in data.feed_forward_generator(5, 50)])
    assert set(drawn.flatten().tolist()) <= set(data.preloaded.chunk(2, -1)[0].flatten().tolist())
    assert len(set(drawn.flatten().tolist())) == 7
    ((s, s_next),) = data.feed_forward_generator(1, 20)
    assert torch.allclose(s_next - s, torch.full_like(s, 0.1), atol=1e-5)


# ------------------------------------------------------------------ rotations
@pytest.mark.parametrize("flip", [False, True])
def test_a_steady_turn_is_a_steady_turn_at_any_time(flip):  # q and -q are one rotation
    data = loader(turning(1.5, flip=flip), dt=0.1)
    for time in (0.0, 0.07, 0.333, 0.95):
        q = data.get_frame_at_time(0, time)[3:7].double().numpy()
        assert np.linalg.norm(q) == pytest.approx(1.0, abs=1e-6)
        assert rotation_vector(q)[2] == pytest.approx(1.5 * time, abs=1e-4)


def test_slerp_takes_the_short_way_and_lerp_would_not_be_it():
    start, end = torch.tensor([0.0, 0, 0, 1]), torch.tensor([0.0, 0, math.sin(1.0), math.cos(1.0)])  # 0 and 2 rad
    for sign in (1, -1):
        quarter = slerp(start, sign * end, torch.tensor([0.25]))
        assert quarter[2].item() == pytest.approx(math.sin(0.25), abs=1e-6)
    straight = torch.nn.functional.normalize(torch.lerp(start, end, 0.25), dim=0)
    assert abs(straight[2].item() - math.sin(0.25)) > 1e-3
    assert torch.allclose(slerp(start, start, torch.tensor([0.5])), start)


def test_velocities_are_differentiated_once_at_the_clips_own_rate():
    clip = turning(0.8).with_velocities()
    assert list(clip.groups) == ["root_pos", "root_rot", "lin_vel", "ang_vel"]
    inner = clip.frames[1:-1]
    assert np.abs(inner[:, clip.where(["ang_vel"])] - [0, 0, 0.8]).max() < 1e-6
    assert np.abs(inner[:, clip.where(["lin_vel"])] - [1, 0, 0]).max() < 2e-3  # forward, in the root's own frame
    assert np.abs(clip.frames[[0, -1]][:, clip.where(["ang_vel"])] - [0, 0, 0.8]).max() < 1e-6


def test_rotations_are_standardised_and_non_rotations_refused():
    clip = turning(1.0, flip=True)
    assert (clip.frames[:, 6] >= 0).all()
    frames = clip.frames.copy()
    frames[4, 3:7] *= 1.2
    with pytest.raises(ValueError, match=r"root_rot of frame 4 is no rotation: its length is 1\.200"):
        MotionClip("bad", frames, clip.columns, 0.1)


def test_the_product_of_a_rotation_and_its_vector():
    half = np.array([0.0, 0.0, math.sin(0.5), math.cos(0.5)])
    assert rotation_vector(multiply(half, half)) == pytest.approx([0, 0, 2.0])


# ------------------------------------------------------------------ files
def test_the_documented_columns_need_no_names():
    clip = read_clip(CLIPS / "quadruped_trot.txt")
    assert clip.groups == DOCUMENTED
    assert "Fields" not in json.loads((CLIPS / "quadruped_trot.txt").read_text())
    assert (clip.frame_duration, clip.weight, len(clip.frames)) == (0.02, 1.0, 41)
    assert clip.joint_names == [str(i) for i in range(12)]
    data = AMPLoader("cpu", 0.02, CLIPS, motion_files=["quadruped_trot.txt"])
    assert data.observation_dim == 61 - 7
    assert data.num_motions == 1
    only = AMPLoader("cpu", 0.02, CLIPS, motion_files=["quadruped_trot.txt"], fields=["root_pos.z", "joint_pos"])
    assert only.get_full_frame_batch(3).shape == (3, 61)
    assert only.features(only.get_full_frame_batch(3))[:, 0].tolist() == pytest.approx([0.28] * 3)
    assert only.observation_dim == 13


def test_a_csv_as_unitree_publishes_it_gets_velocities_and_thirty_frames_a_second():
    clip = read_clip(CLIPS / "biped_walk.csv", file_joint_names=BIPED_JOINTS)
    assert clip.frame_duration == pytest.approx(1 / 30)
    assert list(clip.groups) == ["root_pos", "root_rot", "joint_pos", "joint_vel", "lin_vel", "ang_vel"]
    assert clip.frames[:, clip.where(["lin_vel.x"])] == pytest.approx(1.0, abs=1e-3)
    assert clip.joint_names == BIPED_JOINTS
    assert read_clip(CLIPS / "biped_walk.csv", fps=60).frame_duration == pytest.approx(1 / 60)


@pytest.mark.parametrize("suffix", [".txt", ".json", ".npz", ".csv"])
def test_a_clip_survives_every_format(tmp_path, suffix):
    clip = read_clip(CLIPS / "quadruped_pace.npz")
    write_clip(tmp_path / f"clip{suffix}", clip)
    again = read_clip(tmp_path / f"clip{suffix}", fps=50 if suffix == ".csv" else None)
    assert again.columns == clip.columns
    assert again.frame_duration == pytest.approx(clip.frame_duration)
    assert np.abs(again.frames - clip.frames).max() < 1e-5


def test_an_npz_of_isaac_lab_has_its_root_and_joints(tmp_path):  # (w, x, y, z) there
    steps = np.arange(4)
    half = 0.1 * steps / 2
    rotation = np.stack([np.cos(half), 0 * half, 0 * half, np.sin(half)], 1)[:, None]
    np.savez(
        tmp_path / "isaac.npz",
        fps=np.int64(50),
        dof_names=np.array(["knee", "hip"]),
        dof_positions=np.stack([steps, 10 * steps], 1).astype(np.float32),
        dof_velocities=np.ones((4, 2), np.float32),
        body_names=np.array(["pelvis"]),
        body_positions=np.zeros((4, 1, 3), np.float32),
        body_rotations=rotation.astype(np.float32),
    )
    clip = read_clip(tmp_path / "isaac.npz")
    assert clip.frame_duration == pytest.approx(0.02)
    assert clip.joint_names == ["knee", "hip"]
    assert clip.frames[:, clip.where(["root_rot.z"])][:, 0] == pytest.approx(np.sin(half), abs=1e-6)
    assert clip.frames[:, clip.where(["joint_vel"])] == pytest.approx(1.0)


def test_the_script_makes_the_clips_of_the_package(tmp_path):
    for path in write_clips(tmp_path):
        made, kept = read_clip(path), read_clip(CLIPS / path.name)
        assert made.columns == kept.columns
        assert np.abs(made.frames - kept.frames).max() < 1e-6
    assert sum(path.stat().st_size for path in CLIPS.iterdir()) < 100_000


# ------------------------------------------------------------------ joints
def test_joints_are_matched_by_name_whatever_their_order():
    shuffled = list(reversed(QUADRUPED_JOINTS))
    plain = AMPLoader("cpu", 0.02, CLIPS, motion_files=["quadruped_pace.npz"], joint_names=QUADRUPED_JOINTS)
    other = AMPLoader("cpu", 0.02, CLIPS, motion_files=["quadruped_pace.npz"], joint_names=shuffled)
    a, b = plain.get_frame_at_time(0, 0.3), other.get_frame_at_time(0, 0.3)
    for group in ("joint_pos", "joint_vel"):
        columns = plain.clips[0].where([group])
        assert torch.equal(a[columns], b[columns].flip(0))
    assert torch.equal(a[:7], b[:7])


def test_a_joint_that_a_clip_lacks_is_named_not_filled_with_zeros():
    with pytest.raises(ValueError, match=r"quadruped_pace\.npz lacks the joints tail; it has FR_hip"):
        AMPLoader("cpu", 0.02, CLIPS, motion_files=["quadruped_pace.npz"], joint_names=[*QUADRUPED_JOINTS, "tail"])


def test_joints_without_names_are_not_matched_by_position():
    with pytest.raises(ValueError, match="does not name its joints.*give file_joint_names"):
        AMPLoader("cpu", 0.02, CLIPS, motion_files=["quadruped_trot.txt"], joint_names=QUADRUPED_JOINTS)
    data = AMPLoader(
        "cpu",
        0.02,
        CLIPS,
        motion_files=["quadruped_trot.txt"],
        joint_names=QUADRUPED_JOINTS[:3],
        file_joint_names=QUADRUPED_JOINTS,
    )
    assert data.clips[0].groups["joint_vel"] == 3


# ------------------------------------------------------------------ bad input
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"Frames": [[1.0]]}, "no Fields"),
        ({"Frames": [[1.0] * 61]}, "1 frame; a motion needs at least 2"),
        ({"FrameDuration": 0.0}, "positive time apart"),
        ({"FrameDuration": -0.1}, "positive time apart"),
        ({"MotionWeight": 0.0}, "weight must be positive"),
        ({"Fields": ["a.0", "a.0"], "Frames": [[1, 2], [3, 4]]}, "same name: a.0"),
        ({"Fields": ["a.0"], "Frames": [[1, 2], [3, 4]]}, "do not fit 1 columns"),
        ({"Fields": ["a.0"], "Frames": [[1], [float("nan")]]}, "frame 1 has nan in a.0"),
        ({"Fields": ["a.0"], "Frames": [[1], [2, 3]]}, "spoilt.txt"),
    ],
)
def test_damaged_clips_are_refused_with_the_reason(tmp_path, change, text):
    content = json.loads((CLIPS / "quadruped_trot.txt").read_text()) | change
    del content["SHA256"]  # as in a file of another program
    (tmp_path / "spoilt.txt").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=text) as caught:
        read_clip(tmp_path / "spoilt.txt")
    assert "spoilt.txt" in str(caught.value)


def test_missing_and_foreign_files_are_named(tmp_path):
    (tmp_path / "a.txt").write_text("no json")
    (tmp_path / "b.json").write_text("{}")
    (tmp_path / "c.csv").write_text("1,2\n3\n")
    for name in ("a.txt", "b.json", "c.csv"):
        with pytest.raises(ValueError, match=name):
            read_clip(tmp_path / name)
    with pytest.raises(ValueError, match=r"clip\.pkl: a motion clip is one of"):
        read_clip(tmp_path / "clip.pkl")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        AMPLoader("cpu", 0.1, tmp_path / "nowhere")
    with pytest.raises(ValueError, match="name the clips"):
        AMPLoader("cpu", 0.1)
    np.save(tmp_path / "d.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "d.npy").rename(tmp_path / "d.npz")
    with pytest.raises(ValueError, match=r"d\.npz"):
        read_clip(tmp_path / "d.npz")


def test_a_clip_shorter_than_the_interval_is_refused():
    with pytest.raises(ValueError, match="ramp lasts 0.4 s, less than time_between_frames=0.5"):
        loader(ramp(), dt=0.5)
    with pytest.raises(ValueError, match="less than the 0.5 s of 6 frames"):
        loader(ramp(), dt=0.1).expert_features(3, 6)


def test_clips_with_other_columns_do_not_mix():
    with pytest.raises(ValueError, match="have other columns"):
        AMPLoader("cpu", 0.02, CLIPS)
    with pytest.raises(ValueError, match="no field 'nose'; it has v"):
        loader(ramp(), fields=["nose"])
