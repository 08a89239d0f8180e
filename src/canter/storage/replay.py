"""Replay buffers of transitions for off-policy learning, with uniform and with prioritised sampling.

Each environment has a ring of R rows and a head, the row that the next step is written to:

    row           ... p-2     p-1     p = head
    observation       o_t     o_t+1   o_t+2          the next observation of a row is in the row after it
    action, reward    a_t     a_t+1   -

Where a step does not begin at the observation that the last one led to (the episode ended, or the environment was
reset), the head moves on by one, and the row before it holds only that final observation. Final observations thus cost
one row per episode, and a step that only resets an environment is not stored. `order` lists the rows that hold a step,
oldest to newest; uniform samples are drawn from it.
"""

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from canter.storage.rollout_storage import Field, is_absent, observation_fields
from canter.utils.memory import check_memory
from canter.utils.tree import Obs, nested, tree_leaves

OBSERVED = ("observations", "critic_observations")
MIN_PRIORITY = 1e-6  # keeps the probability of every step above 0


class ReplayBatch(NamedTuple):
    """B steps, or B windows of up to n steps."""

    obs: Obs
    critic_obs: Obs  # the same object as `obs` if the critic has no observation of its own
    actions: Tensor
    rewards: Tensor  # (B,) discounted sum over the window
    next_obs: Obs
    next_critic_obs: Obs
    dones: Tensor  # (B,) 1 where the window ends in a terminal state
    discounts: Tensor  # (B,) factor of the value after the window: gamma to the power of its length
    weights: Tensor | None = None  # (B,) importance weights of prioritised samples
    places: Tensor | None = None  # (B,) positions of prioritised samples, for `set_priorities`


