"""Reading the documented pickle layout without running what a pickle says: numbers, text, containers, plain arrays."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def _empty_array(subtype: Any, shape: Any, kind: Any) -> np.ndarray:
    """What an array is made from before its state is set; never of the size or class the file asks for."""
    return np.ndarray.__new__(np.ndarray, (0,), "b")


def _array_from(buffer: Any, kind: np.dtype, shape: Any, order: str, axis_order: Any = None) -> np.ndarray:
    return np.frombuffer(buffer, dtype=kind).reshape(shape, order="F" if order == "F" else "C")


def _bytes_from(text: str, encoding: str = "latin1") -> bytes:
    """How old protocols spell bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin1")


def _scalar(kind: np.dtype, content: bytes = b"") -> Any:
    return np.frombuffer(content, dtype=kind)[0]


ALLOWED: dict[tuple[str, str], Callable[..., Any] | type] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("collections", "OrderedDict"): OrderedDict,
    ("_codecs", "encode"): _bytes_from,
}
for package in ("numpy.core", "numpy._core"):
    ALLOWED[f"{package}.multiarray", "_reconstruct"] = _empty_array
    ALLOWED[f"{package}.multiarray", "scalar"] = _scalar
    ALLOWED[f"{package}.numeric", "_frombuffer"] = _array_from


class PlainUnpickler(pickle.Unpickler):
    """Knows arrays and containers; anything else that a pickle names is refused before it is even looked up."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """One of a few names, each standing for code of ours or of numpy's."""
        try:
            return ALLOWED[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}, which is no plain data") from None


def read_pickle(path: Path) -> dict[str, np.ndarray]:
    """The arrays of one file of the documented layout; ValueError that names it if it holds anything else."""
    try:
        with path.open("rb") as file:
            content = PlainUnpickler(file).load()
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a spoilt pickle may raise anything
        raise ValueError(f"{path} cannot be imported: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a dict of arrays")
    arrays = {}
    for name, value in content.items():
        # The documented writer put a comma too many behind `observations`, which made it a tuple of one.
        value = value[0] if isinstance(value, tuple) and len(value) == 1 else value
        if value is None:
            continue
        if not isinstance(name, str) or not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
            raise ValueError(f"{path}: {name!r} is no array of numbers")
        arrays[name] = value
    return arrays
