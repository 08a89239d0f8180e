"""Rollout storage: one tensor (T, N, ...) per declared field, with returns, advantages and minibatches of them."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from canter.compat.arguments import also_here
from canter.compat.names import StorageNames
from canter.storage.trajectories import Trajectories, episode_starts, start_positions, trajectory_index
from canter.utils.distributed import RANKS
from canter.utils.memory import check_memory
from canter.utils.tree import Obs, nested, tree_leaves

Scalar = float | Tensor  # a 0-dim tensor


class Field(NamedTuple):
    """Declaration of one stored quantity."""

    shape: tuple[int, ...]  # of one step of one environment
    batch: str | None = None  # name in a minibatch, dotted for an entry of a dict; None or "" leaves it out
    source: str | None = None  # name in a transition, dotted for an entry of a dict; None if it is computed
    dtype: torch.dtype = torch.float32
    default: float | None = None  # stored where a transition lacks the field; None makes that an error


def dict_entry(attribute: str, key: str, doc: str, writable: bool = False) -> Any:
    """A property for one entry of the dict `attribute`; None if it is absent."""

    def write(owner: Any, value: Any) -> None:
        setattr(owner, attribute, {**getattr(owner, attribute), key: value})

    return property(lambda owner: getattr(owner, attribute).get(key), write if writable else None, doc=doc)


class MiniBatch:
    """One minibatch: flat fields (B, ...), or (T, n, ...) together with `trajectories` and `hidden` if recurrent."""

    obs: Obs
    critic_obs: Obs
    actions: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    old_actions_log_prob: Tensor
    old_params: dict[str, Tensor]  # parameters of the action distribution while collecting
    valid: Tensor | None = None  # (B,) or (T, n) mask of the steps to learn from; None for all
    learned: Tensor | None = None  # mask of the steps that the surrogate loss learns from; None for the valid ones
    hidden: dict[str, Tensor]  # (M, S, L, H) memory state at the first step of each trajectory, by memory name
    trajectories: Trajectories | None = None
    random_masks: Mapping[str, Tensor] = MappingProxyType({})  # (..., 1) each, drawn while collecting
    old_mu = dict_entry("old_params", "mu", "Mean of the Gaussian that the actions were sampled from.")
    old_sigma = dict_entry("old_params", "sigma", "Standard deviation of that Gaussian.")

    def __init__(self, **fields: Any) -> None:
        for name, value in fields.items():  # not a SimpleNamespace, which torch.compile cannot trace
            setattr(self, name, value)

    def mean(self, x: Tensor) -> Tensor:
        """Mean of a per-step quantity over the valid steps."""
        return x.mean() if self.valid is None else masked_mean(x, self.valid)

    @property
    def masks(self) -> Tensor | None:
        """(T, M) mask of real steps in the padded layout, None for flat batches."""
        return None if self.trajectories is None else self.trajectories.masks

    @property
    def hidden_states(self) -> Any:
        """`hidden` as `policy.act` and `policy.evaluate` take it: (actor, critic); None without memories."""
        from canter.modules.actor_critic_recurrent import ActorCriticHiddenState  # which imports the storage

        return ActorCriticHiddenState(self.hidden, self.hidden) if self.hidden else None


class Transition:
    """One step of N environments. Attribute names are the sources of the declared fields."""

    observations: Obs | None = None
    critic_observations: Obs | None = None
    actions: Tensor | None = None
    rewards: Tensor | None = None
    dones: Tensor | None = None
    truncated: Tensor | None = None
    values: Tensor | None = None
    actions_log_prob: Tensor | None = None
    params: Mapping[str, Tensor] = MappingProxyType({})
    hidden: Mapping[str, Tensor] = MappingProxyType({})  # memory state before the step
    hidden_states: Any = None  # the same as `policy.get_hidden_states()` gives it
    random_masks: Mapping[str, Tensor] = MappingProxyType({})
    valid: Tensor | None = None
    action_mean = dict_entry("params", "mu", "Mean of the Gaussian that the action was sampled from.", True)
    action_sigma = dict_entry("params", "sigma", "Standard deviation of that Gaussian.", True)

    def clear(self) -> None:
        """Drop all values."""
        self.__dict__ = {}


class RolloutStorage(StorageNames):
    """The last rollout: T steps of N environments, one tensor per field.

    Args:
        obs_shape: Shape of one observation, or a nested dict of shapes or `Field`s.
        privileged_obs_shape: The same for the critic; None or [None] if the critic uses the actor's observation.
        param_shapes: Shapes of the stored parameters of the action distribution; a Gaussian's by default.
        hidden_shapes: Shape (S, L, H) of the state of one environment, by memory name.
        random_masks: Names of the policy's random masks.
        has_invalid_steps: Whether some steps are excluded from learning.
        extra_fields: Further fields, by name. Source and name in the minibatch default to the field's own name.
    """

    Transition = Transition
    MiniBatch = MiniBatch
    older = 0  # rows of earlier rollouts
    unpack_hidden: Any = None  # gives memories by name for what `policy.get_hidden_states()` returns

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
        random_masks: Iterable[str] = (),
        has_invalid_steps: bool = False,
        extra_fields: Mapping[str, Field] | None = None,
    ) -> None:
        self.num_envs, self.num_transitions_per_env = num_envs, num_transitions_per_env
        self.device = torch.device(device)
        self.obs_shape, self.actions_shape, self.action_dtype = obs_shape, tuple(actions_shape), action_dtype
        self.privileged_obs_shape = None if is_absent(privileged_obs_shape) else privileged_obs_shape
        self.param_shapes = dict(param_shapes or {"mu": self.actions_shape, "sigma": self.actions_shape})
        self.hidden_shapes = dict(hidden_shapes or {})
        self.random_mask_names, self.has_invalid_steps = tuple(random_masks), has_invalid_steps
        self.fields = self.declare_fields()
        for name, field in (extra_fields or {}).items():
            field = field._replace(batch=name if field.batch is None else field.batch, source=field.source or name)
            if name in self.fields or field.batch in {f.batch for f in self.fields.values() if f.batch}:
                raise ValueError(f"extra_fields: {name!r} (in a minibatch {field.batch!r}) is declared already")
            self.fields[name] = field
        way_out = "make num_envs or num_steps_per_env smaller"
        check_memory("rollout", self.fields, num_transitions_per_env, num_envs, self.device, way_out)
        self.data = {name: self._zeros(field) for name, field in self.fields.items()}
        self.step = 0
        """Steps of the rollout that are stored."""
        self.num_finished = 0
        """Steps whose rewards are those to learn from; the others have the environment's."""
        self.rows = torch.arange(num_transitions_per_env, device=self.device).view(-1, 1)
        """(T, 1) row of each step of the rollout."""
        # Of each field: name, entry of a transition and the rest of the path to it, default, shape and size of a row.
        self._written = []
        for name, field in self.fields.items():
            if field.source:
                default = None if field.default is None else self.data[name].new_full((), field.default)
                shape, (entry, *rest) = (num_envs, *field.shape), field.source.split(".")
                self._written.append((name, entry, rest, default, shape, math.prod(shape)))
        # Of each field: name, and path in a minibatch.
        self._batched = [(name, f.batch.split(".")) for name, f in self.fields.items() if f.batch]

    def declare_fields(self) -> dict[str, Field]:
        """Every stored field by name. Extended by subclasses."""
        fields = observation_fields("observations", self.obs_shape, "obs", "observations")
        shape = self.privileged_obs_shape
        fields |= observation_fields("privileged_observations", shape, "critic_obs", "critic_observations")
        fields |= {
            "actions": Field(self.actions_shape, "actions", "actions", self.action_dtype),
            "rewards": Field((1,), None, "rewards"),
            "env_rewards": Field((1,), None, "env_rewards", default=math.nan),  # which episode statistics are of
            "dones": Field((1,), None, "dones", torch.bool),
            "truncated": Field((1,), None, "truncated", torch.bool, default=False),
            "final_values": Field((1,), None, "final_values", default=math.nan),  # NaN without a final observation
            "values": Field((1,), "values", "values"),
            "returns": Field((1,), "returns"),
            "advantages": Field((1,), "advantages"),
            "actions_log_prob": Field((1,), "old_actions_log_prob", "actions_log_prob"),
        }
        fields |= {name: Field(s, f"old_params.{name}", f"params.{name}") for name, s in self.param_shapes.items()}
        fields |= {f"hidden.{name}": Field(s, None, f"hidden.{name}") for name, s in self.hidden_shapes.items()}
        for name in (f"random_masks.{mask}" for mask in self.random_mask_names):
            fields[name] = Field((1,), name, name, torch.bool)
        if self.has_invalid_steps:
            fields["valid"] = Field((1,), "valid", "valid", torch.bool)
        return fields

    def _zeros(self, field: Field) -> Tensor:
        shape = (self.num_transitions_per_env, self.num_envs, *field.shape)
        return torch.zeros(shape, dtype=field.dtype, device=self.device)

    def add_transitions(self, transition: Transition) -> None:
        """Store one transition."""
        self.add(vars(transition))

    def add(self, transition: Mapping[str, Any]) -> None:
        """Store one transition, given as a mapping from the fields' sources to (N, ...) tensors."""
        self.check_space()
        if "rewards" in transition:
            transition = {"env_rewards": transition["rewards"], **transition}
        if transition.get("hidden_states") is not None:
            transition = {**transition, "hidden": self.unpack_hidden(transition["hidden_states"])}
        self.put(self.next_row, transition)
        self.step += 1

    def check_space(self) -> None:
        """Raise if the storage is full."""
        if self.step >= (limit := self.num_transitions_per_env):
            raise AssertionError(f"Rollout buffer overflow: it holds {limit} steps; call clear() first")

    @property
    def next_row(self) -> int:
        """Row of the next step."""
        return self.step

    def put(self, row: int | Tensor, values: Mapping[str, Any]) -> None:
        """Copy one step, (N, ...) tensors by source, to a row; the caller increments `step`.

        The row is a number, or a (1,) tensor of `rows`, which a captured function reads anew in every replay.
        """
        columns, missing = [], []
        for name, entry, rest, default, shape, size in self._written:
            value = values.get(entry)
            for key in rest:
                value = value.get(key) if isinstance(value, Mapping) else None
            value = default if value is None else value
            if not isinstance(value, Tensor):
                missing.append(name)
            elif value.shape != shape:
                # (N,) is stored as (N, 1); a parameter that all environments share, (A,), as (N, A)
                value = value.reshape(shape) if value.numel() == size else value.expand(shape)
            columns.append((self.data[name], value))
        if missing:
            raise ValueError(f"the transition lacks {', '.join(missing)}; it has {', '.join(values)}")
        for data, value in columns:
            if isinstance(row, int):
                data[row].copy_(value)
            else:
                data.index_copy_(0, row, value.unsqueeze(0).to(data.dtype))

    def clear(self) -> None:
        """Start the next rollout."""
        self.step = self.num_finished = 0

    def untie_buffer_loop(self) -> None:
        """Put the rows in the order of time, where they are a ring."""

    @property
    def newest(self) -> slice:
        """Rows of the last rollout, in the order of time after `untie_buffer_loop`."""
        stop = min(len(self.data["rewards"]), self.older + self.step)
        return slice(stop - self.step, stop)

    @property
    def newest_valid(self) -> Tensor | None:
        """(T, N) mask of the valid steps in the last rollout; None if all are."""
        return self.data["valid"][self.newest].squeeze(-1) if self.has_invalid_steps else None

    def column(self, name: str) -> Tensor:
        """(T, N, ...) of a field in the newest rollout; (T, N) if it is one number a step."""
        rows = self.data[name][self.newest]
        return rows.squeeze(-1) if self.fields[name].shape == (1,) else rows

    def env_steps(self) -> tuple[Tensor, Tensor, Tensor]:
        """(T, N) rewards as the environment gave them, ends of episodes, and whether a step is valid."""
        done = self.column("dones")
        valid = self.column("valid") if self.has_invalid_steps else torch.ones_like(done)
        return self.column("env_rewards"), done & valid, valid

    @property
    def filled(self) -> int:
        """Number of rows to learn from."""
        return self.newest.stop

    def __getattr__(self, name: str) -> Any:
        data = self.__dict__.get("data", {})
        if name in data:
            return data[name]
        if tree := nested(data, name):
            return tree
        raise AttributeError(f"{type(self).__name__} has no field {name!r}; it has {', '.join(data)}")

    @property
    def privileged_observations(self) -> Any:
        """(T, N, ...) critic observations, None if the critic uses the actor's."""
        return None if self.privileged_obs_shape is None else self.__getattr__("privileged_observations")

    def compute_returns(self, last_values: Tensor, gamma: Scalar, lam: Scalar, normalize: bool = True) -> None:
        """Fill `returns` and `advantages` of the newest rows; with `normalize`, advantages get mean 0 and std 1.

        A field "ends", where an extension declares one, is the probability with which each step ended its episode.
        """
        rows, data = self.newest, self.data
        ends = data.get("ends", data["dones"])[rows]
        advantages = gae(data["rewards"][rows], data["values"][rows], ends, last_values, gamma, lam)
        data["returns"][rows].copy_(advantages + data["values"][rows])
        if normalize:
            advantages = normalize_advantages(advantages, data["valid"][rows] if self.has_invalid_steps else None)
        data["advantages"][rows].copy_(advantages)

    def get_statistics(self) -> tuple[Tensor, Tensor]:
        """Mean length of the trajectories in the rollout, and mean reward."""
        starts = episode_starts(self.data["dones"][: self.step].squeeze(-1))
        valid = self.data["valid"][: self.step].squeeze(-1) if self.has_invalid_steps else torch.ones_like(starts)
        return valid.sum() / (starts & valid).sum(), masked_mean(self.data["rewards"][: self.step], valid)

    def mini_batch_generator(
        self, num_mini_batches: int, num_epochs: int = 8, generator: Generator | None = None
    ) -> Iterator[MiniBatch]:
        """Flat minibatches; every epoch is a new permutation of all steps."""
        for _ in range(num_epochs):
            for index in self.step_minibatches(num_mini_batches, generator):
                yield self.take(index)

    def step_minibatches(self, num_mini_batches: int, generator: Generator | None = None) -> Sequence[Tensor]:
        """Random split of all steps into minibatches: flat (T * N) indices of each."""
        total = (self.older + self.step) * self.num_envs
        if not 1 <= num_mini_batches <= total:
            raise ValueError(f"num_mini_batches={num_mini_batches} does not fit {total} steps")
        return torch.randperm(total, generator=generator, device=self.device).tensor_split(num_mini_batches)

    def take(self, index: Tensor) -> MiniBatch:
        """Minibatch of the steps at flat (T * N) indices of any shape."""
        batch: dict[str, Any] = {"old_params": {}, "random_masks": {}, "hidden": {}}
        for name, path in self._batched:
            node = batch
            for key in path[:-1]:
                node = node.setdefault(key, {})
            rows = self.data[name].flatten(0, 1)
            node[path[-1]] = rows.index_select(0, index) if index.dim() == 1 else rows[index]  # the first is faster
        if self.privileged_obs_shape is None:
            batch["critic_obs"] = batch["obs"]
        if self.has_invalid_steps:
            batch["valid"] = batch["valid"].squeeze(-1)
        return MiniBatch(**batch)

    def recurrent_mini_batch_generator(
        self, num_mini_batches: int, num_epochs: int = 8, generator: Generator | None = None
    ) -> Iterator[MiniBatch]:
        """Minibatches of whole environments (T, n, ...), cut into trajectories; every epoch is a new permutation."""
        for envs, total in self.env_minibatches(num_mini_batches, num_epochs, generator):
            yield self.take_envs(envs, total)

    def env_minibatches(
        self, num_mini_batches: int, num_epochs: int = 1, generator: Generator | None = None
    ) -> list[tuple[Tensor, int]]:
        """Environments of each minibatch of each epoch, and their number of trajectories; one host read in all."""
        if not 1 <= num_mini_batches <= self.num_envs:
            raise ValueError(f"num_mini_batches={num_mini_batches} does not fit {self.num_envs} environments")
        orders = [torch.randperm(self.num_envs, generator=generator, device=self.device) for _ in range(num_epochs)]
        groups = [envs for order in orders for envs in order.tensor_split(num_mini_batches)]
        per_env = self._starts().sum(0)
        return list(zip(groups, torch.stack([per_env[envs].sum() for envs in groups]).tolist(), strict=True))

    def take_envs(self, envs: Tensor, total: int) -> MiniBatch:
        """Minibatch of the rollouts of some environments, cut into at most `total` trajectories."""
        index = torch.arange(self.filled, device=self.device).unsqueeze(1) * self.num_envs + envs  # (T, n)
        starts = self._starts()[:, envs]
        row, column = trajectory_index(starts)
        first = index.flatten()[start_positions(starts, column, total)]  # (M,)
        batch = self.take(index)
        batch.hidden = {name: self.data[f"hidden.{name}"].flatten(0, 1)[first] for name in self.hidden_shapes}
        batch.trajectories = Trajectories(row, column, total)
        return batch

    def _starts(self) -> Tensor:
        return episode_starts(self.data["dones"][: self.filled].squeeze(-1))  # (T, N)


