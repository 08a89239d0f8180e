"""Motion features for environments without any: windows of the last frames of a part of the observation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from canter.envs.records import fill_extras
from canter.envs.vec_env import StepRecord, VecEnv
from canter.envs.wrappers import VecEnvWrapper
from canter.utils.obs_layout import ObsLayout
from canter.utils.tree import Obs


class MotionFeatures(VecEnvWrapper):
    """Adds `extras["observations"]["ref_obs"]` (N, frames, d), oldest frame first, the input of APPO.

    A window never spans a reset: it begins as copies of an episode's first frame, and the last one of an episode is in
    `extras["final_observation"]["ref_obs"]`.

    Args:
        env: The environment.
        features: Columns of the observation, or names of its segments; all of it if None.
        frames: Length of the window, in control steps.
        privileged: Read them from the critic's observation.
    """

    def __init__(
        self, env: VecEnv, features: Sequence[int | str] | None = None, frames: int = 2, privileged: bool = False
    ) -> None:
        super().__init__(env)
        if frames < 1:
            raise ValueError(f"frames must be at least 1, got {frames}")
        self.frames, self.privileged = frames, privileged
        segments = env.critic_obs_segments if privileged else env.obs_segments
        width = int((env.critic_obs_space if privileged else env.obs_space).shape[0])  # pyright: ignore[reportOptionalSubscript]
        columns = feature_columns(features, segments, width)
        self.columns = torch.tensor(columns, device=env.device)
        self.history = torch.zeros(env.num_envs, frames, len(columns), device=env.device)
        self._fill(*env.get_observations())

    def _frame(self, obs: Any, critic_obs: Any) -> Tensor:
        return (critic_obs if self.privileged else obs)[:, self.columns].unsqueeze(1)  # (N, 1, d)

    def _fill(self, obs: Any, critic_obs: Any) -> None:
        self.history.copy_(self._frame(obs, critic_obs).expand_as(self.history))

    def reset(self) -> tuple[Obs, Obs]:
        """Start a new episode in every environment."""
        obs, critic_obs = super().reset()
        self._fill(obs, critic_obs)
        return obs, critic_obs

    def step(self, actions: Tensor) -> StepRecord:
        """Apply one action per environment; tensor code that may be captured."""
        record = super().step(actions)
        frame = self._frame(record.obs, record.critic_obs)
        window = torch.cat([self.history[:, 1:], frame], 1)
        groups = {}
        if record.final_obs is not None and (record.final_critic_obs is not None or not self.privileged):
            last = self._frame(record.final_obs, record.final_critic_obs)
            groups["ref_obs"] = torch.cat([self.history[:, 1:], last], 1)
        begins = (record.terminated | record.truncated | ~record.valid).view(-1, 1, 1)
        self.history.copy_(torch.where(begins, frame.expand_as(window), window))
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
    layout = ObsLayout(segments or {"obs": (width,)})
    columns: list[int] = []
    for feature in range(width) if features is None else features:
        columns += range(width)[layout.slice(feature)] if isinstance(feature, str) else [range(width)[feature]]
    return columns


def windows(frames: Tensor, length: int = 2) -> Tensor:
    """(L, d) frames of one clip -> (L - length + 1, length * d) windows, oldest frame first."""
    if len(frames) < length:
        raise ValueError(f"a clip of {len(frames)} frames has no window of {length}")
    count = len(frames) - length + 1
    return torch.cat([frames[i : i + count] for i in range(length)], 1)
