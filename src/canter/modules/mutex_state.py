"""What a policy of sub-policies carries from step to step: its last choices, and the velocities it commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from canter.modules.memory import Carried


class Selections(Carried):
    """The last choices of each environment, (N, 1, len, S); zeros before the first."""

    def __init__(self, policy: Any, length: int, count: int) -> None:
        self.policy, self.state_shape = policy, (1, length, count)

    def zero_state(self, num_envs: int) -> Tensor:
        """No choice yet."""
        return self.policy.velocity_low.new_zeros(num_envs, *self.state_shape)

    def push(self, kept: Tensor, selection: Tensor) -> Tensor:
        """The choices with the newest last; an episode's first fills all places."""
        newest = selection.to(kept.dtype)[:, None, None, :]
        is_first = (kept.sum((1, 2, 3)) == 0).view(-1, 1, 1, 1)
        return torch.where(is_first, newest.expand_as(kept), torch.cat([kept[:, :, 1:], newest], 2))


class Velocities(Carried):
    """The commanded velocity of each environment for each sub-policy, (N, 1, 1, S); 0 is one that is to be drawn."""

    def __init__(self, policy: Any, count: int) -> None:
        self.policy, self.state_shape = policy, (1, 1, count)
        self.for_all = torch.zeros(self.state_shape)

    def zero_state(self, num_envs: int) -> Tensor:
        """What was drawn for everybody."""
        return self.for_all.to(self.policy.velocity_low.device).repeat(num_envs, 1, 1, 1)

    def draw(self, num_envs: int) -> Tensor:
        """One velocity per environment and sub-policy."""
        low, high = self.policy.velocity_low, self.policy.velocity_high
        share = torch.rand(num_envs, *self.state_shape, device=low.device, generator=self.policy.generator)
        return self.policy.tie_velocities(low + share * (high - low))

    def reset(self, dones: Tensor | None = None) -> None:
        """Draw for environments whose episode ended; the same for everybody if None."""
        if dones is None:
            self.for_all, self.state = self.draw(1)[0], None
            return
        kept = self.zero_state(len(dones)) if self.state is None else self.state
        self.state = torch.where(dones.bool().view(-1, 1, 1, 1), self.draw(len(dones)), kept)


def velocity_range(given: Any, what: str) -> tuple[float, float]:
    """The ends of a range, equal for a number."""
    ends = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given, given)
    is_numeric = all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends)
    if len(ends) != 2 or not is_numeric or ends[0] > ends[1]:
        raise ValueError(f"{what} is {given!r}; give a number, or a range of two")
    return float(ends[0]), float(ends[1])


def by_number(mapping: Mapping[Any, Any], count: int) -> dict[int, Any]:
    """A mapping from sub-policy numbers, which JSON has as text."""
    for key in mapping:
        if not str(key).isdigit() or int(key) >= count:
            raise ValueError(f"cmd_vel_mapping speaks of sub-policy {key!r}; there are 0 to {count - 1}")
    return {int(key): value for key, value in mapping.items()}


def velocity_tables(mapping: Mapping[int, Any], scales: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """(S,) ends of every range and the scale of its command, 0 where none is mapped."""
    names = ("velocity_low", "velocity_high", "velocity_scale")
    tables = {name: torch.zeros(len(scales)) for name in names}
    for i, value in mapping.items():
        if "lin_vel" not in scales[i]:
            raise KeyError(f"obs_scales of sub-policy {i} has no lin_vel, which its command is multiplied by")
        row = (*velocity_range(value, f"cmd_vel_mapping[{i}]"), float(scales[i]["lin_vel"]))
        for name, number in zip(names, row, strict=True):
            tables[name][i] = number
    return tables
