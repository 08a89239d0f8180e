"""What a storage is made of: declared fields, the transition that fills them, the minibatch that leaves them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from canter.storage.trajectories import Trajectories
from canter.utils.returns import masked_mean
from canter.utils.tree import Obs


class Field(NamedTuple):
    """One stored quantity: its shape per step, its name in a minibatch (if it appears there) and in a transition."""

    shape: tuple[int, ...]
    batch: str | None = None
    source: str | None = None
    dtype: torch.dtype = torch.float32


class MiniBatch:
    """One minibatch: flat fields (B, ...), or (T, n, ...) together with `trajectories` and `hidden` if recurrent."""

    def __init__(self, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(self, name, value)

    obs: Obs
    critic_obs: Obs
    actions: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    old_actions_log_prob: Tensor
    old_params: dict[str, Tensor]
    valid: Tensor | None
    hidden: dict[str, Tensor]
    trajectories: Trajectories | None
    tosses: Mapping[str, Tensor] = MappingProxyType({})
    """(..., 1) results of the policy's coins while collecting."""

    def mean(self, x: Tensor) -> Tensor:
        """Mean of a per-step quantity over the steps that count."""
        return masked_mean(x, self.valid)

    @property
    def masks(self) -> Tensor | None:
        """(T, M) mask of real steps in the padded layout, None for flat batches."""
        if self.trajectories is None:
            return None
        row, column, total = self.trajectories
        masks = torch.zeros(len(row), total, dtype=torch.bool, device=row.device)
        masks[row, column] = True
        return masks


class Transition:
    """What one step of N environments leaves for the storage; names are those of the declared fields' sources."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the step."""
        self.observations: Obs | None = None
        self.critic_observations: Obs | None = None
        self.actions: Tensor | None = None
        self.rewards: Tensor | None = None
        self.dones: Tensor | None = None
        self.values: Tensor | None = None
        self.actions_log_prob: Tensor | None = None
        self.params: dict[str, Tensor] = {}
        self.hidden: dict[str, Tensor] = {}
        """State of the memories before the step."""
        self.next_hidden: dict[str, Tensor] = {}
        """State of the memories after it."""
        self.tosses: dict[str, Tensor] = {}
        self.valid: Tensor | None = None

    @property
    def action_mean(self) -> Tensor | None:
        """Mean of the Gaussian the action came from."""
        return self.params.get("mu")

    @property
    def action_sigma(self) -> Tensor | None:
        """Standard deviation of the Gaussian the action came from."""
        return self.params.get("sigma")


def is_absent(shape: Any) -> bool:
    """Whether a documented shape argument means "there is none": None or [None]."""
    return shape is None or (not isinstance(shape, Mapping) and len(shape) > 0 and shape[0] is None)


def observation_fields(name: str, shape: Any, batch: str, source: str) -> dict[str, Field]:
    """One field, or one per leaf of a nested dict of shapes."""
    if isinstance(shape, Mapping):
        fields: dict[str, Field] = {}
        for key, part in shape.items():
            fields |= observation_fields(f"{name}.{key}", part, f"{batch}.{key}", f"{source}.{key}")
        return fields
    if isinstance(shape, Field):
        return {name: Field(shape.shape, batch, source, shape.dtype)}
    return {name: Field(tuple(shape), batch, source)}


def nested(flat: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    """The leaves named `prefix.a.b` as a nested dict."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        if name.startswith(prefix + "."):
            *path, last = name[len(prefix) + 1 :].split(".")
            node = tree
            for key in path:
                node = node.setdefault(key, {})
            node[last] = value
    return tree
