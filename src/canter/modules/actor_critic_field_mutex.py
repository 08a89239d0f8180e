"""Policies that switch between sub-policies by the obstacle in the observation."""

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from canter.modules.actor_critic_mutex import ActorCriticMutex
from canter.modules.distributions import Params
from canter.modules.policy import Carried, Context
from canter.utils.obs_layout import ObsLayout

Velocity = float | Sequence[float]
RESETS = ("all", "when_skill", "none")
# Positions in a flat observation: `name`, `name[3]`, `name[1:6]`, `name[-2:]`.
POSITION = re.compile(r"(?P<name>[^\[\]]+)(?:\[(?P<first>-?\d*)(?P<colon>:)?(?P<last>-?\d*)\])?")


def find_positions(layout: ObsLayout, text: str, size: int | None = None) -> slice:
    """The columns of a position such as `name[1:6]`; raises if they are not `size` columns, where it is given."""
    match = POSITION.fullmatch(text)
    if match is None or (match["colon"] is None and match["first"] in ("", "-")):
        raise ValueError(f"{text!r} is not a position; write 'component', 'component[9]' or 'component[1:6]'")
    whole = layout.slice(match["name"])
    width = whole.stop - whole.start
    first, last = (int(match[name]) if match[name] else None for name in ("first", "last"))
    if first is not None and match["colon"] is None:
        last = first + 1 or None  # [-1] ends where the component ends
    start, stop, _ = slice(first, last).indices(width)
    beyond = any(n is not None and not -width <= n <= width for n in (first, last))
    if beyond or stop <= start:
        raise ValueError(f"{text!r} lies outside of {match['name']!r}, which has {width} values")
    if size is not None and stop - start != size:
        raise ValueError(f"{text!r} has {stop - start} values, but needs {size}")
    return slice(whole.start + start, whole.start + stop)


class Selections(Carried):
    """The last choices of each environment, (N, 1, len, S); zeros before the first."""

    def __init__(self, policy: Any, length: int, count: int) -> None:
        self.policy, self.state_shape = policy, (1, length, count)

    def zero_state(self, num_envs: int) -> Tensor:
        """No choice yet."""
        return self.policy.velocity_low.new_zeros(num_envs, *self.state_shape)


class Velocities(Carried):
    """The commanded velocity of each environment for each sub-policy, (N, 1, 1, S); 0 means not drawn yet."""

    def __init__(self, policy: Any, count: int) -> None:
        self.policy, self.state_shape = policy, (1, 1, count)
        self.for_all = torch.zeros(self.state_shape)

    def zero_state(self, num_envs: int) -> Tensor:
        """The velocities drawn for all environments."""
        return self.for_all.to(self.policy.velocity_low.device).repeat(num_envs, 1, 1, 1)

    def draw(self, num_envs: int) -> Tensor:
        """One velocity per environment and sub-policy."""
        low, high = self.policy.velocity_low, self.policy.velocity_high
        share = torch.rand(num_envs, *self.state_shape, device=low.device, generator=self.policy.generator)
        return self.policy.tie_velocities(low + share * (high - low))

    def reset(self, dones: Tensor | None = None) -> None:
        """Draw for environments whose episode ended; one velocity for all environments if None."""
        if dones is None:
            self.for_all, self.state = self.draw(1)[0], None
            return
        kept = self.zero_state(len(dones)) if self.state is None else self.state
        self.state = torch.where(dones.bool().view(-1, 1, 1, 1), self.draw(len(dones)), kept)


