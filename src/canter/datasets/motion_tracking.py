"""Motion files for tracking tasks of mjlab and BeyondMimic: joints and bodies of a robot, by forward kinematics."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from canter.datasets.motion_clip import (
    JOINT_POS,
    JOINT_VEL,
    ROOT_POS,
    ROOT_ROT,
    MotionClip,
    column_names,
    conjugate,
    rotate_back,
)
from canter.datasets.motion_loader import slerp
from canter.utils.files import StrPath, atomic_write

WXYZ_FROM_XYZW = [3, 0, 1, 2]


def write_tracking(
    path: StrPath, clip: MotionClip, scene: StrPath, fps: float = 50.0, breadth_first: bool = False
) -> dict[str, np.ndarray]:
    """Write the clip as the robot of a MuJoCo scene moves it, `fps` frames a second; returns the arrays by name.

    `joint_pos` and `joint_vel` (T, J); `body_pos_w`, `body_quat_w` (w, x, y, z), `body_lin_vel_w` and `body_ang_vel_w`
    (T, B, 3 or 4), all in the world, velocities at the bodies' origins; `fps`, `joint_names`, `body_names`. Joints and
    bodies are in the order of the scene, as in mjlab, or `breadth_first`, as in Isaac Lab.
    """
    if Path(path).suffix != ".npz":
        raise ValueError(f"motion of a tracking task is an .npz, not {path}")
    arrays = track(clip, scene, fps, breadth_first)
    atomic_write(Path(path), functools.partial(np.savez, **arrays))  # pyright: ignore[reportArgumentType]
    return arrays


def track(clip: MotionClip, scene: StrPath, fps: float, breadth_first: bool = False) -> dict[str, np.ndarray]:
    """The arrays of `write_tracking`."""
    try:
        import mujoco as package
    except ImportError as error:
        raise ImportError("forward kinematics needs MuJoCo: pip install mujoco") from error
    mujoco: Any = package
    model = mujoco.MjModel.from_xml_path(str(scene))
    free = [j for j in range(model.njnt) if model.jnt_type[j] == int(mujoco.mjtJoint.mjJNT_FREE)]
    if not free:
        raise ValueError(f"{scene} has no free joint; name a scene whose robot has a floating base")
    root = int(model.jnt_bodyid[free[0]])
    bodies = [b for b in range(root, model.nbody) if model.body_rootid[b] == model.body_rootid[root]]
    if breadth_first:
        bodies.sort(key=lambda b: depth(model, b))  # bodies of one depth stay in the order of the scene
    one_axis = (int(mujoco.mjtJoint.mjJNT_HINGE), int(mujoco.mjtJoint.mjJNT_SLIDE))
    joints = [
        j for b in bodies for j in range(model.njnt) if model.jnt_bodyid[j] == b and model.jnt_type[j] in one_axis
    ]
    names = [model.joint(j).name for j in joints]
    clip = resample(with_robot_joints(clip, [model.joint(j).name for j in sorted(joints)]).with_joints(names), fps)
    place = model.jnt_qposadr[free[0]], model.jnt_dofadr[free[0]]
    parts = {name: clip.frames[:, clip.where([name])] for name in clip.groups}
    qpos, qvel = np.tile(model.qpos0, (len(clip.frames), 1)), np.zeros((len(clip.frames), model.nv))
    qpos[:, place[0] : place[0] + 3] = parts[ROOT_POS]
    qpos[:, place[0] + 3 : place[0] + 7] = parts[ROOT_ROT][:, WXYZ_FROM_XYZW]
    qvel[:, place[1] : place[1] + 3] = rotate_back(conjugate(parts[ROOT_ROT]), parts["lin_vel"])  # in the world
    qvel[:, place[1] + 3 : place[1] + 6] = parts["ang_vel"]  # in the root's frame
    qpos[:, model.jnt_qposadr[joints]], qvel[:, model.jnt_dofadr[joints]] = parts[JOINT_POS], parts[JOINT_VEL]
    data, speed = mujoco.MjData(model), np.zeros(6)
    found: dict[str, list[Any]] = {"body_pos_w": [], "body_quat_w": [], "body_lin_vel_w": [], "body_ang_vel_w": []}
    for data.qpos[:], data.qvel[:] in zip(qpos, qvel, strict=True):
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        mujoco.mj_comVel(model, data)
        speeds = []
        for body in bodies:
            mujoco.mj_objectVelocity(model, data, mujoco.mjtObj.mjOBJ_XBODY, body, speed, 0)
            speeds.append(speed.copy())
        found["body_pos_w"].append(data.xpos[bodies])
        found["body_quat_w"].append(data.xquat[bodies])
        found["body_lin_vel_w"].append(np.array(speeds)[:, 3:])
        found["body_ang_vel_w"].append(np.array(speeds)[:, :3])
    arrays = {JOINT_POS: parts[JOINT_POS], JOINT_VEL: parts[JOINT_VEL]} | {n: np.array(a) for n, a in found.items()}
    about = {"fps": np.array([fps]), "joint_names": np.array(names)}
    about["body_names"] = np.array([model.body(b).name for b in bodies])
    return {name: array.astype(np.float32) for name, array in arrays.items()} | about


def depth(model: Any, body: int) -> int:
    """Number of bodies above a body."""
    return 0 if body == 0 else 1 + depth(model, int(model.body_parentid[body]))


def with_robot_joints(clip: MotionClip, names: list[str]) -> MotionClip:
    """The clip with the robot's names for joints that it only numbers; they are in the order of the scene."""
    own = clip.joint_names
    if not own or not all(name.isdigit() for name in own):
        return clip
    if len(own) != len(names):
        text = f"has {len(own)} joints without names, the robot {len(names)}: {', '.join(names)}"
        raise ValueError(f"{clip.name} {text}; give the names of the file's joints")
    known = dict(zip(own, names, strict=True))
    groups = [column.partition(".") for column in clip.columns]
    columns = [f"{g}.{known[part]}" if g in (JOINT_POS, JOINT_VEL) else f"{g}{dot}{part}" for g, dot, part in groups]
    return MotionClip(clip.name, clip.frames, columns, clip.frame_duration, clip.weight)


def resample(clip: MotionClip, fps: float) -> MotionClip:
    """Root and joints of the clip at another rate, rotations on the short way, with velocities of the new frames."""
    if not fps > 0:
        raise ValueError(f"the rate must be above 0 frames a second, got {fps:g}")
    count = int(np.floor(clip.duration * fps + 1e-6)) + 1
    position = np.minimum(np.arange(count) / (fps * clip.frame_duration), len(clip.frames) - 1)
    low = np.minimum(position.astype(int), len(clip.frames) - 2)
    blend = (position - low)[:, None]
    parts = {name: clip.frames[:, clip.where([name])] for name in (ROOT_POS, ROOT_ROT, JOINT_POS)}
    moved = {name: part[low] + blend * (part[low + 1] - part[low]) for name, part in parts.items()}
    turned = parts[ROOT_ROT]
    moved[ROOT_ROT] = slerp(*(torch.from_numpy(x) for x in (turned[low], turned[low + 1], blend))).numpy()
    columns = column_names({name: part.shape[1] for name, part in moved.items()}, clip.joint_names)
    return MotionClip(clip.name, np.concatenate(list(moved.values()), 1), columns, 1.0 / fps).with_velocities()
