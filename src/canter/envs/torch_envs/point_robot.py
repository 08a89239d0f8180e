"""A point robot that follows velocity commands, with the trimmings of a legged-robot task."""

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
    kept_on_reset = ("tracking_error", "CoT")

    def __init__(
        self, num_envs: int, device: torch.device | str = "cpu", seed: int | None = None, max_episode_length: int = 200
    ) -> None:
        self.obs_space = spaces.Box(-np.inf, np.inf, (6,))
        self.critic_obs_space = spaces.Box(-np.inf, np.inf, (9,))
        self.action_space = spaces.Box(-1.0, 1.0, (2,))
        super().__init__(num_envs, device, seed, max_episode_length)

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
        """The segments in their stated order."""
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
        picture = draw.canvas(160, 160)
        draw.arrow(picture, (x, y), (cx, cy), draw.GREEN)
        draw.arrow(picture, (x, y), (vx, vy), draw.BLUE)
        draw.disc(picture, (x, y), 0.06, draw.BLACK)
        return picture
