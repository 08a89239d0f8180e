"""Replay that is drawn from by priority (Schaul et al. 2016, proportional)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from canter.storage.fields import Field
from canter.storage.replay import ReplayBatch, TransitionReplayBuffer

SMALLEST = 1e-6  # so that every step can be drawn again


class PrioritizedReplayBuffer(TransitionReplayBuffer):
    """Steps drawn in proportion to a power of how wrong their value was; new ones as if they were the worst.

    The sums are made anew for every batch: a pass over the priorities, which on a GPU costs less than a tree.

    Args:
        exponent: The power.
        given: See `TransitionReplayBuffer`.
    """

    def __init__(self, *args: Any, exponent: Tensor | float = 0.6, **given: Any) -> None:
        super().__init__(*args, **given)
        self.exponent = exponent
        self.highest = torch.ones((), device=self.device)
        self.correction = torch.tensor(0.4, device=self.device)
        """Power of the importance weights."""

    def declare_fields(self) -> dict[str, Field]:
        """One priority per row besides."""
        return super().declare_fields() | {"priorities": Field(())}

    def add(self, *args: Any, **given: Any) -> None:
        """Keep one step of every environment, to be drawn soon."""
        super().add(*args, **given)
        # Heads stand on rows that hold no step; the newest lie right before them.
        newest = self._flat((self.head - 1) % self.num_rows)
        held = self.data["holds_step"][newest]
        self.data["priorities"][newest] = torch.where(held, self.highest, self.data["priorities"][newest])

    def append(self, env: int, *args: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Keep several steps of one environment, to be drawn soon."""
        first = int(self.count[env])
        super().append(env, *args)
        slots = torch.arange(first, int(self.count[env]), device=self.device) % self.num_rows * self.num_envs + env
        self.data["priorities"][self.data["order"][slots].long() * self.num_envs + env] = self.highest

    def draw(self, batch_size: int, n_step: int, gamma: Tensor | float, generator: Generator | None) -> ReplayBatch:
        """A batch with its importance weights and its places."""
        powers = torch.where(self.data["holds_step"], self.data["priorities"] ** self.exponent, 0.0).double()
        sums = powers.cumsum(0)
        # One draw from each of B equal parts of the sum: less variance than B draws from the whole.
        parts = torch.arange(batch_size, dtype=torch.float64, device=self.device)
        chance = torch.rand(batch_size, dtype=torch.float64, device=self.device, generator=generator)
        places = torch.searchsorted(sums, (parts + chance) / batch_size * sums[-1], right=True)
        places = places.clamp_(max=len(sums) - 1)
        batch = self.take(places // self.num_envs, places % self.num_envs, n_step, gamma)
        share = powers[places] / sums[-1] * self.size.sum()
        weights = share.clamp_min(1e-12) ** -self.correction.double()
        return batch._replace(weights=(weights / weights.max()).float(), places=places)

    def set_priorities(self, places: Tensor, errors: Tensor) -> None:
        """Draw these steps in proportion to their errors from now on."""
        priorities = errors.abs() + SMALLEST
        self.data["priorities"][places] = priorities
        self.highest.copy_(torch.maximum(self.highest, priorities.max()))

    def state_dict(self) -> dict[str, Any]:
        """The highest priority besides."""
        return super().state_dict() | {"highest": self.highest.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`, in place."""
        super().load_state_dict(state)
        self.highest.copy_(state["highest"])
