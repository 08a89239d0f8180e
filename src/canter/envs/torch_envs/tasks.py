"""Torch-native tasks: Gymnasium's classic control, and point robots that follow commands, a course or an image."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from canter.envs.torch_envs.base import State, TorchEnv
from canter.envs.vec_env import Device

KINDS = ("flat", "mud", "beam")
BLACK, GREY, RED, GREEN, BLUE = (30, 30, 30), (170, 170, 170), (200, 60, 50), (60, 150, 80), (60, 90, 200)
Point = tuple[float, float]


def symmetric_box(*high: float) -> spaces.Box:
    """The Box between `-high` and `high`."""
    bound = np.array(high, np.float32)
    return spaces.Box(-bound, bound)


def canvas(height: int, width: int) -> np.ndarray:
    """A white (H, W, 3) uint8 image."""
    return np.full((height, width, 3), 255, np.uint8)


def line(image: np.ndarray, start: Point, end: Point, colour: tuple[int, int, int], thickness: float) -> None:
    """A straight stroke between points (x, y) in [-1, 1], y upwards, `thickness` pixels wide."""
    size = np.array(image.shape[:2]) - 1
    a, b = (np.array([1 - y, 1 + x]) / 2 * size for x, y in (start, end))
    pixels = np.stack(np.meshgrid(*map(np.arange, image.shape[:2]), indexing="ij"), -1)
    along = np.clip(((pixels - a) @ (b - a)) / max(((b - a) ** 2).sum(), 1e-9), 0, 1)
    distance = np.linalg.norm(pixels - (a + along[..., None] * (b - a)), axis=-1)
    image[distance <= thickness / 2] = colour


def disc(image: np.ndarray, centre: Point, radius: float, colour: tuple[int, int, int]) -> None:
    """A filled circle whose radius is a fraction of the image's half width."""
    line(image, centre, centre, colour, radius * image.shape[1])


