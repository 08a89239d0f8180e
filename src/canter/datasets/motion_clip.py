"""Motion clips: frames with named columns at a fixed rate, read from and written to several file formats."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from canter.utils.files import StrPath, atomic_write
from canter.utils.reading import FileContentError, read_limited, read_npz

ROOT_POS, ROOT_ROT, JOINT_POS, JOINT_VEL = "root_pos", "root_rot", "joint_pos", "joint_vel"
JOINTS = (JOINT_POS, JOINT_VEL)
# Columns of the AMP text format, which does not name them.
DOCUMENTED = {
    ROOT_POS: 3,
    ROOT_ROT: 4,
    JOINT_POS: 12,
    "toe_pos": 12,
    "lin_vel": 3,
    "ang_vel": 3,
    JOINT_VEL: 12,
    "toe_vel": 12,
}
AXES = ("x", "y", "z", "w")
SUFFIXES = (".txt", ".json", ".npz", ".csv")
LAFAN1_FPS = 30.0
MAX_BYTES = 1 << 30  # of the arrays of an npz
MAX_TEXT_BYTES = 1 << 25  # of a text; its numbers need many times as much memory
CHECKSUM, CSV_CHECKSUM = "SHA256", "# sha256: "
XYZW_FROM_WXYZ = [1, 2, 3, 0]
# Our name -> other names in an npz. Rotations of bodies are (w, x, y, z) there.
NPZ_NAMES = {
    JOINT_POS: ("dof_positions", "dof_pos"),
    JOINT_VEL: ("dof_velocities", "dof_vel"),
    "joint_names": ("dof_names",),
    "body_pos": ("body_positions", "body_pos_w"),
    "body_rot": ("body_rotations", "body_quat_w"),
}


@dataclass
class MotionClip:
    """Frames (T, D) at a fixed rate; a column is named `group.part`, rotations are (x, y, z, w)."""

    name: str
    frames: np.ndarray
    columns: list[str]
    frame_duration: float  # seconds
    weight: float = 1.0  # sampling weight, relative to other clips

    def __post_init__(self) -> None:
        self.frames = np.asarray(self.frames, np.float64)
        if self.frames.ndim != 2 or self.frames.shape[1] != len(self.columns):
            raise ValueError(f"{self.name}: frames of shape {self.frames.shape} do not fit {len(self.columns)} columns")
        if len(self.frames) < 2:
            raise ValueError(f"{self.name} has {len(self.frames)} frame; a motion needs at least 2")
        if not 0 < self.frame_duration < np.inf:
            raise ValueError(f"{self.name}: frames must be a positive time apart, got {self.frame_duration!r} s")
        if not 0 < self.weight < np.inf:
            raise ValueError(f"{self.name}: its weight must be positive, got {self.weight!r}")
        if twice := sorted(column for column, count in Counter(self.columns).items() if count > 1):
            raise ValueError(f"{self.name} has columns of the same name: {', '.join(twice)}")
        if not np.isfinite(self.frames).all():
            row, column = np.argwhere(~np.isfinite(self.frames))[0]
            raise ValueError(f"{self.name}: frame {row} has {self.frames[row, column]} in {self.columns[column]}")
        if where := self.where([ROOT_ROT], required=False):
            norms = np.linalg.norm(self.frames[:, where], axis=1, keepdims=True)
            worst = int(np.abs(norms - 1).argmax())
            if abs((length := norms[worst, 0]) - 1) > 1e-2:
                text = f"of frame {worst} is no rotation: its length is {length:.3f}, not 1"
                raise ValueError(f"{self.name}: {ROOT_ROT} {text}")
            unit = self.frames[:, where] / norms
            self.frames[:, where] = np.where(unit[:, 3:] < 0, -unit, unit)

    @property
    def duration(self) -> float:
        """Seconds from the first frame to the last."""
        return (len(self.frames) - 1) * self.frame_duration

    @property
    def groups(self) -> dict[str, int]:
        """Width of every group, in order."""
        return dict(Counter(map(group_of, self.columns)))

    @property
    def joint_names(self) -> list[str]:
        """The joints, in the order of their columns."""
        return [column.partition(".")[2] for column in self.columns if group_of(column) == JOINT_POS]

    def where(self, fields: Sequence[str], required: bool = True) -> list[int]:
        """Column numbers of groups or single columns, in the order of `fields`."""
        hits = {f: [i for i, column in enumerate(self.columns) if f in (column, group_of(column))] for f in fields}
        if required and not all(hits.values()):
            missing = next(field for field in fields if not hits[field])
            raise ValueError(f"{self.name} has no field {missing!r}; it has {', '.join(self.groups)}")
        return [i for field in fields for i in hits[field]]

    def with_joints(self, joint_names: Sequence[str]) -> MotionClip:
        """The clip with the robot's joints in the robot's order, matched by name; a missing joint is an error."""
        if all(name.isdigit() for name in self.joint_names) and not all(name.isdigit() for name in joint_names):
            text = f"does not name its joints, so they cannot be matched to {', '.join(joint_names)}"
            raise ValueError(f"{self.name} {text}; give file_joint_names, the order in which the file has them")
        if missing := [name for name in joint_names if name not in self.joint_names]:
            raise ValueError(f"{self.name} lacks the joints {', '.join(missing)}; it has {', '.join(self.joint_names)}")
        wanted: list[str] = []
        for group in self.groups:
            own = [column for column in self.columns if group_of(column) == group]
            wanted += [f"{group}.{name}" for name in joint_names] if group in JOINTS else own
        return MotionClip(self.name, self.frames[:, self.where(wanted)], wanted, self.frame_duration, self.weight)

    def with_velocities(self) -> MotionClip:
        """The clip with missing velocities computed from its positions; those of the root in the root's frame."""
        parts: dict[str, np.ndarray] = {}
        groups, dt = self.groups, self.frame_duration
        if JOINT_POS in groups:
            parts[JOINT_VEL] = np.gradient(self.frames[:, self.where([JOINT_POS])], dt, axis=0)
        if ROOT_POS in groups and ROOT_ROT in groups:
            rotation, position = self.frames[:, self.where([ROOT_ROT])], self.frames[:, self.where([ROOT_POS])]
            parts["lin_vel"] = rotate_back(rotation, np.gradient(position, dt, axis=0))
            last = len(rotation) - 1  # central differences, one-sided at both ends
            later, earlier = np.r_[1 : last + 1, last], np.r_[0, 0:last]
            turned = rotation_vector(multiply(rotation[later], conjugate(rotation[earlier])))
            parts["ang_vel"] = rotate_back(rotation, turned / ((later - earlier)[:, None] * dt))
        parts = {name: part for name, part in parts.items() if name not in groups}
        columns = self.columns + column_names({n: a.shape[1] for n, a in parts.items()}, self.joint_names)
        return MotionClip(self.name, np.concatenate([self.frames, *parts.values()], 1), columns, dt, self.weight)


