"""A task for visual policies: move a dot to a target that is only seen."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from canter.envs.torch_envs.base import State, TorchEnv


class ImageReach(TorchEnv):
    """Move the red dot to the green one; the observation is a uint8 picture (3, size, size), the reward -distance."""

    size, speed, blob = 24, 0.2, 0.12

    def __init__(
        self, num_envs: int, device: torch.device | str = "cpu", seed: int | None = None, max_episode_length: int = 25
    ) -> None:
        self.obs_space = self.critic_obs_space = spaces.Box(0, 255, (3, self.size, self.size), np.uint8)
        self.action_space = spaces.Box(-1.0, 1.0, (2,))
        self._axis = torch.linspace(-1, 1, self.size, device=device)
        super().__init__(num_envs, device, seed, max_episode_length)

    def initial_state(self, n: int) -> State:
        """Dot and target anywhere: both (x, y) in [-0.9, 0.9]."""
        return {"dot": self.uniform(n, 2, -0.9, 0.9), "target": self.uniform(n, 2, -0.9, 0.9)}

    def dynamics(self, state: State, action: Tensor) -> tuple[State, Tensor, Tensor]:
        """The action is a velocity; walls stop the dot. No state is terminal."""
        dot = (state["dot"] + self.speed * action.clamp(-1.0, 1.0)).clamp(-0.9, 0.9)
        distance = (dot - state["target"]).norm(dim=1)
        return {"dot": dot, "target": state["target"]}, -distance, torch.zeros_like(distance, dtype=torch.bool)

    def observe(self, state: State) -> Tensor:
        """A soft blob per channel: red the dot, green the target; y points down the rows."""
        centre = torch.stack([state["dot"], state["target"]], 1)  # (N, 2, 2)
        near = torch.exp(-(self._axis - centre.unsqueeze(-1)).square() / (2 * self.blob**2))  # (N, channel, xy, size)
        blobs = (255 * near[:, :, 1, :, None] * near[:, :, 0, None, :]).to(torch.uint8)
        return torch.nn.functional.pad(blobs, (0, 0, 0, 0, 0, 1))  # a black blue channel

    def render(self) -> np.ndarray:
        """The first picture, enlarged."""
        picture = self.observe(self._state)[0].permute(1, 2, 0).cpu().numpy()  # type: ignore[union-attr]
        return picture.repeat(8, 0).repeat(8, 1)