def gae(rewards: Tensor, values: Tensor, ends: Tensor, last_values: Tensor, gamma: Scalar, lam: Scalar) -> Tensor:
    """Generalised advantage estimates (Schulman 2016, eq. 16); all (T, N, 1) but last_values (N, 1).

    `ends` is a bool, or the probability of an end, which ends the sum. The value of a state in which an episode was
    truncated must be part of its last reward.
    """
    discount = (1.0 - ends.to(rewards.dtype)) * gamma
    deltas = torch.addcmul(rewards - values, discount, torch.cat([values[1:], last_values.unsqueeze(0)]))
    decay = discount * lam
    advantage, advantages = torch.zeros_like(last_values), []
    for delta, factor in zip(reversed(deltas.unbind()), reversed(decay.unbind()), strict=True):
        advantage = torch.addcmul(delta, factor, advantage)
        advantages.append(advantage)
    return torch.stack(advantages[::-1])


def masked_mean(x: Tensor, valid: Tensor | None) -> Tensor:
    """Mean of x over the entries where `valid` (broadcast from the left) is true; over all if it is None."""
    if valid is None:
        return x.mean()
    weight = valid.view(*valid.shape, *[1] * (x.dim() - valid.dim())).expand_as(x)
    return torch.where(weight, x, 0.0).sum() / weight.sum().clamp(min=1)


