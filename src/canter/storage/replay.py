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

import functools
import itertools
import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from canter.storage.rollout_storage import Field, is_absent, observation_fields
from canter.utils.memory import check_memory
from canter.utils.tree import Obs, nested, tree_leaves

OBSERVED = ("observations", "critic_observations")
COUNTED = ("head", "count", "size", "is_started", "dones", "ends", "holds_step", "order")  # whole numbers and flags
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
    fields: Mapping[str, Tensor] = MappingProxyType({})  # the extra fields of the first step, (B, ...) each


class TransitionReplayBuffer:
    """The last `capacity` steps of `num_envs` environments, sampled uniformly.

    Args:
        capacity: Rows of all environments together; every stored episode end takes one too.
        obs_shape: Shape of one observation, or a nested dict of shapes or `Field`s.
        action_shape: Shape of one action; () for discrete ones.
        obs_dtype: Dtype of observations that `obs_shape` gives no dtype for.
        critic_obs_shape: Like `obs_shape`, for the critic; None if the critic uses the actor's observation.
        has_invalid_steps: Whether some steps only reset an environment.
        extra_fields: More to store of every step, by name; `ReplayBatch.fields` has it.
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
        extra_fields: Mapping[str, Field] = MappingProxyType({}),
    ) -> None:
        if capacity < num_envs or num_envs < 1:
            raise ValueError(f"capacity must be at least one step of each of {num_envs} environments, got {capacity}")
        self.capacity, self.num_envs, self.device = int(capacity), num_envs, torch.device(device)
        self.obs_shape, self.obs_dtype = obs_shape, obs_dtype
        self.action_shape, self.action_dtype = tuple(action_shape), action_dtype
        self.critic_obs_shape = None if is_absent(critic_obs_shape) else critic_obs_shape
        self.has_invalid_steps, self.extra_fields = has_invalid_steps, dict(extra_fields)
        self.num_rows = -(-self.capacity // num_envs) + 1
        self.fields = self.declare_fields()
        self.observed = [name for name in self.fields if name.split(".")[0] in OBSERVED]
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
        own = {name: getattr(self, name) for name in ("head", "count", "size", "is_started")}
        self.columns = self.data | own
        is_numpy_type = all(column.dtype != torch.bfloat16 for column in self.columns.values())
        is_own = type(self).add is TransitionReplayBuffer.add
        self.is_numpy = num_envs == 1 and self.device.type == "cpu" and is_numpy_type and is_own
        """Whether `add` writes by NumPy: for one environment on a CPU, and no subclass that does more."""
        self.arrays: dict[str, Any] = {}  # the memory of the columns

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
        fields |= {"order": Field((), dtype=torch.int32)}
        if taken := fields.keys() & self.extra_fields.keys():
            raise ValueError(f"the replay buffer has a field {min(taken)!r} already; give yours another name")
        return fields | self.extra_fields

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
        fields: Mapping[str, Tensor] = MappingProxyType({}),
        env: int | None = None,
    ) -> None:
        """Store one step of every environment, or L steps of one; tensor code that can be captured, unless `is_numpy`.

        `next_obs` is before any reset, and of L steps that of the last; `done` marks terminal states, `truncated` where
        an episode was cut off; `valid` is false where a step only reset. `fields` are the values of `extra_fields`.
        `env` has the L steps, fewer than there are rows, which begin a new episode.
        """
        if fields.keys() != self.extra_fields.keys():
            raise ValueError(f"the step has the extra fields {list(fields)}, declared are {list(self.extra_fields)}")
        begin, end = self.named_leaves(obs, critic_obs), self.named_leaves(next_obs, next_critic_obs)
        for name, leaf in begin.items():
            if env is None and leaf.shape[0] != self.num_envs:
                raise ValueError(f"one step of {self.num_envs} environments was expected, {name} has {len(leaf)} rows")
        step: dict[str, Any] = {"actions": action, "rewards": reward, **fields}
        if self.is_numpy and env is None:
            if self.has_invalid_steps and valid is not None and not valid.item():
                return
            columns = self.arrays or self._make_arrays()
            begin, step, end = (
                {name: value.numpy().reshape(columns[name].shape[1:]) for name, value in part.items()}
                for part in (begin, step, end)
            )
            step["dones"] = is_terminal = bool(done.item())
            step["ends"] = is_terminal or (truncated is not None and bool(truncated.item()))
            head = columns["head"][0]
            has_left = columns["is_started"][0] and any((columns[n][head] != row).any() for n, row in begin.items())
            self._write(columns, 0, begin, step, end, has_left, True, operator.setitem)
            return
        step["dones"] = done = done.to(torch.bool).reshape(-1)
        step["ends"] = done if truncated is None else done | truncated.reshape(-1)
        if env is not None:
            lane = slice(env, env + 1)
            self._write(self.columns, lane, begin, step, end, self.is_started[lane], True, put_rows, len(reward))
            return
        real = torch.ones_like(done) if valid is None or not self.has_invalid_steps else valid
        put = functools.partial(put_valid_rows, real) if self.has_invalid_steps else put_rows
        at = self._flat(self.head)
        differs = [(self.data[name].index_select(0, at) != leaf).reshape(len(at), -1) for name, leaf in begin.items()]
        has_left = self.is_started & real & (differs[0] if len(differs) == 1 else torch.cat(differs, 1)).any(1)
        self._write(self.columns, slice(None), begin, step, end, has_left, real, put)

    def _write(
        self,
        columns: Any,
        lane: Any,
        begin: Mapping[str, Any],
        step: Mapping[str, Any],
        end: Mapping[str, Any],
        has_left: Any,
        real: Any,
        put: Any,
        length: int | None = None,
    ) -> None:
        """Write steps by `put(column, rows, values)`: one of every environment where it is `real`, or `length` of one.

        Where an environment `has_left`, the step does not begin where the last one led to.

        For one environment on a CPU, `lane` 0, columns are arrays, and rows numbers: much faster than fifty operations
        on small tensors, with the same arithmetic. Otherwise `lane` is a slice of the environments.
        """
        num_rows, holds_step = self.num_rows, columns["holds_step"]
        head, count = columns["head"][lane], columns["count"][lane]
        env, offsets, added = None, 0, real
        if length is not None:
            env, offsets, added = lane.start, torch.arange(length, device=self.device), length
        # The final observation of an episode that was left keeps its row.
        columns["ends"][self._flat((head - 1) % num_rows, env)] |= has_left
        first = head + has_left
        rows, next_row = (first + offsets) % num_rows, (first + added) % num_rows
        at, after = self._flat(rows, env), self._flat(next_row, env)
        # Steps in these rows are overwritten. Where the head has not moved its row holds none.
        overwritten = holds_step[at] if length is None else holds_step[at].sum()
        columns["size"][lane] -= 0 + overwritten + holds_step[after]
        columns["size"][lane] += added
        for name, value in begin.items():
            put(columns[name], at, value)
        for name, value in step.items():
            put(columns[name], at, value)
        put(columns["order"], self._flat((count + offsets) % num_rows, env), rows)
        put(holds_step, at, real)
        for name, value in end.items():
            put(columns[name], after, value)
        put(holds_step, after, False)
        columns["head"][lane] = next_row
        columns["count"][lane] += added
        columns["is_started"][lane] |= real

    def _make_arrays(self) -> dict[str, Any]:
        self.arrays = {name: column.numpy() for name, column in self.columns.items()}
        # A memoryview gives Python's numbers, with which arithmetic is faster than with NumPy's.
        self.arrays |= {name: memoryview(self.arrays[name]) for name in COUNTED}
        return self.arrays

    def _flat(self, rows: Any, env: Any = None) -> Any:
        """Places of rows of environments, by default of one row of each."""
        if self.num_envs == 1:
            return rows
        return rows * self.num_envs + (self.envs if env is None else env)

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
        fields = {name: data[name].index_select(0, first) for name in self.extra_fields}
        obs, critic_obs = self._observed(first)
        next_obs, next_critic_obs = self._observed(after)
        return ReplayBatch(
            obs, critic_obs, actions, rewards, next_obs, next_critic_obs, dones, discounts, fields=fields
        )

    def _observed(self, at: Tensor) -> tuple[Any, Any]:
        found = {name: self.data[name].index_select(0, at) for name in self.observed}
        obs = found[OBSERVED[0]] if OBSERVED[0] in found else nested(found, OBSERVED[0])
        if self.critic_obs_shape is None:
            return obs, obs
        return obs, found[OBSERVED[1]] if OBSERVED[1] in found else nested(found, OBSERVED[1])

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


def put_rows(column: Tensor, rows: Tensor, values: Tensor | bool) -> None:
    """Write the rows of a tensor."""
    if isinstance(values, bool):
        column.index_fill_(0, rows, values)
    else:
        column.index_copy_(0, rows, values.reshape(len(rows), *column.shape[1:]).to(column.device, column.dtype))


def put_valid_rows(valid: Tensor, column: Tensor, rows: Tensor, values: Tensor | bool) -> None:
    """Write the rows of a tensor that are `valid`."""
    kept = column.index_select(0, rows)
    new = kept & values if isinstance(values, bool) else values.reshape(kept.shape).to(column.dtype)
    column.index_copy_(0, rows, torch.where(valid.view(-1, *[1] * (kept.dim() - 1)), new, kept))


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

    def add(self, *args: Any, env: int | None = None, **kwargs: Any) -> None:
        """Store one step of every environment, or several of one, with the highest priority."""
        if env is not None:
            first = int(self.count[env])
            super().add(*args, env=env, **kwargs)
            slots = torch.arange(first, int(self.count[env]), device=self.device) % self.num_rows * self.num_envs + env
            self.data["priorities"][self.data["order"][slots].long() * self.num_envs + env] = self.highest
            self.rebuild()
            return
        super().add(*args, **kwargs)
        newest = self._flat((self.head - 1) % self.num_rows)  # a head is on a row without a step
        held = self.data["holds_step"][newest]
        self.data["priorities"][newest] = torch.where(held, self.highest, self.data["priorities"][newest])
        for back in range(3):  # a head moves by two rows at most; steps in its way are overwritten
            changed = self._flat((self.head - back) % self.num_rows)
            self.tree.put(changed, self._powers(changed))

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
