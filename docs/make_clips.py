"""The motion clips that come with canter, made of sines.

python docs/make_clips.py [DIRECTORY]
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np

from canter.datasets import CLIPS
from canter.datasets.motion_clip import DOCUMENTED, MotionClip, column_names, write_clip

LEGS = ("FR", "FL", "RR", "RL")
QUADRUPED_JOINTS = [f"{leg}_{part}" for leg in LEGS for part in ("hip", "thigh", "calf")]
BIPED_JOINTS = [f"{side}_{part}" for side in ("left", "right") for part in ("hip", "knee", "ankle")]
# Phase of each leg: a trot moves diagonal legs together, a pace those of one side.
GAITS = {"trot": (0.0, 0.5, 0.5, 0.0), "pace": (0.0, 0.5, 0.0, 0.5)}
LEG_LENGTH = 0.2


def path(time: np.ndarray, speed: float, turn: float, height: float) -> tuple[np.ndarray, np.ndarray]:
    """Position and rotation of a root that moves at `speed` and turns at `turn` rad/s."""
    yaw = turn * time
    x, y = (np.sin(yaw), 1 - np.cos(yaw)) if turn else (time, np.zeros_like(time))
    scale = speed / turn if turn else speed
    rotation = np.stack([0 * yaw, 0 * yaw, np.sin(yaw / 2), np.cos(yaw / 2)], 1)  # (x, y, z, w)
    return np.stack([scale * x, scale * y, np.full_like(time, height)], 1), rotation


def quadruped(gait: str, speed: float, turn: float, num_frames: int = 41, dt: float = 0.02) -> MotionClip:
    """The 61 documented columns of a gait with a stride of half a second."""
    time = np.arange(num_frames) * dt
    phase = 2 * math.pi * (time[:, None] / 0.5 + np.array(GAITS[gait]))  # (T, 4)
    hip, thigh, calf = np.zeros_like(phase), 0.8 + 0.3 * np.sin(phase), -1.5 + 0.25 * np.cos(phase)
    joints = np.stack([hip, thigh, calf], 2)  # (T, 4, 3)
    toe = LEG_LENGTH * np.stack([-np.sin(thigh) - np.sin(thigh + calf), hip, -np.cos(thigh) - np.cos(thigh + calf)], 2)
    position, rotation = path(time, speed, turn, 0.28)
    joint_pos, toe_pos = joints.reshape(num_frames, 12), toe.reshape(num_frames, 12)
    lin_vel = np.tile([speed, 0.0, 0.0], (num_frames, 1))
    ang_vel = np.tile([0.0, 0.0, turn], (num_frames, 1))
    joint_vel, toe_vel = (np.gradient(values, dt, axis=0) for values in (joint_pos, toe_pos))
    frames = np.concatenate([position, rotation, joint_pos, toe_pos, lin_vel, ang_vel, joint_vel, toe_vel], 1)
    return MotionClip(f"quadruped_{gait}", frames, column_names(DOCUMENTED, QUADRUPED_JOINTS), dt)


def biped(num_frames: int = 46, dt: float = 1 / 30) -> MotionClip:
    """A walk with the columns of LAFAN1: root position, root rotation, joints."""
    time = np.arange(num_frames) * dt
    phase = 2 * math.pi * (time[:, None] + np.array([0.0, 0.5]))  # (T, 2)
    joints = np.stack([0.4 * np.sin(phase), 0.5 - 0.5 * np.cos(phase), -0.1 * np.sin(phase)], 2).reshape(num_frames, 6)
    position, rotation = path(time, 1.0, 0.0, 0.75)
    columns = column_names({"root_pos": 3, "root_rot": 4, "joint_pos": 6}, BIPED_JOINTS)
    return MotionClip("biped_walk", np.concatenate([position, rotation, joints], 1), columns, dt)


def point(turn: float, speed: float = 0.6, num_frames: int = 81, dt: float = 0.05) -> MotionClip:
    """Velocity of a point mass in the plane: straight, or in a circle."""
    angle = turn * np.arange(num_frames) * dt
    frames = speed * np.stack([np.cos(angle), np.sin(angle)], 1)
    return MotionClip("point", frames, ["velocity.x", "velocity.y"], dt)


def write_clips(directory: Path) -> list[Path]:
    """Write every clip; returns the files."""
    clips = {
        "quadruped_trot.txt": (quadruped("trot", 0.8, 0.0), False),
        "quadruped_pace.npz": (quadruped("pace", 0.5, 0.4), True),
        "biped_walk.csv": (biped(), False),
        "point_straight.txt": (point(0.0), True),
        "point_circle.txt": (point(1.5), True),
    }
    for name, (clip, with_names) in clips.items():
        write_clip(directory / name, clip, with_names=with_names)
    return [directory / name for name in clips]


if __name__ == "__main__":
    write_clips(Path(sys.argv[1]) if len(sys.argv) > 1 else CLIPS)