class TransitionReplayBuffer:
    """The last `capacity` steps of `num_envs` environments, sampled uniformly.

    Args:
        capacity: Rows of all environments together; every stored episode end takes one too.
        obs_shape: Shape of one observation, or a nested dict of shapes or `Field`s.
        action_shape: Shape of one action; () for discrete ones.
        obs_dtype: Dtype of observations that `obs_shape` gives no dtype for.
        critic_obs_shape: Like `obs_shape`, for the critic; None if the critic uses the actor's observation.
        has_invalid_steps: Whether some steps only reset an environment.
    """

    state_names: tuple[str, ...] = ("head", "count", "size", "is_started")

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
        way_out = "make buffer_size smaller, or observations (images as uint8)"
        check_memory("replay buffer", self.fields, self.num_rows, num_envs, self.device, way_out)
        self.data = {
            name: torch.zeros(self.num_rows * num_envs, *field.shape, dtype=field.dtype, device=self.device)
            for name, field in self.fields.items()
        }
        self.envs = torch.arange(num_envs, device=self.device)
        self.head = torch.zeros(num_envs, dtype=torch.long, device=self.device)
        self.count = torch.zeros_like(self.head)  # (N,) steps ever stored
        self.size = torch.zeros_like(self.head)  # (N,) steps stored now
        self.is_started = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
        self.arrays: dict[str, np.ndarray] = {}  # of `add_one`: the memory of the tensors

    def __getstate__(self) -> dict[str, Any]:
        """Attributes that are copied and pickled: a copied array would not share the memory of its tensor."""
        return {**self.__dict__, "arrays": {}}

    def declare_fields(self) -> dict[str, Field]:
        """Every stored field by name. Extended by subclasses."""
        fields: dict[str, Field] = {}
        for name, shape in zip(OBSERVED, (self.obs_shape, self.critic_obs_shape), strict=True):
            fields |= observation_fields(name, shape, name, name, self.obs_dtype)
        fields |= {"actions": Field(self.action_shape, dtype=self.action_dtype), "rewards": Field(())}
        fields |= {name: Field((), dtype=torch.bool) for name in ("dones", "ends", "holds_step")}
        return fields | {"order": Field((), dtype=torch.int32)}

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
        """Store one step of every environment. Tensor code only, so that it can be captured.

        `next_obs` is before any reset, `done` marks terminal states, `valid` is false where a step only reset.
        """
        begin = self.named_leaves(obs, critic_obs)
        for name, leaf in begin.items():
            if len(leaf) != self.num_envs:
                raise ValueError(f"one step of {self.num_envs} environments was expected, {name} has {len(leaf)} rows")
        real = torch.ones_like(self.is_started) if valid is None or not self.has_invalid_steps else valid
        done = done.to(torch.bool).reshape(-1)
        ended = done if truncated is None else done | truncated.reshape(-1)
        data, at = self.data, self._flat(self.head)
        has_left = self.is_started & real  # where the last episode was left: its final observation keeps its row
        differs = [(data[name].index_select(0, at) != leaf).reshape(self.num_envs, -1) for name, leaf in begin.items()]
        has_left &= (differs[0] if len(differs) == 1 else torch.cat(differs, 1)).any(1)
        before = self._flat((self.head - 1) % self.num_rows)
        data["ends"].index_copy_(0, before, data["ends"].index_select(0, before) | has_left)
        row = (self.head + has_left) % self.num_rows
        self.head.copy_((row + real) % self.num_rows)
        at, after = self._flat(row), self._flat(self.head)
        # Steps in these rows are overwritten. Where the head has not moved its row holds none.
        self.size += real
        for claimed in (at, after):
            self.size -= data["holds_step"].index_select(0, claimed).long()
        values = {"actions": action, "rewards": reward, "dones": done, "ends": ended, "holds_step": real}
        self._put(at, begin | values, real)
        slot = self._flat(self.count % self.num_rows)
        self._put(slot, {"order": row}, real)
        self.count += real
        self._put(after, self.named_leaves(next_obs, next_critic_obs), real)
        data["holds_step"].index_fill_(0, after, False)
        self.is_started |= real

    @property
    def can_add_one(self) -> bool:
        """Whether `add_one` can stand for `add`: one environment on a CPU, and no subclass that stores more."""
        is_numpy = all(value.dtype != torch.bfloat16 for value in self.data.values())
        is_plain = type(self).add is TransitionReplayBuffer.add
        return self.num_envs == 1 and self.device.type == "cpu" and is_numpy and is_plain

    def add_one(
        self,
        obs: Obs,
        action: Tensor,
        reward: Tensor,
        next_obs: Obs,
        done: Tensor,
        *,
        truncated: Tensor,
        critic_obs: Obs | None = None,
        next_critic_obs: Obs | None = None,
        valid: Tensor | None = None,
    ) -> None:
        """Store what `add` stores, by writes to arrays: on a CPU much faster than fifty small tensor operations."""
        if valid is not None and self.has_invalid_steps and not valid.item():
            return
        if not self.arrays:
            own = {name: getattr(self, name) for name in ("head", "count", "size", "is_started")}
            self.arrays = {name: value.numpy() for name, value in (self.data | own).items()}
        arrays, num_rows = self.arrays, self.num_rows
        head, holds_step, ends = arrays["head"], arrays["holds_step"], arrays["ends"]
        begin = {name: to_row(leaf, arrays[name]) for name, leaf in self.named_leaves(obs, critic_obs).items()}
        row = int(head[0])
        if arrays["is_started"][0] and any((arrays[name][row] != value).any() for name, value in begin.items()):
            ends[row - 1] = True  # the last episode was left: its final observation keeps its row
            row = (row + 1) % num_rows
        after = (row + 1) % num_rows
        arrays["size"][0] += 1 - int(holds_step[row]) - int(holds_step[after])
        for name, value in begin.items():
            arrays[name][row] = value
        is_terminal = bool(done.item())
        arrays["actions"][row] = to_row(action, arrays["actions"])
        arrays["rewards"][row] = reward.item()
        arrays["dones"][row] = is_terminal
        ends[row] = is_terminal or bool(truncated.item())
        holds_step[row] = True
        arrays["order"][int(arrays["count"][0]) % num_rows] = row
        arrays["count"][0] += 1
        for name, leaf in self.named_leaves(next_obs, next_critic_obs).items():
            arrays[name][after] = to_row(leaf, arrays[name])
        holds_step[after] = False
        head[0] = after
        arrays["is_started"][0] = True

    def append(self, env: int, obs: Mapping[str, Tensor], actions: Tensor, rewards: Any, is_terminated: bool) -> None:
        """Store L steps of one environment, fewer than there are rows; `obs` are (L + 1, ...) by field."""
        length, num_rows = len(rewards), self.num_rows
        steps = torch.arange(length + 1, device=self.device)
        head, was_started = int(self.head[env]), bool(self.is_started[env])
        self.data["ends"][(head - 1) % num_rows * self.num_envs + env] |= was_started
        rows = (head + int(was_started) + steps) % num_rows
        at = rows * self.num_envs + env
        self.size[env] += length - self.data["holds_step"][at].sum()
        is_last = steps[:-1] == length - 1
        rewards = torch.as_tensor(rewards).reshape(length)
        values = {"actions": actions.reshape(length, *self.action_shape), "rewards": rewards, "ends": is_last}
        values |= {**obs, "dones": is_last & is_terminated, "holds_step": steps < length}
        for name, value in values.items():
            self.data[name][at[: len(value)]] = value.to(self.device, self.data[name].dtype)
        slots = (self.count[env] + steps[:-1]) % num_rows * self.num_envs + env
        self.data["order"][slots] = rows[:-1].to(torch.int32)
        self.count[env] += length
        self.head[env] = rows[-1]
        self.is_started[env] = True

    def _put(self, rows: Tensor, values: Mapping[str, Tensor], real: Tensor) -> None:
        for name, value in values.items():
            target = self.data[name]
            value = value.reshape(self.num_envs, *target.shape[1:]).to(target.dtype)
            if self.has_invalid_steps:
                kept = target.index_select(0, rows)
                value = torch.where(real.view(-1, *[1] * (value.dim() - 1)), value, kept)
            target.index_copy_(0, rows, value)

    def _flat(self, rows: Tensor, envs: Any = None) -> Tensor:
        """Places of rows of environments, by default of one row of each."""
        if self.num_envs == 1:
            return rows
        return rows * self.num_envs + (self.envs if envs is None else envs)

    def named_leaves(self, obs: Obs, critic_obs: Obs | None) -> dict[str, Tensor]:
        """The tensors of an observation by field name."""
        if self.critic_obs_shape is None and isinstance(obs, Tensor):
            return {OBSERVED[0]: obs}
        leaves = dict(tree_leaves(obs, OBSERVED[0]))
        if self.critic_obs_shape is not None:
            if critic_obs is None:
                raise ValueError("the buffer keeps the critic's observations; give critic_obs and next_critic_obs")
            leaves |= tree_leaves(critic_obs, OBSERVED[1])
        return leaves

    def sample(
        self, batch_size: int, *, n_step: int = 1, gamma: Tensor | float = 0.99, generator: Generator | None = None
    ) -> dict[str, Any]:
        """A random batch, with replacement, by the documented names."""
        if batch_size > (stored := len(self)):
            raise ValueError(f"batch_size={batch_size} is larger than the {stored} stored steps")
        batch = self.draw(batch_size, n_step, gamma, generator)
        named = {name: getattr(batch, name) for name in ("actions", "rewards", "dones", "discounts")}
        named |= {"observations": batch.obs, "next_observations": batch.next_obs}
        named["discounts"] = batch.discounts.contiguous()
        if self.critic_obs_shape is not None:
            named |= {"critic_observations": batch.critic_obs, "next_critic_observations": batch.next_critic_obs}
        return named

    def draw(self, batch_size: int, n_step: int, gamma: Tensor | float, generator: Generator | None) -> ReplayBatch:
        """A random batch, uniform with replacement. No host reads, so that it can be captured."""
        # Doubles: float32 has too few values to reach every step of a large buffer.
        number = torch.rand(batch_size, dtype=torch.float64, device=self.device, generator=generator)
        if self.num_envs == 1:
            envs: Any = 0
            newest, age = self.count, (number * self.size).long()
        else:
            last = self.size.cumsum(0)
            place = (number * last[-1]).long()
            envs = torch.searchsorted(last, place, right=True).clamp_(max=self.num_envs - 1)
            newest, age = self.count[envs], last[envs] - 1 - place
        slot = self._flat((newest - 1 - age) % self.num_rows, envs)
        return self.take(self.data["order"].index_select(0, slot), envs, n_step, gamma)

    def take(self, rows: Tensor, envs: Any, n_step: int, gamma: Tensor | float) -> ReplayBatch:
        """Windows of up to `n_step` steps from (rows, envs) on; they end with the episode, or with the newest step."""
        data, num_rows, num_envs = self.data, self.num_rows, self.num_envs
        first = self._flat(rows, envs)
        if n_step == 1:
            rewards, last = data["rewards"].index_select(0, first), rows
            discounts = torch.as_tensor(gamma, device=self.device).expand_as(rewards)
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
        after = self._flat((last + 1) % num_rows, envs)
        dones = data["dones"].index_select(0, self._flat(last, envs)).float()
        actions = data["actions"].index_select(0, first)
        return ReplayBatch(*self._observed(first), actions, rewards, *self._observed(after), dones, discounts)

    def _observed(self, at: Tensor) -> tuple[Any, Any]:
        found = {name: self.data[name].index_select(0, at) for name in self.data if name.startswith(OBSERVED)}
        obs, critic_obs = (found[name] if name in found else nested(found, name) for name in OBSERVED)
        return obs, obs if self.critic_obs_shape is None else critic_obs

    def __len__(self) -> int:
        """Number of stored steps; a host read."""
        return int(self.size.sum())

    def clear(self) -> None:
        """Remove all steps."""
        for state in (self.head, self.count, self.size, self.is_started, self.data["holds_step"], self.data["ends"]):
            state.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The whole content, without rows that were never written."""
        written = min(self.num_rows, int(self.count.max()) * 2 + 2) * self.num_envs  # a step takes at most two rows
        state: dict[str, Any] = {name: getattr(self, name).clone() for name in self.state_names}
        state["data"] = {name: value[:written].clone() for name, value in self.data.items()}
        return state | {"capacity": self.capacity, "num_envs": self.num_envs}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise if `state` does not fit this buffer."""
        way_out = "use the same, or load a checkpoint without a replay buffer"
        for name in ("capacity", "num_envs"):
            if state[name] != (ours := getattr(self, name)):
                raise ValueError(f"the saved replay buffer has {name}={state[name]}, this one {ours}: {way_out}")
        saved, own = ({n: f"{tuple(x.shape[1:])} {x.dtype}" for n, x in d.items()} for d in (state["data"], self.data))
        for name, kind in own.items():
            if saved.get(name) != kind:
                raise ValueError(f"the saved replay buffer has {saved.get(name)} for {name!r}, this one needs {kind}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`, in place; nothing is changed if it does not fit."""
        self.check_state(state)
        self.clear()
        for name in self.state_names:
            getattr(self, name).copy_(state[name])
        for name, value in self.data.items():
            value[: len(state["data"][name])].copy_(state["data"][name])


def to_row(value: Tensor, rows: np.ndarray) -> np.ndarray:
    """The value of a single environment, (1, ...), as a row of an array."""
    return value.numpy().reshape(rows.shape[1:])


class SumTree:
    """Sums over a row of non-negative numbers, in levels of `FAN_OUT` children each, for draws in proportion to them.

    Every sum is computed from its children, so the sums depend on the numbers alone and not on their history. Tensor
    code only, so that it can be captured.
    """

    FAN_OUT = 64

    def __init__(self, length: int, device: torch.device) -> None:
        self.levels: list[Tensor] = []  # the numbers, then sums; the last level has at most `FAN_OUT`
        while not self.levels or length > 1:
            length = -(-length // self.FAN_OUT)
            self.levels.append(torch.zeros(length * self.FAN_OUT, dtype=torch.float64, device=device))
        self.children = torch.arange(self.FAN_OUT, device=device)

    @property
    def total(self) -> Tensor:
        """The sum of all numbers, ()."""
        return self.levels[-1].sum()

    def fill(self, numbers: Tensor) -> None:
        """Set all numbers."""
        self.levels[0][: len(numbers)] = numbers
        for below, level in itertools.pairwise(self.levels):
            sums = below.view(-1, self.FAN_OUT).sum(1)
            level[: len(sums)] = sums

    def put(self, places: Tensor, numbers: Tensor) -> None:
        """Set the numbers at `places`, which may repeat where the numbers do."""
        self.levels[0][places] = numbers
        for below, level in itertools.pairwise(self.levels):
            places = places // self.FAN_OUT
            level[places] = below.view(-1, self.FAN_OUT)[places].sum(1)

    def find(self, amounts: Tensor) -> Tensor:
        """(B,) places at which the sum of the numbers up to there exceeds each of the amounts."""
        places = torch.zeros_like(amounts, dtype=torch.long)
        for level in reversed(self.levels):
            sums = level.view(-1, self.FAN_OUT)[places].cumsum(1)  # (B, FAN_OUT)
            # Rounding must not lead beyond the last child that is not zero.
            last = (sums < sums[:, -1:]).sum(1)
            child = torch.minimum((sums <= amounts.unsqueeze(1)).sum(1), last).unsqueeze(1)
            amounts = amounts - torch.where(child > 0, sums.gather(1, (child - 1).clamp_min(0)), 0.0).squeeze(1)
            places = places * self.FAN_OUT + child.squeeze(1)
        return places


class PrioritizedReplayBuffer(TransitionReplayBuffer):
    """Replay with proportional prioritised sampling (Schaul et al. 2016).

    The probability of a step is proportional to its temporal-difference error to the power `exponent`; new steps get
    the highest priority so far. After an assignment to `exponent` call `rebuild`.
    """

    state_names = (*TransitionReplayBuffer.state_names, "highest")

    def __init__(self, *args: Any, exponent: Tensor | float = 0.6, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.exponent = exponent
        self.highest = torch.ones((), device=self.device)
        self.correction = torch.tensor(0.4, device=self.device)  # power of the importance weights
        self.tree = SumTree(self.num_rows * self.num_envs, self.device)

    def declare_fields(self) -> dict[str, Field]:
        """The fields of a replay buffer and a priority."""
        return super().declare_fields() | {"priorities": Field(())}

    def rebuild(self) -> None:
        """Compute the sums of all priorities again."""
        self.tree.fill(self._powers(slice(None)))

    def _powers(self, places: Any) -> Tensor:
        held, priorities = self.data["holds_step"][places], self.data["priorities"][places]
        return torch.where(held, priorities**self.exponent, 0.0).double()

    def add(self, *args: Any, **kwargs: Any) -> None:
        """Store one step of every environment, with the highest priority."""
        super().add(*args, **kwargs)
        newest = self._flat((self.head - 1) % self.num_rows)  # a head is on a row without a step
        held = self.data["holds_step"][newest]
        self.data["priorities"][newest] = torch.where(held, self.highest, self.data["priorities"][newest])
        for back in range(3):  # a head moves by two rows at most; steps in its way are overwritten
            changed = self._flat((self.head - back) % self.num_rows)
            self.tree.put(changed, self._powers(changed))

    def append(self, env: int, *args: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Store several steps of one environment, with the highest priority."""
        first = int(self.count[env])
        super().append(env, *args)
        slots = torch.arange(first, int(self.count[env]), device=self.device) % self.num_rows * self.num_envs + env
        self.data["priorities"][self.data["order"][slots].long() * self.num_envs + env] = self.highest
        self.rebuild()

    def draw(self, batch_size: int, n_step: int, gamma: Tensor | float, generator: Generator | None) -> ReplayBatch:
        """A random batch by priority, with importance weights and places."""
        # One draw from each of B equal parts of the sum: less variance than B draws from the whole.
        parts = torch.arange(batch_size, dtype=torch.float64, device=self.device)
        number = torch.rand(batch_size, dtype=torch.float64, device=self.device, generator=generator)
        total = self.tree.total
        places = self.tree.find((parts + number) / batch_size * total)
        batch = self.take(places // self.num_envs, places % self.num_envs, n_step, gamma)
        shares = self.tree.levels[0][places] / total
        weights = (shares * self.size.sum()).clamp_min(1e-12) ** -self.correction.double()
        return batch._replace(weights=(weights / weights.max()).float(), places=places)

    def set_priorities(self, places: Tensor, errors: Tensor) -> None:
        """Set the priorities of the steps at `places` from their errors."""
        priorities = errors.abs() + MIN_PRIORITY
        self.data["priorities"][places] = priorities
        self.tree.put(places, self._powers(places))
        self.highest.copy_(torch.maximum(self.highest, priorities.max()))

    def clear(self) -> None:
        """Remove all steps."""
        super().clear()
        self.rebuild()

    def state_dict(self) -> dict[str, Any]:
        """The whole content, with powers as they were computed: their rounding depends on how many are computed."""
        return super().state_dict() | {"powers": self.tree.levels[0].clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`, in place; nothing is changed if it does not fit."""
        super().load_state_dict(state)
        if "powers" in state:
            self.tree.fill(state["powers"])
        else:
            self.rebuild()
