"""Parameters laid end to end, so that an optimizer on a CPU handles one tensor instead of many small ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class FlatParameters:
    """One vector that the given parameters, and their gradients, become views of."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.shapes = [p.shape for p in parameters]
        self.sizes = [p.numel() for p in parameters]
        self.vector = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in parameters]))
        self.vector.grad = torch.zeros_like(self.vector)
        self.parameters, self.grads = list(parameters), self.views(self.vector.grad)
        for p, value in zip(parameters, self.views(self.vector.data), strict=True):
            p.data = value

    def put_grads(self, grads: Sequence[Tensor | None]) -> None:
        """Write the parameters' gradients, zero for None."""
        assert self.vector.grad is not None
        present = [(mine, grad) for mine, grad in zip(self.grads, grads, strict=True) if grad is not None]
        if len(present) < len(self.grads):
            self.vector.grad.zero_()
        if present:
            mine, given = zip(*present, strict=True)
            torch._foreach_copy_(list(mine), list(given))  # pyright: ignore[reportPrivateImportUsage]
        for p, grad in zip(self.parameters, self.grads, strict=True):
            p.grad = grad

    def mask(self, chosen: Sequence[nn.Parameter]) -> Tensor:
        """Where in the vector some of the parameters lie."""
        known = {id(p) for p in chosen}
        parts = zip(self.parameters, self.sizes, strict=True)
        return torch.cat([torch.full((size,), id(p) in known, device=self.vector.device) for p, size in parts])

    def views(self, vector: Tensor) -> list[Tensor]:
        """The vector cut into the parameters' shapes."""
        return [part.view(shape) for part, shape in zip(vector.split(self.sizes), self.shapes, strict=True)]

    def split_moments(self, moments: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One parameter's share each of the optimizer's state of the vector."""
        shares: list[dict[str, Any]] = [{} for _ in self.sizes]
        for name, value in moments.items():
            parts = self.views(value) if torch.is_tensor(value) and value.dim() else [value] * len(shares)
            for share, part in zip(shares, parts, strict=True):
                share[name] = part
        return shares

    def join_moments(self, shares: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The inverse of `split_moments`."""
        joined: dict[str, Any] = {}
        for name, first in shares[0].items():
            if torch.is_tensor(first) and first.dim():
                joined[name] = torch.cat([share[name].reshape(-1) for share in shares])
            else:  # a step count, the same for every parameter
                joined[name] = first
        return joined


def split_state(state: Mapping[str, Any], flats: Sequence[FlatParameters]) -> dict[str, Any]:
    """The state of an optimizer over vectors as that of one over the parameters themselves."""
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    index = 0
    for group, flat in zip(state["param_groups"], flats, strict=True):
        indices = list(range(index, index + len(flat.sizes)))
        index += len(indices)
        moments = state["state"].get(group["params"][0])
        if moments is not None:
            result["state"] |= dict(zip(indices, flat.split_moments(moments), strict=True))
        result["param_groups"].append({**group, "params": indices})
    return result


def join_state(state: Mapping[str, Any], flats: Sequence[FlatParameters]) -> dict[str, Any]:
    """The inverse of `split_state`."""
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    for number, (group, flat) in enumerate(zip(state["param_groups"], flats, strict=True)):
        shares = [state["state"][index] for index in group["params"] if index in state["state"]]
        if len(shares) == len(flat.sizes):
            result["state"][number] = flat.join_moments(shares)
        result["param_groups"].append({**group, "params": [number]})
    return result
