"""Named loss terms of a minibatch and the table of their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Terms(NamedTuple):
    """Loss terms of a minibatch: losses by name, intermediate results, and statistics to report."""

    losses: dict[str, Tensor]
    inter_vars: dict[str, Any]
    stats: dict[str, Tensor]


class LossWeights(dict[str, Any]):
    """Weight of each loss by name: a number, or a device scalar such as `alg.live.entropy_coef`.

    A loss `x` that is not in the table has the weight of the setting `x_coef`. A number that changes is kept on the
    device from then on, so that annealing it needs no new recording.
    """

    def __init__(self, alg: Any) -> None:
        super().__init__(surrogate_loss=1.0)
        self.alg = alg
        self.first: dict[str, float] = {}
        self.tensors: dict[str, Tensor] = {}
        self.zeros: frozenset[str] = frozenset()

    def weighted_sum(self, losses: Mapping[str, Tensor]) -> Tensor:
        """The sum of the losses, each times its weight; a loss without a weight is an error."""
        total = None
        for name, loss in losses.items():
            weight = self[name]
            # A loss of weight zero is only reported: without its gradient the backward pass is shorter.
            if not (name in self.zeros if torch.is_tensor(weight) else weight == 0.0):
                total = loss * weight if total is None else total + loss * weight
        return next(iter(losses.values())) * 0.0 if total is None else total

    def __missing__(self, name: str) -> Tensor:
        """The device scalar of the setting `<name>_coef`."""
        if f"{name}_coef" not in self.alg.setting_fields:
            raise KeyError(f"loss {name!r} has no weight: set loss_weights[{name!r}] or declare a setting {name}_coef")
        self[name] = getattr(self.alg.live, f"{name}_coef")
        return self[name]

    def sync(self) -> tuple[Any, ...]:
        """Copy changed numbers to the device; returns what recorded functions depend on."""
        for name, weight in self.items():
            if not torch.is_tensor(weight) and self.first.setdefault(name, weight) != weight:
                self.tensors.setdefault(name, self.alg.device_scalar(weight)).fill_(weight)
        self.update({name: tensor for name, tensor in self.tensors.items() if not torch.is_tensor(self[name])})
        unused = [getattr(self.alg.live, name) for name, value in self.alg.live_values.items() if value == 0.0]
        self.zeros = frozenset(name for name, weight in self.items() if any(weight is scalar for scalar in unused))
        return (*((name, w.data_ptr() if torch.is_tensor(w) else w) for name, w in self.items()), self.zeros)
