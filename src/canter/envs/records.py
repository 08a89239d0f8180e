"""From whatever an environment answered to one step record: dtypes, episode-end flags and final observations."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.envs.groups import split_groups
from canter.envs.vec_env import StepRecord
from canter.utils.tree import Obs, tree_leaves, tree_map

# Who writes which: final_obs Gymnasium and Isaac Lab; final_observation ManiSkill, ApexRL and Gymnasium < 1.0;
# terminal mjlab; terminal_obs an AMP fork of rsl_rl; final_observations Holosoma; terminal_observation SB3.
# extras["observations"]["raw"], of FastTD3's Playground, is looked for after these.
FINAL_OBS_NAMES = (
    "final_obs",
    "final_observation",
    "terminal",
    "terminal_obs",
    "final_observations",
    "terminal_observation",
)
FINAL_CRITIC_OBS_NAMES = ("final_critic_obs", "final_critic_observation", "final_privileged_obs")

Extras = Mapping[str, Any] | Sequence[Mapping[str, Any]]

_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Warn, but never twice with the same words."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=3)


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype an observation is kept in: uint8 stays (images), everything else becomes float32."""
    return dtype if dtype == torch.uint8 else torch.float32


def take_tensor(value: Any, device: torch.device | None = None, copy: bool = False) -> Tensor:
    """One observation leaf in its stored dtype on `device`; `copy` makes it share no memory with `value`."""
    leaf = torch.as_tensor(value).detach()
    device = device or leaf.device
    return leaf.to(device, stored_dtype(leaf.dtype), copy=copy, memory_format=torch.contiguous_format)


def take_obs(obs: Any, device: torch.device | None = None, copy: bool = False) -> Obs:
    """An observation of tensors or arrays as tensors or plain dicts of tensors, in stored dtypes."""
    return tree_map(lambda leaf: take_tensor(leaf, device, copy), obs)


def per_env(
    value: Any, dtype: torch.dtype, name: str, num_envs: int, device: torch.device, copy: bool = False
) -> Tensor:
    """(N,) from (N,), (N, 1) or, for one environment, a scalar, of any dtype; any other shape is an error."""
    tensor = torch.as_tensor(value).detach()
    if tensor.shape not in {(num_envs,), (num_envs, 1)} and not (num_envs == 1 and tensor.dim() == 0):
        raise ValueError(f"{name} of {num_envs} environments must have shape ({num_envs},), got {tuple(tensor.shape)}")
    return tensor.reshape(num_envs).to(device, dtype, copy=copy)


def differ_on_host(a: Tensor, b: Tensor) -> bool:
    """Whether two masks differ, if that can be known without waiting for a device."""
    return a.device.type == "cpu" and bool((a.numpy() != b.numpy()).any())


