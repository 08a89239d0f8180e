"""Policies that switch between sub-policies by what the observation says lies ahead."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from canter.modules.actor_critic_mutex import ActorCriticMutex
from canter.modules.distributions import Params
from canter.modules.mutex_state import Selections, Velocities, by_number, velocity_tables
from canter.modules.obs_positions import find_positions
from canter.modules.policy import Context

Velocity = float | Sequence[float]
RESETS = ("all", "when_skill", "none")


class ActorCriticFieldMutex(ActorCriticMutex):
    """One sub-policy per kind of obstacle, chosen by a one-hot part of the observation; the first if there is none.

    Positions are written as `component[index]` or `component[first:last]`.

    Args:
        cmd_vel_mapping: Sub-policy number -> forward velocity that it is commanded, a number or a range to draw from.
        reset_non_selected: Whose memory is zeroed: "all" (or true) not among the last choices; "when_skill": the same,
            but only while the first is not among them either; "none" (or false) nobody's.
        action_smoothing_buffer_len: How many of the last choices are averaged.
        selection: Where the one-hot number of the obstacle is.
        command: Where the commanded forward velocity is.
        last_action: Where the last action is; the end of `proprioception`, if there is such a component.
    """

    velocity_low: Tensor
    velocity_high: Tensor
    velocity_scale: Tensor
    is_mapped: Tensor
    recovery: Tensor
    env_action_scale: Tensor

    def __init__(
        self,
        *args: Any,
        cmd_vel_mapping: Mapping[int | str, Velocity] | None = None,
        reset_non_selected: str | bool = "all",
        action_smoothing_buffer_len: int = 1,
        selection: str = "engaging_block[1:6]",
        command: str = "proprioception[9]",
        last_action: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.reset_non_selected = {True: "all", False: "none"}.get(reset_non_selected, reset_non_selected)  # pyright: ignore[reportArgumentType, reportCallIssue]
        if self.reset_non_selected not in RESETS:
            raise ValueError(f"reset_non_selected must be one of {', '.join(RESETS)}, got {reset_non_selected!r}")
        if action_smoothing_buffer_len < 1:
            raise ValueError(f"action_smoothing_buffer_len must be at least 1, got {action_smoothing_buffer_len}")
        self.selection_at = find_positions(self.obs_layout, selection)
        if last_action is None and "proprioception" in self.obs_layout:
            last_action = f"proprioception[-{self.num_actions}:]"
        self.last_action_at: slice | None = None
        if last_action is not None:
            self.last_action_at = find_positions(self.obs_layout, last_action, self.num_actions)
        count = len(self.submodules)
        self.cmd_vel_mapping = by_number(cmd_vel_mapping or {}, count)
        self.command_at = find_positions(self.obs_layout, command, 1) if self.cmd_vel_mapping else None
        scales = (self._setting(i, "normalization", "obs_scales", {"lin_vel": 1.0}) for i in range(count))
        self.cmd_scales = [dict(scale) for scale in scales]
        self._register(count)
        missing = list(range(self.num_choices, self.selection_at.stop - self.selection_at.start))
        if missing:
            warnings.warn(f"obstacles {missing} have no sub-policy: the first one meets them", stacklevel=2)
        self.velocities = Velocities(self, count)
        self.selections = Selections(self, action_smoothing_buffer_len, count)
        self.carried |= {"selections": self.selections, "velocities": self.velocities}
        for i, policy in enumerate(self.sub_policies):
            self.carried |= {f"{name}_{i}": memory for name, memory in policy.memories.items()}
        self.resample_cmd_vel_current()

    # ------------------------------------------------------------------ making ready
    def _register(self, count: int) -> None:
        """Everything per sub-policy as tensors, so that a choice is arithmetic."""
        tables = velocity_tables(self.cmd_vel_mapping, self.cmd_scales)
        tables["is_mapped"] = torch.tensor([i in self.cmd_vel_mapping for i in range(count)], dtype=torch.bool)
        tables["recovery"] = torch.ones(count, self.num_actions)
        for i in range(count):
            tables["recovery"][i] = self.env_action_scale / self.action_scale(i)
        for name, table in tables.items():
            self.register_buffer(name, table, persistent=False)

    @property
    def num_choices(self) -> int:
        """How many sub-policies have a number of their own."""
        return len(self.submodules)

    def action_scale(self, i: int) -> Tensor:
        """What the environment of sub-policy i multiplied its actions by."""
        return getattr(self, f"subpolicy_action_scale_{i}")

    # ------------------------------------------------------------------ documented steps of a choice
    @property
    def action_smoothing_buffer(self) -> Tensor | None:
        """(len, N, S) the last choices, the newest last; None before the first."""
        return None if self.selections.state is None else self.selections.state.squeeze(1).transpose(0, 1)

    @property
    def cmd_vel_current(self) -> dict[int, Any]:
        """Velocity by sub-policy: a number for everybody, or (N,) once episodes have ended."""
        if self.velocities.state is None:
            return {i: float(self.velocities.for_all[..., i]) for i in self.cmd_vel_mapping}
        return {i: self.velocities.state[:, 0, 0, i] for i in self.cmd_vel_mapping}

    def resample_cmd_vel_current(self, dones: Tensor | None = None) -> None:
        """Draw velocities: one for everybody, or one for each environment that is done."""
        self.velocities.reset(dones)

    def tie_velocities(self, velocities: Tensor) -> Tensor:
        """Velocities (..., S) just drawn, where some must be the same."""
        return velocities

    def get_policy_selection(self, observations: Tensor) -> Tensor:
        """(N, S) bool, one true in each row."""
        flags = observations[:, self.selection_at] > 0.5
        number = flags.to(torch.uint8).argmax(-1)  # 0 where there is no obstacle
        number = torch.where(number < self.num_choices, number, 0)
        return number.unsqueeze(-1) == torch.arange(len(self.submodules), device=number.device)

    def recover_last_action(self, observations: Tensor, policy_selection: Tensor) -> Tensor:
        """The observation with the last action in the units of the chosen sub-policy; the one given is not changed."""
        if self.last_action_at is None:
            return observations
        factor = torch.where(policy_selection.unsqueeze(-1), self.recovery, 0.0).sum(1)  # (N, A)
        recovered = observations.clone()
        recovered[:, self.last_action_at] *= factor
        return recovered

    def override_cmd_vel(
        self, observations: Tensor, policy_selection: Tensor, velocities: Tensor | None = None
    ) -> Tensor:
        """The observation with the velocity that the chosen sub-policy is commanded, where it is commanded one."""
        if self.command_at is None:
            return observations
        if velocities is None:
            kept = self.velocities.state
            velocities = (self.velocities.zero_state(len(observations)) if kept is None else kept)[:, 0, 0]
        chosen = policy_selection & self.is_mapped
        command = torch.where(chosen, velocities * self.velocity_scale, 0.0).sum(-1, keepdim=True)
        overridden = observations.clone()
        before = observations[:, self.command_at]
        overridden[:, self.command_at] = torch.where(chosen.any(-1, keepdim=True), command, before)
        return overridden

    # ------------------------------------------------------------------ core
    @torch.no_grad()
    def actor_params(self, obs: Tensor, ctx: Context) -> Params:
        """Every sub-policy's action in the environment's units, weighed by how many of the last choices were its."""
        if obs.dim() != 2:
            raise ValueError(f"{type(self).__name__} acts step by step on (N, D), got {tuple(obs.shape)}")
        selection = self.get_policy_selection(obs)
        choices = self.selections.push(ctx.hidden["selections"], selection)
        kept = ctx.hidden["velocities"]
        velocities = torch.where(kept == 0, self.velocities.draw(len(obs)), kept)
        ctx.hidden |= {"selections": choices, "velocities": velocities}
        share = choices.mean((1, 2))  # (N, S)
        ctx.aux["selection_share"] = share
        seen = self.override_cmd_vel(self.recover_last_action(obs, selection), selection, velocities[:, 0, 0])
        mean = torch.zeros(len(obs), self.num_actions, device=obs.device)
        for i, policy in enumerate(self.sub_policies):
            own = Context({name: ctx.hidden[f"{name}_{i}"] for name in policy.memories})
            params = policy.actor_params(policy.obs_normalizer.normalize(seen), own)  # pyright: ignore[reportCallIssue]
            action = policy.distribution.to_env(policy.distribution.mode(params))
            mean = mean + action * self.action_scale(i) / self.env_action_scale * share[:, i : i + 1]
            idle = self._is_idle(share, i)
            for name, state in own.hidden.items():
                ctx.hidden[f"{name}_{i}"] = state.masked_fill(idle.view(-1, 1, 1, 1), 0.0)
        return {"mu": mean, "sigma": torch.zeros_like(self.env_action_scale).expand(self.num_actions)}

    def _is_idle(self, share: Tensor, i: int) -> Tensor:
        """(N,) where the memory of sub-policy i starts anew."""
        unused = share[:, i] == 0
        if self.reset_non_selected == "when_skill":
            return unused & (share[:, 0] == 0) if i > 0 else torch.zeros_like(unused)
        return unused & (self.reset_non_selected == "all")

    def sample_action(self, params: Params, generator: torch.Generator | None) -> Tensor:
        """The action itself: nothing is explored."""
        return params["mu"]


class ActorCriticClimbMutex(ActorCriticFieldMutex):
    """Obstacle 3 is climbed up by sub-policy 3 and down by one of its own, the last.

    Args:
        sub_policy_paths: Run directories of all but the last.
        jump_down_policy_path: Run directory of the last.
        jump_down_vel: Velocity that the last is commanded, a number or a range; None takes that of sub-policy 3.
        jump_up: Where the observation says, by a positive number, that the obstacle leads up.
    """

    JUMP_OBSTACLE_ID = 3

    def __init__(
        self,
        *args: Any,
        sub_policy_paths: Sequence[str | Path] = (),
        jump_down_policy_path: str | Path,
        jump_down_vel: Velocity | None = None,
        jump_up: str = "engaging_block[-1]",
        cmd_vel_mapping: Mapping[int | str, Velocity] | None = None,
        **kwargs: Any,
    ) -> None:
        jump, down = self.JUMP_OBSTACLE_ID, len(sub_policy_paths)
        if down <= jump:
            raise ValueError(f"climbing is the business of sub-policy {jump}; sub_policy_paths has only {down}")
        mapping = {int(key) if str(key).isdigit() else key: value for key, value in (cmd_vel_mapping or {}).items()}
        if jump_down_vel is not None:
            mapping[down] = jump_down_vel
        elif jump in mapping:
            mapping[down] = mapping[jump]
        elif mapping:
            raise KeyError(
                f"jump_down_vel is not given, and cmd_vel_mapping has no velocity for sub-policy {jump} either"
            )
        self.shares_velocity = jump_down_vel is None and bool(mapping)
        paths = [*sub_policy_paths, jump_down_policy_path]
        super().__init__(*args, sub_policy_paths=paths, cmd_vel_mapping=mapping, **kwargs)
        self.jump_up_at = find_positions(self.obs_layout, jump_up, 1)

    @property
    def num_choices(self) -> int:
        """The last sub-policy has no number of its own."""
        return len(self.submodules) - 1

    def tie_velocities(self, velocities: Tensor) -> Tensor:
        """Down as fast as up, where nothing else was said."""
        if not self.shares_velocity:
            return velocities
        up = slice(self.JUMP_OBSTACLE_ID, self.JUMP_OBSTACLE_ID + 1)
        return torch.cat([velocities[..., :-1], velocities[..., up]], -1)

    def get_policy_selection(self, observations: Tensor) -> Tensor:
        """(N, S) bool, one true in each row; the last where sub-policy 3 would climb down."""
        selection = super().get_policy_selection(observations)
        climbs, leads_up = selection[:, self.JUMP_OBSTACLE_ID], observations[:, self.jump_up_at].squeeze(-1) > 0
        split = selection.clone()
        split[:, self.JUMP_OBSTACLE_ID], split[:, -1] = climbs & leads_up, climbs & ~leads_up
        return split
