"""Drawing from replay: single steps, or windows of several, uniformly."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from canter.storage.fields import nested
from canter.storage.replay_rings import OBSERVED, ReplayRings
from canter.utils.tree import Obs


class ReplayBatch(NamedTuple):
    """B steps, or windows of up to n steps, ready to learn from."""

    obs: Obs
    critic_obs: Obs
    """The same object as `obs` where the critic has no observation of its own."""
    actions: Tensor
    rewards: Tensor
    """(B,) discounted sum over the window."""
    next_obs: Obs
    next_critic_obs: Obs
    dones: Tensor
    """(B,) 1 where nothing follows the window."""
    discounts: Tensor
    """(B,) of the value after the window: gamma to the number of steps in it."""
    weights: Tensor | None = None
    """(B,) importance weights of prioritised samples."""
    places: Tensor | None = None
    """(B,) where prioritised samples came from."""


class TransitionReplayBuffer(ReplayRings):
    """Replay of the last steps; see `ReplayRings` for the arguments and the layout."""

    def sample(
        self, batch_size: int, *, n_step: int = 1, gamma: Tensor | float = 0.99, generator: Generator | None = None
    ) -> dict[str, Any]:
        """A batch by its documented names, drawn uniformly with replacement."""
        stored = len(self)
        if batch_size > stored:
            raise ValueError(f"a batch of {batch_size} was asked for, but {stored} steps are stored")
        batch = self.draw(batch_size, n_step, gamma, generator)
        named = {"observations": batch.obs, "actions": batch.actions, "rewards": batch.rewards}
        named |= {"next_observations": batch.next_obs, "dones": batch.dones, "discounts": batch.discounts}
        if self.critic_obs_shape is not None:
            named |= {"critic_observations": batch.critic_obs, "next_critic_observations": batch.next_critic_obs}
        return named

    def draw(self, batch_size: int, n_step: int, gamma: Tensor | float, generator: Generator | None) -> ReplayBatch:
        """A batch without any question to the device, which may be captured."""
        return self.take(*self._choose(batch_size, generator), n_step, gamma)

    def _choose(self, batch_size: int, generator: Generator | None) -> tuple[Tensor, Tensor]:
        """Rows and environments of steps, uniform over all that are stored."""
        # Doubles, since a float32 has too few values to reach every step of a large buffer.
        number = torch.rand(batch_size, dtype=torch.float64, device=self.device, generator=generator)
        if self.num_envs == 1:
            envs: Any = 0
            age = (number * self.size).long()
            newest = self.count
        else:
            last = self.size.cumsum(0)
            place = (number * last[-1]).long()
            envs = torch.searchsorted(last, place, right=True).clamp_(max=self.num_envs - 1)
            age = last[envs] - 1 - place
            newest = self.count[envs]
        slot = (newest - 1 - age) % self.num_rows * self.num_envs + envs
        return self.data["order"][slot].long(), envs

    def take(self, rows: Tensor, envs: Any, n_step: int, gamma: Tensor | float) -> ReplayBatch:
        """The steps at (rows, envs), each continued to a window of up to `n_step` steps.

        A window ends with its episode, or with the newest step there is.
        """
        data, num_rows, num_envs = self.data, self.num_rows, self.num_envs
        first = rows * num_envs + envs
        if n_step == 1:
            rewards, last = data["rewards"][first], rows
            discounts = torch.ones_like(rewards) * gamma
        else:
            offsets = torch.arange(n_step, device=self.device)
            window = (rows.unsqueeze(1) + offsets) % num_rows  # (B, n)
            at = window * num_envs + (envs if isinstance(envs, int) else envs.unsqueeze(1))
            head = self.head[envs] if num_envs > 1 else self.head
            ends = data["ends"][at].long()
            is_past = ends.cumsum(1) > ends
            is_past |= offsets >= ((head - rows) % num_rows).unsqueeze(1)
            steps = n_step - is_past.sum(1)
            rewards = torch.where(is_past, 0.0, data["rewards"][at] * gamma**offsets).sum(1)
            discounts = gamma**steps
            last = (rows + steps - 1) % num_rows
        after = (last + 1) % num_rows * num_envs + envs
        dones = data["dones"][last * num_envs + envs].float()
        obs, critic_obs = self._observed(first)
        next_obs, next_critic_obs = self._observed(after)
        return ReplayBatch(
            obs, critic_obs, data["actions"][first], rewards, next_obs, next_critic_obs, dones, discounts
        )

    def _observed(self, at: Tensor) -> tuple[Any, Any]:
        found = {name: self.data[name][at] for name in self.data if name.startswith(OBSERVED)}
        obs, critic_obs = (found[name] if name in found else nested(found, name) for name in OBSERVED)
        return obs, obs if self.critic_obs_shape is None else critic_obs
