"""Classic control: CartPole, the same without velocities, and Pendulum, with Gymnasium's dynamics and limits."""

from __future__ import annotations

import math

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from canter.envs.torch_envs import draw
from canter.envs.torch_envs.base import State, TorchEnv


def symmetric_box(*high: float) -> spaces.Box:
    """The Box between `-high` and `high`."""
    bound = np.array(high, np.float32)
    return spaces.Box(-bound, bound)


class CartPole(TorchEnv):
    """Keep a pole upright by pushing its cart left (0) or right (1): Gymnasium's CartPole-v1.

    Source: Barto, Sutton, Anderson 1983, integrated by explicit Euler steps.
    """

    gravity, force, dt = 9.8, 10.0, 0.02
    mass_pole, mass_total, half_length = 0.1, 1.1, 0.5
    x_limit, angle_limit = 2.4, 12 * math.pi / 180
    max_episode_length = 500
    obs_space = critic_obs_space = symmetric_box(2 * x_limit, np.inf, 2 * angle_limit, np.inf)
    action_space = spaces.Discrete(2)

    def initial_state(self, n: int) -> State:
        """Nearly upright and at rest: (x, velocity, angle, angular velocity)."""
        return {"pole": self.uniform(n, 4, -0.05, 0.05)}

    def dynamics(self, state: State, action: Tensor) -> tuple[State, Tensor, Tensor]:
        """One Euler step; the reward is 1 in every step, the last one included."""
        x, v, angle, w = state["pole"].unbind(1)
        sin, cos = angle.sin(), angle.cos()
        pole = self.mass_pole * self.half_length
        push = ((2 * action - 1) * self.force + pole * w.square() * sin) / self.mass_total
        inertia = self.half_length * (4 / 3 - self.mass_pole * cos.square() / self.mass_total)
        w_dot = (self.gravity * sin - cos * push) / inertia
        v_dot = push - pole * w_dot * cos / self.mass_total
        x, v, angle, w = x + self.dt * v, v + self.dt * v_dot, angle + self.dt * w, w + self.dt * w_dot
        terminated = (x.abs() > self.x_limit) | (angle.abs() > self.angle_limit)
        return {"pole": torch.stack([x, v, angle, w], 1)}, torch.ones_like(x), terminated

    def observe(self, state: State) -> Tensor:
        """The whole state."""
        return state["pole"].clone()

    def render(self) -> np.ndarray:
        """The first cart and its pole."""
        x, _, angle, _ = self._state["pole"][0].tolist()
        image = draw.canvas(120, 240)
        cart = (x / self.x_limit, -0.5)
        draw.line(image, (-1, -0.62), (1, -0.62), draw.GREY, 1)
        draw.line(image, (cart[0] - 0.08, -0.55), (cart[0] + 0.08, -0.55), draw.BLACK, 9)
        tip = (cart[0] + 0.5 * math.sin(angle), cart[1] + math.cos(angle))
        draw.line(image, cart, tip, draw.RED, 4)
        return image


class MaskedCartPole(CartPole):
    """CartPole that observes only positions: the policy needs a memory for the velocities."""

    obs_space = critic_obs_space = symmetric_box(2 * CartPole.x_limit, 2 * CartPole.angle_limit)

    def observe(self, state: State) -> Tensor:
        """(x, angle)."""
        return state["pole"][:, 0::2].clone()


class Pendulum(TorchEnv):
    """Swing a rod up and hold it with little torque: Gymnasium's Pendulum-v1."""

    gravity, mass, length, dt = 10.0, 1.0, 1.0, 0.05
    max_speed, max_torque = 8.0, 2.0
    max_episode_length = 200
    obs_space = critic_obs_space = symmetric_box(1, 1, max_speed)
    action_space = spaces.Box(-max_torque, max_torque, (1,))

    def initial_state(self, n: int) -> State:
        """Any angle, slow: (angle, angular velocity), the angle 0 being upright."""
        return {"rod": torch.cat([self.uniform(n, 1, -math.pi, math.pi), self.uniform(n, 1, -1.0, 1.0)], 1)}

    def dynamics(self, state: State, action: Tensor) -> tuple[State, Tensor, Tensor]:
        """One semi-implicit Euler step; the cost is that of the state before the step. No state is terminal."""
        angle, w = state["rod"].unbind(1)
        torque = action[:, 0].clamp(-self.max_torque, self.max_torque)
        off = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        reward = -(off.square() + 0.1 * w.square() + 0.001 * torque.square())
        w_dot = 1.5 * self.gravity / self.length * angle.sin() + 3 / (self.mass * self.length**2) * torque
        w = (w + self.dt * w_dot).clamp(-self.max_speed, self.max_speed)
        angle = angle + self.dt * w
        return {"rod": torch.stack([angle, w], 1)}, reward, torch.zeros_like(angle, dtype=torch.bool)

    def observe(self, state: State) -> Tensor:
        """(cos, sin, angular velocity)."""
        angle, w = state["rod"].unbind(1)
        return torch.stack([angle.cos(), angle.sin(), w], 1)

    def render(self) -> np.ndarray:
        """The first rod."""
        angle, _ = self._state["rod"][0].tolist()
        image = draw.canvas(160, 160)
        draw.line(image, (0, 0), (-0.8 * math.sin(angle), 0.8 * math.cos(angle)), draw.RED, 6)
        draw.disc(image, (0, 0), 0.05, draw.BLACK)
        return image
