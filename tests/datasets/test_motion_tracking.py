"""Motion files of tracking tasks: order, rates, positions and velocities of bodies."""

import numpy as np
import pytest

from canter.cli.__main__ import main
from canter.datasets import read_clip, write_tracking

pytest.importorskip("mujoco")
# The base carries an arm of two parts and, declared after it, a tail; all turn about the vertical axis.
ROBOT = """<mujoco><worldbody><geom type="plane" size="1 1 1"/>
<body name="base"><freejoint/><geom size=".1"/>
  <body name="upper" pos="1 0 0"><joint name="shoulder" axis="0 0 1"/><geom size=".1"/>
    <body name="lower" pos="1 0 0"><joint name="elbow" axis="0 0 1"/><geom size=".1" pos=".5 0 0"/></body></body>
  <body name="tail" pos="-1 0 0"><joint name="tail" axis="0 0 1"/><geom size=".1"/></body>
</body></worldbody></mujoco>"""


@pytest.fixture
def scene(tmp_path):
    path = tmp_path / "robot.xml"
    path.write_text(ROBOT)
    return path


@pytest.fixture
def clip(tmp_path):
    """A CSV like LAFAN1's, 30 frames a second, three joints in the order of the scene: 2 s of turning in a circle."""
    t = np.arange(61) / 30
    rows = np.zeros((61, 10))
    rows[:, 0], rows[:, 2] = 3.0 * t, 0.5
    rows[:, 5], rows[:, 6] = np.sin(t / 2), np.cos(t / 2)  # yaw of 1 rad/s
    rows[:, 7], rows[:, 8], rows[:, 9] = 2.0 * t, -t, 0.25
    path = tmp_path / "turn.csv"
    np.savetxt(path, rows, delimiter=",", fmt="%.10f")
    return path


def test_bodies_are_where_the_joints_put_them(clip, scene, tmp_path):
    arrays = write_tracking(tmp_path / "turn.npz", read_clip(clip), scene)
    assert arrays["joint_names"].tolist() == ["shoulder", "elbow", "tail"]
    assert arrays["body_names"].tolist() == ["base", "upper", "lower", "tail"]
    assert arrays["fps"].tolist() == [50]
    assert arrays["joint_pos"].shape == (101, 3)
    t = 0.5  # frame 25: the base has turned by 0.5, the shoulder by 1, the elbow by -0.5
    base, turned = np.array([3 * t, 0, 0.5]), np.array([np.cos(t), np.sin(t), 0])
    upper = base + turned
    lower = upper + np.array([np.cos(3 * t), np.sin(3 * t), 0])
    found = {name: array[25] for name, array in arrays.items() if name.startswith("body_") and name.endswith("_w")}
    np.testing.assert_allclose(found["body_pos_w"], [base, upper, lower, base - turned], atol=1e-3)
    np.testing.assert_allclose(found["body_quat_w"][2], [np.cos(t), 0, 0, np.sin(t)], atol=1e-3)  # 2 rad/s in all
    np.testing.assert_allclose(found["body_ang_vel_w"][:, 2], [1, 3, 2, 1], atol=1e-2)
    across = np.array([-np.sin(t), np.cos(t), 0])
    np.testing.assert_allclose(found["body_lin_vel_w"][1], np.array([3.0, 0, 0]) + across, atol=1e-2)
    np.testing.assert_allclose(arrays["joint_vel"][25], [2, -1, 0], atol=1e-2)


def test_velocities_are_the_changes_of_positions(clip, scene, tmp_path):
    arrays = write_tracking(tmp_path / "turn.npz", read_clip(clip), scene, fps=200.0)
    moved = np.gradient(arrays["body_pos_w"].astype(float), 1 / 200, axis=0)
    np.testing.assert_allclose(arrays["body_lin_vel_w"][2:-2], moved[2:-2], atol=0.12)  # of up to 6 m/s
    assert np.abs(moved).max() > 4


def test_breadth_first_is_the_order_of_isaac_lab(clip, scene, tmp_path):
    mujoco_order = write_tracking(tmp_path / "a.npz", read_clip(clip), scene)
    isaac = write_tracking(tmp_path / "b.npz", read_clip(clip), scene, breadth_first=True)
    assert isaac["body_names"].tolist() == ["base", "upper", "tail", "lower"]
    assert isaac["joint_names"].tolist() == ["shoulder", "tail", "elbow"]
    np.testing.assert_array_equal(isaac["joint_pos"], mujoco_order["joint_pos"][:, [0, 2, 1]])
    np.testing.assert_array_equal(isaac["body_pos_w"], mujoco_order["body_pos_w"][:, [0, 1, 3, 2]])


def test_joints_are_matched_by_name_and_the_file_is_a_clip_again(clip, scene, tmp_path):
    named = read_clip(clip, file_joint_names=["elbow", "tail", "shoulder"])
    arrays = write_tracking(tmp_path / "turn.npz", named, scene)
    np.testing.assert_allclose(arrays["joint_vel"][50], [0, 2, -1], atol=1e-2)
    again = read_clip(tmp_path / "turn.npz")
    assert again.joint_names == ["shoulder", "elbow", "tail"]
    np.testing.assert_allclose(again.frames[:, again.where(["root_pos"])], arrays["body_pos_w"][:, 0], atol=1e-6)


def test_the_command_writes_files_and_says_what_is_missing(clip, scene, tmp_path, capsys):
    assert main(["motion", str(clip), "--tracking", str(tmp_path / "out"), "--scene", str(scene)]) == 0
    assert np.load(tmp_path / "out" / "turn.npz")["body_pos_w"].shape == (101, 4, 3)
    assert main(["motion", str(clip), "--tracking", str(tmp_path / "out.npz")]) != 0
    assert "--scene" in capsys.readouterr().err
    bolted = tmp_path / "bolted.xml"
    bolted.write_text(ROBOT.replace("<freejoint/>", ""))
    assert main(["motion", str(clip), "--tracking", str(tmp_path / "x.npz"), "--scene", str(bolted)]) != 0
    assert "free joint" in capsys.readouterr().err
    names = ["a", "elbow", "tail"]
    command = ["motion", str(clip), "--joint-names", *names, "--tracking", str(tmp_path / "x.npz")]
    assert main([*command, "--scene", str(scene)]) != 0
    assert "shoulder" in capsys.readouterr().err
