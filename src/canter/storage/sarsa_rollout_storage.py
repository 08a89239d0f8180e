"""Rollout storage with the state that every step led to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from canter.storage.fields import Field, MiniBatch, nested, observation_fields
from canter.storage.rollout_storage import RolloutStorage
from canter.storage.trajectories import Trajectories
from canter.utils.tree import tree_map

# stored name of the states -> (in a minibatch, in a transition)
SIDES = {"observations": ("obs", "observations"), "privileged_observations": ("critic_obs", "critic_observations")}


class SarsaRolloutStorage(RolloutStorage):
    """Keeps T + 1 rows of observations; `observations` and `next_observations` are two views of them.

    The row after an episode's end is the first of the next episode, so the state an episode ended in has a row of its
    own: give it as `final_observations`, and minibatches have it as `next_obs`.
    """

    def declare_fields(self) -> dict[str, Field]:
        """What every rollout keeps, and for each side of the observation the next and the final state."""
        fields = super().declare_fields()
        fields["dones"] = fields["dones"]._replace(batch="dones")
        for name, shape in self.sides().items():
            batch, source = SIDES[name]
            for when in ("next", "final"):
                fields |= observation_fields(f"{when}_{name}", shape, f"{when}_{batch}", f"{when}_{source}")
        return fields

    def sides(self) -> dict[str, Any]:
        """Stored name -> shape of what the actor, and what the critic, sees."""
        sides = {"observations": self.obs_shape, "privileged_observations": self.privileged_obs_shape}
        return {name: shape for name, shape in sides.items() if shape is not None}

    def _zeros(self, field: Field) -> Tensor:
        """One tensor for the states of this step and of the next, told apart by what they are in a minibatch."""
        batch, _, leaf = (field.batch or "").partition(".")
        for now, _ in SIDES.values():
            if batch in (now, f"next_{now}"):
                key = f"{now}.{leaf}"
                if key not in self.shared():
                    shape = (self.num_transitions_per_env + 1, self.num_envs, *field.shape)
                    self.shared()[key] = torch.zeros(shape, dtype=field.dtype, device=self.device)
                return self.shared()[key][1:] if batch.startswith("next_") else self.shared()[key][:-1]
        return super()._zeros(field)

    def shared(self) -> dict[str, Tensor]:
        """The tensors of T + 1 rows, by their name in a minibatch."""
        return self.__dict__.setdefault("all_rows", {})

    @property
    def all_observations(self) -> Tensor:
        """(T + 1, N, ...) of a flat observation."""
        return self.shared()["obs."]

    def row(self, transition: Mapping[str, Any]) -> dict[str, Tensor]:
        """What a transition has for every field; where no final state is known the next one stands for it."""
        known = {name: value for name, value in transition.items() if value is not None}
        for _, source in SIDES.values():
            if f"next_{source}" in known:
                known.setdefault(f"final_{source}", known[f"next_{source}"])
        return super().row(known)

    def _batch(
        self, fields: Mapping[str, Tensor], hidden: dict[str, Tensor], trajectories: Trajectories | None
    ) -> MiniBatch:
        batch = super()._batch(fields, hidden, trajectories)
        ended = batch.dones.squeeze(-1)  # pyright: ignore[reportAttributeAccessIssue]
        for name in self.sides():
            key = SIDES[name][0]
            both = [f"{when}_{key}" for when in ("next", "final")]
            following, final = (fields[name] if name in fields else nested(fields, name) for name in both)

            def pick(reached: Tensor, last: Tensor) -> Tensor:
                return torch.where(ended.view(*ended.shape, *[1] * (last.dim() - ended.dim())), last, reached)

            setattr(batch, f"next_{key}", tree_map(pick, following, final))
        if self.privileged_obs_shape is None:
            batch.next_critic_obs = batch.next_obs  # pyright: ignore[reportAttributeAccessIssue]
        return batch
