"""Replay for off-policy learning: rings of the last steps of N environments, by name.

Each environment has a ring of R rows and a head, the row that the next step goes to:

    row           ... p-2     p-1     p = head
    observation       o_t     o_t+1   o_t+2          the next observation of a row is the row after it
    action, reward    a_t     a_t+1   -

Where the next step does not begin at the observation the last one led to (its episode ended, or somebody reset the
environment) the head moves on by one, and the row it leaves holds that final observation and nothing else. So final
observations cost a row only where an episode ended, and a step that only reset an environment is never stored.
`order` lists the rows that hold a step, oldest to newest, from which samples are drawn uniformly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from canter.storage.fields import Field, is_absent, observation_fields
from canter.storage.replay_memory import check_memory
from canter.utils.tree import Obs, tree_leaves

OBSERVED = ("observations", "critic_observations")


class ReplayRings:
    """The last `capacity` steps of `num_envs` environments on any device; subclasses draw from them.

    Args:
        capacity: Rows of all environments together; every stored episode end takes one too.
        obs_shape: Shape of one observation, or a nested dict of shapes or `Field`s.
        action_shape: Shape of one action; () for discrete ones.
        device: Where the rings live.
        obs_dtype: Kind of the observations, unless `obs_shape` says it.
        action_dtype: Kind of the actions.
        critic_obs_shape: The same as `obs_shape` for the critic; None where it sees the actor's observation.
        num_envs: N, how many rows one `add` has.
        has_invalid_steps: Whether some steps only reset an environment.
    """

    def __init__(
        self,
        capacity: int,
        obs_shape: Any,
        action_shape: Any = (),
        device: torch.device | str = "cpu",
        obs_dtype: torch.dtype = torch.float32,
        action_dtype: torch.dtype = torch.long,
        critic_obs_shape: Any = None,
        *,
        num_envs: int = 1,
        has_invalid_steps: bool = False,
    ) -> None:
        if capacity < num_envs or num_envs < 1:
            raise ValueError(f"capacity must be at least one step of each of {num_envs} environments, got {capacity}")
        self.capacity, self.num_envs, self.device = int(capacity), num_envs, torch.device(device)
        self.obs_shape, self.obs_dtype = obs_shape, obs_dtype
        self.action_shape, self.action_dtype = tuple(action_shape), action_dtype
        self.critic_obs_shape = None if is_absent(critic_obs_shape) else critic_obs_shape
        self.has_invalid_steps = has_invalid_steps
        self.num_rows = -(-self.capacity // num_envs) + 1
        self.fields = self.declare_fields()
        check_memory(self.fields, self.num_rows, num_envs, self.device)
        rows = self.num_rows * num_envs
        self.data = {
            name: torch.zeros(rows, *field.shape, dtype=field.dtype, device=self.device)
            for name, field in self.fields.items()
        }
        self.envs = torch.arange(num_envs, device=self.device)
        self.head = torch.zeros(num_envs, dtype=torch.long, device=self.device)
        self.count = torch.zeros_like(self.head)  # (N,) steps ever stored
        self.size = torch.zeros_like(self.head)  # (N,) steps that are still there
        self.is_started = torch.zeros(num_envs, dtype=torch.bool, device=self.device)

    def declare_fields(self) -> dict[str, Field]:
        """Name, shape and kind of everything that is kept for a step. Extended by subclasses."""
        fields: dict[str, Field] = {}
        for name, shape in zip(OBSERVED, (self.obs_shape, self.critic_obs_shape), strict=True):
            if shape is not None:
                fields |= observation_fields(name, _with_dtype(shape, self.obs_dtype), name, name)
        return fields | {
            "actions": Field(self.action_shape, dtype=self.action_dtype),
            "rewards": Field(()),
            "dones": Field((), dtype=torch.bool),
            "ends": Field((), dtype=torch.bool),
            "holds_step": Field((), dtype=torch.bool),
            "order": Field((), dtype=torch.int32),
        }

    # ------------------------------------------------------------------ writing
    def add(
        self,
        obs: Obs,
        action: Tensor,
        reward: Tensor,
        next_obs: Obs,
        done: Tensor,
        *,
        truncated: Tensor | None = None,
        critic_obs: Obs | None = None,
        next_critic_obs: Obs | None = None,
        valid: Tensor | None = None,
    ) -> None:
        """Keep one step of every environment: tensor code alone, which may be captured.

        Args:
            obs: Where the step began, (N, ...).
            action: (N, ...).
            reward: (N,).
            next_obs: Where it led to, before any reset.
            done: (N,) whether nothing follows: a true terminal state.
            truncated: (N,) whether the episode was cut off here.
            critic_obs: The critic's side of `obs`.
            next_critic_obs: The critic's side of `next_obs`.
            valid: (N,) whether it was a step; false where it only reset an environment.
        """
        begin = self._named(obs, critic_obs)
        for name, leaf in begin.items():
            if len(leaf) != self.num_envs:
                raise ValueError(f"one step of {self.num_envs} environments was expected, {name} has {len(leaf)} rows")
        real = torch.ones_like(self.is_started) if valid is None or not self.has_invalid_steps else valid
        done = done.to(torch.bool).reshape(-1)
        ended = done if truncated is None else done | truncated.reshape(-1)
        here = self._open_row(begin, real)
        values = {**begin, "actions": action, "rewards": reward.reshape(-1), "dones": done, "ends": ended}
        self._put(here, values, real)
        self._put(here, {"holds_step": real}, None)
        slot = self.count % self.num_rows * self.num_envs + self.envs
        self._put(slot, {"order": self.head.to(torch.int32)}, real)
        self.count += real
        self.size += real
        self._claim(real)
        self._put(self._flat(self.head), self._named(next_obs, next_critic_obs), real)
        self.is_started |= real

    def append(self, env: int, obs: Mapping[str, Tensor], actions: Tensor, rewards: Any, is_terminated: bool) -> None:
        """Keep L steps of one environment at once; `obs` are (L + 1, ...) by field, fewer than there are rows."""
        length, num_rows, device = len(rewards), self.num_rows, self.device
        head, was_started = int(self.head[env]), bool(self.is_started[env])
        if was_started:
            self.data["ends"][(head - 1) % num_rows * self.num_envs + env] = True
        rows = (head + int(was_started) + torch.arange(length + 1, device=device)) % num_rows
        at = rows * self.num_envs + env
        gone = int(self.data["holds_step"][at].sum())
        is_last = torch.arange(length, device=device) == length - 1
        rewards = torch.as_tensor(rewards, dtype=torch.float32, device=device).reshape(length)
        values = {"actions": actions.reshape(length, *self.action_shape), "rewards": rewards, "ends": is_last}
        values |= {"dones": is_last & is_terminated, "holds_step": torch.ones_like(is_last)}
        for name, value in obs.items():
            self.data[name][at] = value.to(device, self.data[name].dtype)
        for name, value in values.items():
            self.data[name][at[:-1]] = value.to(device, self.data[name].dtype)
        self.data["holds_step"][at[-1]] = False
        slots = (self.count[env] + torch.arange(length, device=device)) % num_rows * self.num_envs + env
        self.data["order"][slots] = rows[:-1].to(torch.int32)
        self.count[env] += length
        self.size[env] += length - gone
        self.head[env] = rows[-1]
        self.is_started[env] = True

    def _open_row(self, begin: Mapping[str, Tensor], real: Tensor) -> Tensor:
        """Flat rows that steps from these observations go to; where an episode was left, the one after its final."""
        at = self._flat(self.head)
        moved = torch.zeros_like(real)
        for name, leaf in begin.items():
            moved |= (self.data[name][at] != leaf).reshape(self.num_envs, -1).any(1)
        moved &= self.is_started & real
        last = self._flat((self.head - 1) % self.num_rows)
        self.data["ends"][last] |= moved
        self._claim(moved)
        return self._flat(self.head)

    def _claim(self, moving: Tensor) -> None:
        """Move heads on; a step that was stored in their new row is gone."""
        self.head.copy_((self.head + moving) % self.num_rows)
        at = self._flat(self.head)
        held = self.data["holds_step"][at]
        self.size -= (held & moving).long()
        self.data["holds_step"][at] = held & ~moving

    def _put(self, rows: Tensor, values: Mapping[str, Tensor], real: Tensor | None) -> None:
        for name, value in values.items():
            target = self.data[name]
            value = value.reshape(self.num_envs, *target.shape[1:]).to(target.dtype)
            if self.has_invalid_steps and real is not None:
                value = torch.where(real.view(-1, *[1] * (value.dim() - 1)), value, target[rows])
            target[rows] = value

    def _flat(self, rows: Tensor, envs: Tensor | None = None) -> Tensor:
        return rows * self.num_envs + (self.envs if envs is None else envs)

    def _named(self, obs: Obs, critic_obs: Obs | None) -> dict[str, Tensor]:
        leaves = dict(tree_leaves(obs, OBSERVED[0]))
        if self.critic_obs_shape is not None:
            if critic_obs is None:
                raise ValueError("the buffer keeps the critic's observations; give critic_obs and next_critic_obs")
            leaves |= tree_leaves(critic_obs, OBSERVED[1])
        return leaves

    # ------------------------------------------------------------------ keeping
    def __len__(self) -> int:
        """Steps that can be drawn; reading it waits for the device."""
        return int(self.size.sum())

    def clear(self) -> None:
        """Forget everything."""
        for state in (self.head, self.count, self.size, self.is_started, self.data["holds_step"], self.data["ends"]):
            state.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Everything stored, without the rows that were never written."""
        # Every step takes at most two rows.
        written = min(self.num_rows, int(self.count.max()) * 2 + 2) * self.num_envs
        own = {"head": self.head, "count": self.count, "size": self.size, "is_started": self.is_started}
        state: dict[str, Any] = {name: value.clone() for name, value in own.items()}
        state["data"] = {name: value[:written].clone() for name, value in self.data.items()}
        return state | {"capacity": self.capacity, "num_envs": self.num_envs}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise if `state` is of another buffer, before anything is changed."""
        for name, ours in (("capacity", self.capacity), ("num_envs", self.num_envs)):
            if state[name] != ours:
                raise ValueError(
                    f"the saved replay buffer has {name}={state[name]}, this one {ours}: use the same, or load "
                    "a checkpoint without a replay buffer"
                )
        for name, value in self.data.items():
            theirs = state["data"].get(name)
            if theirs is None or theirs.shape[1:] != value.shape[1:] or theirs.dtype != value.dtype:
                got = "none" if theirs is None else f"{tuple(theirs.shape[1:])} {theirs.dtype}"
                want = f"{tuple(value.shape[1:])} {value.dtype}"
                raise ValueError(f"the saved replay buffer has {got} for {name!r}, this one needs {want}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`, in place."""
        self.check_state(state)
        self.clear()
        for name in ("head", "count", "size", "is_started"):
            getattr(self, name).copy_(state[name])
        for name, value in self.data.items():
            value[: len(state["data"][name])].copy_(state["data"][name])


def _with_dtype(shape: Any, dtype: torch.dtype) -> Any:
    """`shape` with a kind at every leaf that does not say its own."""
    if isinstance(shape, Mapping):
        return {name: _with_dtype(part, dtype) for name, part in shape.items()}
    return shape if isinstance(shape, Field) else Field(tuple(shape), dtype=dtype)
