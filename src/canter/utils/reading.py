"""Reading files that strangers may have written: within bounds, importing nothing, with errors that name the file.

The `root` of a file is the run directory that it belongs to: no link below it is followed, see `canter.utils.files`.
"""

import json
import math
import os
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import yaml

from canter.compat.spellings import TRANSLATED_MODULES
from canter.utils.files import StrPath, open_read

MAX_TEXT = 1 << 20  # bytes of a config, a record or a manifest
MAX_ARRAYS = 1 << 33  # bytes of the arrays of an npz
MAX_VALUES = 100_000  # of a YAML file, each alias counted as what it stands for
MAX_DEPTH = 64
# The first bytes of the media that reports show, and where they begin.
MEDIA = {".png": (0, b"\x89PNG\r\n\x1a\n"), ".gif": (0, b"GIF8"), ".mp4": (4, b"ftyp")}
# Settings whose text may name code as "module:name" or "module.name".
CODE_SETTINGS = ("class_name", "data_augmentation_func")


class FileContentError(ValueError):
    """A file cannot be used; the message names it and the reason."""


def read_limited(path: StrPath, limit: int = MAX_TEXT, root: StrPath | None = None) -> bytes:
    """The content of a plain file of at most `limit` bytes."""
    with open_read(path, root) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise FileContentError(f"{path} has {size} bytes, more than the {limit} that such a file may have")
        return file.read(limit)


def read_medium(path: StrPath, limit: int, root: StrPath | None = None) -> bytes:
    """The content of a picture or a film, whose first bytes are those of its kind."""
    content = read_limited(path, limit, root)
    place, magic = MEDIA[os.path.splitext(path)[1]]
    if content[place : place + len(magic)] != magic:
        raise FileContentError(f"{path} is not what its name says")
    return content


def read_yaml(path: StrPath, root: StrPath | None = None) -> dict[str, Any]:
    """The mapping in a YAML file; aliases may not multiply its size."""
    return _read_mapping(path, parse_yaml, MAX_TEXT, root)


def read_json(path: StrPath, limit: int = MAX_TEXT, root: StrPath | None = None) -> dict[str, Any]:
    """The object in a JSON file."""
    return _read_mapping(path, json.loads, limit, root)


def _read_mapping(path: StrPath, parse: Callable[[str], Any], limit: int, root: StrPath | None) -> dict[str, Any]:
    try:
        content = parse(read_limited(path, limit, root).decode("utf-8"))
    except (FileContentError, OSError):
        raise
    except Exception as error:  # a damaged file may raise anything, for example RecursionError or AttributeError
        raise FileContentError(f"{path} cannot be read: {str(error) or type(error).__name__}") from error
    if not isinstance(content, dict):
        raise FileContentError(f"{path} holds a {type(content).__name__}, not named values")
    return content


def parse_yaml(text: str, loader: Any = yaml.SafeLoader) -> Any:
    """The value of a YAML text; ValueError if its aliases stand for more than `MAX_VALUES` values in all."""
    sizes: dict[str, int] = {}  # by anchor
    nodes: list[tuple[str | None, int]] = [(None, 0)]  # anchor and size so far of every open collection
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        anchor, size = getattr(event, "anchor", None), 1
        if isinstance(event, yaml.CollectionStartEvent):
            nodes.append((anchor, 1))
            if len(nodes) > MAX_DEPTH:
                raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = nodes.pop()
        elif isinstance(event, yaml.AliasEvent):
            if anchor not in sizes:
                raise ValueError(f"the alias *{anchor} stands for nothing, or for what contains it")
            size = sizes[anchor]
        elif not isinstance(event, yaml.ScalarEvent):
            continue
        if anchor is not None:
            sizes[anchor] = size
        nodes[-1] = (nodes[-1][0], nodes[-1][1] + size)
        if nodes[-1][1] > MAX_VALUES:
            raise ValueError(f"with its aliases it has more than {MAX_VALUES} values")
    return yaml.load(text, loader)


def read_npz(path: StrPath, limit: int = MAX_ARRAYS) -> dict[str, np.ndarray]:
    """The arrays of an npz, each of exactly the size that its header states, `limit` bytes in all; no objects."""
    with open_read(path) as file:
        try:
            return _read_arrays(zipfile.ZipFile(file), limit)
        except Exception as error:  # a damaged archive may raise anything
            raise FileContentError(f"{path} cannot be read: {str(error) or type(error).__name__}") from error


def _read_arrays(archive: zipfile.ZipFile, limit: int) -> dict[str, np.ndarray]:
    members = archive.infolist()
    if (total := sum(member.file_size for member in members)) > limit:
        raise ValueError(f"it unpacks to {total} bytes, more than the {limit} that it may have")
    if any(not member.filename.endswith(".npy") for member in members):
        raise ValueError("it holds other files than arrays")
    return {member.filename[:-4]: _read_array(archive, member) for member in members}


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """One array, whose memory is allocated only after its header was compared with the size of the data."""
    headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    with archive.open(member) as file:
        shape, is_fortran, dtype = headers[np.lib.format.read_magic(file)](file)
        size = member.file_size - file.tell()
        if dtype.hasobject or min((0, *shape)) < 0 or math.prod(shape) * dtype.itemsize != size:
            raise ValueError(f"{member.filename} has {size} bytes, and its header says {dtype} of shape {shape}")
        data = bytearray(file.read())  # checks the CRC-32 at the end
    if not data:
        return np.empty(shape, dtype)
    return np.frombuffer(data, dtype).reshape(shape, order="F" if is_fortran else "C")


def named_modules(config: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """The settings of a config that name code, and the module that each of them would import."""
    parts: Any = enumerate(config) if isinstance(config, (list, tuple)) else ()
    for name, value in config.items() if isinstance(config, Mapping) else parts:
        path = f"{key}.{name}" if key else str(name)
        if path.startswith("run.plugins.") and isinstance(value, str):
            yield path, value
        if path.startswith(("run.task", "run.wrappers")):
            texts = (text for text in (name, value) if isinstance(text, str) and ":" in text)
            yield from ((path, text.rpartition(":")[0]) for text in texts)
        if not isinstance(value, str):
            yield from named_modules(value, path)
        elif name in CODE_SETTINGS and not value.startswith(TRANSLATED_MODULES) and (":" in value or "." in value):
            yield path, value.replace(":", ".").rpartition(".")[0]


def refuse_imports(config: Any, path: object, modules: Collection[str], way_out: str) -> None:
    """Refuse a config from a file whose settings name a module that the user did not name too."""
    for setting, module in named_modules(config):
        if module not in modules:
            problem = f"{path}: {setting} would import the module {module!r}, which is done only if you name it too"
            raise FileContentError(f"{problem}; if you trust it, {way_out.format(module=module)}")
