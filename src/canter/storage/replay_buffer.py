"""Replay buffer of state pairs, such as past motion features for a discriminator."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


class ReplayBuffer:
    """A ring of the last `buffer_size` pairs of states; `insert` and `sample` are tensor code that can be captured."""

    def __init__(self, obs_dim: int, buffer_size: int, device: torch.device | str = "cpu") -> None:
        if obs_dim < 1 or buffer_size < 1:
            raise ValueError(f"obs_dim and buffer_size must be at least 1, got {obs_dim} and {buffer_size}")
        self.buffer_size, self.device = buffer_size, torch.device(device)
        self.states = torch.zeros(buffer_size, obs_dim, device=self.device)
        self.next_states = torch.zeros_like(self.states)
        self._offsets = torch.arange(buffer_size, device=self.device)
        self._step = self._offsets.new_zeros(())  # on the device, so that a replayed graph advances it
        self._num_samples = torch.zeros_like(self._step)

    @property
    def step(self) -> int:
        """Row of the next pair; a host read."""
        return int(self._step)

    @property
    def num_samples(self) -> int:
        """Number of stored pairs; a host read."""
        return int(self._num_samples)

    def insert(self, states: Tensor, next_states: Tensor) -> None:
        """Write (B, D) pairs over the oldest; of a batch larger than the buffer, the last ones."""
        if states.shape != next_states.shape or states.shape[1:] != self.states.shape[1:]:
            shapes, width = f"{tuple(states.shape)} and {tuple(next_states.shape)}", self.states.shape[1]
            raise ValueError(f"pairs of shape {shapes} do not fit a buffer of width {width}")
        states, next_states = states[-self.buffer_size :], next_states[-self.buffer_size :]
        rows = (self._step + self._offsets[: len(states)]).remainder(self.buffer_size)
        self.states.index_copy_(0, rows, states.to(self.states))
        self.next_states.index_copy_(0, rows, next_states.to(self.states))
        self._step.add_(len(states)).remainder_(self.buffer_size)
        self._num_samples.add_(len(states)).clamp_(max=self.buffer_size)

    def sample(self, count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """(count, D) pairs, uniform with replacement over the stored ones; zeros if there are none."""
        number = torch.rand(count, generator=generator, device=self.device, dtype=torch.float64)
        rows = (number * self._num_samples).long()
        return self.states[rows], self.next_states[rows]

    def state_dict(self) -> dict[str, Any]:
        """The stored pairs, and the row of the next one."""
        kept = slice(0, self.num_samples)
        pairs = {"states": self.states[kept].clone(), "next_states": self.next_states[kept].clone()}
        return {**pairs, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, exactly if the buffers have one size, else with the newest pairs."""
        step, count = int(state["step"]), len(state["states"])
        oldest_first = (state[name].to(self.device).roll(-step, 0) for name in ("states", "next_states"))
        self._num_samples.zero_()
        self._step.fill_(step if count == self.buffer_size else 0)
        self.insert(*oldest_first)

    def feed_forward_generator(
        self, num_mini_batch: int, mini_batch_size: int, generator: torch.Generator | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of pairs, uniform with replacement."""
        if self.num_samples == 0:
            raise ValueError("the replay buffer is empty; insert() something first")
        for _ in range(num_mini_batch):
            yield self.sample(mini_batch_size, generator)