def end_flags(dones: Any, extras: Mapping[str, Any], num_envs: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`terminated` and `truncated` (N,), disjoint, from `dones` and whatever of the two the extras tell."""

    def flag(name: str, value: Any) -> Tensor:
        return per_env(value, torch.bool, name, num_envs, device)

    done = flag("dones", dones)
    terminated = extras.get("terminated")
    truncated = extras.get("truncated")
    if truncated is not None:
        truncated = flag("truncated", truncated)
    elif extras.get("time_outs") is not None:
        # legged_gym writes time_outs only on steps that reset something: it is stale on the others.
        truncated = flag("time_outs", extras["time_outs"]) & done
    if terminated is None:
        truncated = torch.zeros_like(done) if truncated is None else truncated
        terminated = done & ~truncated
    else:
        terminated = flag("terminated", terminated)
        truncated = done & ~terminated if truncated is None else truncated
    ended = terminated | truncated
    if differ_on_host(ended, done):
        warn_once(
            "dones differ from terminated | truncated; an episode ends where either says so, "
            "and without bootstrap where only dones says so"
        )
    terminated = terminated | (done & ~ended)
    return terminated, truncated & ~terminated


def find_final(extras: Mapping[str, Any]) -> Any:
    """The final observation under any name that environments give it, None if there is none."""
    for name in FINAL_OBS_NAMES:
        value = extras.get(name)
        # "terminal" also serves as the name of a flag elsewhere.
        if value is not None and (name != "terminal" or isinstance(value, Mapping)):
            return value
    groups = extras.get("observations")
    return groups.get("raw") if isinstance(groups, Mapping) else None


def _stack_rows(rows: Sequence[Any], done: Tensor) -> Any:
    """A batch from one entry per environment; entries of environments that go on may be None."""
    example = next((row for row in rows if row is not None), None)
    if example is None:
        return None
    if isinstance(example, Mapping):
        return {k: _stack_rows([None if row is None else row[k] for row in rows], done) for k in example}
    for index, ended in enumerate(done.tolist()):
        if ended and rows[index] is None:
            raise ValueError(f"environment {index} ended, but its final observation is None")
    blank = np.zeros_like(np.asarray(example))
    return torch.as_tensor(np.stack([blank if row is None else np.asarray(row) for row in rows]))


def _scatter(rows: Any, indices: Tensor, num_envs: int, device: torch.device) -> Tensor:
    leaf = take_tensor(rows, device)
    return leaf.new_zeros(num_envs, *leaf.shape[1:]).index_copy_(0, indices.to(device, torch.int64), leaf)


def _full_leaf(leaf: Any, done: Tensor) -> Any:
    if isinstance(leaf, (list, tuple)) or (isinstance(leaf, np.ndarray) and leaf.dtype == object):
        return _stack_rows(list(leaf), done)
    leaf = torch.as_tensor(leaf)
    num_envs = len(done)
    if leaf.dim() and leaf.shape[0] == num_envs:
        return leaf
    # Rows of ended environments only: which ones they are has to be asked of the device.
    indices = done.nonzero().squeeze(1)
    if leaf.dim() == 0 or leaf.shape[0] != len(indices):
        raise ValueError(
            f"final observation has shape {tuple(leaf.shape)}; its first dimension must be "
            f"{num_envs} (every environment) or {len(indices)} (those that ended)"
        )
    return _scatter(leaf, indices, num_envs, done.device) if len(indices) else None


def full_final(final: Any, done: Tensor, copy: bool = False) -> Any:
    """A found final observation as a full batch on the device of `done`; rows that go on may hold anything."""
    if isinstance(final, Mapping) and "env_ids" in final and "observations" in final:
        ids = torch.as_tensor(final["env_ids"]).reshape(-1)
        return tree_map(lambda leaf: _scatter(leaf, ids, len(done), done.device), final["observations"])
    batch = tree_map(lambda leaf: _full_leaf(leaf, done), final)
    if any(leaf is None for _, leaf in tree_leaves(batch)):
        return None
    return take_obs(batch, done.device, copy)


class EndWatch:
    """Learns, without waiting for the device, whether any row it was shown is true; it may learn a few steps late."""

    def __init__(self, device: torch.device) -> None:
        self._any = torch.zeros((), dtype=torch.bool, device=device)
        self._copy = torch.zeros((), dtype=torch.bool, pin_memory=device.type == "cuda")
        self._seen = self._copy.numpy()

    def __call__(self, mask: Tensor) -> bool:
        """Look at one more mask."""
        self._any.logical_or_(mask.any())
        self._copy.copy_(self._any, non_blocking=True)
        return bool(self._seen)


def merge_infos(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One extras dict from SB3's list of one info per environment."""
    names = {name: None for info in infos for name in info if name in FINAL_OBS_NAMES}
    return {"infos": infos, **{name: [info.get(name) for info in infos] for name in names}}


def known_final(
    extras: Mapping[str, Any], done: Tensor, split: Callable[[Any], tuple[Any, Any]], shared: bool, copy: bool
) -> tuple[Obs | None, Obs | None, dict[str, Any]]:
    """Final observation, the critic's, and the final groups that belong to neither (AMP features, for example)."""
    found = find_final(extras)
    batch = None if found is None else full_final(found, done, copy)
    if batch is None:
        return None, None, {}
    actor, critic = split(batch)
    others = {}
    if isinstance(batch, Mapping) and batch is not actor:
        others = {name: group for name, group in batch.items() if group is not actor and group is not critic}
    named = next((extras[name] for name in FINAL_CRITIC_OBS_NAMES if extras.get(name) is not None), None)
    if named is not None:
        critic = full_final(named, done, copy)
    elif critic is actor and not shared:
        critic = None
    return actor, critic, others


def step_record(
    obs: Any,
    critic_obs: Any,
    rewards: Any,
    dones: Any,
    extras: Extras | None,
    valid: Tensor | None = None,
    *,
    device: torch.device | None = None,
    split: Callable[[Any], tuple[Any, Any]] = split_groups,
    copy: bool = False,
) -> StepRecord:
    """One step record from the answers of any environment.

    `obs` and `critic_obs` may be None where only the rest is wanted. A final observation without a critic's part
    stands for both if the two observations are the same object (or None), else the critic's is unknown. `split` takes
    the two parts out of a final observation; `copy` makes every tensor independent of what the environment holds.
    """
    given = dict(extras) if isinstance(extras, Mapping) else merge_infos(extras or ())
    rewards = torch.as_tensor(rewards)
    target: torch.device = rewards.device if device is None else device
    num_envs = rewards.shape[0] if rewards.dim() else 1
    reward = per_env(rewards, torch.float32, "rewards", num_envs, target, copy)
    terminated, truncated = end_flags(dones, given, num_envs, target)
    done = terminated | truncated
    final_obs, final_critic_obs, others = known_final(given, done, split, critic_obs is obs, copy)
    if valid is None:
        valid = per_env(given.get("valid", torch.ones_like(done)), torch.bool, "valid", num_envs, target, copy)
    record = StepRecord(obs, critic_obs, reward, terminated, truncated, final_obs, final_critic_obs, valid, given)
    return told(record, others)


def told(record: StepRecord, final_groups: Mapping[str, Any] | None = None) -> StepRecord:
    """The record with its flags and final observations also in `extras`, for readers that get only those."""
    extras = {name: value for name, value in record.extras.items() if name not in _FINAL_NAMES}
    extras.update(
        terminated=record.terminated, truncated=record.truncated, time_outs=record.truncated, valid=record.valid
    )
    final = record.final_obs
    if final is not None:
        if isinstance(final, Mapping) or final_groups or record.final_critic_obs is not final:
            final = {**(final_groups or {}), "obs": final}
            if record.final_critic_obs is not None and record.final_critic_obs is not record.final_obs:
                final["critic_obs"] = record.final_critic_obs
        extras["final_observation"] = final
    return record._replace(extras=extras)


_FINAL_NAMES = {*FINAL_OBS_NAMES, *FINAL_CRITIC_OBS_NAMES}
