"""A robot in MuJoCo behind the interface of a real one: the program that runs on the robot runs on this too."""

import dataclasses
import math
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from canter.export.robot.controller import Command, Sensors
from canter.export.robot.description import Robot

VARIED = ("geom_friction", "body_mass", "body_inertia", "actuator_forcerange", "dof_frictionloss", "dof_armature")
VARIED += ("dof_damping",)


@dataclasses.dataclass(frozen=True)
class Variation:
    """How a simulation differs from its scene."""

    delay: float = 0.0
    """Seconds by which commands reach the motors late."""
    noise: dict[str, float] = dataclasses.field(default_factory=dict)
    """Standard deviation of noise by sensor; of `orientation` in rad."""
    push: float = 0.0
    """Speed in m/s that a push adds to the base, in a random direction, every `push_interval` seconds."""
    push_interval: float = 2.0
    friction: float = 1.0
    """Factor of the sliding friction of all contacts."""
    mass: float = 1.0
    """Factor of the base's mass."""
    strength: float = 1.0
    """Factor of the motors' gains and largest torques."""
    damping_gain: float = 1.0
    """Factor of the damping gain alone."""
    joint_friction: float | None = None
    """Friction of every joint in Nm; the scene's if None."""
    armature: float | None = None
    """Rotor inertia of every joint in kg m^2; the scene's if None."""
    joint_damping: float | None = None
    """Passive damping of every joint in Nms/rad; the scene's if None. 0 where the scene has the gain `kd` there."""