def normalize_advantages(advantages: Tensor, valid: Tensor | None = None) -> Tensor:
    """Advantages with mean 0 and (unbiased) standard deviation 1 over the valid entries, of all ranks together."""
    if RANKS.size > 1:
        rows = advantages.new_full((), advantages.numel()) if valid is None else valid.sum().to(advantages.dtype)
        mean = masked_mean(advantages, valid)
        count, mean, variance = RANKS.merge(rows, mean, masked_mean((advantages - mean).square(), valid))
        return (advantages - mean) / ((variance * (count / (count - 1).clamp(min=1))).sqrt() + 1e-8)
    if valid is None and advantages.numel() > 1:
        std, mean = torch.std_mean(advantages)
        return (advantages - mean) / (std + 1e-8)
    count = advantages.new_ones(()) if valid is None else valid.sum().to(advantages.dtype)
    centred = advantages - masked_mean(advantages, valid)
    variance = masked_mean(centred**2, valid) * count / (count - 1).clamp(min=1)
    return centred / (variance.sqrt() + 1e-8)


def is_absent(shape: Any) -> bool:
    """Whether a shape argument means "no such observation": None or [None]."""
    return shape is None or (not isinstance(shape, Mapping) and len(shape) > 0 and shape[0] is None)


def observation_fields(
    name: str, shape: Any, batch: str, source: str, dtype: torch.dtype = torch.float32
) -> dict[str, Field]:
    """One field, or one per leaf of a nested dict of shapes, of `dtype` if it is no `Field`; none for None."""
    fields = {}
    for path, leaf in () if shape is None else tree_leaves(shape):
        dotted = f".{path}" if path else ""
        leaf = leaf if isinstance(leaf, Field) else Field(tuple(leaf), dtype=dtype)
        fields[name + dotted] = Field(leaf.shape, batch + dotted, source + dotted, leaf.dtype)
    return fields


_RINGS = "canter.storage.queue_rollout_storage"
__getattr__ = also_here(
    QueueRolloutStorage=_RINGS, ActionLabelRollout=_RINGS, AmpRolloutStorage=_RINGS, SarsaRolloutStorage=_RINGS
)
