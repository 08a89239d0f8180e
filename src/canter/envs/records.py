"""Builds a `StepRecord` from the results of any environment: dtypes, groups, end flags and final observations."""

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from canter.compat.spellings import (
    ACTOR_GROUPS,
    CRITIC_GROUPS,
    FINAL_CRITIC_OBS_NAMES,
    FINAL_OBS_NAMES,
    PLAYGROUND_PAIR,
    PRIVILEGED,
)
from canter.envs.vec_env import StepRecord
from canter.utils.tree import Obs, tree_leaves, tree_map

_FINAL_NAMES = {*FINAL_OBS_NAMES, *FINAL_CRITIC_OBS_NAMES}
DISAGREEMENT = "dones differ from terminated | truncated; an episode ends where either says so, "
DISAGREEMENT += "and without bootstrap where only dones says so"

_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Warn, but never twice with the same message."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=3)


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which canter stores an observation: uint8 stays (images), everything else becomes float32."""
    return dtype if dtype == torch.uint8 else torch.float32


def to_obs(obs: Any, device: torch.device | None = None, copy: bool = False) -> Any:
    """Tensors or arrays in stored dtypes on `device`; with `copy` they share no memory with `obs`."""

    def convert(value: Any) -> Tensor:
        leaf = torch.as_tensor(value).detach()
        dtype = stored_dtype(leaf.dtype)
        return leaf.to(device or leaf.device, dtype, copy=copy, memory_format=torch.contiguous_format)

    return tree_map(convert, obs)


def per_env(value: Any, dtype: torch.dtype, name: str, num_envs: int, device: torch.device, copy: bool) -> Tensor:
    """(N,) tensor from (N,), (N, 1) or, for one environment, a scalar, of any dtype; any other shape is an error."""
    tensor = torch.as_tensor(value).detach()
    if tensor.shape not in {(num_envs,), (num_envs, 1)} and (num_envs > 1 or tensor.dim()):
        raise ValueError(f"{name} of {num_envs} environments must have shape ({num_envs},), got {tuple(tensor.shape)}")
    return tensor.reshape(num_envs).to(device, dtype, copy=copy)


def group_sets(names: Iterable[str]) -> tuple[list[str], list[str]] | None:
    """Groups of the actor and of the critic by their names; None if they are the parts of one observation.

    The critic sees its own group; with a group "privileged" it sees that beside the actor's.
    """
    names = list(names)
    if all(name in names for name in PLAYGROUND_PAIR):
        return [PLAYGROUND_PAIR[0]], [PLAYGROUND_PAIR[1]]
    own = next(([name] for name in CRITIC_GROUPS if name in names), [])
    more = [name for name in names if name == PRIVILEGED]
    actor = next(([name] for name in ACTOR_GROUPS if name in names), [])
    if not actor and (own or more):
        actor = [name for name in names if name not in (*CRITIC_GROUPS, PRIVILEGED)]
    return (actor, (own or actor) + more) if actor else None


@functools.cache
def split_names(names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Keys of a dict observation that the actor and the critic see; a key that no name gives to one is the actor's."""
    actor, critic = group_sets(names) or (names, names)
    rest = [name for name in names if name not in (*actor, *critic)]
    if rest:  # two names for a critic's group are no reason to show one of them to the actor
        rest = [name for name in rest if name not in (*CRITIC_GROUPS, PRIVILEGED)]
        critic = [*critic, *rest] if set(actor) <= set(critic) else critic
        actor = [*actor, *rest]
    unused = [name for name in names if name not in (*actor, *critic)]
    if unused:
        warn_once(f"the observation's {unused} are used by no network, because the critic's group is {list(critic)}")
    both = (set(actor), set(critic))
    return tuple(n for n in names if n in both[0]), tuple(n for n in names if n in both[1])


