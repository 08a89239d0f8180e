"""Wrappers with windows of past values: parts of an observation for actor and critic, and motion features for AMP."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from canter.envs.records import fill_extras, with_obs
from canter.envs.spec import named_parts
from canter.envs.vec_env import StepRecord, VecEnv
from canter.envs.wrappers import VecEnvWrapper, checked_layout
from canter.utils.obs_layout import ObsLayout, Segments
from canter.utils.tree import Obs

LAST_ACTION = "last_action"


def shifted(window: Tensor, frame: Tensor) -> Tensor:
    """The window (N, frames, d), oldest first, with `frame` (N, d) as its newest."""
    return torch.cat([window[:, 1:], frame.unsqueeze(1)], 1)


def push(window: Tensor, frame: Tensor, begins: Tensor) -> None:
    """Shift the window in place, as a graph may hold it; where an episode `begins` (N,), fill it with the frame."""
    window.copy_(torch.where(begins.view(-1, 1, 1), frame.unsqueeze(1), shifted(window, frame)))


def check_steps(name: str, steps: Any) -> None:
    """Raise unless the length of a window is a whole number of at least 1."""
    if not isinstance(steps, Integral) or steps < 1:
        raise ValueError(f"{name} must be a whole number of steps, at least 1, got {steps!r}")


class ObsComponents(VecEnvWrapper):
    """Names the parts of a flat observation and selects those that the actor and the critic see.

    A window `history={"position": 5}` is one more component, `position_history`, of shape (5, width), oldest first,
    filled with the first observation when an episode begins.

    Args:
        env: Environments with flat observations.
        segments: Names and sizes of the observation's parts, in order; those of the environment if None.
        actor: Components the actor sees; all if None.
        critic: Components the critic sees; all of them, its own included, if None.
        own_critic: Show the critic the environment's own critic observation; if false it sees parts of the actor's.
        history: Component -> number of steps in its window; `last_action` may be one.
        last_action: Add the component `last_action`, the previous action, 0 at first, if there is none of this name.
    """

    def __init__(
        self,
        env: VecEnv,
        segments: Segments | None = None,
        actor: Sequence[str] | None = None,
        critic: Sequence[str] | None = None,
        history: Mapping[str, int] | None = None,
        last_action: bool = False,
        own_critic: bool = True,
    ) -> None:
        super().__init__(env)
        layouts, self._shares = [], env.critic_obs_space is env.obs_space or not own_critic
        names_of_critic = env.obs_segments if self._shares else env.critic_obs_segments
        spaces_of_both = (env.obs_space, env.obs_space if self._shares else env.critic_obs_space)
        wanted = {name.removesuffix("_history") for name in (*(actor or ()), *(history or ()))} - {LAST_ACTION}
        named = (segments or named_parts(env, wanted), names_of_critic)
        for box, names in zip(spaces_of_both, named, strict=True):
            if not isinstance(box, spaces.Box) or len(box.shape) != 1:
                raise TypeError(f"ObsComponents wants flat observations, got {box}; wrap the environment in FlattenObs")
            layouts.append(checked_layout(names or {"obs": box.shape}, box.shape[0], "segments"))
        self._source, self._critic_source = layouts
        history, space, shapes = history or {}, env.action_space, dict(self._source.shapes)
        for name, steps in history.items():
            check_steps(f"history[{name!r}]", steps)
        self._bounds: list[Tensor] = []  # of continuous actions
        self._adds_action = (last_action or LAST_ACTION in history) and LAST_ACTION not in shapes
        if self._adds_action:
            if not isinstance(space, (spaces.Box, spaces.Discrete)):
                raise TypeError(f"last_action is for Box and Discrete actions, not for {space}")
            if isinstance(space, spaces.Box):
                ends = np.stack([space.low.ravel(), space.high.ravel()])
                self._bounds = list(torch.as_tensor(ends, dtype=torch.float32, device=env.device))
            shapes[LAST_ACTION] = (env.num_actions,)
        width = env.num_actions if self._adds_action else 0
        self._last_action = torch.zeros(env.num_envs, width, device=env.device)
        known = ObsLayout(shapes)
        sizes = {name: (steps, known.size([name])) for name, steps in history.items()}
        self._windows = {name: torch.zeros(env.num_envs, *size, device=env.device) for name, size in sizes.items()}
        self._has_started = False
        available = known.resized({f"{name}_history": size for name, size in sizes.items()})
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
        self._has_started = False
        return super().reset()

    def _pair(self, obs: Any, critic_obs: Any) -> tuple[Obs, Obs]:
        if not self._has_started:
            self._has_started = True
            self._last_action.zero_()
            parts = self._parts(obs, self._last_action)
            for name, window in self._windows.items():
                window.copy_(parts[name].unsqueeze(1))
        return self._views(obs, critic_obs, self._windows, self._last_action)

    def step(self, actions: Tensor) -> StepRecord:
        """Apply one action per environment."""
        applied = self._last_action
        if self._bounds:
            applied = actions.to(applied).reshape(self.num_envs, -1).clamp(*self._bounds)
        elif applied.shape[1]:
            choices = torch.arange(applied.shape[1], device=applied.device)
            applied = (actions.to(choices.device).reshape(-1, 1) == choices).float()
        record = super().step(actions)
        final = record.final_obs, record.final_critic_obs
        if record.final_obs is not None:
            parts = self._parts(record.final_obs, applied)
            last = {name: shifted(window, parts[name]) for name, window in self._windows.items()}
            final = self._views(*final, last, applied)
        # Where the step after an episode's end only resets, the new episode begins there.
        begins = ~record.valid if self.has_invalid_steps else record.done
        self._last_action.copy_(applied.masked_fill(begins.unsqueeze(-1), 0.0))
        parts = self._parts(record.obs, self._last_action)
        for name, window in self._windows.items():
            push(window, parts[name], begins)
        return with_obs(record, self._views(record.obs, record.critic_obs, self._windows, self._last_action), final)

    def get_state(self) -> dict[str, Any] | None:
        """Return the state of the wrapped environment, the windows and the last action."""
        inner, windows = self.env.get_state(), {name: window.clone() for name, window in self._windows.items()}
        return None if inner is None else {"env": inner, "windows": windows, "last_action": self._last_action.clone()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a result of `get_state`."""
        self.env.set_state(state["env"])
        for name, window in self._windows.items():
            window.copy_(state["windows"][name])
        self._last_action.copy_(state["last_action"])
        self._has_started = True

    def _parts(self, obs: Any, last_action: Tensor) -> dict[str, Tensor]:
        return self._source.split(obs) | ({LAST_ACTION: last_action} if self._adds_action else {})

    def _views(self, obs: Any, critic_obs: Any, windows: Mapping[str, Tensor], last_action: Tensor) -> tuple[Any, Any]:
        past = {f"{name}_history": window.flatten(1) for name, window in windows.items()}
        parts = {**self._parts(obs, last_action), **past}
        critic_obs = obs if self._shares else critic_obs
        actor = torch.cat([parts[name] for name in self._actor.shapes], dim=-1)
        if self._is_one or critic_obs is None:
            return actor, actor if self._is_one else None
        if not self._shares:
            parts = {**self._parts(obs, last_action), **self._critic_source.split(critic_obs), **past}
        return actor, torch.cat([parts[name] for name in self._critic.shapes], dim=-1)


