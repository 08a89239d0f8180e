"""Rollout storage: tensors of shape (T, N, ...) by name, declared once and batched by loops over the names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from canter.storage.fields import Field, MiniBatch, Transition, is_absent, nested, observation_fields
from canter.storage.trajectories import Trajectories, episode_starts, start_positions, trajectory_index
from canter.utils.returns import gae, masked_mean, normalize_advantages
from canter.utils.tree import tree_leaves


class RolloutStorage:
    """The last rollout, by name.

    Args:
        num_envs: N.
        num_transitions_per_env: T.
        obs_shape: Shape of one observation, or a nested dict of shapes or `Field`s.
        privileged_obs_shape: The same for the critic; None or [None] where it sees the actor's observation.
        actions_shape: Shape of one action.
        device: Where the tensors live.
        param_shapes: Parameters of the action distribution to keep; a Gaussian's by default.
        action_dtype: Kind of the actions.
        hidden_shapes: Shape (S, L, H) of one environment's state by memory name.
        coins: Names of the policy's coins, whose results are kept.
        has_invalid_steps: Whether some steps must not count.
    """

    Transition = Transition

    def __init__(
        self,
        num_envs: int,
        num_transitions_per_env: int,
        obs_shape: Any,
        privileged_obs_shape: Any,
        actions_shape: Any,
        device: torch.device | str = "cpu",
        *,
        param_shapes: Mapping[str, tuple[int, ...]] | None = None,
        action_dtype: torch.dtype = torch.float32,
        hidden_shapes: Mapping[str, tuple[int, ...]] | None = None,
        coins: Iterable[str] = (),
        has_invalid_steps: bool = False,
    ) -> None:
        self.num_envs, self.num_transitions_per_env = num_envs, num_transitions_per_env
        self.device = torch.device(device)
        self.obs_shape, self.actions_shape, self.action_dtype = obs_shape, tuple(actions_shape), action_dtype
        self.privileged_obs_shape = None if is_absent(privileged_obs_shape) else privileged_obs_shape
        self.param_shapes = dict(param_shapes or {"mu": self.actions_shape, "sigma": self.actions_shape})
        self.hidden_shapes = dict(hidden_shapes or {})
        self.coins = tuple(coins)
        self.has_invalid_steps = has_invalid_steps
        self.fields = self.declare_fields()
        self.data = {name: self._zeros(field) for name, field in self.fields.items()}
        self.step = 0
        self.cursor = torch.zeros(
            1, dtype=torch.long, device=self.device
        )  # the same on the device, for captured writes

    def declare_fields(self) -> dict[str, Field]:
        """Name, shape and kind of everything that is kept for a step. Extended by subclasses."""
        fields = observation_fields("observations", self.obs_shape, "obs", "observations")
        if self.privileged_obs_shape is not None:
            fields |= observation_fields(
                "privileged_observations", self.privileged_obs_shape, "critic_obs", "critic_observations"
            )
        fields |= {
            "actions": Field(self.actions_shape, "actions", "actions", self.action_dtype),
            "rewards": Field((1,), None, "rewards"),
            "dones": Field((1,), None, "dones", torch.bool),
            "values": Field((1,), "values", "values"),
            "returns": Field((1,), "returns"),
            "advantages": Field((1,), "advantages"),
            "actions_log_prob": Field((1,), "old_actions_log_prob", "actions_log_prob"),
        }
        fields |= {
            name: Field(shape, f"old_params.{name}", f"params.{name}") for name, shape in self.param_shapes.items()
        }
        fields |= {f"hidden.{name}": Field(shape, None, f"hidden.{name}") for name, shape in self.hidden_shapes.items()}
        fields |= {f"tosses.{name}": Field((1,), f"tosses.{name}", f"tosses.{name}", torch.bool) for name in self.coins}
        if self.has_invalid_steps:
            fields["valid"] = Field((1,), "valid", "valid", torch.bool)
        return fields

    def add(self, row: Mapping[str, Tensor]) -> None:
        """Write one (N, ...) row of every named field."""
        self.check_space()
        self.write(row)
        self.step += 1

    def check_space(self) -> None:
        """Raise if every row is written."""
        if self.step >= self.num_transitions_per_env:
            raise AssertionError(
                f"Rollout buffer overflow: it holds {self.num_transitions_per_env} steps; call clear() first"
            )

    @property
    def filled(self) -> int:
        """How many rows there are to learn from."""
        return self.step

    @property
    def newest(self) -> slice:
        """The rows of the last rollout."""
        return slice(0, self.step)

    def write(self, row: Mapping[str, Tensor]) -> None:
        """Write the row under the cursor and move it on: tensor code alone, the caller counts `step`."""
        for name, value in row.items():
            if name not in self.data:
                raise KeyError(f"the storage has no field {name!r}; it has {', '.join(self.data)}")
            target = self.data[name]
            # (N,) goes into (N, 1); a parameter that all environments share, (A,), into (N, A)
            fits = value.numel() == target[0].numel()
            shaped = value.reshape(1, *target.shape[1:]) if fits else value.expand(1, *target.shape[1:])
            target.index_copy_(0, self.cursor, shaped.to(target.dtype))
        self.cursor += 1

    def add_transitions(self, transition: Transition) -> None:
        """Write one transition."""
        self.add(self.row(vars(transition)))

    def row(self, transition: Mapping[str, Any]) -> dict[str, Tensor]:
        """What a transition has for every field that comes from one."""
        given = dict(tree_leaves(transition))
        row = {name: given.get(f.source) for name, f in self.fields.items() if f.source}
        missing = [name for name, value in row.items() if value is None]
        if missing:
            raise ValueError(f"the transition lacks {', '.join(missing)}")
        return row  # pyright: ignore[reportReturnType]

    def clear(self) -> None:
        """Start the next rollout."""
        self.step = 0
        self.cursor.zero_()

    def __getattr__(self, name: str) -> Any:
        data = self.__dict__.get("data", {})
        if name in data:
            return data[name]
        tree = nested(data, name)
        if not tree:
            raise AttributeError(f"{type(self).__name__} has no field {name!r}")
        return tree

    @property
    def privileged_observations(self) -> Any:
        """(T, N, ...) of the critic, None where it sees the actor's observation."""
        if self.privileged_obs_shape is None:
            return None
        name = "privileged_observations"
        return self.data[name] if name in self.data else nested(self.data, name)

    def compute_returns(self, last_values: Tensor, gamma: float, lam: float, normalize: bool = True) -> None:
        """Fill `returns` and `advantages` of the steps written so far; the latter with mean 0, std 1 if `normalize`."""
        used = {name: self.data[name][: self.step] for name in ("rewards", "values", "dones", "returns", "advantages")}
        advantages = gae(used["rewards"], used["values"], used["dones"], last_values, gamma, lam)
        used["returns"].copy_(advantages + used["values"])
        valid = self.data["valid"][: self.step] if self.has_invalid_steps else None
        used["advantages"].copy_(normalize_advantages(advantages, valid) if normalize else advantages)

    def get_statistics(self) -> tuple[Tensor, Tensor]:
        """Mean length of the trajectories in the rollout, and mean reward."""
        starts, rewards = episode_starts(self.data["dones"][: self.step].squeeze(-1)), self.data["rewards"][: self.step]
        valid = self.data["valid"][: self.step].squeeze(-1) if self.has_invalid_steps else torch.ones_like(starts)
        return valid.sum() / (starts & valid).sum(), masked_mean(rewards, valid)

    def mini_batch_generator(
        self, num_mini_batches: int, num_epochs: int = 8, generator: torch.Generator | None = None
    ) -> Iterator[MiniBatch]:
        """Flat minibatches; every epoch is a new permutation of all steps."""
        for _ in range(num_epochs):
            for index in self.deal_steps(num_mini_batches, generator):
                yield self.take(index)

    def deal_steps(self, num_mini_batches: int, generator: torch.Generator | None = None) -> Sequence[Tensor]:
        """All steps in a new order, split into minibatches: flat (T * N) indices."""
        total = self.filled * self.num_envs
        if not 1 <= num_mini_batches <= total:
            raise ValueError(f"num_mini_batches={num_mini_batches} does not fit {total} steps")
        return torch.randperm(total, generator=generator, device=self.device).tensor_split(num_mini_batches)

    def take(self, index: Tensor) -> MiniBatch:
        """The steps at flat indices (B,)."""
        flat = {f.batch: self.data[name].flatten(0, 1)[index] for name, f in self.fields.items() if f.batch}
        return self._batch(flat, {}, None)

    def recurrent_mini_batch_generator(
        self, num_mini_batches: int, num_epochs: int = 8, generator: torch.Generator | None = None
    ) -> Iterator[MiniBatch]:
        """Minibatches of whole environments (T, n, ...), cut into trajectories; every epoch deals them anew."""
        for envs, total in self.deal_envs(num_mini_batches, num_epochs, generator):
            yield self.take_envs(envs, total)

    def deal_envs(
        self, num_mini_batches: int, num_epochs: int = 1, generator: torch.Generator | None = None
    ) -> list[tuple[Tensor, int]]:
        """Environments of each minibatch of each epoch, and how many trajectories they have; one host read."""
        if not 1 <= num_mini_batches <= self.num_envs:
            raise ValueError(f"num_mini_batches={num_mini_batches} does not fit {self.num_envs} environments")
        per_env = self._starts().sum(0)
        groups = [
            envs
            for _ in range(num_epochs)
            for envs in torch.randperm(self.num_envs, generator=generator, device=self.device).tensor_split(
                num_mini_batches
            )
        ]
        totals = torch.stack([per_env[envs].sum() for envs in groups]).tolist()
        return list(zip(groups, map(int, totals), strict=True))

    def take_envs(self, envs: Tensor, total: int) -> MiniBatch:
        """The rollouts of some environments, cut into `total` trajectories (or fewer: no step points at spare ones)."""
        starts = self._starts()[:, envs]
        row, column = trajectory_index(starts)
        first = start_positions(starts, column, total)
        hidden = {
            name: self.data[f"hidden.{name}"][: self.filled, envs].flatten(0, 1)[first] for name in self.hidden_shapes
        }  # (M, S, L, H)
        fields = {f.batch: self.data[name][: self.filled, envs] for name, f in self.fields.items() if f.batch}
        return self._batch(fields, hidden, Trajectories(row, column, total))

    def _starts(self) -> Tensor:
        return episode_starts(self.data["dones"][: self.filled].squeeze(-1))  # (T, N)

    def _batch(
        self, fields: Mapping[str, Tensor], hidden: dict[str, Tensor], trajectories: Trajectories | None
    ) -> MiniBatch:
        batch: dict[str, Any] = {name: value for name, value in fields.items() if "." not in name}
        for name in ("obs", "critic_obs", "old_params", "tosses"):
            if name not in batch:
                batch[name] = nested(fields, name)
        if self.privileged_obs_shape is None:
            batch["critic_obs"] = batch["obs"]
        batch["valid"] = batch["valid"].squeeze(-1) if "valid" in batch else None
        return MiniBatch(**batch, hidden=hidden, trajectories=trajectories)

    def _zeros(self, field: Field) -> Tensor:
        shape = (self.num_transitions_per_env, self.num_envs, *field.shape)
        return torch.zeros(shape, dtype=field.dtype, device=self.device)
