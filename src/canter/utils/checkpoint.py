"""Checkpoints: written atomically, verified by checksum, and loaded without running code.

A file is an ordinary `torch.save` archive. Its zip comment (the last bytes) is `canter-sha256:` and the SHA-256 of
everything before the digest, so that any flipped bit is detected; torch alone misses almost all of them. A checksum
proves no good intention: every archive, with or without one, must also be bounded and hold plain data.
"""

import contextlib
import hashlib
import io
import os
import pickletools
import re
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from canter.utils.files import StrPath, atomic_write, open_read

FORMAT_VERSION = 1
FINAL_NAME = "checkpoint_final.pt"  # written at the end of a run, beside the last one with a number
NORMALIZER_CLIP = "normalizer_clip"  # entry of a normaliser that bounds its results
MARK = b"canter-sha256:"
_COMMENT_SIZE = len(MARK) + 64
_END_SIZE = 22  # a zip's end record without comment; its last two bytes are the comment's length
# The names and operations that torch.save writes for plain data. torch's safe loader accepts more, of which some, such
# as bytearray, allocate any size; UntypedStorage does when it is called, and is only named where a text follows it.
_PLAIN_NAME = re.compile(
    r"torch._utils _rebuild_(tensor_v[23]|parameter)|torch (\w+Storage|Size|device|[a-z]+\d+(_\w+)?|bool)"
    r"|torch.storage UntypedStorage|collections (OrderedDict|Counter)|(__builtin__|builtins) (set|complex)"
    r"|_codecs encode"
)
_PLAIN_OPERATION = re.compile(
    r"PROTO|STOP|GLOBAL|REDUCE|BUILD|BINPERSID|MARK|NONE|NEWTRUE|NEWFALSE|(LONG_)?BIN(PUT|GET)|BININT[12]?|BINFLOAT"
    r"|LONG[14]|(SHORT_)?BINUNICODE|EMPTY_(DICT|LIST|TUPLE)|TUPLE[123]?|APPENDS?|SETITEMS?"
)
_GROWTH = 8  # the content may be this many times larger than the file, because tensors and texts are shared in it
_NAME = re.compile(r"model_([0-9]{1,18})\.pt")
# What torch.save puts into an archive; all of it in one folder.
_MEMBER = re.compile(r"[^/]+/(data\.pkl|byteorder|version|data/[0-9]+|\.data/serialization_id|\.(format|storage)_\w+)")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message names the file and the reason."""


def save_checkpoint(path: StrPath, state: Mapping[str, Any], root: StrPath | None = None) -> None:
    """Write `state` and the format version to `path` atomically; TypeError names the key of an unsafe value.

    Links below `root` are not followed; see `canter.utils.files.Folder`.
    """
    content = _to_plain({"format_version": FORMAT_VERSION, **state}, "state")

    def write(file: BinaryIO) -> None:
        torch.save(content, file)
        end = file.seek(0, os.SEEK_END)
        file.seek(end - 2)
        file.write(_COMMENT_SIZE.to_bytes(2, "little") + MARK)
        file.write(_digest(file, end + len(MARK)))

    atomic_write(path, write, expected_size=_tensor_bytes(content), root=root)


def _to_plain(value: Any, key: str) -> Any:
    kind = type(value)  # exact types: isinstance takes numpy's float64 for a float, the safe loader does not
    if kind in (Tensor, torch.nn.Parameter):
        tensor = value.detach()
        # Saving a slice would save its whole storage.
        return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
    if kind in (dict, OrderedDict, Counter):
        if bad := [name for name in value if type(name) not in (str, int)]:
            raise TypeError(f"a checkpoint cannot hold the key {bad[0]!r} in {key}; use str or int")
        return {name: _to_plain(part, f"{key}[{name!r}]") for name, part in value.items()}
    if kind in (list, tuple):
        return kind(_to_plain(part, f"{key}[{index}]") for index, part in enumerate(value))
    if value is None or kind in (str, int, float, bool):
        return value
    allowed = "tensor, str, int, float, bool, None, list, tuple or dict"
    raise TypeError(f"a checkpoint cannot hold {key}, a {kind.__module__}.{kind.__qualname__}; use {allowed}")


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(_tensor_bytes(part) for part in parts)


def _digest(file: BinaryIO, length: int) -> bytes:
    """Return the hex SHA-256 of the first `length` bytes; the position is after them."""
    sha = hashlib.sha256()
    file.seek(0)
    while length > 0 and (chunk := file.read(min(length, 1 << 20))):
        sha.update(chunk)
        length -= len(chunk)
    return sha.hexdigest().encode()


def verify_checkpoint(path: StrPath) -> bool:
    """Check every byte of `path` (CheckpointError); False for a foreign archive, which has only CRC-32 checksums."""
    with _open(Path(path)) as file:
        return _verify(file, Path(path))


def load_checkpoint(path: StrPath, map_location: Any = None) -> dict[str, Any]:
    """Return the content of a verified checkpoint, or of another `torch.save` archive whose CRC-32 checksums match."""
    path = Path(path)
    with _open(path) as file:
        # The same descriptor for both steps, because the file may be replaced in between.
        _verify(file, path)
        file.seek(0)
        try:
            content = torch.load(file, map_location=map_location, weights_only=True)
            _check_growth(content, _GROWTH * os.fstat(file.fileno()).st_size)
        except Exception as error:
            raise CheckpointError(f"checkpoint {path} cannot be loaded safely: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"checkpoint {path} holds a {type(content).__name__}, not a dict")
    version = content.get("format_version", 0)
    if type(version) is not int or version > FORMAT_VERSION:
        readable = f"this canter reads up to {FORMAT_VERSION}"
        raise CheckpointError(f"checkpoint {path} has format version {version!r}, {readable}; upgrade it")
    return content


def _open(path: Path) -> BinaryIO:
    if path.is_dir():
        names = [file for _, file in find_checkpoints(path)[-1:]]
        raise CheckpointError(f"checkpoint {path} is a directory" + (f"; name a file: {names[0]}" if names else ""))
    return cast("BinaryIO", io.BufferedReader(open_read(path)))


def _verify(file: BinaryIO, path: Path) -> bool:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _COMMENT_SIZE))
    tail = file.read(_COMMENT_SIZE)
    if tail.startswith(MARK):
        if _digest(file, size - 64) != tail[len(MARK) :]:
            raise CheckpointError(f"checkpoint {path} is damaged: its SHA-256 does not match ({size} bytes)")
    # Plain `torch.save` writes archives that end with the end record and have no comment.
    elif not (tail[-_END_SIZE:].startswith(b"PK\x05\x06") and tail.endswith(b"\0\0")):
        raise CheckpointError(f"checkpoint {path} is truncated, damaged or not a torch.save archive ({size} bytes)")
    try:
        with zipfile.ZipFile(file) as archive:
            _check_archive(archive, path, size, has_checksum=tail.startswith(MARK))
    except CheckpointError:
        raise
    except Exception as error:  # a damaged archive may raise anything
        raise CheckpointError(f"checkpoint {path} is damaged: {str(error) or type(error).__name__}") from error
    return tail.startswith(MARK)


def _check_archive(archive: zipfile.ZipFile, path: Path, size: int, has_checksum: bool) -> None:
    """Refuse an archive that unpacks to more than its size, that is damaged, or that asks for more than plain data."""
    # torch reads archives with a library of its own, which ignores case and takes another one of two equal names. Only
    # an archive that both read in one way is accepted.
    members, names = archive.infolist(), archive.namelist()
    if odd := [name for name in names if not _MEMBER.fullmatch(name)]:
        raise ValueError(f"it holds {odd[0]!r}, which torch.save does not write")
    if len({name.casefold() for name in names}) < len(names) or len({name.split("/")[0] for name in names}) > 1:
        raise ValueError("its members are in several folders, or two have one name")
    pickled = [name for name in names if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickled) != 1 or min(member.header_offset for member in members):
        raise ValueError("it does not begin with its members, or has no data.pkl")
    # torch stores members uncompressed, so an archive that unpacks to more than itself is a zip bomb.
    if any(member.compress_type for member in members) or sum(member.file_size for member in members) > size:
        raise ValueError(f"it claims more content than its {size} bytes, or is compressed")
    if not has_checksum and (damaged := archive.testzip()):
        raise ValueError(f"the CRC-32 of {damaged!r} does not match")
    if found := _find_unsafe(archive.read(pickled[0])):
        raise CheckpointError(f"checkpoint {path} cannot be loaded safely: it asks for {found}, no plain data")


def _find_unsafe(pickled: bytes) -> str | None:
    """The first name or operation of a pickle that plain data does not need; nothing is executed."""
    storages, is_storage = set(), False  # places of UntypedStorage in the memo, and whether it is on top of the stack
    for operation, argument, _ in pickletools.genops(pickled):
        name = operation.name
        if not _PLAIN_OPERATION.fullmatch(name):
            return f"the operation {name}"
        if name == "GLOBAL" and not _PLAIN_NAME.fullmatch(str(argument)):
            return str(argument).replace(" ", ".")
        if is_storage and name in ("BINPUT", "LONG_BINPUT"):
            storages.add(argument)
            continue
        if is_storage and name not in ("BINUNICODE", "SHORT_BINUNICODE"):
            return "torch.storage.UntypedStorage"
        is_loaded = name in ("BINGET", "LONG_BINGET") and argument in storages
        is_storage = is_loaded or (name == "GLOBAL" and argument == "torch.storage UntypedStorage")
    return None


def _check_growth(content: Any, limit: int) -> None:
    """Refuse content that is larger than `limit` bytes once nothing in it is shared, or that contains itself."""
    total, waiting = 0, [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, (list, tuple, set)):
            waiting += value
        total += value.nbytes if isinstance(value, Tensor) else len(value) if isinstance(value, (str, bytes)) else 1
        if total > max(limit, 1 << 20):
            raise ValueError(f"it expands to more than {max(limit, 1 << 20)} bytes")


@contextlib.contextmanager
def damaged_content(path: StrPath) -> Iterator[None]:
    """Turn what a checkpoint's content can cause besides errors with a message of ours into a CheckpointError."""
    try:
        yield
    except (AttributeError, ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError) as error:
        if isinstance(error, (CheckpointError, NotImplementedError)):
            raise
        text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
        raise CheckpointError(f"checkpoint {path} has unusable content: {type(error).__name__}: {text}") from error


