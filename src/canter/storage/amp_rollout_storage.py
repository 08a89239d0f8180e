"""Rollout storage with the motion features of the policy and of the expert."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from canter.storage.action_label_rollout import ActionLabelRollout
from canter.storage.fields import Field


class AmpRolloutStorage(ActionLabelRollout):
    """Keeps feature windows of the policy's motion (`ref_obs`) and of the expert's (`ref_motion`), raw.

    Args:
        amp_obs_shape: Shape of one window; it is kept flat, (D,).
    """

    def __init__(self, *args: Any, amp_obs_shape: Sequence[int], **kwargs: Any) -> None:
        self.amp_obs_dim = math.prod(amp_obs_shape)
        super().__init__(*args, **kwargs)

    def declare_fields(self) -> dict[str, Field]:
        """What a labelled rollout keeps, the features, and where the policy's may be learned from."""
        width = (self.amp_obs_dim,)
        return super().declare_fields() | {
            "ref_obs": Field(width, "ref_obs", "ref_obs"),
            "ref_motion": Field(width, "ref_motion", "ref_motion"),
            "ref_valid": Field((1,), "ref_valid", "ref_valid", torch.bool),
        }

    def row(self, transition: Mapping[str, Any]) -> dict[str, Tensor]:
        """What a transition has for every field; features may be learned from unless it says otherwise."""
        every = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        return super().row({"ref_valid": every, **transition})

    def feed_forward_generator_amp(
        self, num_mini_batch: int | None, mini_batch_size: int, generator: torch.Generator | None = None
    ) -> Iterator[tuple[Tensor]]:
        """Batches of the policy's features: so many, or as many whole ones as there are; rows across resets never."""
        rows = self.data["ref_obs"][: self.filled].flatten(0, 1)
        rows = rows[self.data["ref_valid"][: self.filled].reshape(-1)]
        if not len(rows):
            raise ValueError("the storage has no motion features yet")
        order = torch.randperm(len(rows), generator=generator, device=self.device)
        count = max(1, len(rows) // mini_batch_size) if num_mini_batch is None else num_mini_batch
        for number in range(count):
            index = torch.arange(number * mini_batch_size, (number + 1) * mini_batch_size, device=self.device)
            yield (rows[order[index.remainder(len(rows))]],)
