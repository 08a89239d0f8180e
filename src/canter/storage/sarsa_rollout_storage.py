"""Rollout storage with the next state of every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from canter.storage.rollout_storage import Field, MiniBatch, RolloutStorage, observation_fields
from canter.utils.tree import tree_map

# Stored name of an observation -> its name in a minibatch, and in a transition.
SIDES = {"observations": ("obs", "observations"), "privileged_observations": ("critic_obs", "critic_observations")}


class SarsaRolloutStorage(RolloutStorage):
    """Stores T + 1 rows of observations; `observations` and `next_observations` are two views of them.

    The row after the end of an episode is the first of the next episode, so the final state of an episode has a row of
    its own: pass it as `final_observations`, and minibatches contain it as `next_obs`.
    """

    def declare_fields(self) -> dict[str, Field]:
        """The fields of a rollout, and the next and the final state of the actor's and the critic's observation."""
        self.all_rows: dict[str, Tensor] = {}  # T + 1 rows, by name in a minibatch
        fields = super().declare_fields()
        fields["dones"] = fields["dones"]._replace(batch="dones")
        shapes = {"observations": self.obs_shape, "privileged_observations": self.privileged_obs_shape}
        for name, shape in shapes.items():
            batch, source = SIDES[name]
            for when in ("next", "final") if shape is not None else ():
                fields |= observation_fields(f"{when}_{name}", shape, f"{when}_{batch}", f"{when}_{source}")
        return fields

    def _zeros(self, field: Field) -> Tensor:
        """A new tensor; observations and next observations are views of one."""
        key = (field.batch or "").removeprefix("next_")
        if key.partition(".")[0] not in ("obs", "critic_obs"):
            return super()._zeros(field)
        if key not in self.all_rows:
            shape = (self.num_transitions_per_env + 1, self.num_envs, *field.shape)
            self.all_rows[key] = torch.zeros(shape, dtype=field.dtype, device=self.device)
        return self.all_rows[key][:-1] if key == field.batch else self.all_rows[key][1:]

    @property
    def all_observations(self) -> Tensor:
        """(T + 1, N, ...) of a flat observation."""
        return self.all_rows["obs"]

    def write(self, transition: Mapping[str, Any]) -> None:
        """Write a transition; a final state that it lacks is the next one."""
        known = {name: value for name, value in transition.items() if value is not None}
        for _, source in SIDES.values():
            if f"next_{source}" in known:
                known.setdefault(f"final_{source}", known[f"next_{source}"])
        super().write(known)

    def take(self, index: Tensor) -> MiniBatch:
        """Minibatch of the steps at flat (T * N) indices; `next_obs` is the final state where an episode ended."""
        batch: Any = super().take(index)

        def pick(following: Tensor, final: Tensor) -> Tensor:
            return torch.where(batch.dones.view(*index.shape, *[1] * (final.dim() - index.dim())), final, following)

        batch.next_obs = tree_map(pick, batch.next_obs, batch.final_obs)
        if self.privileged_obs_shape is None:
            batch.next_critic_obs = batch.next_obs
        else:
            batch.next_critic_obs = tree_map(pick, batch.next_critic_obs, batch.final_critic_obs)
        return batch