class ActorCriticFieldMutex(ActorCriticMutex):
    """One sub-policy per kind of obstacle, chosen by a one-hot part of the observation; the first if there is none.

    Positions are written as `component[index]` or `component[first:last]`.

    Args:
        cmd_vel_mapping: Sub-policy number -> its commanded forward velocity, a number or a range to draw from.
        reset_non_selected: Which memories are zeroed: "all" (or true) those of sub-policies not among the last choices;
            "when_skill" the same, but only while the first is not among them either; "none" (or false) none.
        action_smoothing_buffer_len: Number of last choices that are averaged.
        selection: Position of the one-hot number of the obstacle.
        command: Position of the commanded forward velocity.
        last_action: Position of the last action; the end of `proprioception`, if there is such a component.
    """

    num_not_selectable = 0
    """Number of sub-policies, at the end of the list, that no obstacle number selects."""

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
        actions = self.num_actions
        self.last_action_at = None if last_action is None else find_positions(self.obs_layout, last_action, actions)
        count = len(self.submodules)
        self.num_choices = count - self.num_not_selectable
        default = {"lin_vel": 1.0}
        self.cmd_scales = [dict(self._setting(i, "normalization", "obs_scales", default)) for i in range(count)]
        self._register_tables(cmd_vel_mapping or {}, count)
        self.command_at = find_positions(self.obs_layout, command, 1) if self.cmd_vel_mapping else None
        missing = list(range(self.num_choices, self.selection_at.stop - self.selection_at.start))
        if missing:
            warnings.warn(f"obstacles {missing} have no sub-policy: the first one is used for them", stacklevel=2)
        self.velocities = Velocities(self, count)
        self.selections = Selections(self, action_smoothing_buffer_len, count)
        self.carried |= {"selections": self.selections, "velocities": self.velocities}
        for i, policy in enumerate(self.submodules):
            self.carried |= {f"{name}_{i}": memory for name, memory in policy.memories.items()}
        self.resample_cmd_vel_current()

    def _register_tables(self, mapping: Mapping[Any, Any], count: int) -> None:
        """Register the constants of every sub-policy as tensors, so that a choice is arithmetic."""
        low, high, scale = torch.zeros(3, count)
        recovery = torch.ones(count, self.num_actions)
        self.cmd_vel_mapping: dict[int, Any] = {}
        for key, value in mapping.items():
            if not str(key).isdigit() or int(key) >= count:
                raise ValueError(f"cmd_vel_mapping names sub-policy {key!r}; there are 0 to {count - 1}")
            i = int(key)  # JSON has text
            if "lin_vel" not in self.cmd_scales[i]:
                raise KeyError(f"obs_scales of sub-policy {i} has no lin_vel, which its command is multiplied by")
            is_range = isinstance(value, Sequence) and not isinstance(value, str)
            ends: tuple[Any, ...] = tuple(value) if is_range else (value, value)
            is_numeric = all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends)
            if len(ends) != 2 or not is_numeric or ends[0] > ends[1]:
                raise ValueError(f"cmd_vel_mapping[{i}] is {value!r}; give a number, or a range of two")
            low[i], high[i], scale[i] = *ends, float(self.cmd_scales[i]["lin_vel"])
            self.cmd_vel_mapping[i] = value
        for i in range(count):
            recovery[i] = self.env_action_scale / getattr(self, f"subpolicy_action_scale_{i}")
        is_mapped = torch.tensor([i in self.cmd_vel_mapping for i in range(count)], dtype=torch.bool)
        tables = (nn.Buffer(table, persistent=False) for table in (low, high, scale, recovery, is_mapped))
        self.velocity_low, self.velocity_high, self.velocity_scale, self.recovery, self.is_mapped = tables

    @property
    def action_smoothing_buffer(self) -> Tensor | None:
        """(len, N, S) the last choices, the newest last; None before the first."""
        return None if self.selections.state is None else self.selections.state.squeeze(1).transpose(0, 1)

    @property
    def cmd_vel_current(self) -> dict[int, Any]:
        """Velocity by sub-policy: one number for all environments, or (N,) once episodes have ended."""
        if self.velocities.state is None:
            return {i: float(self.velocities.for_all[..., i]) for i in self.cmd_vel_mapping}
        return {i: self.velocities.state[:, 0, 0, i] for i in self.cmd_vel_mapping}

    def resample_cmd_vel_current(self, dones: Tensor | None = None) -> None:
        """Draw velocities: one for all environments, or one for each environment that is done."""
        self.velocities.reset(dones)

    def tie_velocities(self, velocities: Tensor) -> Tensor:
        """Hook to make some of the drawn velocities (..., S) equal."""
        return velocities

    def get_policy_selection(self, observations: Tensor) -> Tensor:
        """(N, S) bool, one true in each row."""
        flags = observations[:, self.selection_at] > 0.5
        number = flags.to(torch.uint8).argmax(-1)  # 0 where there is no obstacle
        number = torch.where(number < self.num_choices, number, 0)
        return number.unsqueeze(-1) == torch.arange(len(self.submodules), device=number.device)

    def recover_last_action(self, observations: Tensor, policy_selection: Tensor) -> Tensor:
        """A copy of the observation with the last action in the units of the chosen sub-policy."""
        if self.last_action_at is None:
            return observations
        factor = torch.where(policy_selection.unsqueeze(-1), self.recovery, 0.0).sum(1)  # (N, A)
        recovered = observations.clone()
        recovered[:, self.last_action_at] *= factor
        return recovered

    def override_cmd_vel(
        self, observations: Tensor, policy_selection: Tensor, velocities: Tensor | None = None
    ) -> Tensor:
        """A copy of the observation with the commanded velocity of the chosen sub-policy, if it has one."""
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

    @torch.no_grad()
    def actor_params(self, obs: Tensor, ctx: Context) -> Params:
        """Mean of the sub-policies' actions in the environment's units, weighted by their share of the last choices."""
        if obs.dim() != 2:
            raise ValueError(f"{type(self).__name__} acts step by step on (N, D), got {tuple(obs.shape)}")
        selection, past, kept = self.get_policy_selection(obs), ctx.hidden["selections"], ctx.hidden["velocities"]
        newest = selection.to(past.dtype)[:, None, None, :]
        is_first = (past.sum((1, 2, 3)) == 0).view(-1, 1, 1, 1)  # an episode's first choice fills all places
        choices = torch.where(is_first, newest.expand_as(past), torch.cat([past[:, :, 1:], newest], 2))
        velocities = torch.where(kept == 0, self.velocities.draw(obs.shape[0]), kept)
        ctx.hidden |= {"selections": choices, "velocities": velocities}
        share = choices.mean((1, 2))  # (N, S)
        ctx.aux["selection_share"] = share
        seen = self.override_cmd_vel(self.recover_last_action(obs, selection), selection, velocities[:, 0, 0])
        mean = torch.zeros_like(obs[:, :1]).expand(-1, self.num_actions)
        for i, policy in enumerate(self.submodules):
            own = Context({name: ctx.hidden[f"{name}_{i}"] for name in policy.memories})
            params = policy.actor_params(policy.obs_normalizer.normalize(seen), own)
            action = policy.distribution.to_env(policy.distribution.mode(params))
            scale = getattr(self, f"subpolicy_action_scale_{i}")
            mean = mean + action * scale / self.env_action_scale * share[:, i : i + 1]
            idle, is_reset = share[:, i] == 0, self.reset_non_selected == "all"
            if self.reset_non_selected == "when_skill":
                idle, is_reset = idle & (share[:, 0] == 0), i > 0
            for name, state in own.hidden.items():
                ctx.hidden[f"{name}_{i}"] = state.masked_fill(idle.view(-1, 1, 1, 1), 0.0) if is_reset else state
        return {"mu": mean, "sigma": torch.zeros_like(self.env_action_scale).expand(self.num_actions)}

    def sample_action(self, params: Params, generator: torch.Generator | None) -> Tensor:
        """The mean: there is no exploration."""
        return params["mu"]


