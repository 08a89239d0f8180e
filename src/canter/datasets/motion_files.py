"""Motion clips from files: the AMP text format, npz of several makers, and CSV as Unitree publishes LAFAN1."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from canter.datasets.motion_clip import DOCUMENTED, JOINT_POS, JOINT_VEL, ROOT_POS, ROOT_ROT, MotionClip, column_names
from canter.utils.files import atomic_write

SUFFIXES = (".txt", ".json", ".npz", ".csv")
LAFAN1_FPS = 30.0
MAX_BYTES = 1 << 30
XYZW_FROM_WXYZ = [1, 2, 3, 0]
# Our name -> what others call it in an npz. Rotations of bodies are (w, x, y, z) there.
NPZ_NAMES = {
    JOINT_POS: ("dof_positions", "dof_pos"),
    JOINT_VEL: ("dof_velocities", "dof_vel"),
    "joint_names": ("dof_names",),
    "body_pos": ("body_positions", "body_pos_w"),
    "body_rot": ("body_rotations", "body_quat_w"),
}


def read_clip(
    path: str | Path,
    file_joint_names: Sequence[str] | None = None,
    fps: float | None = None,
    weight: float | None = None,
) -> MotionClip:
    """The clip in a file; what it says of itself is checked, and an error names the file.

    Args:
        path: .txt or .json (AMP), .npz or .csv.
        file_joint_names: The file's joints in its order, if it does not say.
        fps: Frames per second, if the file does not say; 30 for a CSV, as in LAFAN1.
        weight: How often it is drawn relative to others; overrides the file's.
    """
    path = Path(path)
    readers = {".txt": _read_json, ".json": _read_json, ".npz": _read_npz, ".csv": _read_csv}
    if path.suffix not in readers:
        raise ValueError(f"{path}: a motion clip is one of {', '.join(SUFFIXES)}")
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"{path} has {size} bytes, more than the {MAX_BYTES} of a motion clip")
    try:
        clip = readers[path.suffix](path, file_joint_names, fps)
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no motion clip: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if weight is not None:
        clip.weight = weight
    return clip.with_velocities()


def _read_json(path: Path, joints: Sequence[str] | None, fps: float | None) -> MotionClip:
    content = json.loads(path.read_text(encoding="utf-8"))
    frames = np.array(content["Frames"], np.float64)
    joints = content.get("JointNames", joints)
    fields = content.get("Fields")
    if fields is None:
        if frames.ndim != 2 or frames.shape[1] != sum(DOCUMENTED.values()):
            raise ValueError(
                f"frames of shape {frames.shape} have no Fields, and are not the {sum(DOCUMENTED.values())} columns of "
                f"{', '.join(f'{name} {width}' for name, width in DOCUMENTED.items())}"
            )
        fields = DOCUMENTED
    columns = column_names(fields, joints) if isinstance(fields, Mapping) else [str(name) for name in fields]
    dt = content["FrameDuration"] if fps is None else 1.0 / fps
    return MotionClip(path.name, frames, columns, float(dt), float(content.get("MotionWeight", 1.0)))


def _read_csv(path: Path, joints: Sequence[str] | None, fps: float | None) -> MotionClip:
    lines = path.read_text(encoding="utf-8").splitlines()
    head = lines[0].split(",") if lines else []
    is_header = any(not _is_number(cell) for cell in head)
    rows = [[float(cell) for cell in line.split(",")] for line in lines[is_header:] if line.strip()]
    widths = {len(row) for row in rows}
    if len(widths) != 1:
        raise ValueError(f"rows of {sorted(widths) or 'no'} columns; all must have the same")
    if is_header:
        columns = [cell.strip() for cell in head]
    else:
        columns = column_names({ROOT_POS: 3, ROOT_ROT: 4, JOINT_POS: widths.pop() - 7}, joints)
    return MotionClip(path.name, np.array(rows), columns, 1.0 / (fps or LAFAN1_FPS))


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _read_npz(path: Path, joints: Sequence[str] | None, fps: float | None) -> MotionClip:
    with np.load(path, allow_pickle=False) as archive:
        content: dict[str, Any] = {name: archive[name] for name in archive.files}
    for ours, theirs in NPZ_NAMES.items():
        for name in theirs:
            if name in content and ours not in content:
                content[ours] = content.pop(name)
    if "joint_names" in content:
        joints = [str(name) for name in content["joint_names"]]
    if "frame_duration" in content and fps is None:
        dt = float(content["frame_duration"])
    else:
        dt = 1.0 / float(np.asarray(content["fps"] if fps is None else fps).reshape(-1)[0])
    if "body_pos" in content and ROOT_POS not in content:
        content[ROOT_POS] = content["body_pos"][:, 0]
        content[ROOT_ROT] = content["body_rot"][:, 0][:, XYZW_FROM_WXYZ]
    columns_given = [str(name) for name in content.get("columns", [])]
    if columns_given:
        return MotionClip(path.name, content["frames"], columns_given, dt, float(content.get("weight", 1.0)))
    known = [name for name in DOCUMENTED if name in content]
    if not known:
        raise ValueError(f"it has {', '.join(content)}, but none of {', '.join(DOCUMENTED)}")
    parts = {name: np.asarray(content[name]).reshape(len(content[name]), -1) for name in known}
    lengths = {name: len(part) for name, part in parts.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"its arrays have different numbers of frames: {lengths}")
    columns = column_names({name: part.shape[1] for name, part in parts.items()}, joints)
    return MotionClip(
        path.name, np.concatenate(list(parts.values()), 1), columns, dt, float(content.get("weight", 1.0))
    )


def write_clip(path: str | Path, clip: MotionClip, digits: int = 5, with_names: bool = True) -> None:
    """Write a clip in the format that the name's ending says; a CSV has no room for rate and weight.

    Args:
        path: .txt or .json (AMP), .npz or .csv.
        clip: What to write.
        digits: After the decimal point, in text.
        with_names: Name the columns in text, which AMP's own files and LAFAN1's do not.
    """
    path = Path(path)

    def write(file: BinaryIO) -> None:
        if path.suffix == ".npz":
            columns, dt, weight = np.array(clip.columns), np.float64(clip.frame_duration), np.float64(clip.weight)
            np.savez(file, frames=clip.frames, columns=columns, frame_duration=dt, weight=weight)
        elif path.suffix == ".csv":
            file.write((",".join(clip.columns) + "\n").encode() if with_names else b"")
            np.savetxt(file, clip.frames, fmt=f"%.{digits}f", delimiter=",")
        elif path.suffix in (".txt", ".json"):
            rows = ",\n".join(json.dumps([round(float(x), digits) for x in frame]) for frame in clip.frames)
            head = {"LoopMode": "Wrap", "FrameDuration": clip.frame_duration, "MotionWeight": clip.weight}
            text = json.dumps({**head, **({"Fields": clip.columns} if with_names else {})})[:-1]
            file.write(f'{text}, "Frames": [\n{rows}\n]}}\n'.encode())
        else:
            raise ValueError(f"{path}: a motion clip is one of {', '.join(SUFFIXES)}")

    atomic_write(path, write)