class MujocoRobot:
    """A MuJoCo scene as a transport.

    Every joint has a position servo with the gains that are sent; the scene's own actuators only lend it their force
    range. It gives the sensors `joint_pos`, `joint_vel`, `joint_torque`, `orientation`, `base_pos`, `base_lin_vel`,
    `base_ang_vel`, `contact` (one number for each foot: the bodies at the ends), `command`, and those of the scene.

    Args:
        scene: MuJoCo's XML file.
        robot: The joints and sensors that are wanted.
        command: The reading of the sensor `command`; assign to the attribute `command` to change it.
        is_real_time: Follow the clock on the wall; otherwise time passes only in `wait`.
        variation: Differences from the scene.
        joints: Names of the joints as the robot reports them; wrong ones show what a mistake does.
    """

    def __init__(
        self,
        scene: Any,
        robot: Robot,
        command: Sequence[float] = (0.0, 0.0, 0.0),
        is_real_time: bool = False,
        variation: Variation | None = None,
        seed: int = 0,
        joints: Sequence[str] | None = None,
    ) -> None:
        try:
            import mujoco as package
        except ImportError as error:
            raise ImportError("a simulated robot needs MuJoCo: pip install mujoco") from error
        if not Path(scene).is_file():
            raise FileNotFoundError(f"there is no scene {scene}; give an XML file of MuJoCo")
        mujoco: Any = package
        self.mujoco, self.robot = mujoco, robot
        self.joints = list(joints or robot.joints)
        self.command = np.asarray(command, np.float64)
        self.cut: set[str] = set()
        """Sensors that give no new readings, as after a broken cable."""
        self.is_real_time, self.generator = is_real_time, np.random.default_rng(seed)
        spec = mujoco.MjSpec.from_file(str(scene))
        driven = {actuator.target for actuator in spec.actuators}
        for name in robot.joints:
            if spec.joint(name) is None:
                raise ValueError(f"the scene has no joint {name!r}; it has {[joint.name for joint in spec.joints]}")
            if name not in driven:
                spec.add_actuator(name=name, target=name, trntype=mujoco.mjtTrn.mjTRN_JOINT)
        self.model = model = spec.compile()
        self.data = mujoco.MjData(model)
        ids = [model.joint(name).id for name in robot.joints]
        self.qpos, self.qvel = model.jnt_qposadr[ids], model.jnt_dofadr[ids]
        self.is_free = bool(model.jnt_type[0] == mujoco.mjtJoint.mjJNT_FREE)
        self.base = int(model.jnt_bodyid[ids[0]]) if not self.is_free else int(model.jnt_bodyid[0])
        self._servos(ids)
        self.original = {name: getattr(model, name).copy() for name in VARIED}
        self.vary(variation or Variation())
        names = {model.sensor(number).name for number in range(model.nsensor)}
        self.scene_sensors = [name for name in robot.all_sensors if name in names]
        self.old: dict[str, tuple[float, Any]] = {}
        self.late: deque[tuple[float, Command]] = deque()
        self.reset()

    def _servos(self, ids: Sequence[int]) -> None:
        """Make a servo of the actuator of each joint; gains come with every command."""
        model, mujoco = self.model, self.mujoco
        by_joint = {int(model.actuator_trnid[number, 0]): number for number in range(model.nu)}
        self.actuators = np.array([by_joint[joint] for joint in ids])
        model.actuator_gaintype[:] = mujoco.mjtGain.mjGAIN_FIXED
        model.actuator_biastype[:] = mujoco.mjtBias.mjBIAS_AFFINE
        model.actuator_gainprm[:], model.actuator_biasprm[:] = 0.0, 0.0
        model.actuator_gear[self.actuators, 0] = 1.0
        model.actuator_ctrllimited[:] = 0
        ranges, is_limited = model.actuator_forcerange, model.actuator_forcelimited.astype(bool)
        efforts = np.where(np.isfinite(self.robot.effort), self.robot.effort, np.inf)
        for actuator, effort in zip(self.actuators, efforts, strict=True):
            if math.isfinite(effort):
                ranges[actuator], is_limited[actuator] = (-effort, effort), True
        model.actuator_forcelimited[:] = is_limited

    def vary(self, given: Variation) -> None:
        """Make the simulation differ from its scene, in this way alone."""
        model, self.variation = self.model, given
        for name, values in self.original.items():
            getattr(model, name)[:] = values
        model.geom_friction[:, 0] *= given.friction
        model.body_mass[self.base] *= given.mass
        model.body_inertia[self.base] *= given.mass
        model.actuator_forcerange[:] *= given.strength
        for name, value in (("frictionloss", "joint_friction"), ("armature", "armature"), ("damping", "joint_damping")):
            if getattr(given, value) is not None:
                getattr(model, f"dof_{name}")[self.qvel] = getattr(given, value)
        self.mujoco.mj_setConst(model, self.data)

    def reset(self) -> None:
        """Put the robot into the scene's first key frame, at rest, without stiffness."""
        if self.model.nkey:
            self.mujoco.mj_resetDataKeyframe(self.model, self.data, 0)
        else:
            self.mujoco.mj_resetData(self.model, self.data)
        self.data.time, self.next_push = 0.0, self.variation.push_interval
        self.late.clear()
        self._apply(Command(*(np.zeros(len(self.actuators)) for _ in range(3))))
        self.mujoco.mj_forward(self.model, self.data)
        self.begin = time.perf_counter()

    def _apply(self, command: Command) -> None:
        """Give gains and targets to the servos."""
        factor, model = self.variation.strength, self.model
        model.actuator_gainprm[self.actuators, 0] = factor * command.kp
        model.actuator_biasprm[self.actuators, 1] = -factor * command.kp
        model.actuator_biasprm[self.actuators, 2] = -factor * self.variation.damping_gain * command.kd
        self.data.ctrl[self.actuators] = command.target

    def advance(self, until: float) -> None:
        """Simulate until a time; commands take effect when their delay is over."""
        step = self.model.opt.timestep
        while self.data.time + 0.5 * step < until:
            while self.late and self.late[0][0] <= self.data.time + 1e-9:
                self._apply(self.late.popleft()[1])
            if self.variation.push and self.data.time >= self.next_push:
                self.push(self.variation.push)
                self.next_push += self.variation.push_interval
            self.mujoco.mj_step(self.model, self.data)

    def push(self, speed: float, angle: float | None = None) -> None:
        """Add a horizontal velocity to the base, in the direction `angle` in rad; in a random one if None."""
        angle = float(self.generator.uniform(0.0, 2.0 * math.pi)) if angle is None else angle
        if self.is_free:
            self.data.qvel[:2] += [speed * math.cos(angle), speed * math.sin(angle)]

    def read(self) -> Sensors:
        """The newest readings."""
        data, now = self.data, float(self.data.time)
        orientation = data.xquat[self.base].copy() if self.is_free else np.array([1.0, 0.0, 0.0, 0.0])
        found = {
            "joint_pos": data.qpos[self.qpos].copy(),
            "joint_vel": data.qvel[self.qvel].copy(),
            "joint_torque": data.actuator_force[self.actuators].copy(),
            "orientation": orientation,
            "command": self.command.copy(),
            "base_pos": data.xpos[self.base].copy(),
        }
        if self.is_free:
            found["base_lin_vel"] = data.xmat[self.base].reshape(3, 3).T @ data.qvel[:3]
            found["base_ang_vel"] = data.qvel[3:6].copy()
        if "contact" in self.robot.all_sensors:
            found["contact"] = self.contacts()
        for name in self.scene_sensors:
            found.setdefault(name, data.sensor(name).data.copy())
        for name, deviation in self.variation.noise.items():
            if name not in found:
                raise ValueError(f"there is no sensor {name!r} to add noise to; there are {', '.join(found)}")
            noise = self.generator.normal(0.0, deviation, 3 if name == "orientation" else found[name].shape)
            if name == "orientation":
                self.mujoco.mju_quatIntegrate(found[name], noise, 1.0)
            else:
                found[name] = found[name] + noise
        readings = {name: (now, value) for name, value in found.items()}
        readings |= {name: self.old[name] for name in self.cut if name in self.old}
        self.old = readings
        return readings

    def contacts(self) -> np.ndarray:
        """Whether each foot, a body without further ones, touches something."""
        model, bodies = self.model, range(1, self.model.nbody)
        feet = [body for body in bodies if body not in model.body_parentid and model.body_dofnum[body]]
        touching = {int(model.geom_bodyid[geom]) for contact in self.data.contact for geom in contact.geom}
        return np.array([float(foot in touching) for foot in feet])

    def write(self, command: Command) -> None:
        """Send targets and gains; in the order of `joints`, which the motors take for their own."""
        self.late.append((float(self.data.time) + self.variation.delay, command))

    def wait(self, until: float) -> float:
        """Let time pass."""
        if not self.is_real_time:
            self.advance(until)
            return float(self.data.time)
        while (now := time.perf_counter() - self.begin) < until:
            time.sleep(min(until - now, 0.1))
        self.advance(now)
        return now

    def close(self) -> None:
        """Nothing to close."""