class ActorCriticClimbMutex(ActorCriticFieldMutex):
    """Climbs up obstacle 3 with sub-policy 3, and down with an extra sub-policy, the last.

    Args:
        sub_policy_paths: Run directories of all but the last.
        jump_down_policy_path: Run directory of the last.
        jump_down_vel: Commanded velocity of the last, a number or a range; that of sub-policy 3 if None.
        jump_up: Position of a number that is positive where the obstacle leads up.
    """

    JUMP_OBSTACLE_ID = 3
    num_not_selectable = 1

    def __init__(
        self,
        num_actor_obs: int,
        num_critic_obs: int,
        num_actions: int,
        sub_policy_class_name: str | None = None,
        sub_policy_paths: Sequence[str | Path] = (),
        *args: Any,
        jump_down_policy_path: str | Path,
        jump_down_vel: Velocity | None = None,
        jump_up: str = "engaging_block[-1]",
        cmd_vel_mapping: Mapping[int | str, Velocity] | None = None,
        **kwargs: Any,
    ) -> None:
        jump, down = self.JUMP_OBSTACLE_ID, len(sub_policy_paths)
        if down <= jump:
            raise ValueError(f"sub-policy {jump} climbs, but sub_policy_paths has only {down} entries")
        mapping = {int(key) if str(key).isdigit() else key: value for key, value in (cmd_vel_mapping or {}).items()}
        if jump_down_vel is not None:
            mapping[down] = jump_down_vel
        elif jump in mapping:
            mapping[down] = mapping[jump]
        elif mapping:
            raise KeyError(f"jump_down_vel is None, and cmd_vel_mapping has no velocity for sub-policy {jump} either")
        self.shares_velocity = jump_down_vel is None and bool(mapping)
        paths = [*sub_policy_paths, jump_down_policy_path]
        given = (num_actor_obs, num_critic_obs, num_actions, sub_policy_class_name, paths, *args)
        super().__init__(*given, cmd_vel_mapping=mapping, **kwargs)
        self.jump_up_at = find_positions(self.obs_layout, jump_up, 1)

    def tie_velocities(self, velocities: Tensor) -> Tensor:
        """Climb down as fast as up, unless `jump_down_vel` is given."""
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