def arrow(image: np.ndarray, start: Point, vector: Point, colour: tuple[int, int, int]) -> None:
    """A stroke from `start` along `vector`, with a dot at its head."""
    end = (start[0] + vector[0], start[1] + vector[1])
    line(image, start, end, colour, 2)
    disc(image, end, 0.03, colour)


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
        image, x = canvas(120, 240), x / self.x_limit
        line(image, (-1, -0.62), (1, -0.62), GREY, 1)
        line(image, (x - 0.08, -0.55), (x + 0.08, -0.55), BLACK, 9)
        line(image, (x, -0.5), (x + 0.5 * math.sin(angle), math.cos(angle) - 0.5), RED, 4)
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
        image = canvas(160, 160)
        line(image, (0, 0), (-0.8 * math.sin(angle), 0.8 * math.cos(angle)), RED, 6)
        disc(image, (0, 0), 0.05, BLACK)
        return image


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
        shapes = {"position": (n, 2), "velocity": (n, 2), "last_action": (n, 2), "tracking_error": (n,), "CoT": (n,)}
        return {
            **{name: torch.zeros(shape, device=self.device) for name, shape in shapes.items()},
            "measured": self.noise * self.normal(n, 2),
            "command": self.uniform(n, 2, -self.max_command, self.max_command),
            "friction": self.uniform(n, 1, 0.5, 2.0),
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
        power, n = (force.abs() * velocity.abs()).sum(1), len(speed)
        change = torch.rand(n, 1, generator=self.generator, device=self.device) < self.command_change_prob
        after = {
            **state,
            "position": position,
            "velocity": velocity,
            "measured": velocity + self.noise * self.normal(n, 2),
            "last_action": action,
            "command": torch.where(change, self.uniform(n, 2, -self.max_command, self.max_command), command),
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
        image = canvas(160, 160)
        arrow(image, (x, y), (cx, cy), GREEN)
        arrow(image, (x, y), (vx, vy), BLUE)
        disc(image, (x, y), 0.06, BLACK)
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


class Course(TorchEnv):
    """Drive a mass along a course at the commanded speed: over open ground, through mud, along a narrow beam.

    Mud stops a robot whose force is below `stickiness`. On the beam a force proportional to the offset from the middle,
    and a side wind, push the robot outwards; it falls at `beam_half_width`. The observation has the documented
    components of a robot that meets obstacles; its joint positions are one number, the offset from the middle:

        proprioception  linear velocity 3, angular velocity 3, gravity 3, commands 3, offset 1, last action 2
        engaging_block  distance to the next obstacle 1, one-hot number of the current one 5, its width and wind 2

    Args:
        segments: Kinds of ground in order, "flat", "mud" or "beam"; a course of one kind has no end.
        action_scale: Factor of the actions.
        command_range: Commanded speeds in m/s; one is drawn for each episode.
    """

    mass, dt, gain, max_force, segment_length, look_ahead = 1.0, 0.05, 8.0, 10.0, 3.0, 0.2
    friction, stickiness = 1.0, 7.0  # N per m/s everywhere, N in mud
    beam_pull, max_wind, beam_half_width, ground_half_width = 25.0, 1.0, 0.2, 2.0
    lin_vel_scale = 2.0
    """Factor of velocities and commands in the observation."""
    max_episode_length = 600
    obs_segments = critic_obs_segments = {"proprioception": (15,), "engaging_block": (8,)}
    obs_space = critic_obs_space = spaces.Box(-np.inf, np.inf, (23,))
    action_space = spaces.Box(-10.0, 10.0, (2,))

    def __init__(
        self,
        num_envs: int,
        device: Device = "cpu",
        seed: int | None = None,
        max_episode_length: int | None = None,
        segments: Sequence[str] = ("flat", "mud", "flat", "beam", "flat"),
        action_scale: float = 0.5,
        command_range: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        unknown = [kind for kind in segments if kind not in KINDS]
        if unknown or not segments:
            raise ValueError(f"segments are of the kinds {', '.join(KINDS)}, got {list(segments)}")
        self.action_scale, self.command_range, self.is_endless = action_scale, command_range, len(segments) == 1
        self.length = len(segments) * self.segment_length
        self.kinds = torch.tensor([KINDS.index(kind) for kind in segments], device=device)
        super().__init__(num_envs, device, seed, max_episode_length)

    def initial_state(self, n: int) -> State:
        """At the start, a little off the middle and already moving."""
        offset = self.uniform(n, 1, -0.15, 0.15)
        return {
            "position": torch.cat([torch.zeros_like(offset), offset], 1),
            "velocity": torch.cat([self.uniform(n, 1, 0.0, 1.0), self.uniform(n, 1, -0.2, 0.2)], 1),
            "last_action": torch.zeros(n, 2, device=self.device),
            "command": self.uniform(n, 1, *self.command_range),
            "wind": self.uniform(n, 1, -self.max_wind, self.max_wind),
        }

    def kind_at(self, x: Tensor) -> Tensor:
        """(N,) number of the kind of ground at x."""
        place = torch.div(x, self.segment_length, rounding_mode="floor").long()
        return self.kinds[place.clamp(0, len(self.kinds) - 1)]

    def dynamics(self, state: State, action: Tensor) -> tuple[State, Tensor, Tensor]:
        """Force against friction; on the beam a pull away from the middle. Falling and arriving end an episode."""
        kind = self.kind_at(state["position"][:, 0])
        on_beam = kind == KINDS.index("beam")
        force = (self.gain * self.action_scale * action).clamp(-self.max_force, self.max_force)
        offset = state["position"][:, 1]
        pull = torch.where(on_beam, self.beam_pull * offset + state["wind"][:, 0], 0.0)
        outward = torch.stack([torch.zeros_like(pull), pull], 1)
        braking = self.friction * state["velocity"]
        velocity = state["velocity"] + self.dt * (force - braking + outward) / self.mass
        # Mud reduces the speed by a fixed amount per step, at most to 0.
        held = torch.where(kind == KINDS.index("mud"), self.dt * self.stickiness / self.mass, 0.0).unsqueeze(1)
        velocity = velocity * (1.0 - held / velocity.norm(dim=1, keepdim=True).clamp_min(1e-6)).clamp_min(0.0)
        position = state["position"] + self.dt * velocity
        after = {**state, "position": position, "velocity": velocity, "last_action": action}
        speed_error = velocity[:, 0] - state["command"][:, 0]
        effort = (self.action_scale * action).square().sum(1)
        reward = torch.exp(-8.0 * speed_error.square()) + torch.exp(-20.0 * position[:, 1].square()) - 0.02 * effort
        fell = position[:, 1].abs() > torch.where(on_beam, self.beam_half_width, self.ground_half_width)
        return after, torch.where(fell, -10.0, reward), fell | ((position[:, 0] >= self.length) & (not self.is_endless))

    def observe(self, state: State) -> Tensor:
        """Concatenate both components."""
        x, offset = state["position"].split(1, 1)
        zero, x = torch.zeros_like(x), x[:, 0]
        speed, command = self.lin_vel_scale * state["velocity"], self.lin_vel_scale * state["command"]
        proprioception = [speed, *[zero] * 6, zero - 1, command, zero, zero, offset, state["last_action"]]
        # Flat ground is 0, so an obstacle counts from just before it to its end.
        met = torch.maximum(self.kind_at(x), self.kind_at(x + self.look_ahead))
        flags = (met.unsqueeze(1) == torch.arange(5, device=self.device)) & (met.unsqueeze(1) > 0)
        left = self.segment_length - torch.remainder(x, self.segment_length)
        on_beam = (met == KINDS.index("beam")).unsqueeze(1)
        info = torch.where(on_beam, torch.cat([zero + self.beam_half_width, state["wind"]], 1), 0.0)
        return torch.cat([*proprioception, left.unsqueeze(1), flags.float(), info], 1)

    def render(self) -> np.ndarray:
        """The first robot from above; mud is a broad band, the beam a narrow one."""
        x, y = self._state["position"][0].tolist()
        image, scale = canvas(80, 400), 2 / self.length
        for i, kind in enumerate(self.kinds.tolist()):
            start, end = i * self.segment_length + 0.1, (i + 1) * self.segment_length - 0.1
            colour, width = ((GREY, 2), (GREY, 30), (BLUE, 10))[kind]
            line(image, (scale * start - 1, 0.0), (scale * end - 1, 0.0), colour, width)
        disc(image, (scale * (x % self.length) - 1, y), 0.02, RED)
        return image