class MotionFeatures(VecEnvWrapper):
    """Adds `extras["observations"]["ref_obs"]` (N, frames, d), oldest frame first, the input of APPO.

    A window never spans a reset: it begins as copies of an episode's first frame, and the last one of an episode is in
    `extras["final_observation"]["ref_obs"]`. `features` are columns of the observation, `privileged` of the critic's,
    or names of segments; all of it if None. `frames` is the length of the window in control steps.
    """

    def __init__(
        self, env: VecEnv, features: Sequence[int | str] | None = None, frames: int = 2, privileged: bool = False
    ) -> None:
        super().__init__(env)
        check_steps("frames", frames)
        self.frames, self.privileged = frames, privileged
        pair: Any = (env.critic_obs_space, env.critic_obs_segments) if privileged else (env.obs_space, env.obs_segments)
        self.columns = torch.tensor(feature_columns(features, pair[1], pair[0].shape[0]), device=env.device)
        self.history = torch.zeros(env.num_envs, frames, len(self.columns), device=env.device)
        self.history.copy_(self._frame(*env.get_observations()).unsqueeze(1))

    def _frame(self, obs: Any, critic_obs: Any) -> Tensor:
        return (critic_obs if self.privileged else obs)[:, self.columns]  # (N, d)

    def reset(self) -> tuple[Obs, Obs]:
        """Start a new episode in every environment."""
        obs, critic_obs = super().reset()
        self.history.copy_(self._frame(obs, critic_obs).unsqueeze(1))
        return obs, critic_obs

    def step(self, actions: Tensor) -> StepRecord:
        """Apply one action per environment; tensor code that may be captured."""
        record, groups = super().step(actions), {}
        if record.final_obs is not None and (record.final_critic_obs is not None or not self.privileged):
            groups["ref_obs"] = shifted(self.history, self._frame(record.final_obs, record.final_critic_obs))
        push(self.history, self._frame(record.obs, record.critic_obs), record.done | ~record.valid)
        observations = {**(record.extras.get("observations") or {}), "ref_obs": self.history.clone()}
        return fill_extras(record._replace(extras={**record.extras, "observations": observations}), groups)

    def get_state(self) -> dict[str, Any] | None:
        """Return the state of the wrapped environment and the windows."""
        inner = super().get_state()
        return None if inner is None else {"env": inner, "history": self.history.clone()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a result of `get_state`."""
        super().set_state(state["env"])
        self.history.copy_(state["history"])


def feature_columns(features: Sequence[int | str] | None, segments: Any, width: int) -> list[int]:
    """Columns of the observation for numbers and segment names, in the order given."""
    layout, columns = ObsLayout(segments or {"obs": (width,)}), range(width)
    chosen = columns if features is None else features
    parts = [columns[layout.slice(name)] if isinstance(name, str) else [columns[name]] for name in chosen]
    return [column for part in parts for column in part]


def windows(frames: Tensor, length: int = 2) -> Tensor:
    """(L, d) frames of one clip -> (L - length + 1, length * d) windows, oldest frame first."""
    if len(frames) < length:
        raise ValueError(f"a clip of {len(frames)} frames has no window of {length}")
    return frames.unfold(0, length, 1).transpose(1, 2).flatten(1)
