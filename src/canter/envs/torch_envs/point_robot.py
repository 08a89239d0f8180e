"""Point tasks in the plane: a robot that follows velocity commands, and a dot that reaches a target in an image."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from canter.envs.torch_envs import draw
from canter.envs.torch_envs.base import State, TorchEnv


class PointRobot(TorchEnv):
    """Drive a mass in the plane at the commanded velocity, over ground of unknown friction, with noisy odometry.

    The actor sees the measured velocity; the critic also sees the true one and the friction.
    """

    mass, gravity, dt = 2.0, 9.8, 0.05
    max_force, max_command, max_speed, noise = 8.0, 1.0, 3.0, 0.1
    command_change_prob = 0.02
    obs_segments = {"velocity": (2,), "command": (2,), "last_action": (2,)}
    critic_obs_segments = {**obs_segments, "true_velocity": (2,), "friction": (1,)}
    max_episode_length = 200
    kept_on_reset = ("tracking_error", "CoT")
    obs_space = spaces.Box(-np.inf, np.inf, (6,))
    critic_obs_space = spaces.Box(-np.inf, np.inf, (9,))
    action_space = spaces.Box(-1.0, 1.0, (2,))

    def initial_state(self, n: int) -> State:
        """At rest at the origin, with a new command and a new friction."""
        zero = torch.zeros(n, 2, device=self.device)
        return {
            "position": zero,
            "velocity": zero.clone(),
            "measured": self.noise * self.normal(n, 2),
            "last_action": zero.clone(),
            "command": self.uniform(n, 2, -self.max_command, self.max_command),
            "friction": self.uniform(n, 1, 0.5, 2.0),
            "tracking_error": zero[:, 0].clone(),
            "CoT": zero[:, 0].clone(),
        }

    def dynamics(self, state: State, action: Tensor) -> tuple[State, Tensor, Tensor]:
        """Viscous friction against the driving force; faster than `max_speed` the robot falls over."""
        action = action.clamp(-1.0, 1.0)
        force, command = self.max_force * action, state["command"]
        velocity = state["velocity"] + self.dt * (force - state["friction"] * state["velocity"]) / self.mass
        position = state["position"] + self.dt * velocity
        error = (velocity - command).square().sum(1)
        reward = torch.exp(-4.0 * error) - 0.01 * (action - state["last_action"]).square().sum(1)
        speed = velocity.norm(dim=1)
        power = (force.abs() * velocity.abs()).sum(1)
        n = len(speed)
        change = torch.rand(n, 1, generator=self.generator, device=self.device) < self.command_change_prob
        after = {
            "position": position,
            "velocity": velocity,
            "measured": velocity + self.noise * self.normal(n, 2),
            "last_action": action,
            "command": torch.where(change, self.uniform(n, 2, -self.max_command, self.max_command), command),
            "friction": state["friction"],
            "tracking_error": (velocity[:, 0] - command[:, 0]).abs(),
            "CoT": power / (self.mass * self.gravity * torch.where(speed == 0, 1.0, speed)),
        }
        return after, reward, speed > self.max_speed

    def observe(self, state: State) -> tuple[Tensor, Tensor]:
        """The segments in the order of `obs_segments`."""
        obs = torch.cat([state["measured"], state["command"], state["last_action"]], 1)
        return obs, torch.cat([obs, state["velocity"], state["friction"]], 1)

    @property
    def tracking_error(self) -> Tensor:
        """(N,) |v_x - command_x| in the last step, in m/s."""
        return self._state["tracking_error"].clone()

    @property
    def CoT(self) -> Tensor:  # noqa: N802 - the documented name
        """(N,) cost of transport in the last step: sum of |force| |speed| over m g v."""
        return self._state["CoT"].clone()

    def render(self) -> np.ndarray:
        """The first robot from above with its velocity (blue) and its command (green)."""
        x, y = (torch.remainder(self._state["position"][0] + 1, 2) - 1).tolist()
        vx, vy = (self._state["velocity"][0] / 4.0).tolist()
        cx, cy = (self._state["command"][0] / 4.0).tolist()
        image = draw.canvas(160, 160)
        draw.arrow(image, (x, y), (cx, cy), draw.GREEN)
        draw.arrow(image, (x, y), (vx, vy), draw.BLUE)
        draw.disc(image, (x, y), 0.06, draw.BLACK)
        return image


class ImageReach(TorchEnv):
    """Move the red dot to the green one; the observation is a uint8 image (3, size, size), the reward -distance."""

    size, speed, blob = 24, 0.2, 0.12
    max_episode_length = 25
    obs_space = critic_obs_space = spaces.Box(0, 255, (3, size, size), np.uint8)
    action_space = spaces.Box(-1.0, 1.0, (2,))

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
        axis = torch.linspace(-1, 1, self.size, device=self.device)
        near = torch.exp(-(axis - centre.unsqueeze(-1)).square() / (2 * self.blob**2))  # (N, channel, xy, size)
        blobs = (255 * near[:, :, 1, :, None] * near[:, :, 0, None, :]).to(torch.uint8)
        return torch.nn.functional.pad(blobs, (0, 0, 0, 0, 0, 1))  # a black blue channel

    def render(self) -> np.ndarray:
        """The first image, enlarged."""
        image = self.observe(self._state)[0].permute(1, 2, 0).cpu().numpy()  # type: ignore[union-attr]
        return image.repeat(8, 0).repeat(8, 1)