def find_checkpoints(directory: StrPath) -> list[tuple[int, Path]]:
    """Return the number and path of every `model_<number>.pt` in `directory`, in numeric order."""
    found = []
    for path in Path(directory).iterdir():
        if match := _NAME.fullmatch(path.name):
            if is_own_file(path):
                found.append((int(match[1]), path))
            elif path.is_symlink() or path.exists():  # or else it has just been pruned
                warnings.warn(f"{path} is named like a checkpoint but is not a file of its own; ignored", stacklevel=2)
    return sorted(found)


def is_own_file(path: Path) -> bool:
    """Whether a name in a run directory is a file, and no link to one."""
    return path.is_file() and not path.is_symlink()


def newest_valid_checkpoint(directory: StrPath) -> Path:
    """Return the valid checkpoint with the highest number; damaged newer ones are skipped with a warning.

    Where none is valid or has a number it is checkpoint_final.pt.
    """
    final = Path(directory) / FINAL_NAME
    found = [final] * is_own_file(final) + [path for _, path in find_checkpoints(directory)]
    others = ", ".join(sorted(path.name for path in Path(directory).glob("*.pt") if path not in found))
    hint = f"; it also has {others}, which can be named" if others else ""
    if not found:
        raise FileNotFoundError(f"no model_<number>.pt and no {FINAL_NAME} in {directory}{hint}")
    for path in reversed(found):
        try:
            verify_checkpoint(path)
            return path
        except (CheckpointError, OSError) as error:
            warnings.warn(f"SKIPPING the damaged checkpoint {path}: {error}", stacklevel=2)
    newest = found[-1].name
    raise CheckpointError(f"none of {len(found)} checkpoints in {directory} is valid; the newest is {newest}{hint}")


