"""The answers of the rsl_rl family and its relatives, told apart by their shape.

| kind               | get_observations()     | step(actions)                                             |
|--------------------|------------------------|-----------------------------------------------------------|
| rsl_rl 1.x         | tensor                 | obs, privileged or None, rewards, dones, infos            |
| AMP_for_hardware   | tensor                 | the same, ended env ids, terminal AMP states              |
| rsl_rl 2.x, st_rl  | (tensor, extras)       | obs, rewards, dones, extras with "observations"           |
| rsl_rl 3.x to 5.x  | TensorDict or dict     | groups, rewards, dones, extras                            |
| ApexRL             | tensor or mapping      | obs, rewards, dones, extras                               |
| batched Gymnasium  | (reset) obs, info      | obs, rewards, terminated, truncated, info                 |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Groups = dict[str, Any]


def read_start(answer: Any) -> tuple[Any, Any, Mapping[str, Any]]:
    """Observation, privileged observation or None, and extras, from what `reset` or `get_observations` returned."""
    if not isinstance(answer, tuple):
        return answer, None, {}
    obs, second = answer[0], answer[1] if len(answer) > 1 else None
    if isinstance(second, Mapping):
        return obs, None, second
    return obs, second, {}


def read_step(answer: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
    """Observation, privileged observation or None, rewards, dones and extras, from what `step` returned."""
    answer = tuple(answer)
    if len(answer) == 4:
        obs, rewards, dones, extras = answer
        return obs, None, rewards, dones, dict(extras or {})
    if len(answer) == 5 and answer[1] is not None and torch.as_tensor(answer[1]).dim() < 2:
        obs, rewards, terminated, truncated, extras = answer
        flags = {"terminated": torch.as_tensor(terminated).bool(), "truncated": torch.as_tensor(truncated).bool()}
        return obs, None, rewards, flags["terminated"] | flags["truncated"], {**(extras or {}), **flags}
    if len(answer) in (5, 7):
        obs, privileged, rewards, dones, extras, *amp = answer
        more = dict(zip(("reset_env_ids", "terminal_amp_states"), amp, strict=False))
        return obs, privileged, rewards, dones, {**(extras or {}), **more}
    raise TypeError(
        f"step() returned {len(answer)} things; it must return (obs, rewards, dones, extras), "
        "(obs, privileged_obs, rewards, dones, infos) or (obs, rewards, terminated, truncated, info)"
    )


def gather_groups(obs: Any, privileged: Any, extras: Mapping[str, Any]) -> Groups:
    """Every observation of one answer by its group's name; a bare tensor is the group "policy"."""
    if isinstance(obs, Mapping):
        groups = dict(obs.items())
    else:
        groups = {**(extras.get("observations") or {}), "policy": obs}
        groups.pop("obs", None)
    if privileged is not None:
        groups["critic"] = privileged
    return {name: group for name, group in groups.items() if group is not None and not is_empty(group)}


def is_empty(group: Any) -> bool:
    """Whether a group is a tensor without features: a way to say that there is none."""
    return not isinstance(group, Mapping) and len(group.shape) > 1 and group.shape[1] == 0