def group_of(column: str) -> str:
    """The part of a column's name before the dot."""
    return column.partition(".")[0]


def column_names(widths: Mapping[str, int], joint_names: Sequence[str] | None = None) -> list[str]:
    """One name per column of groups of these widths: joints by name, three or four numbers by axis."""
    columns: list[str] = []
    for group, width in widths.items():
        parts = AXES[:width] if group not in JOINTS and width in (3, 4) else range(width)
        if group in JOINTS and joint_names:
            if len(joint_names) != width:
                raise ValueError(f"{group} has {width} columns, but there are {len(joint_names)} joint names")
            parts = joint_names
        columns += [f"{group}.{part}" for part in parts]
    return columns


def read_clip(
    path: StrPath, file_joint_names: Sequence[str] | None = None, fps: float | None = None, weight: float | None = None
) -> MotionClip:
    """Read a clip (.txt or .json of AMP, .npz, .csv) and compute missing velocities; errors name the file.

    `file_joint_names`, in the file's order, and `fps`, 30 for a CSV as in LAFAN1, replace what a file does not contain;
    `weight` overrides the file's sampling weight.
    """
    path = Path(path)
    readers = {".txt": _read_json, ".json": _read_json, ".npz": _read_npz, ".csv": _read_csv}
    if path.suffix not in readers:
        raise ValueError(f"{path}: a motion clip is one of {', '.join(SUFFIXES)}")
    try:
        with np.errstate(all="ignore"):  # what overflows is found by the checks of a clip
            clip = readers[path.suffix](path, file_joint_names, fps)
            clip.weight = clip.weight if weight is None else weight
            return clip.with_velocities()
    except (OSError, FileContentError):
        raise
    except ValueError as error:
        raise FileContentError(f"{path}: {error}") from error
    except Exception as error:  # a damaged file may raise anything
        raise FileContentError(f"{path} is no motion clip: {error!r}") from error


