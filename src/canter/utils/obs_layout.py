"""Names for the parts of a flat observation vector."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import SupportsInt

import torch
from torch import Tensor

Shape = SupportsInt | Sequence[SupportsInt]
Segments = Mapping[str, Shape]


class UnknownSegmentError(KeyError, AssertionError):
    """A name that the observation has no segment for."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"observation has no segment {name!r}; it has {list(known)}")

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0])


class ObsLayout:
    """Where each named segment sits in a flat observation; a shape is an int, a tuple or a list."""

    def __init__(self, segments: Segments) -> None:
        self.shapes = {name: _shape(shape) for name, shape in segments.items()}
        self.sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        self.width = sum(self.sizes.values())
        self._slices: dict[str, slice] = {}
        start = 0
        for name, size in self.sizes.items():
            self._slices[name] = slice(start, start + size)
            start += size

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __repr__(self) -> str:
        return f"ObsLayout({self.shapes})"

    def size(self, names: Sequence[str]) -> int:
        """Total width of the named segments."""
        return sum(self.sizes[name] for name in self.ordered(names))

    def slice(self, name: str) -> slice:
        """The columns of one segment."""
        if name not in self._slices:
            raise UnknownSegmentError(name, self.shapes)
        return self._slices[name]

    def ordered(self, names: Sequence[str]) -> list[str]:
        """The names in the order of the segments, each once."""
        wanted = {names} if isinstance(names, str) else set(names)
        for name in sorted(wanted - self.shapes.keys()):
            raise UnknownSegmentError(name, self.shapes)
        return [name for name in self.shapes if name in wanted]

    def split(self, obs: Tensor) -> dict[str, Tensor]:
        """Every segment by name, as flat views (..., size)."""
        self._check_width(obs)
        return dict(zip(self.sizes, obs.split(list(self.sizes.values()), dim=-1), strict=True))

    def take(self, obs: Tensor, names: Sequence[str]) -> Tensor:
        """The columns of the named segments, in segment order whatever the order of the names."""
        self._check_width(obs)
        parts = [obs[..., self._slices[name]] for name in self.ordered(names)]
        return torch.cat(parts, dim=-1) if len(parts) > 1 else (parts or [obs[..., :0]])[0]

    def put(self, obs: Tensor, names: Sequence[str], values: Tensor) -> Tensor:
        """A copy of the observation whose named segments are consecutive pieces of `values`, in segment order."""
        parts, order = self.split(obs), self.ordered(names)
        if values.shape[-1] != self.size(order):
            raise ValueError(f"segments {order} are {self.size(order)} wide, but got {values.shape[-1]} values")
        parts.update(zip(order, values.split([self.sizes[name] for name in order], dim=-1), strict=True))
        return torch.cat(list(parts.values()), dim=-1)

    def _check_width(self, obs: Tensor) -> None:
        if obs.shape[-1] != self.width:
            raise ValueError(f"observation is {obs.shape[-1]} wide, but its segments {self.sizes} sum to {self.width}")


def _shape(shape: Shape) -> tuple[int, ...]:
    # Python ints, because numpy integers fail the type checks of nn.LSTM.
    return tuple(int(n) for n in shape) if isinstance(shape, Sequence) else (int(shape),)
