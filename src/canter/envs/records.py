"""From whatever an environment answered to one step record: dtypes, episode-end flags and final observations."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.envs.final_obs import FINAL_CRITIC_OBS_NAMES, FINAL_OBS_NAMES, known_final, merge_infos
from canter.envs.groups import split_groups
from canter.envs.host import check_per_env
from canter.envs.vec_env import StepRecord

Extras = Mapping[str, Any] | Sequence[Mapping[str, Any]]

DISAGREEMENT = (
    "dones differ from terminated | truncated; an episode ends where either says so, "
    "and without bootstrap where only dones says so"
)

_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Warn, but never twice with the same words."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=3)


def per_env(
    value: Any, dtype: torch.dtype, name: str, num_envs: int, device: torch.device, copy: bool = False
) -> Tensor:
    """(N,) from (N,), (N, 1) or, for one environment, a scalar, of any dtype; any other shape is an error."""
    tensor = torch.as_tensor(value).detach()
    check_per_env(tensor.shape, name, num_envs)
    return tensor.reshape(num_envs).to(device, dtype, copy=copy)


class EndWatch:
    """Learns, without waiting for the device, whether any row it was shown is true; it may learn a few steps late."""

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):  # it may be made by a rollout and written to by whatever comes after
            self._any = torch.zeros((), dtype=torch.bool, device=device)
            self._copy = torch.zeros((), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._seen = np.from_dlpack(self._copy)  # a view: copies from the device arrive in it by themselves

    def __call__(self, mask: Tensor) -> bool:
        """Look at one more mask."""
        self._any.logical_or_(mask.any())
        self._copy.copy_(self._any, non_blocking=True)
        return bool(self._seen)


_disagreements: dict[torch.device, EndWatch] = {}


def flags_disagree(mask: Tensor) -> bool:
    """Whether any mask shown so far was true anywhere, as far as the host knows."""
    if mask.device not in _disagreements:
        _disagreements[mask.device] = EndWatch(mask.device)
    return _disagreements[mask.device](mask)


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
    # Without "truncated" they agree by construction.
    if extras.get("truncated") is not None and DISAGREEMENT not in _warned and flags_disagree(ended != done):
        warn_once(DISAGREEMENT)
    terminated = terminated | (done & ~ended)
    return terminated, truncated & ~terminated


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
