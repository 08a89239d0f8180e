"""A MuJoCo scene that a bundle drives: observations from the model's quantities, actions to its actuators."""

import math
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from canter.export.runtime import BundleError, Policy

TERM = re.compile(r"(?P<name>[A-Za-z0-9_:./\-]+)(?:\[(?P<first>\d*):(?P<last>\d*)\])?")
ARRAYS = ("qpos", "qvel", "qacc", "act", "ctrl", "sensordata", "cfrc_ext", "actuator_force", "xpos", "xquat")
SYNONYMS = {
    "joint_pos_rel": "joint_pos",
    "joint_vel_rel": "joint_vel",
    "dof_pos": "joint_pos",
    "dof_vel": "joint_vel",
    "last_action": "actions",
    "commands": "command",
    "velocity_commands": "command",
    "gravity": "projected_gravity",
}
UPRIGHT = -0.5  # projected gravity above it: tilted by more than 60 degrees
# Keys of MuJoCo's window -> index and change of the command: up, down, left, right, comma, full stop.
KEYS = {265: (0, 0.1), 264: (0, -0.1), 263: (2, 0.1), 262: (2, -0.1), 44: (1, 0.1), 46: (1, -0.1)}
SPACE = 32


class MujocoScene:
    """A MuJoCo model that is driven by a bundle, from a scene.xml.

    Observations are put together from the bundle's segments. A segment's `term` (or `terms[name]`, or else its name) is
    an array of MuJoCo's data with an optional range, `qpos[1:]`; the name of a sensor; or one of base_lin_vel,
    base_ang_vel, projected_gravity, joint_pos, joint_vel, actions and command.
    """

    def __init__(
        self,
        scene: Any,
        policy: Policy,
        seed: int | None = None,
        command: Sequence[float] = (),
        terms: Mapping[str, str] | None = None,
        reset_noise: float = 0.01,
        seconds: float = 20.0,
        period: float | None = None,
    ) -> None:
        mujoco = import_mujoco()
        self.mujoco, self.spec = mujoco, policy.spec
        if not Path(scene).is_file():
            raise FileNotFoundError(f"there is no scene {scene}; give an XML file of MuJoCo")
        self.model = model = mujoco.MjModel.from_xml_path(str(scene))
        self.data = data = mujoco.MjData(model)
        self.physics, self.command = (model, data), np.asarray(command, np.float64)
        self.reset_noise, self.generator = reset_noise, np.random.default_rng(seed)
        period = period or self.spec.get("control_period")
        if not period:
            raise BundleError("the bundle does not state its control period; give it: --period SECONDS")
        self.period, self.substeps = period, round(period / model.opt.timestep)
        if self.substeps < 1 or abs(self.substeps * model.opt.timestep - period) > 1e-6:
            step = model.opt.timestep
            raise BundleError(f"the control period {period} s is no multiple of the scene's time step {step} s")
        self.limit, self.fps = max(1, round(seconds / period)), min(120, round(1 / period))
        self.action = self.spec["action"]
        self.width = math.prod(self.spec["outputs"][0]["shape"])
        if self.action.get("kind") != "continuous":
            raise BundleError("a MuJoCo scene is driven by continuous actions; this policy's are discrete")
        self._find_actuators()
        self.is_free = model.njnt > 0 and model.jnt_type[0] == mujoco.mjtJoint.mjJNT_FREE
        self.last_action = np.zeros(self.width)
        overrides = dict(terms or {})
        self.segments = []
        for segment in self.spec.get("observation") or []:
            text = overrides.pop(segment["name"], segment.get("term", segment["name"]))
            self.segments.append((segment, self._reader(str(text), segment)))
        if overrides:
            known = [segment["name"] for segment, _ in self.segments]
            raise BundleError(f"the observation has no segment {next(iter(overrides))!r}; it has {known}")
        if not self.segments:
            raise BundleError("the observation of this bundle has no segments, so a scene cannot provide it")
        self.windows: dict[str, deque[np.ndarray]] = {}

    def _find_actuators(self) -> None:
        """Actuators of the actions by name, of themselves or of their joints, and their kind."""
        model, names = self.model, self.action.get("names")
        if not names:
            if model.nu != self.width:
                raise BundleError(f"the bundle has {self.width} actions without names, the scene {model.nu} actuators")
            self.actuators = list(range(model.nu))
        else:
            known: dict[str, int] = {}
            for number in range(model.nu):
                joint = model.joint(model.actuator_trnid[number, 0]).name
                known |= {joint: number, joint.rpartition("/")[2]: number}
            known |= {model.actuator(number).name: number for number in range(model.nu)}
            missing = [name for name in names if name not in known]
            if missing:
                raise BundleError(f"the scene has no actuator or actuated joint {missing[0]!r}; it has {sorted(known)}")
            self.actuators = [known[name] for name in names]
        joints = model.actuator_trnid[self.actuators, 0]
        self.joint_pos_at, self.joint_vel_at = model.jnt_qposadr[joints], model.jnt_dofadr[joints]
        gain, bias = model.actuator_gainprm[self.actuators], model.actuator_biasprm[self.actuators]
        self.are_servos = bool(np.all((gain[:, 0] > 0) & np.isclose(bias[:, 1], -gain[:, 0])))
        default = np.asarray(self.action.get("default_pose", self.action.get("offset", [])), np.float64)
        if default.size == self.model.nq:
            self.start, default = default, default[self.joint_pos_at]
        else:
            self.start = model.key_qpos[0].copy() if model.nkey else model.qpos0.copy()
            if default.size == self.width:
                self.start[self.joint_pos_at] = default
        self.default = default if default.size == self.width else self.start[self.joint_pos_at]

    def _reader(self, text: str, segment: Mapping[str, Any]) -> Callable[[], np.ndarray]:
        """The function that reads a segment's newest values."""
        match, data, model = TERM.fullmatch(text), self.data, self.model
        if match is None:
            raise BundleError(f"{text!r} is not a term; write a name or a range such as 'qpos[1:]'")
        name = match["name"].removeprefix("sensor:")
        part = slice(*(int(match[end]) if match[end] else None for end in ("first", "last")))
        quantities: dict[str, Callable[[], np.ndarray]] = {
            "base_lin_vel": self._base_lin_vel,
            "base_ang_vel": lambda: data.qvel[3:6],
            "projected_gravity": self._projected_gravity,
            "joint_pos": lambda: data.qpos[self.joint_pos_at] - self.default,
            "joint_vel": lambda: data.qvel[self.joint_vel_at],
            "actions": lambda: self.last_action,
            "command": lambda: self.command,
        }
        sensors = {model.sensor(i).name: model.sensor(i) for i in range(model.nsensor)}
        if name in sensors:
            first, width = int(sensors[name].adr[0]), int(sensors[name].dim[0])
            read = lambda: data.sensordata[first : first + width]  # noqa: E731
        elif name in ARRAYS:
            read = lambda: np.asarray(getattr(data, name)).ravel()  # noqa: E731
        elif SYNONYMS.get(name, name) in quantities:
            read = quantities[SYNONYMS.get(name, name)]
        else:
            known = ", ".join([*ARRAYS, *quantities, *sensors])
            way_out = f"--terms '{{{segment['name']}: TERM}}' names one of {known}"
            raise BundleError(f"the scene has nothing called {name!r} for the segment {segment['name']!r}; {way_out}")
        if name.startswith("base_") and not self.is_free:
            raise BundleError(f"{name} needs a scene whose first joint is free")
        width = segment["width"] // (segment.get("history") or 1)
        found = read()[part].size
        if found != width:
            hint = "; give the command: --command" if name in ("command", "commands", "velocity_commands") else ""
            raise BundleError(f"the segment {segment['name']!r} is {width} wide, but {text!r} has {found} values{hint}")
        return lambda: np.array(read()[part], np.float64)

    def _rotation(self) -> np.ndarray:
        """(3, 3) rotation from the base's frame to the world's."""
        matrix = np.zeros(9)
        self.mujoco.mju_quat2Mat(matrix, self.data.qpos[3:7])
        return matrix.reshape(3, 3)

    def _base_lin_vel(self) -> np.ndarray:
        return self._rotation().T @ self.data.qvel[:3]

    def _projected_gravity(self) -> np.ndarray:
        return self._rotation().T @ np.array([0.0, 0.0, -1.0])

    def observe(self) -> dict[str, np.ndarray]:
        """The observation, with scales, clips and histories of the segments."""
        parts = []
        for segment, read in self.segments:
            value = read()
            if segment.get("clip") is not None:
                value = np.clip(value, *segment["clip"])
            if segment.get("scale") is not None:
                value = value * np.asarray(segment["scale"])
            if segment.get("history"):
                window = self.windows.setdefault(segment["name"], deque(maxlen=segment["history"]))
                window.extend([value] * (segment["history"] if not window else 1))
                value = np.concatenate(window)
            parts.append(value)
        return {self.spec["inputs"][0]["name"]: np.concatenate(parts).astype(np.float32)}

    def reset(self, episode: int) -> dict[str, np.ndarray]:
        """Start an episode in the default pose, with small random differences."""
        self.mujoco.mj_resetData(self.model, self.data)
        noise = self.generator.uniform(-self.reset_noise, self.reset_noise, self.model.nq)
        if self.is_free:
            noise[:7] = 0.0
        self.data.qpos[:] = self.start + noise
        self.data.qvel[:] = self.generator.uniform(-self.reset_noise, self.reset_noise, self.model.nv)
        self.mujoco.mj_forward(self.model, self.data)
        self.last_action, self.steps = np.zeros(self.width), 0
        self.windows.clear()
        return self.observe()

    def step(self, action: Any) -> tuple[dict[str, np.ndarray], float, bool, bool]:
        """Apply one action for a control period: observation, no reward, fallen, time is up."""
        action = np.asarray(action, np.float64).ravel()
        data, target = self.data, self.action.get("target", "ctrl")
        scale = np.asarray(self.action.get("scale", [1.0]))
        wanted = self.default + scale * action
        for _ in range(self.substeps):
            if target == "ctrl":
                data.ctrl[self.actuators] = action
            elif self.are_servos or "stiffness" not in self.action:
                data.ctrl[self.actuators] = wanted
            else:
                stiffness, damping = (np.asarray(self.action.get(name, 0.0)) for name in ("stiffness", "damping"))
                error = wanted - data.qpos[self.joint_pos_at]
                data.ctrl[self.actuators] = stiffness * error - damping * data.qvel[self.joint_vel_at]
            self.mujoco.mj_step(self.model, data)
        self.last_action, self.steps = action, self.steps + 1
        has_fallen = not np.isfinite(data.qpos).all() or (self.is_free and self._projected_gravity()[2] > UPRIGHT)
        return self.observe(), math.nan, bool(has_fallen), self.steps >= self.limit

    def velocity(self) -> np.ndarray:
        """Forward, sideways and turning velocity of a free base; the first joint's velocity of any other."""
        if not self.is_free:
            return self.data.qvel[:1].copy()
        return np.array([*self._base_lin_vel()[:2], self.data.qvel[5]])

    def render(self) -> Any:
        """A picture that follows the robot."""
        if not hasattr(self, "renderer"):
            self.renderer = self.mujoco.Renderer(self.model, 480, 640)
            self.camera = self.mujoco.MjvCamera()
            self.camera.type, self.camera.trackbodyid = (
                self.mujoco.mjtCamera.mjCAMERA_TRACKING,
                min(1, self.model.nbody - 1),
            )
            self.camera.distance, self.camera.elevation = 3.0 * self._radius(), -15.0
        self.renderer.update_scene(self.data, self.camera)
        return self.renderer.render()

    def _radius(self) -> float:
        """Radius of the robot around its base in metres, without the ground."""
        of_robot = self.model.geom_bodyid > 0
        away = np.linalg.norm(self.data.geom_xpos[of_robot] - self.data.xpos[min(1, self.model.nbody - 1)], axis=1)
        return float(np.max(away + self.model.geom_rbound[of_robot], initial=0.5))

    def press(self, key: int) -> None:
        """Change the command by a key of the window: arrows drive and turn, space stops."""
        if key == SPACE:
            self.command[:] = 0.0
        elif key in KEYS and KEYS[key][0] < len(self.command):
            index, change = KEYS[key]
            self.command[index] += change

    def close(self) -> None:
        """Free the renderer."""
        if hasattr(self, "renderer"):
            self.renderer.close()


def import_mujoco() -> Any:
    """MuJoCo, or an error with the install command."""
    try:
        import mujoco
    except ImportError as error:
        raise ImportError('a scene needs MuJoCo: pip install "canter[mujoco]"') from error
    return mujoco


def push(physics: Any, speed: float, generator: np.random.Generator) -> None:
    """Add a velocity in a random horizontal direction to the base of a MuJoCo robot."""
    model, data = physics
    angle = generator.uniform(0.0, 2.0 * math.pi)
    is_free = model.njnt > 0 and model.jnt_type[0] == 0
    change = [speed * math.cos(angle), speed * math.sin(angle)] if is_free else [speed * (1 if angle < math.pi else -1)]
    data.qvel[: len(change)] += change
