"""A motion clip: frames with named columns at a fixed rate, checked once when it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from canter.datasets.rotations import angular_velocity_of, rotate_back, standardize, velocity_of

ROOT_POS, ROOT_ROT, JOINT_POS, JOINT_VEL = "root_pos", "root_rot", "joint_pos", "joint_vel"
JOINTS = (JOINT_POS, JOINT_VEL)
# Columns of the AMP text format, which names none of them.
DOCUMENTED = {
    ROOT_POS: 3, ROOT_ROT: 4, JOINT_POS: 12, "toe_pos": 12, "lin_vel": 3, "ang_vel": 3, JOINT_VEL: 12, "toe_vel": 12,
}  # fmt: skip
AXES = ("x", "y", "z", "w")


@dataclass
class MotionClip:
    """Frames (T, D) at a fixed rate; a column is named `group.part`, rotations are (x, y, z, w)."""

    name: str
    frames: np.ndarray
    columns: list[str]
    frame_duration: float
    """Seconds between two frames."""
    weight: float = 1.0
    """How often it is drawn, relative to other clips."""

    def __post_init__(self) -> None:
        self.frames = np.asarray(self.frames, np.float64)
        if self.frames.ndim != 2 or self.frames.shape[1] != len(self.columns):
            raise ValueError(f"{self.name}: frames of shape {self.frames.shape} do not fit {len(self.columns)} columns")
        if len(self.frames) < 2:
            raise ValueError(f"{self.name} has {len(self.frames)} frame; a motion needs at least 2")
        if not (np.isfinite(self.frame_duration) and self.frame_duration > 0):
            raise ValueError(f"{self.name}: frames must be a positive time apart, got {self.frame_duration!r} s")
        if not (np.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"{self.name}: its weight must be positive, got {self.weight!r}")
        twice = sorted({column for column in self.columns if self.columns.count(column) > 1})
        if twice:
            raise ValueError(f"{self.name} has columns of the same name: {', '.join(twice)}")
        if not np.isfinite(self.frames).all():
            row, column = np.argwhere(~np.isfinite(self.frames))[0]
            raise ValueError(f"{self.name}: frame {row} has {self.frames[row, column]} in {self.columns[column]}")
        where = self.where([ROOT_ROT], required=False)
        if where:
            self.frames[:, where] = standardize(self.frames[:, where], f"{self.name}: {ROOT_ROT}")

    @property
    def duration(self) -> float:
        """Seconds from the first frame to the last: one interval less than there are frames."""
        return (len(self.frames) - 1) * self.frame_duration

    @property
    def groups(self) -> dict[str, int]:
        """Width of every group, in order."""
        widths: dict[str, int] = {}
        for column in self.columns:
            widths[group_of(column)] = widths.get(group_of(column), 0) + 1
        return widths

    @property
    def joint_names(self) -> list[str]:
        """The joints, in the order of their columns."""
        return [column.partition(".")[2] for column in self.columns if group_of(column) == JOINT_POS]

    def where(self, fields: Sequence[str], required: bool = True) -> list[int]:
        """Columns of groups or single columns by name, in the order asked for."""
        found: list[int] = []
        for field in fields:
            hits = [i for i, column in enumerate(self.columns) if field in (column, group_of(column))]
            if required and not hits:
                raise ValueError(f"{self.name} has no field {field!r}; it has {', '.join(self.groups)}")
            found += hits
        return found

    def with_joints(self, joint_names: Sequence[str]) -> MotionClip:
        """The clip with the robot's joints in the robot's order, found by name; one that it lacks is an error."""
        if all(name.isdigit() for name in self.joint_names) and not all(name.isdigit() for name in joint_names):
            raise ValueError(
                f"{self.name} does not name its joints, so they cannot be matched to {', '.join(joint_names)}; "
                "give file_joint_names, the order in which the file has them"
            )
        missing = [name for name in joint_names if name not in self.joint_names]
        if missing:
            raise ValueError(f"{self.name} lacks the joints {', '.join(missing)}; it has {', '.join(self.joint_names)}")
        wanted: list[str] = []
        for group in self.groups:
            own = [column for column in self.columns if group_of(column) == group]
            wanted += [f"{group}.{name}" for name in joint_names] if group in JOINTS else own
        return MotionClip(
            self.name, self.frames[:, self.where(wanted)], wanted, self.frame_duration, self.weight
        )  # fmt: skip

    def with_velocities(self) -> MotionClip:
        """The clip with the velocities it lacks, differentiated at its own rate; those of the root in its own frame."""
        parts: dict[str, np.ndarray] = {}
        groups, dt = self.groups, self.frame_duration
        if JOINT_POS in groups and JOINT_VEL not in groups:
            parts[JOINT_VEL] = velocity_of(self.frames[:, self.where([JOINT_POS])], dt)
        if ROOT_POS in groups and ROOT_ROT in groups:
            rotation = self.frames[:, self.where([ROOT_ROT])]
            if "lin_vel" not in groups:
                parts["lin_vel"] = rotate_back(rotation, velocity_of(self.frames[:, self.where([ROOT_POS])], dt))
            if "ang_vel" not in groups:
                parts["ang_vel"] = rotate_back(rotation, angular_velocity_of(rotation, dt))
        if not parts:
            return self
        columns = self.columns + column_names({n: a.shape[1] for n, a in parts.items()}, self.joint_names)
        return MotionClip(self.name, np.concatenate([self.frames, *parts.values()], 1), columns, dt, self.weight)


def group_of(column: str) -> str:
    """The part of a column's name before the dot."""
    return column.partition(".")[0]


def column_names(widths: Mapping[str, int], joint_names: Sequence[str] | None = None) -> list[str]:
    """One name per column of groups of these widths: joints by name, three or four numbers by axis."""
    columns: list[str] = []
    for group, width in widths.items():
        if group in JOINTS and joint_names:
            if len(joint_names) != width:
                raise ValueError(f"{group} has {width} columns, but there are {len(joint_names)} joint names")
            parts: Sequence[str] = joint_names
        else:
            parts = AXES[:width] if group not in JOINTS and width in (3, 4) else [str(i) for i in range(width)]
        columns += [f"{group}.{part}" for part in parts]
    return columns
