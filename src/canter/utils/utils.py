"""Functions for observation segments, named tuples of arrays, and compressed images."""

import inspect
from collections import namedtuple
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from canter.compat.arguments import also_here
from canter.utils.obs_layout import ObsLayout, Segments

Image = TypeVar("Image", np.ndarray, Tensor)


def get_obs_slice(segments: Segments, name: str) -> tuple[slice, tuple[int, ...]]:
    """Return the columns of one segment in the flat observation, and its shape."""
    layout = ObsLayout(segments)
    return layout.slice(name), layout.shapes[name]


def get_subobs_size(segments: Segments, names: Sequence[str]) -> int:
    """Return the total width of the named segments."""
    return ObsLayout(segments).size(names)


def get_subobs_by_components(observations: Tensor, component_names: Sequence[str], obs_segments: Segments) -> Tensor:
    """Return the columns of the named segments, in segment order."""
    return ObsLayout(obs_segments).take(observations, component_names)


def substitute_estimated_state(
    observations: Tensor, target_components: Sequence[str], estimated_state: Tensor, obs_segments: Segments
) -> Tensor:
    """Return a copy whose target segments are replaced by consecutive columns of the estimate, in segment order."""
    return ObsLayout(obs_segments).put(observations, target_components, estimated_state)


class _ArrayFields(tuple):
    """Methods of the classes made by `namedarraytuple`."""

    __slots__ = ()
    _fields: tuple[str, ...]

    def __getitem__(self, loc: Any) -> Any:
        make: Any = type(self)
        return make(*(None if value is None else value[loc] for value in self))

    def __setitem__(self, loc: Any, value: Any) -> None:
        # A tuple holds one value per field; any other value goes to every field.
        spread = isinstance(value, tuple)
        if spread and len(value) != len(self):
            raise ValueError(f"{type(self).__name__} has fields {self._fields}, but got {len(value)} values")
        for index, (name, own) in enumerate(self.items()):
            new = tuple.__getitem__(value, index) if spread else value
            if own is None and spread and new is not None:
                raise TypeError(f"{type(self).__name__}.{name} is None and cannot be assigned to")
            if own is not None and new is not None:
                own[loc] = new

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def get(self, index: int) -> Any:
        """Return the field at a position, as indexing a plain tuple does."""
        return tuple.__getitem__(self, index)

    def items(self) -> Iterator[tuple[str, Any]]:
        """Iterate over field names and values."""
        return zip(self._fields, self, strict=True)


def namedarraytuple(name: str, fields: Sequence[str] | str) -> Any:
    """Make a named tuple class of arrays: `x[i]` and `x[i] = y` apply to every field, `"field" in x` tests names.

    Fields are arrays, other such tuples, or None, which indexing skips. Instances can be pickled if the result is bound
    to a module-level variable of the same name.
    """
    plain = namedtuple(name, fields)
    if taken := [field for field in plain._fields if field in ("get", "items", "index", "count")]:
        raise ValueError(f"{name} cannot have a field called {taken[0]!r}, which is a method of it")
    caller: Any = inspect.currentframe()
    module = caller.f_back.f_globals.get("__name__", "__main__")
    return type(name, (_ArrayFields, plain), {"__slots__": (), "__module__": module, "__doc__": plain.__doc__})


def compress_normalized_image(image: Image) -> Image:
    """Convert an image with values in [0, 1] to uint8, rounded to the nearest of 255 steps."""
    if isinstance(image, Tensor):
        return (image.clamp(0.0, 1.0) * 255.0).round().to(torch.uint8)
    return np.rint(np.clip(image, 0.0, 1.0) * 255.0).astype(np.uint8)


def decompress_normalized_image(image: Image) -> Image:
    """Convert a uint8 image of `compress_normalized_image` to float32 in [0, 1]."""
    return image.float() / 255.0 if isinstance(image, Tensor) else image.astype(np.float32) / np.float32(255.0)


__getattr__ = also_here(unpad_trajectories="canter.storage.trajectories")
