"""Rollout storage that keeps more than one rollout: a ring that grows to its size and then overwrites the oldest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from canter.storage.fields import Field
from canter.storage.rollout_storage import RolloutStorage
from canter.utils.returns import gae, normalize_advantages


class QueueRolloutStorage(RolloutStorage):
    """The last `buffer_dilation_ratio * T` steps. Older ones are off-policy: they suit imitation, not PPO.

    Args:
        buffer_dilation_ratio: Rows kept, as a multiple of T; 1 keeps the last rollout alone.
    """

    def __init__(
        self, num_envs: int, num_transitions_per_env: int, *args: Any, buffer_dilation_ratio: float = 1.0, **kwargs: Any
    ) -> None:
        if buffer_dilation_ratio < 1.0:
            raise ValueError(f"buffer_dilation_ratio must be at least 1, got {buffer_dilation_ratio}")
        self.target = int(buffer_dilation_ratio * num_transitions_per_env)
        self.is_ring = self.target > num_transitions_per_env
        self.older = 0  # rows of the rollouts before this one that are still there
        super().__init__(num_envs, num_transitions_per_env, *args, **kwargs)
        self.is_first = torch.ones((), dtype=torch.bool, device=self.device)

    def declare_fields(self) -> dict[str, Field]:
        """What every rollout keeps, and where one rollout meets the next."""
        fields = super().declare_fields()
        return fields | {"firsts": Field((1,), None, None, torch.bool)} if self.is_ring else fields

    @property
    def capacity(self) -> int:
        """Rows there is room for, so far."""
        return len(self.data["rewards"])

    @property
    def filled(self) -> int:
        """How many rows there are to learn from."""
        return min(self.capacity, self.older + self.step)

    @property
    def newest(self) -> slice:
        """The rows of the last rollout, once the ring is untied."""
        return slice(self.filled - self.step, self.filled)

    def write(self, row: Mapping[str, Tensor]) -> None:
        """Write the row under the cursor and move it on, around the end to the oldest."""
        if not self.is_ring:
            super().write(row)
            return
        super().write({**row, "firsts": self.is_first.expand(self.num_envs, 1)})
        self.cursor.remainder_(self.capacity)
        self.is_first.fill_(False)

    def clear(self) -> None:
        """Start the next rollout behind what is kept, making room for it while the ring is below its size."""
        if not self.is_ring:
            super().clear()
            return
        self.older, self.step = self.filled, 0
        self.is_first.fill_(True)
        if self.older == self.capacity and self.expand_buffer_once():
            self.cursor.fill_(self.older)

    def expand_buffer_once(self) -> int:
        """Add room for up to one more rollout, as zero rows; returns how many."""
        added = min(self.num_transitions_per_env, self.target - self.capacity)
        for name, data in self.data.items() if added > 0 else ():
            self.data[name] = torch.cat([data, data.new_zeros(added, *data.shape[1:])])
        return max(added, 0)

    def untie_buffer_loop(self) -> None:
        """Turn a full ring so that the oldest row is the first, which the cursor then points at."""
        if self.is_ring and self.filled == self.capacity:
            for data in self.data.values():
                data.copy_(self.swap_from_cursor(data))
            self.cursor.zero_()

    def swap_from_cursor(self, x: Tensor) -> Tensor:
        """(capacity, ...) with the rows from the cursor on first, then those before it."""
        order = (torch.arange(self.capacity, device=self.device) + self.cursor).remainder(self.capacity)
        return x[order]

    def compute_returns(self, last_values: Tensor, gamma: float, lam: float, normalize: bool = True) -> None:
        """Returns of the newest rollout, bootstrapped from `last_values`; older ones keep theirs."""
        if not self.is_ring:
            super().compute_returns(last_values, gamma, lam, normalize)
            return
        self.untie_buffer_loop()
        rewards, values, dones = (self.data[name][self.newest] for name in ("rewards", "values", "dones"))
        self.data["returns"][self.newest].copy_(gae(rewards, values, dones, last_values, gamma, lam) + values)
        every = slice(0, self.filled)
        advantages = self.data["returns"][every] - self.data["values"][every]
        valid = self.data["valid"][every] if self.has_invalid_steps else None
        self.data["advantages"][every].copy_(normalize_advantages(advantages, valid) if normalize else advantages)

    def _starts(self) -> Tensor:
        starts = super()._starts()  # a rollout may not go on where the one before it stopped
        return starts | self.data["firsts"][: self.filled].squeeze(-1) if self.is_ring else starts
