"""Rollout storages with earlier rollouts in a ring, a teacher's labels, motion features, or next states."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from canter.storage.rollout_storage import Field, MiniBatch, RolloutStorage, Scalar, normalize_advantages
from canter.utils.tree import tree_where


class QueueRolloutStorage(RolloutStorage):
    """The last `buffer_dilation_ratio * T` steps: a ring that grows to that size and then overwrites the oldest rows.

    With a ratio of 1 only the last rollout is kept. Earlier ones are off-policy: they suit imitation, not PPO.
    Trajectories of recurrent minibatches are cut after `max_length` steps; each begins with the memory it had then.
    """

    def __init__(
        self,
        num_envs: int,
        num_transitions_per_env: int,
        *args: Any,
        buffer_dilation_ratio: float = 1.0,
        max_length: int | None = None,
        **kwargs: Any,
    ) -> None:
        if buffer_dilation_ratio < 1.0:
            raise ValueError(f"buffer_dilation_ratio must be at least 1, got {buffer_dilation_ratio}")
        self.target = int(buffer_dilation_ratio * num_transitions_per_env)
        self.max_length = max_length
        self.is_ring = self.target > num_transitions_per_env
        self.first = 0  # row of the rollout's first step
        super().__init__(num_envs, num_transitions_per_env, *args, **kwargs)

    def declare_fields(self) -> dict[str, Field]:
        """The fields of a rollout; in a ring also a mark on the first step of each rollout."""
        fields = super().declare_fields()
        return fields | {"firsts": Field((1,), None, "firsts", torch.bool)} if self.is_ring else fields

    @property
    def capacity(self) -> int:
        """Number of allocated rows."""
        return len(self.data["rewards"])

    @property
    def next_row(self) -> int:
        """Row of the next step."""
        return (self.first + self.step) % self.capacity

    def clear(self) -> None:
        """Start the next rollout after the rows that are kept; a ring below its target size grows first."""
        if not self.is_ring:
            super().clear()
            return
        self.older, self.first = self.filled, self.next_row
        if self.older == self.capacity and self.expand_buffer_once():
            self.first = self.older
        self.step = self.num_finished = 0
        steps = torch.arange(self.num_transitions_per_env, device=self.device)
        self.rows.copy_(((self.first + steps) % self.capacity).unsqueeze(1))

    def put(self, row: int | Tensor, values: Mapping[str, Any]) -> None:
        """Copy one step to a row; in a ring with the mark of a rollout's first step."""
        super().put(row, {**values, "firsts": self.rows[0] == row} if self.is_ring else values)

    def expand_buffer_once(self) -> int:
        """Append up to T zero rows, within the target size; returns their number."""
        added = min(self.num_transitions_per_env, self.target - self.capacity)
        for name, data in self.data.items() if added > 0 else ():
            self.data[name] = torch.cat([data, data.new_zeros(added, *data.shape[1:])])
        return max(added, 0)

    def untie_buffer_loop(self) -> None:
        """Rotate a full ring so that its oldest row is row 0."""
        if self.is_ring and self.filled == self.capacity and self.next_row:
            for data in self.data.values():
                data.copy_(self.swap_from_cursor(data))
            self.first = -self.step % self.capacity
        self.older = self.filled - self.step

    def swap_from_cursor(self, x: Tensor) -> Tensor:
        """(capacity, ...) with the rows from the next one on first, then those before it."""
        return x.roll(-self.next_row, 0)

    def compute_returns(self, last_values: Tensor, gamma: Scalar, lam: Scalar, normalize: bool = True) -> None:
        """Returns of the newest rollout; earlier ones keep theirs. Advantages are normalised over all rows."""
        self.untie_buffer_loop()
        super().compute_returns(last_values, gamma, lam, normalize and not self.is_ring)
        if self.is_ring:
            data = {name: rows[: self.filled] for name, rows in self.data.items()}
            advantages = data["returns"] - data["values"]
            data["advantages"].copy_(normalize_advantages(advantages, data.get("valid")) if normalize else advantages)

    def step_minibatches(self, num_mini_batches: int, generator: torch.Generator | None = None) -> Sequence[Tensor]:
        """Random split of all steps, oldest rows first, into minibatches: flat (T * N) indices of each."""
        self.untie_buffer_loop()
        return super().step_minibatches(num_mini_batches, generator)

    def env_minibatches(self, *args: Any, **kwargs: Any) -> list[tuple[Tensor, int]]:
        """Environments and number of trajectories of each minibatch of each epoch."""
        self.untie_buffer_loop()
        return super().env_minibatches(*args, **kwargs)

    def _starts(self) -> Tensor:
        starts = super()._starts()
        if self.max_length is not None:
            starts[:: self.max_length] = True
        # A rollout need not begin where the one before it stopped.
        return starts | self.data["firsts"][: self.filled].squeeze(-1) if self.is_ring else starts


