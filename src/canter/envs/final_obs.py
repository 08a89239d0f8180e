"""The observation before the reset: where environments put it, and in which layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.envs.tensors import take_obs, take_tensor
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