def prune_checkpoints(directory: StrPath, keep_last: int, names: Collection[str] | None = None) -> list[Path]:
    """Delete checkpoints (of `names`, if given) except the `keep_last` newest and the newest valid one; return them."""
    if keep_last < 2:
        raise ValueError(f"keep_last must be at least 2 so that one is left if the newest is damaged, got {keep_last}")
    found = find_checkpoints(directory)
    if len(found) <= keep_last:
        return []
    try:
        newest_valid = newest_valid_checkpoint(directory)
    except CheckpointError as error:
        warnings.warn(f"{error}; none is deleted", stacklevel=2)
        return []
    removed = []
    candidates = [path for _, path in found if names is None or path.name in names]
    for path in candidates[:-keep_last]:
        if path == newest_valid:
            continue
        try:
            path.unlink()
            removed.append(path)
        except OSError as error:
            warnings.warn(f"cannot delete the old checkpoint {path}: {error}", stacklevel=2)
    return removed


def check_compatible(current: Mapping[str, Tensor], loaded: Mapping[str, Tensor], owner: str) -> None:
    """Raise one CheckpointError that lists every tensor of `loaded` that does not fit `current`; change nothing.

    The bound of a normaliser may be in one of them only.
    """
    want = {name: tuple(tensor.shape) for name, tensor in current.items() if not name.endswith(f".{NORMALIZER_CLIP}")}
    got = {name: v for name, v in loaded.items() if not name.endswith(f".{NORMALIZER_CLIP}")}
    got = {name: tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__ for name, v in got.items()}
    problems = [f"missing {name}, want {want[name]}" for name in want if name not in got]
    problems += [f"unexpected {name}, got {got[name]}" for name in got if name not in want]
    problems += [f"shape of {n}: want {want[n]}, got {got[n]}" for n in want if n in got and got[n] != want[n]]
    if problems:
        head = f"the checkpoint does not fit {owner} ({len(problems)} tensors); nothing was loaded:"
        raise CheckpointError("\n  ".join([head, *problems]))