def split_groups(obs: Any) -> tuple[Any, Any]:
    """The actor's and the critic's part of an observation or a space; the same object if the critic has no own one."""
    groups = obs.spaces if isinstance(obs, spaces.Dict) else obs
    if not isinstance(groups, Mapping):
        return obs, obs
    names = tuple(name for name, group in groups.items() if group is not None)
    actor, critic = split_names(names)
    seen = keys_of(obs, groups, actor)
    return seen, seen if actor == critic else keys_of(obs, groups, critic)


def split_sets(groups: Any) -> tuple[Any, Any]:
    """The actor's and the critic's groups of a batched environment; unlike a dict observation it may have others."""
    sets = group_sets(groups) if isinstance(groups, Mapping) else None
    if sets is None:
        return groups, groups
    actor, critic = (keys_of(groups, groups, tuple(names)) for names in sets)
    return actor, actor if sets[0] == sets[1] else critic


def keys_of(obs: Any, groups: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """Some parts of a dict observation or its space: a lone group by itself, else a dict of them."""
    if len(names) == 1 and (len(groups) > 1 or names[0] in ACTOR_GROUPS):
        return groups[names[0]]
    if len(names) == len(groups):
        return obs
    parts = [(name, groups[name]) for name in names]
    return spaces.Dict(parts) if isinstance(obs, spaces.Dict) else dict(parts)


def join_groups(groups: Mapping[str, Any], names: Sequence[str]) -> tuple[Obs, dict[str, tuple[int, ...]] | None]:
    """The named groups as one vector with its segments, or as a flat dict if one of them is not a vector."""
    # ApexRL's actors take the dict under these names.
    if len(names) == 1 and names[0] in ("obs", "privileged_obs", "critic_obs"):
        return groups[names[0]], None
    leaves = dict(tree_leaves({name: groups[name] for name in names}))
    if len(leaves) == 1:
        return next(iter(leaves.values())), None
    short = [name.rpartition(".")[2] for name in leaves]
    keys = short if len(set(short)) == len(short) else list(leaves)
    named = dict(zip(keys, leaves.values(), strict=True))
    if any(leaf.dim() != 2 or leaf.dtype == torch.uint8 for leaf in named.values()):
        return named, None
    return torch.cat(list(named.values()), dim=1), {name: tuple(leaf.shape[1:]) for name, leaf in named.items()}


def take_groups(groups: Mapping[str, Any], names: Sequence[str]) -> Obs:
    """The observation that `names`, the actor's or the critic's set, make of the groups an environment returns."""
    if missing := [name for name in names if name not in groups]:
        raise KeyError(f"the groups {list(names)} are observed, but {missing[0]!r} is none of {list(groups)}")
    return join_groups(to_obs({name: groups[name] for name in names}), names)[0]


class EndWatch:
    """Reports, without waiting for the device, whether any mask so far had a true row; may be a few steps late."""

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):  # may be constructed in inference mode and written to outside it
            self._any = torch.zeros((), dtype=torch.bool, device=device)
            self._copy = torch.zeros((), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._seen = np.from_dlpack(self._copy)  # a view: asynchronous copies from the device arrive in it

    def __call__(self, mask: Tensor) -> bool:
        """Add one mask."""
        self._any.logical_or_(mask.any())
        self._copy.copy_(self._any, non_blocking=True)
        return bool(self._seen)


_disagreements: dict[torch.device, EndWatch] = {}


def end_flags(dones: Any, extras: Mapping[str, Any], num_envs: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`terminated` and `truncated` (N,), disjoint, from `dones` and whichever flags the extras contain."""

    def flag(name: str, value: Any) -> Any:
        return None if value is None else per_env(value, torch.bool, name, num_envs, device, copy=False)

    done = flag("dones", dones)
    terminated, truncated = (flag(name, extras.get(name)) for name in ("terminated", "truncated"))
    is_stated = truncated is not None
    if not is_stated and extras.get("time_outs") is not None:
        # legged_gym writes time_outs only on steps that reset an environment: it is stale on the others.
        truncated = done & flag("time_outs", extras["time_outs"])
    if terminated is None:
        terminated = done if truncated is None else done & ~truncated
    if truncated is None:
        truncated = done & ~terminated
    ended = terminated | truncated
    # Without "truncated" they agree by construction.
    if is_stated and DISAGREEMENT not in _warned:
        if done.device not in _disagreements:
            _disagreements[done.device] = EndWatch(done.device)
        if _disagreements[done.device](ended != done):
            warn_once(DISAGREEMENT)
    terminated = terminated | (done & ~ended)
    return terminated, truncated & ~terminated


def find_final(extras: Mapping[str, Any]) -> Any:
    """The final observation under any name that environments use, None if there is none."""
    for name in FINAL_OBS_NAMES:
        value = extras.get(name)
        # "terminal" is also the name of a flag in some environments.
        if value is not None and (name != "terminal" or isinstance(value, Mapping)):
            return value
    groups = extras.get("observations")
    return groups.get("raw") if isinstance(groups, Mapping) else None


def full_final(final: Any, done: Tensor, copy: bool = False) -> Any:
    """A final observation as a full batch on the device of `done`; rows of running episodes may hold anything."""
    if isinstance(final, Mapping) and "env_ids" in final and "observations" in final:
        ids = torch.as_tensor(final["env_ids"]).reshape(-1)
        return tree_map(lambda leaf: _scatter(leaf, ids, done), final["observations"])
    batch = tree_map(lambda leaf: _full_leaf(leaf, done), final)
    return None if any(leaf is None for _, leaf in tree_leaves(batch)) else to_obs(batch, done.device, copy)


def _full_leaf(leaf: Any, done: Tensor) -> Any:
    if isinstance(leaf, (list, tuple)) or (isinstance(leaf, np.ndarray) and leaf.dtype == object):
        return _stack_rows(list(leaf), done)
    leaf = torch.as_tensor(leaf)
    num_rows = leaf.shape[0] if leaf.dim() else None
    if num_rows == len(done):
        return leaf
    # Only rows of ended environments: finding their indices waits for the device.
    indices = done.nonzero().squeeze(1)
    if num_rows != len(indices):
        want = f"{len(done)} (every environment) or {len(indices)} (those that ended)"
        raise ValueError(f"final observation has shape {tuple(leaf.shape)}; its first dimension must be {want}")
    return _scatter(leaf, indices, done) if len(indices) else None


def _scatter(rows: Any, indices: Tensor, done: Tensor) -> Tensor:
    leaf = to_obs(rows, done.device)
    return leaf.new_zeros(len(done), *leaf.shape[1:]).index_copy_(0, indices.to(done.device, torch.int64), leaf)


def _stack_rows(rows: Sequence[Any], done: Tensor) -> Any:
    """A batch from one entry per environment; entries of running episodes may be None."""
    example = next((row for row in rows if row is not None), None)
    if example is None:
        return None
    if isinstance(example, Mapping):
        return {k: _stack_rows([None if row is None else row[k] for row in rows], done) for k in example}
    missing = [index for index, ended in enumerate(done.tolist()) if ended and rows[index] is None]
    if missing:
        raise ValueError(f"environment {missing[0]} ended, but its final observation is None")
    blank = np.zeros_like(np.asarray(example))
    return torch.as_tensor(np.stack([blank if row is None else np.asarray(row) for row in rows]))


def step_record(
    obs: Any,
    critic_obs: Any,
    rewards: Any,
    dones: Any,
    extras: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    valid: Tensor | None = None,
    *,
    device: torch.device | None = None,
    split: Callable[[Any], tuple[Any, Any]] = split_sets,
    copy: bool = False,
) -> StepRecord:
    """Build a step record from the results of any environment.

    `obs` and `critic_obs` may be None where only the rest is needed. A final observation without a critic's part
    serves both if the two observations are the same object, otherwise the critic's is unknown. `extras` may be one
    info per environment, as SB3 returns them. `split` returns the actor's and the critic's part of a final
    observation. With `copy`, every tensor is independent of the environment's buffers.
    """
    if isinstance(extras, Mapping):
        given = dict(extras)
    else:
        infos = extras or ()
        names = {name: None for info in infos for name in info if name in FINAL_OBS_NAMES}
        given = {"infos": infos, **{name: [info.get(name) for info in infos] for name in names}}
    rewards = torch.as_tensor(rewards)
    target: torch.device = rewards.device if device is None else device
    num_envs = rewards.shape[0] if rewards.dim() else 1
    reward = per_env(rewards, torch.float32, "rewards", num_envs, target, copy)
    terminated, truncated = end_flags(dones, given, num_envs, target)
    done = terminated | truncated
    if valid is None:
        valid = per_env(given.get("valid", torch.ones_like(done)), torch.bool, "valid", num_envs, target, copy)
    found = find_final(given)
    batch = None if found is None else full_final(found, done, copy)
    final_obs, final_critic_obs, others = None, None, {}
    if batch is not None:
        final_obs, final_critic_obs = split(batch)
        if isinstance(batch, Mapping) and batch is not final_obs:
            others = {n: g for n, g in batch.items() if g is not final_obs and g is not final_critic_obs}
        named = next((given[name] for name in FINAL_CRITIC_OBS_NAMES if given.get(name) is not None), None)
        if named is not None:
            final_critic_obs = full_final(named, done, copy)
        elif final_critic_obs is final_obs and critic_obs is not obs:
            final_critic_obs = None
        for name, final, now in (("obs", final_obs, obs), ("critic_obs", final_critic_obs, critic_obs)):
            check_shapes(name, final, now)
    given.pop("final_observation", None)
    record = StepRecord(obs, critic_obs, reward, terminated, truncated, final_obs, final_critic_obs, valid, given)
    return fill_extras(record, others)


def check_shapes(name: str, final: Any, obs: Any) -> None:
    """Raise if a final observation lacks a part of the observation, or has it in another shape; either may be None."""
    if final is None or obs is None:
        return
    got, want = ({part: tuple(leaf.shape) for part, leaf in tree_leaves(tree, name)} for tree in (final, obs))
    if any(got.get(part) != shape for part, shape in want.items()):
        raise ValueError(f"the final observation has shapes {got}, the observation {want}")


def with_obs(record: StepRecord, obs: tuple[Any, Any], final: tuple[Any, Any]) -> StepRecord:
    """The record with other observations and final observations, each the actor's and the critic's."""
    names = ("obs", "critic_obs", "final_obs", "final_critic_obs")
    return fill_extras(record._replace(**dict(zip(names, (*obs, *final), strict=True))))


def fill_extras(record: StepRecord, final_groups: Mapping[str, Any] | None = None) -> StepRecord:
    """Copy the record's flags and final observations into `extras`, for code that receives only those.

    `final_groups` are final observation groups of neither the actor nor the critic, AMP features for example; those
    that `extras` contains already are kept.
    """
    extras = {name: value for name, value in record.extras.items() if name not in _FINAL_NAMES}
    extras |= {"terminated": record.terminated, "truncated": record.truncated, "time_outs": record.truncated}
    extras["valid"] = record.valid
    final, earlier = record.final_obs, record.extras.get("final_observation")
    if final is not None:
        groups = dict(final_groups or {})
        if isinstance(earlier, Mapping) and "obs" in earlier:
            groups = {**{n: g for n, g in earlier.items() if n not in (*ACTOR_GROUPS, *CRITIC_GROUPS)}, **groups}
        if isinstance(final, Mapping) or groups or record.final_critic_obs is not final:
            groups["obs"] = final
            if record.final_critic_obs is not None and record.final_critic_obs is not final:
                groups["critic_obs"] = record.final_critic_obs
        extras["final_observation"] = groups or final
    return record._replace(extras=extras)