def _read_json(path: Path, joints: Sequence[str] | None, fps: float | None) -> MotionClip:
    content = json.loads(read_limited(path, MAX_TEXT_BYTES))
    if content.get(CHECKSUM, text_digest(content)) != text_digest(content):
        raise ValueError(f"it was changed: its {CHECKSUM} does not match; remove that entry to use it as it is")
    frames = np.array(content["Frames"], np.float64)
    fields = content.get("Fields")
    if fields is None:
        if frames.ndim != 2 or frames.shape[1] != sum(DOCUMENTED.values()):
            known = f"{sum(DOCUMENTED.values())} columns: {', '.join(f'{n} {w}' for n, w in DOCUMENTED.items())}"
            raise ValueError(f"frames of shape {frames.shape} have no Fields, and are not {known}")
        fields = DOCUMENTED
    joints = content.get("JointNames", joints)
    columns = column_names(fields, joints) if isinstance(fields, Mapping) else [str(name) for name in fields]
    dt = content["FrameDuration"] if fps is None else 1.0 / fps
    return MotionClip(path.name, frames, columns, float(dt), float(content.get("MotionWeight", 1.0)))


def _read_csv(path: Path, joints: Sequence[str] | None, fps: float | None) -> MotionClip:
    text = read_limited(path, MAX_TEXT_BYTES).decode("utf-8")
    if text.startswith(CSV_CHECKSUM):
        digest, _, text = text.removeprefix(CSV_CHECKSUM).partition("\n")
        if digest != hashlib.sha256(text.encode()).hexdigest():
            raise ValueError("it was changed: its sha256 does not match; remove its first line to use it as it is")
    lines = [line.split(",") for line in text.splitlines() if line.strip()]
    widths = {len(line) for line in lines}
    if len(widths) != 1:
        raise ValueError(f"rows of {sorted(widths) or 'no'} columns; all must have the same")
    columns = [cell.strip() for cell in lines[0]]
    try:
        np.array(columns, np.float64)
    except ValueError:  # the first line names the columns
        lines = lines[1:]
    else:
        columns = column_names({ROOT_POS: 3, ROOT_ROT: 4, JOINT_POS: len(columns) - 7}, joints)
    return MotionClip(path.name, np.array(lines, np.float64), columns, 1.0 / (fps or LAFAN1_FPS))


def _read_npz(path: Path, joints: Sequence[str] | None, fps: float | None) -> MotionClip:
    content: dict[str, Any] = read_npz(path, MAX_BYTES)
    for ours, theirs in NPZ_NAMES.items():
        for name in theirs:
            if name in content and ours not in content:
                content[ours] = content.pop(name)
    joints = [str(name) for name in content["joint_names"]] if "joint_names" in content else joints
    if "frame_duration" in content and fps is None:
        dt = float(content["frame_duration"])
    else:
        dt = 1.0 / float(np.asarray(content["fps"] if fps is None else fps).reshape(-1)[0])
    if "body_pos" in content and ROOT_POS not in content:
        content[ROOT_POS] = content["body_pos"][:, 0]
        content[ROOT_ROT] = content["body_rot"][:, 0][:, XYZW_FROM_WXYZ]
    weight = float(content.get("weight", 1.0))
    if columns := [str(name) for name in content.get("columns", [])]:
        return MotionClip(path.name, content["frames"], columns, dt, weight)
    known = [name for name in DOCUMENTED if name in content]
    if not known:
        raise ValueError(f"it has {', '.join(content)}, but none of {', '.join(DOCUMENTED)}")
    parts = {name: np.asarray(content[name]).reshape(len(content[name]), -1) for name in known}
    lengths = {name: len(part) for name, part in parts.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"its arrays have different numbers of frames: {lengths}")
    columns = column_names({name: part.shape[1] for name, part in parts.items()}, joints)
    return MotionClip(path.name, np.concatenate(list(parts.values()), 1), columns, dt, weight)


