"""`ObsComponents`: hides parts of an observation from the actor, and adds past values and the last action."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from canter.envs.records import fill_extras
from canter.envs.vec_env import StepRecord, VecEnv
from canter.envs.wrappers import VecEnvWrapper, checked_layout
from canter.utils.obs_layout import ObsLayout, Segments
from canter.utils.tree import Obs

LAST_ACTION = "last_action"
Parts = dict[str, Tensor]


class ObsComponents(VecEnvWrapper):
    """Names the parts of a flat observation and selects those that the actor and the critic see.

    `ObsComponents(env, {"position": 8, "velocity": 9}, actor=["position"])` hides the velocities from the actor and
    keeps them for the critic. A window `history={"position": 5}` is one more component, `position_history`, of shape
    (5, 8), oldest first, filled with the first observation when an episode begins.

    Args:
        env: Environments with flat observations.
        segments: Names and sizes of the observation's parts, in order; those of the environment if None.
        actor: Components the actor sees; all if None.
        critic: Components the critic sees; all of them, its own included, if None.
        history: Component -> number of steps in its window; `last_action` may be one.
        last_action: Add the component `last_action`: the previous action, 0 at first.
    """

    def __init__(
        self,
        env: VecEnv,
        segments: Segments | None = None,
        actor: Sequence[str] | None = None,
        critic: Sequence[str] | None = None,
        history: Mapping[str, int] | None = None,
        last_action: bool = False,
    ) -> None:
        super().__init__(env)
        self._shares = env.critic_obs_space is env.obs_space
        self._source = self._critic_source = source_layout(env.obs_space, segments or env.obs_segments)
        if not self._shares:
            self._critic_source = source_layout(env.critic_obs_space, env.critic_obs_segments)
        history = dict(history or {})
        shapes = dict(self._source.shapes)
        if last_action or LAST_ACTION in history:
            shapes[LAST_ACTION] = (env.num_actions,)
        known = ObsLayout(shapes)
        self._windows = {
            name: torch.zeros(env.num_envs, steps, known.size([name]), device=env.device)
            for name, steps in history.items()
        }
        windows = {f"{name}_history": tuple(window.shape[1:]) for name, window in self._windows.items()}
        self._last_action = torch.zeros(env.num_envs, shapes.get(LAST_ACTION, (0,))[0], device=env.device)
        self._bounds: tuple[Tensor, ...] = (
            action_bounds(env.action_space, env.device) if self._last_action.shape[1] else ()
        )
        self._has_started = False
        available = known.resized(windows)
        own = {name: shape for name, shape in available.shapes.items() if name not in self._source}
        all_critic = available if self._shares else self._critic_source.resized(own)
        self._actor = available.part(list(available.shapes) if actor is None else actor)
        self._critic = all_critic.part(list(all_critic.shapes) if critic is None else critic)
        self.obs_segments, self.critic_obs_segments = self._actor.shapes, self._critic.shapes
        self._is_one = self._shares and self._actor.shapes == self._critic.shapes
        self.obs_space = spaces.Box(-np.inf, np.inf, (self._actor.width,))
        self.critic_obs_space = self.obs_space if self._is_one else spaces.Box(-np.inf, np.inf, (self._critic.width,))

    def reset(self) -> tuple[Obs, Obs]:
        """Start a new episode in every environment."""
        return self._begin(*self.env.reset())

    def get_observations(self) -> tuple[Obs, Obs]:
        """Return the current observation and the critic's."""
        obs, critic_obs = self.env.get_observations()
        if not self._has_started:
            return self._begin(obs, critic_obs)
        return self._views(obs, critic_obs, self._windows, self._last_action)

    def step(self, actions: Tensor) -> StepRecord:
        """Apply one action per environment."""
        applied = self._as_component(actions)
        record = super().step(actions)
        final = record.final_obs, record.final_critic_obs
        if record.final_obs is not None:
            final = self._views(*final, self._shifted(record.final_obs, applied), applied)
        # Where the step after an episode's end only resets, the new episode begins there.
        begins = ~record.valid if self.has_invalid_steps else record.terminated | record.truncated
        last_action = applied.masked_fill(begins.unsqueeze(-1), 0.0)
        parts = self._parts(record.obs, last_action)
        for name, window in self._shifted(record.obs, last_action).items():
            filled = parts[name].unsqueeze(1).expand_as(window)
            # In place: a graph may hold the buffer.
            self._windows[name].copy_(torch.where(begins.view(-1, 1, 1), filled, window))
        self._last_action.copy_(last_action)
        obs, critic_obs = self._views(record.obs, record.critic_obs, self._windows, self._last_action)
        return fill_extras(
            record._replace(obs=obs, critic_obs=critic_obs, final_obs=final[0], final_critic_obs=final[1])
        )

    def get_state(self) -> dict[str, Any] | None:
        """Return the state of the wrapped environment, the windows and the last action."""
        inner = self.env.get_state()
        if inner is None:
            return None
        windows = {name: window.clone() for name, window in self._windows.items()}
        return {"env": inner, "windows": windows, "last_action": self._last_action.clone()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a result of `get_state`."""
        self.env.set_state(state["env"])
        for name, window in self._windows.items():
            window.copy_(state["windows"][name])
        self._last_action.copy_(state["last_action"])
        self._has_started = True

    def _begin(self, obs: Any, critic_obs: Any) -> tuple[Obs, Obs]:
        self._last_action.zero_()
        parts = self._parts(obs, self._last_action)
        for name, window in self._windows.items():
            window.copy_(parts[name].unsqueeze(1).expand_as(window))
        self._has_started = True
        return self._views(obs, critic_obs, self._windows, self._last_action)

    def _parts(self, obs: Any, last_action: Tensor) -> Parts:
        return {**self._source.split(obs), LAST_ACTION: last_action}

    def _shifted(self, obs: Any, last_action: Tensor) -> Parts:
        parts = self._parts(obs, last_action)
        return {name: torch.cat([window[:, 1:], parts[name].unsqueeze(1)], 1) for name, window in self._windows.items()}

    def _views(self, obs: Any, critic_obs: Any, windows: Parts, last_action: Tensor) -> tuple[Any, Any]:
        past = {f"{name}_history": window.flatten(1) for name, window in windows.items()}
        parts = {**self._parts(obs, last_action), **past}
        actor = torch.cat([parts[name] for name in self._actor.shapes], dim=-1)
        if self._is_one or critic_obs is None:
            return actor, actor if self._is_one else None
        if not self._shares:
            parts = {**self._critic_source.split(critic_obs), LAST_ACTION: last_action, **past}
        return actor, torch.cat([parts[name] for name in self._critic.shapes], dim=-1)

    def _as_component(self, actions: Tensor) -> Tensor:
        if not self._last_action.shape[1]:
            return self._last_action
        if isinstance(self.action_space, spaces.Discrete):
            choices = torch.arange(self.num_actions, device=self._last_action.device)
            return (actions.to(choices.device).reshape(-1, 1) == choices).float()
        flat = actions.to(self._last_action).reshape(self.num_envs, -1)
        return flat.maximum(self._bounds[0]).minimum(self._bounds[1])


def source_layout(space: spaces.Space, segments: Segments | None) -> ObsLayout:
    """Layout of the parts of a flat observation."""
    if not isinstance(space, spaces.Box) or len(space.shape) != 1:
        raise TypeError(f"ObsComponents wants flat observations, got {space}; wrap the environment in FlattenObs first")
    return checked_layout(segments or {"obs": space.shape}, space.shape[0], "segments")


def action_bounds(space: spaces.Space, device: torch.device) -> tuple[Tensor, ...]:
    """Lowest and highest values of a continuous action; an empty tuple for a discrete one."""
    if isinstance(space, spaces.Discrete):
        return ()
    if not isinstance(space, spaces.Box):
        raise TypeError(f"last_action is for Box and Discrete actions, not for {space}")
    return tuple(torch.as_tensor(end.ravel(), dtype=torch.float32, device=device) for end in (space.low, space.high))
