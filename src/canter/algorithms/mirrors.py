"""Mirror images by declaration: where the image of each number of a vector is found, and with which sign.

`mirrored[i] = signs[i] * vector[permutation[i]]`. Observations are declared component by component.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from canter.modules.distributions import Beta, Categorical, Gaussian, MultiCategorical, Params, SquashedGaussian
from canter.utils.config import check_settings
from canter.utils.obs_layout import ObsLayout


class Mirror:
    """A signed permutation of a vector's entries that undoes itself."""

    def __init__(self, permutation: Sequence[int], signs: Sequence[float], what: str) -> None:
        n = len(permutation)
        if len(signs) != n or sorted(permutation) != list(range(n)):
            got = f"{permutation}, {signs}"
            raise ValueError(f"the mirror of {what} is no permutation of 0..{n - 1} with {n} signs: {got}")
        for i, j in enumerate(permutation):
            if signs[i] not in (1, -1):
                raise ValueError(f"the mirror of {what} has the sign {signs[i]!r} at {i}; signs are 1 and -1")
            if permutation[j] != i or signs[i] != signs[j]:
                images = f"{j} with sign {signs[i]}, whose image is entry {permutation[j]} with sign {signs[j]}"
                problem = f"applied twice, does not give entry {i} back: its image is entry {images}"
                raise ValueError(f"the mirror of {what}, {problem}")
        self.permutation, self.signs = [int(i) for i in permutation], [float(s) for s in signs]
        self.index, self.sign = torch.tensor(self.permutation), torch.tensor(self.signs)

    def to(self, device: torch.device | str) -> Mirror:
        """The same on a device."""
        self.index, self.sign = self.index.to(device), self.sign.to(device)
        return self

    def __call__(self, x: Tensor) -> Tensor:
        """(..., n) -> (..., n)."""
        if not isinstance(x, Tensor):
            raise TypeError(f"symmetry needs flat observations, got a {type(x).__name__}; flatten them first")
        return x.index_select(-1, self.index) * self.sign


def read_mirror(given: Any, size: int, what: str) -> tuple[list[int], list[float]]:
    """Permutation and signs of one vector: "same", a list of signs, or {permutation, signs}, either left out."""
    if given == "same":
        given = {}
    elif isinstance(given, Sequence) and not isinstance(given, str):
        given = {"signs": given}
    if not isinstance(given, Mapping):
        raise ValueError(f"the mirror of {what} is {given!r}; give 'same', a list of signs, or permutation and signs")
    parts = check_settings(f"the mirror of {what}", given, ("permutation", "signs"))
    permutation, signs = list(parts.get("permutation") or range(size)), list(parts.get("signs") or [1] * size)
    for name, values in (("permutation", permutation), ("signs", signs)):
        if len(values) != size:
            raise ValueError(f"the {name} of {what} has {len(values)} entries for {size} values: {values}")
    return permutation, [float(sign) for sign in signs]


def observation_mirror(layout: ObsLayout, given: Any, what: str) -> Mirror:
    """The mirror of a flat observation from those of its components; each has one, so that none is forgotten.

    `{"pair": other}` says that the component's image is the component of that name, and the other way round.
    """
    if not isinstance(given, Mapping):
        components = list(layout.shapes)
        raise ValueError(f"{what} mirrors are given by component, got {given!r}; the components are {components}")
    unknown, missing = given.keys() - layout.shapes.keys(), layout.shapes.keys() - given.keys()
    if unknown or missing:
        problem = f"unknown {sorted(unknown)}" if unknown else f"missing {sorted(missing)}"
        raise ValueError(f"{what} has a mirror for each of {list(layout.shapes)}, 'same' where it has none: {problem}")
    entries = {name: dict(part) if isinstance(part, Mapping) else part for name, part in given.items()}
    sources = {name: part.pop("pair", name) if isinstance(part, dict) else name for name, part in entries.items()}
    permutation: list[int] = []
    signs: list[float] = []
    for name, size in layout.sizes.items():
        source = sources[name]
        if layout.sizes.get(source) != size:
            raise ValueError(f"{what} {name!r} of {size} values is paired with {source!r}, which is not of that size")
        if sources[source] != name:
            raise ValueError(f"{what} {name!r} is paired with {source!r}, but that is not paired with {name!r}")
        part, part_signs = read_mirror(entries[name], size, f"{what} {name!r}")
        permutation += [layout.slice(source).start + i for i in part]
        signs += part_signs
    return Mirror(permutation, signs, what)


class ActionMirror:
    """The mirror of actions and of the parameters of their distribution.

    Actions of a Beta distribution are shares in (0, 1) of the range; the other sign is the other end of the range.
    """

    def __init__(self, distribution: Any, given: Any, device: torch.device | str) -> None:
        if isinstance(distribution, MultiCategorical) or not isinstance(distribution, Gaussian | Beta | Categorical):
            raise ValueError(f"symmetry is for continuous and Discrete actions, not for {type(distribution).__name__}")
        size = next(iter(distribution.param_shapes.values()))[0]
        permutation, signs = read_mirror(given, size, "actions")
        self.mirror = Mirror(permutation, signs, "actions").to(device)
        if isinstance(distribution, Categorical) and set(signs) != {1}:
            raise ValueError(f"a choice has no sign; give actions a permutation alone, got signs {signs}")
        # A share of the range has an image only where the bounds are each other's mirror image.
        is_bounded = isinstance(distribution, SquashedGaussian | Beta)
        bounds = list(zip(distribution.low, distribution.high, strict=True)) if is_bounded else []
        for i, (low, high) in enumerate(bounds):
            image = bounds[permutation[i]] if signs[i] > 0 else tuple(-end for end in reversed(bounds[permutation[i]]))
            if (low, high) != image:
                theirs = f"[{image[0]}, {image[1]}]; make them equal"
                raise ValueError(f"the bounds of action {i} are [{low}, {high}], its mirror image's are {theirs}")
        self.flipped = self.mirror.sign < 0
        self.has_shares = isinstance(distribution, Beta)

    def actions(self, actions: Tensor) -> Tensor:
        """Mirror images of actions as the distribution sees them."""
        if not actions.is_floating_point():
            return self.mirror.index[actions]
        if not self.has_shares:
            return self.mirror(actions)
        moved = actions.index_select(-1, self.mirror.index)
        return torch.where(self.flipped, 1.0 - moved, moved)

    def params(self, params: Params) -> Params:
        """Parameters of the distribution of the mirrored action."""
        moved = {name: value.index_select(-1, self.mirror.index) for name, value in params.items()}
        if "mu" in moved:
            moved["mu"] = moved["mu"] * self.mirror.sign
        if self.has_shares:  # concentrations are exchanged where the sign changes
            alpha, beta = moved["alpha"], moved["beta"]
            moved = {"alpha": torch.where(self.flipped, beta, alpha), "beta": torch.where(self.flipped, alpha, beta)}
        return moved

    def difference(self, distribution: Any, target: Params, params: Params) -> Tensor:
        """(...,) how far parameters are from the mirrored ones: of means squared, of other distributions the KL."""
        if "mu" in params:
            return (params["mu"] - target["mu"]).square().sum(-1)
        return distribution.kl(target, params)
