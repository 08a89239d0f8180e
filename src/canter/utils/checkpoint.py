"""Checkpoints: written whole, read without running code, and never believed without their checksum.

A file is an ordinary `torch.save` archive. Its last bytes, which the zip format calls the archive comment, are
`canter-sha256:` and the SHA-256 of everything before the digest, so that `torch.load` reads it as it is and one flipped
bit anywhere is found: torch alone notices almost none of them.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from canter.utils.files import atomic_write

FORMAT_VERSION = 1
MARK = b"canter-sha256:"
_COMMENT_SIZE = len(MARK) + 64
_END_SIZE = 22  # a zip's end record without comment; its last two bytes are the comment's length
_END_SIGNATURE = b"PK\x05\x06"
_NAME = re.compile(r"model_([0-9]{1,18})\.pt")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message names the file and the reason."""


class CheckpointInfo(NamedTuple):
    """What verifying a file told."""

    trusted: bool
    """Whether it carries canter's checksum; a foreign archive has only its members' CRC-32."""
    size: int


def save_checkpoint(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write `state` and the format version to `path`, whole or not at all.

    Raises TypeError naming the key of anything that is not a tensor, str, int, float, bool, None, list, tuple or dict.
    """
    content = _to_plain({"format_version": FORMAT_VERSION, **state}, "state")

    def write(file: BinaryIO) -> None:
        torch.save(content, file)
        _append_checksum(file)

    atomic_write(path, write, expected_size=_tensor_bytes(content))


def _to_plain(value: Any, key: str) -> Any:
    kind = type(value)  # exact types: numpy's float64 is a float to isinstance, but not to a safe loader
    if kind in (Tensor, torch.nn.Parameter):
        tensor = value.detach()
        # A slice would drag its whole storage into the file.
        return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
    if kind in (dict, OrderedDict):
        for name in value:
            if type(name) not in (str, int):
                raise TypeError(f"a checkpoint cannot hold the key {name!r} in {key}; use str or int")
        return {name: _to_plain(part, f"{key}[{name!r}]") for name, part in value.items()}
    if kind in (list, tuple):
        return kind(_to_plain(part, f"{key}[{index}]") for index, part in enumerate(value))
    if value is None or kind in (str, int, float, bool):
        return value
    raise TypeError(
        f"a checkpoint cannot hold {key}, a {kind.__module__}.{kind.__qualname__}; "
        "make it a tensor, str, int, float, bool, None, list, tuple or dict"
    )


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(_tensor_bytes(part) for part in parts)


def _append_checksum(file: BinaryIO) -> None:
    end = file.seek(0, os.SEEK_END)
    file.seek(end - 2)
    file.write(_COMMENT_SIZE.to_bytes(2, "little") + MARK)
    file.write(_digest(file, end + len(MARK)))


def _digest(file: BinaryIO, length: int) -> bytes:
    """Hex SHA-256 of the first `length` bytes, the position left after them."""
    sha = hashlib.sha256()
    file.seek(0)
    while length > 0 and (chunk := file.read(min(length, 1 << 20))):
        sha.update(chunk)
        length -= len(chunk)
    return sha.hexdigest().encode()


def verify_checkpoint(path: str | os.PathLike[str]) -> CheckpointInfo:
    """Read every byte of `path` against its checksum; CheckpointError if the file is damaged."""
    with _open(Path(path)) as file:
        return _verify(file, Path(path))


def load_checkpoint(path: str | os.PathLike[str], map_location: Any = None) -> dict[str, Any]:
    """The content of a verified checkpoint, read with `weights_only=True`.

    An archive that other software wrote with `torch.save` is accepted if its members' CRC-32 are right.
    """
    path = Path(path)
    with _open(path) as file:
        # One descriptor for both: the name may come to mean a newer file in between.
        _verify(file, path)
        file.seek(0)
        try:
            content = torch.load(file, map_location=map_location, weights_only=True)
        except Exception as error:
            raise CheckpointError(f"checkpoint {path} cannot be loaded safely: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"checkpoint {path} holds a {type(content).__name__}, not a dict")
    version = content.get("format_version", 0)
    if type(version) is not int or version > FORMAT_VERSION:
        raise CheckpointError(
            f"checkpoint {path} has format version {version!r}, this canter reads up to {FORMAT_VERSION}; upgrade it"
        )
    return content


def _open(path: Path) -> BinaryIO:
    if path.is_dir():
        raise CheckpointError(f"checkpoint {path} is a directory")
    return open(path, "rb")


def _verify(file: BinaryIO, path: Path) -> CheckpointInfo:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _COMMENT_SIZE))
    tail = file.read(_COMMENT_SIZE)
    if size == 0:
        raise CheckpointError(f"checkpoint {path} is empty")
    if tail.startswith(MARK):
        if _digest(file, size - 64) != tail[len(MARK) :]:
            raise CheckpointError(f"checkpoint {path} is damaged: its SHA-256 does not match ({size} bytes)")
        return CheckpointInfo(trusted=True, size=size)
    # Only an archive that ends with its end record, without a comment, can have been written by plain `torch.save`.
    if not (tail[-_END_SIZE:].startswith(_END_SIGNATURE) and tail.endswith(b"\0\0")):
        raise CheckpointError(f"checkpoint {path} is truncated, damaged or not a torch.save archive ({size} bytes)")
    _verify_members(file, path, size)
    return CheckpointInfo(trusted=False, size=size)


def _verify_members(file: BinaryIO, path: Path, size: int) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            # torch stores members uncompressed, so an archive that unpacks to more than itself is a bomb.
            is_bomb = sum(member.file_size for member in archive.infolist()) > size
            damaged = None if is_bomb else archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {error}") from error
    if is_bomb:
        raise CheckpointError(f"checkpoint {path} claims more content than its {size} bytes")
    if damaged is not None:
        raise CheckpointError(f"checkpoint {path} is damaged: the CRC-32 of {damaged!r} does not match")


def find_checkpoints(directory: str | os.PathLike[str]) -> list[tuple[int, Path]]:
    """Every `model_<number>.pt` in `directory` with its number, in numeric order."""
    found = []
    for path in Path(directory).iterdir():
        if match := _NAME.fullmatch(path.name):
            if path.is_file():
                found.append((int(match[1]), path))
            elif path.exists():  # or else it has just been pruned
                warnings.warn(f"{path} is named like a checkpoint but is not a file; ignored", stacklevel=2)
    return sorted(found)


def newest_valid_checkpoint(directory: str | os.PathLike[str]) -> Path:
    """The checkpoint with the highest number that verifies; a damaged newer one is skipped with a warning.

    Raises FileNotFoundError if there is none at all, CheckpointError if there are some but none is valid.
    """
    directory = Path(directory)
    found = find_checkpoints(directory)
    if not found:
        raise FileNotFoundError(f"no model_<number>.pt in {directory}")
    for _, path in reversed(found):
        reason = _reason_invalid(path)
        if reason is None:
            return path
        warnings.warn(f"SKIPPING the damaged checkpoint {path}: {reason}", stacklevel=2)
    raise CheckpointError(
        f"none of the {len(found)} checkpoints in {directory} is valid; the newest is {found[-1][1].name}"
    )


def _reason_invalid(path: Path) -> str | None:
    try:
        verify_checkpoint(path)
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def prune_checkpoints(
    directory: str | os.PathLike[str], keep_last: int, names: Collection[str] | None = None
) -> list[Path]:
    """Delete all but the `keep_last` newest checkpoints and the newest valid one; returns the deleted paths.

    Args:
        directory: Directory with files `model_<number>.pt`.
        keep_last: Number of checkpoints to keep.
        names: File names that may be deleted, which alone are counted; all if None.
    """
    if keep_last < 2:
        raise ValueError(f"keep_last must be at least 2 so that one is left if the newest is damaged, got {keep_last}")
    found = find_checkpoints(directory)
    if len(found) <= keep_last:
        return []
    newest_valid = next((path for _, path in reversed(found) if _reason_invalid(path) is None), None)
    if newest_valid is None:
        warnings.warn(f"no checkpoint in {directory} is valid; none is deleted", stacklevel=2)
        return []
    removed = []
    candidates = found if names is None else [entry for entry in found if entry[1].name in names]
    for _, path in candidates[:-keep_last]:
        if path == newest_valid:
            continue
        try:
            path.unlink()
            removed.append(path)
        except OSError as error:
            warnings.warn(f"cannot delete the old checkpoint {path}: {error}", stacklevel=2)
    return removed


def check_compatible(current: Mapping[str, Tensor], loaded: Mapping[str, Tensor], owner: str) -> None:
    """Raise one RuntimeError that lists every tensor of `loaded` that does not fit `owner`'s; change nothing."""
    problems = [f"missing {name}, want {tuple(current[name].shape)}" for name in current if name not in loaded]
    problems += [f"unexpected {name}, got {_shape(loaded[name])}" for name in loaded if name not in current]
    problems += [
        f"shape of {name}: want {tuple(current[name].shape)}, got {_shape(loaded[name])}"
        for name in current
        if name in loaded and _shape(loaded[name]) != tuple(current[name].shape)
    ]
    if problems:
        lines = "\n  ".join(problems)
        raise RuntimeError(
            f"the checkpoint does not fit {owner} ({len(problems)} tensors); nothing was loaded:\n  {lines}"
        )


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
