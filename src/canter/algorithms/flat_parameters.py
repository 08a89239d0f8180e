"""Parameters stored in one vector, because each tensor slows an optimizer step down."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from canter.execution.torch_private import address, copy_all


class FlatParameters:
    """Stores parameters and gradients as views of one vector each."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.shapes = [p.shape for p in parameters]
        self.sizes = [p.numel() for p in parameters]
        self.vector = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in parameters]))
        self.vector.grad = torch.zeros_like(self.vector)
        self.parameters, self.grads = list(parameters), self.views(self.vector.grad)
        self.places = self.views(self.vector.data)
        for p, place in zip(parameters, self.places, strict=True):
            p.data = place

    def put_grads(self, grads: Sequence[Tensor | None]) -> None:
        """Write the parameters' gradients; None counts as zero."""
        assert self.vector.grad is not None
        present = [(mine, grad) for mine, grad in zip(self.grads, grads, strict=True) if grad is not None]
        if len(present) < len(self.grads):
            self.vector.grad.zero_()
        if present:
            copy_all([mine for mine, _ in present], [grad for _, grad in present])
        for p, grad in zip(self.parameters, self.grads, strict=True):
            p.grad = grad

    def moved(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Parameters that lie elsewhere since their data was assigned (`p.data = x`), and their place in the vector."""
        pairs = zip(self.parameters, self.places, strict=True)
        return [(p, place) for p, place in pairs if address(p) != address(place)]

    def mask(self, chosen: Sequence[nn.Parameter]) -> Tensor:
        """Mask of the vector that is true for the chosen parameters."""
        known = {id(p) for p in chosen}
        parts = zip(self.parameters, self.sizes, strict=True)
        return torch.cat([torch.full((size,), id(p) in known, device=self.vector.device) for p, size in parts])

    def views(self, vector: Tensor) -> list[Tensor]:
        """Views of a vector in the shapes of the parameters."""
        return [part.view(shape) for part, shape in zip(vector.split(self.sizes), self.shapes, strict=True)]


def split_state(state: Mapping[str, Any], flats: Sequence[FlatParameters]) -> dict[str, Any]:
    """Convert the state dict of an optimizer over vectors into that of one over the parameters."""
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    index = 0
    for group, flat in zip(state["param_groups"], flats, strict=True):
        indices = list(range(index, index + len(flat.sizes)))
        index += len(indices)
        for name, value in state["state"].get(group["params"][0], {}).items():
            parts = flat.views(value) if torch.is_tensor(value) and value.dim() else [value] * len(indices)
            for i, part in zip(indices, parts, strict=True):
                result["state"].setdefault(i, {})[name] = part
        result["param_groups"].append({**group, "params": indices})
    return result


def join_state(state: Mapping[str, Any], flats: Sequence[FlatParameters]) -> dict[str, Any]:
    """Convert the state dict of an optimizer over parameters into that of one over the vectors."""
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    for number, (group, flat) in enumerate(zip(state["param_groups"], flats, strict=True)):
        shares = [state["state"][index] for index in group["params"] if index in state["state"]]
        if len(shares) == len(flat.sizes):
            joined = result["state"][number] = dict(shares[0])
            for name, first in shares[0].items():
                if torch.is_tensor(first) and first.dim():  # or else a step count, the same for every parameter
                    joined[name] = torch.cat([share[name].reshape(-1) for share in shares])
        result["param_groups"].append({**group, "params": [number]})
    return result