def write_clip(path: str | Path, clip: MotionClip, digits: int = 5, with_names: bool = True) -> None:
    """Write a clip in the format of the file name's suffix; a CSV does not contain rate and weight.

    Text formats get `digits` decimal places, and column names `with_names`; the files of AMP and LAFAN1 have none. All
    but a CSV without names contain a checksum.
    """
    path = Path(path)

    def write(file: BinaryIO) -> None:
        if path.suffix == ".npz":
            columns, dt, weight = np.array(clip.columns), np.float64(clip.frame_duration), np.float64(clip.weight)
            np.savez(file, frames=clip.frames, columns=columns, frame_duration=dt, weight=weight)
        elif path.suffix == ".csv":
            rows = [",".join(f"{x:.{digits}f}" for x in frame) for frame in clip.frames]
            text = "".join(f"{row}\n" for row in ([",".join(clip.columns), *rows] if with_names else rows)).encode()
            file.write(f"{CSV_CHECKSUM}{hashlib.sha256(text).hexdigest()}\n".encode() if with_names else b"")
            file.write(text)
        elif path.suffix in (".txt", ".json"):
            frames = [[round(float(x), digits) for x in frame] for frame in clip.frames]
            head: dict[str, Any] = {"LoopMode": "Wrap", "FrameDuration": clip.frame_duration}
            head |= {"MotionWeight": clip.weight} | ({"Fields": clip.columns} if with_names else {})
            head[CHECKSUM] = text_digest({**head, "Frames": frames})
            rows = ",\n".join(map(json.dumps, frames))
            file.write(f'{json.dumps(head)[:-1]}, "Frames": [\n{rows}\n]}}\n'.encode())
        else:
            raise ValueError(f"{path}: a motion clip is one of {', '.join(SUFFIXES)}")

    atomic_write(path, write)


def text_digest(content: Mapping[str, Any]) -> str:
    """SHA-256 of the values of a text clip, however they are spelled, without its checksum."""
    values = {name: value for name, value in content.items() if name != CHECKSUM}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def conjugate(rotations: np.ndarray) -> np.ndarray:
    """The inverse rotations."""
    return rotations * np.array([-1.0, -1.0, -1.0, 1.0])


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The rotation b followed by a."""
    av, aw, bv, bw = a[..., :3], a[..., 3:], b[..., :3], b[..., 3:]
    vector = aw * bv + bw * av + np.cross(av, bv)
    return np.concatenate([vector, aw * bw - (av * bv).sum(-1, keepdims=True)], -1)


def rotate_back(rotations: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """World vectors in the rotated frame."""
    pure = np.concatenate([vectors, np.zeros((*vectors.shape[:-1], 1))], -1)
    return multiply(multiply(conjugate(rotations), pure), rotations)[..., :3]


def rotation_vector(rotations: np.ndarray) -> np.ndarray:
    """Axis times angle (rad), the angle at most pi."""
    signed = np.where(rotations[..., 3:] < 0, -rotations, rotations)
    length = np.linalg.norm(signed[..., :3], axis=-1, keepdims=True)
    angle = 2 * np.arctan2(length, signed[..., 3:])
    return signed[..., :3] * np.where(length < 1e-9, 2.0, angle / np.maximum(length, 1e-12))
