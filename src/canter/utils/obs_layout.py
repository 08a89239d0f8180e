"""Named segments of a flat observation vector."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, SupportsInt

import torch
from torch import Tensor

from canter.utils.tree import tree_leaves

Shape = SupportsInt | Sequence[SupportsInt]
Segments = Mapping[str, Shape]


class UnknownSegmentError(KeyError, AssertionError):
    """The observation has no segment of this name."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0])


class ObsLayout:
    """Positions of the named segments in a flat observation; a shape is an int, a tuple or a list."""

    def __init__(self, segments: Segments) -> None:
        # nn.LSTM rejects numpy integers.
        parts = {name: shape if isinstance(shape, Sequence) else [shape] for name, shape in segments.items()}
        self.shapes = {name: tuple(int(n) for n in shape) for name, shape in parts.items()}
        self.sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        ends = list(itertools.accumulate(self.sizes.values(), initial=0))
        self.width = ends[-1]
        self._slices = {name: slice(*ends[i : i + 2]) for i, name in enumerate(self.sizes)}

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __repr__(self) -> str:
        return f"ObsLayout({self.shapes})"

    def size(self, names: Sequence[str]) -> int:
        """Return the total width of the named segments."""
        return sum(self.sizes[name] for name in self.ordered(names))

    def slice(self, name: str) -> slice:
        """Return the columns of one segment."""
        return self._slices[self.ordered([name])[0]]

    def ordered(self, names: Sequence[str]) -> list[str]:
        """Return the names in segment order, without duplicates."""
        wanted = {names} if isinstance(names, str) else set(names)
        for name in sorted(wanted - self.shapes.keys()):
            raise UnknownSegmentError(f"observation has no segment {name!r}; it has {list(self.shapes)}")
        return [name for name in self.shapes if name in wanted]

    def split(self, obs: Tensor) -> dict[str, Tensor]:
        """Return every segment by name, as flat views (..., size)."""
        self._check_width(obs)
        return dict(zip(self.sizes, obs.split(list(self.sizes.values()), dim=-1), strict=True))

    def flat(self, obs: Any) -> Tensor:
        """Convert an observation (flat tensor, image or dict by segment name) to (..., width), uint8 as 0 to 1."""
        if isinstance(obs, Tensor):
            return _flat_leaf(obs, next(iter(self.shapes.values())) if len(self.shapes) == 1 else (self.width,))
        leaves = dict(tree_leaves(obs))
        if leaves.keys() != self.shapes.keys():
            raise ValueError(f"the observation has the parts {list(leaves)}, but its segments are {list(self.shapes)}")
        parts = [_flat_leaf(leaves[name], shape) for name, shape in self.shapes.items()]
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    def resized(self, shapes: Segments) -> ObsLayout:
        """Return a layout with the given shapes; new names come last."""
        return ObsLayout({**self.shapes, **shapes})

    def part(self, names: Sequence[str]) -> ObsLayout:
        """Return the layout of the result of `take(obs, names)`."""
        return ObsLayout({name: self.shapes[name] for name in self.ordered(names)})

    def take(self, obs: Tensor, names: Sequence[str]) -> Tensor:
        """Return the columns of the named segments, in segment order."""
        self._check_width(obs)
        parts = [obs[..., self._slices[name]] for name in self.ordered(names)]
        return torch.cat(parts, dim=-1) if len(parts) > 1 else (parts or [obs[..., :0]])[0]

    def put(self, obs: Tensor, names: Sequence[str], values: Tensor) -> Tensor:
        """Return a copy whose named segments are replaced by consecutive columns of `values`, in segment order."""
        parts, order = self.split(obs), self.ordered(names)
        if values.shape[-1] != self.size(order):
            raise ValueError(f"segments {order} are {self.size(order)} wide, but got {values.shape[-1]} values")
        parts.update(zip(order, values.split([self.sizes[name] for name in order], dim=-1), strict=True))
        return torch.cat(list(parts.values()), dim=-1)

    def _check_width(self, obs: Tensor) -> None:
        if obs.shape[-1] != self.width:
            raise ValueError(f"observation is {obs.shape[-1]} wide, but its segments {self.sizes} sum to {self.width}")


def _flat_leaf(leaf: Tensor, shape: tuple[int, ...]) -> Tensor:
    # Without a batch dimension in front of it, the shape of a flat batch only looks like that of a segment.
    is_batch = leaf.dim() > len(shape) > 1 and leaf.shape[-1] == shape[-1]
    if is_batch and tuple(leaf.shape[-len(shape) :]) == shape:
        leaf = leaf.flatten(-len(shape))
    return leaf.float() / 255.0 if leaf.dtype == torch.uint8 else leaf