class ActionLabelRollout(QueueRolloutStorage):
    """Rollouts with a teacher's action label for every step, and whether the teacher acted in it."""

    def declare_fields(self) -> dict[str, Field]:
        """The fields of a rollout and the labels."""
        return super().declare_fields() | {
            "action_labels": Field(self.actions_shape, "action_labels", "action_labels", self.action_dtype),
            "teacher_acted": Field((1,), "teacher_acted", "teacher_acted", torch.bool, default=False),
        }


class AmpRolloutStorage(ActionLabelRollout):
    """Labelled rollouts with feature windows of the policy's motion (`ref_obs`) and of the expert's (`ref_motion`).

    Windows, of shape `amp_obs_shape`, are stored flat, (D,), and before normalisation.
    """

    def __init__(self, *args: Any, amp_obs_shape: Sequence[int], **kwargs: Any) -> None:
        self.amp_obs_dim = math.prod(amp_obs_shape)
        super().__init__(*args, **kwargs)

    def declare_fields(self) -> dict[str, Field]:
        """The fields of a labelled rollout, the features, and masks of the features to learn from."""
        windows = {name: Field((self.amp_obs_dim,), name, name) for name in ("ref_obs", "ref_motion")}
        masks = {name: Field((1,), name, name, torch.bool, default=True) for name in ("ref_valid", "ref_motion_valid")}
        return super().declare_fields() | windows | masks

    def feed_forward_generator_amp(
        self, num_mini_batch: int | None, mini_batch_size: int, generator: torch.Generator | None = None
    ) -> Iterator[tuple[Tensor]]:
        """Batches of the policy's valid features; as many whole ones as there are if `num_mini_batch` is None."""
        rows = self.data["ref_obs"][: self.filled][self.data["ref_valid"][: self.filled].squeeze(-1)]
        if not len(rows):
            raise ValueError("the storage has no motion features yet")
        order = torch.randperm(len(rows), generator=generator, device=self.device)
        count = max(1, len(rows) // mini_batch_size) if num_mini_batch is None else num_mini_batch
        for number in range(count):
            index = torch.arange(number * mini_batch_size, (number + 1) * mini_batch_size, device=self.device)
            yield (rows[order[index.remainder(len(rows))]],)


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
        observed = {n: f for n, f in fields.items() if (f.batch or "").partition(".")[0] in ("obs", "critic_obs")}
        for when in ("next_", "final_"):
            for name, field in observed.items():
                fields[when + name] = field._replace(batch=f"{when}{field.batch}", source=f"{when}{field.source}")
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

    @property
    def next_critic_observations(self) -> Any:
        """(T, N, ...) the critic's next observations; the actor's if the critic uses those."""
        return self.next_observations if self.privileged_obs_shape is None else self.next_privileged_observations

    def put(self, row: int | Tensor, values: Mapping[str, Any]) -> None:
        """Copy one step to a row; a final state that it lacks is the next one."""
        known = {name: value for name, value in values.items() if value is not None}
        finals = {f"final_{name[5:]}": value for name, value in known.items() if name.startswith("next_")}
        super().put(row, finals | known)

    def take(self, index: Tensor) -> MiniBatch:
        """Minibatch of the steps at flat (T * N) indices; `next_obs` is the final state where an episode ended."""
        batch: Any = super().take(index)
        done = batch.dones.squeeze(-1)
        batch.next_obs = tree_where(done, batch.final_obs, batch.next_obs)
        if self.privileged_obs_shape is None:
            batch.next_critic_obs = batch.next_obs
        else:
            batch.next_critic_obs = tree_where(done, batch.final_critic_obs, batch.next_critic_obs)
        return batch
