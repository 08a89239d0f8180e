"""A MuJoCo scene that a bundle drives: observations from the model's quantities, actions to its actuators."""

import math
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from canter.export.runtime import BundleError, Policy
from canter.export.sources import SourceReader, import_mujoco

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
    """A MuJoCo model that is driven by a bundle, from a scene.xml or as an `MjModel`.

    Observations are put together from the bundle's segments by their `source`. Where a bundle does not state it, a
    segment's `term` (or its name) is read, and `terms[name]` replaces both: an array of MuJoCo's data with an optional
    range, `qpos[1:]`; the name of a sensor; or one of base_lin_vel, base_ang_vel, projected_gravity, joint_pos,
    joint_vel, actions and command.
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
        if not isinstance(scene, mujoco.MjModel) and not Path(scene).is_file():
            raise FileNotFoundError(f"there is no scene {scene}; give an XML file of MuJoCo")
        is_model = isinstance(scene, mujoco.MjModel)
        self.model = model = scene if is_model else mujoco.MjModel.from_xml_path(str(scene))
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
        self.source_reader = SourceReader(self)
        self.is_free = model.njnt > 0 and model.jnt_type[0] == mujoco.mjtJoint.mjJNT_FREE
        self._find_actuators()
        self._find_start()
        self.last_action = np.zeros(self.width)
        self.anchor: tuple[np.ndarray, np.ndarray] | None = None
        """Position and orientation of the reference motion's anchor, for a policy that follows one."""
        overrides = dict(terms or {})
        self.segments = []
        data.qpos[:] = self.start
        mujoco.mj_forward(model, data)
        if any(
            (s.get("source") or {}).get("kind", "").startswith("motion_anchor") for s in self.spec["observation"] or []
        ):
            self.anchor = (data.xpos[min(1, model.nbody - 1)].copy(), np.array([1.0, 0.0, 0.0, 0.0]))
        for segment in self.spec.get("observation") or []:
            text = overrides.pop(segment["name"], None)
            if text is None and segment.get("source") is not None:
                read = self.source_reader(segment)
            else:
                read = self._reader(str(text or segment.get("term", segment["name"])), segment)
            self.segments.append((segment, read))
        if overrides:
            known = [segment["name"] for segment, _ in self.segments]
            raise BundleError(f"the observation has no segment {next(iter(overrides))!r}; it has {known}")
        if not self.segments:
            raise BundleError("the observation of this bundle has no segments, so a scene cannot provide it")
        self.windows: dict[str, deque[np.ndarray]] = {}
        self.late: dict[str, deque[np.ndarray]] = {}

    def notes(self) -> list[str]:
        """What differs between this scene and the bundle's description of the training."""
        trained, found = self.spec.get("physics") or {}, scene_options(self.model)
        differing = [name for name in found if name in trained and not is_close(trained[name], found[name])]
        texts = [
            f"the scene's {name} is {found[name]}, the policy was trained with {trained[name]}" for name in differing
        ]
        return texts + self.servo_notes + self.source_reader.notes

    def _find_actuators(self) -> None:
        """Actuators of the actions by name, of themselves or of their joints, and how they are driven."""
        model, names, self.servo_notes = self.model, self.action.get("names"), []
        found = [] if names else list(range(model.nu))
        if not names and model.nu != self.width:
            raise BundleError(f"the bundle has {self.width} actions without names, the scene {model.nu} actuators")
        known: dict[str, int] = {}
        for number in range(model.nu):
            joint = model.joint(model.actuator_trnid[number, 0]).name
            known |= {joint: number, joint.rpartition("/")[2]: number}
        known |= {model.actuator(number).name: number for number in range(model.nu)}
        joints = [self.source_reader.find("joint", name) for name in names or []]
        missing = [name for name in names or [] if name not in known]
        self.is_direct = bool(missing) and len(missing) == len(names or []) and None not in joints
        has_gains = "stiffness" in self.action or self.action.get("target") == "effort"
        if missing and not (self.is_direct and has_gains):
            raise BundleError(f"the scene has no actuator or actuated joint {missing[0]!r}; it has {sorted(known)}")
        if self.is_direct:
            self.servo_notes.append("the scene has no actuators: torques by the bundle's gains act on its joints")
            self.actuators, chosen = [], np.array(joints)
        else:
            self.actuators = [known[name] for name in names] if names else found
            chosen = model.actuator_trnid[self.actuators, 0]
        self.joint_pos_at, self.joint_vel_at = model.jnt_qposadr[chosen], model.jnt_dofadr[chosen]
        gain, bias = model.actuator_gainprm[self.actuators], model.actuator_biasprm[self.actuators]
        has_servos = not self.is_direct and np.all((gain[:, 0] > 0) & np.isclose(bias[:, 1], -gain[:, 0]))
        self.are_servos = bool(has_servos) and self.action.get("target") in (None, "position", "relative_position")
        limits = {joint["name"]: joint.get("effort") for joint in self.spec.get("joints") or []}
        efforts = [limits.get(name) for name in names or []]
        self.efforts = np.array([np.inf if limit is None else limit for limit in efforts] or [np.inf])
        if self.are_servos and "stiffness" in self.action:
            self._use_gains(gain[:, 0], -bias[:, 2])

    def _use_gains(self, stiffness: np.ndarray, damping: np.ndarray) -> None:
        """Give the scene's servos the bundle's gains."""
        wanted = [np.broadcast_to(self.action.get(name, 0.0), self.width) for name in ("stiffness", "damping")]
        if np.allclose(wanted, [stiffness, damping], rtol=1e-4):
            return
        if self.action.get("damping") is None:
            wanted[1] = damping
        self.model.actuator_gainprm[self.actuators, 0] = wanted[0]
        self.model.actuator_biasprm[self.actuators, 1] = -wanted[0]
        self.model.actuator_biasprm[self.actuators, 2] = -wanted[1]
        self.servo_notes.append("the gains of the scene's servos are replaced by the bundle's")

    def _find_start(self) -> None:
        """The pose in which episodes begin, and the default pose of the actions."""
        model, joints = self.model, {joint["name"]: joint.get("default") for joint in self.spec.get("joints") or []}
        default = np.asarray(self.action.get("default_pose", self.action.get("offset", [])), np.float64)
        if default.size == model.nq:
            self.start, default = default, default[self.joint_pos_at]
        else:
            self.start = model.key_qpos[0].copy() if model.nkey else model.qpos0.copy()
            pose = self.spec.get("reset_pose")
            if self.is_free and pose and not model.nkey:
                self.start[:7] = [*pose["position"], *pose["orientation"]]
            for name, value in joints.items():
                number = self.source_reader.find("joint", name)
                if number is not None and value is not None:
                    self.start[model.jnt_qposadr[number]] = value
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
            if segment.get("delay"):  # the shortest of the training, in control periods
                late = self.late.setdefault(segment["name"], deque(maxlen=1 + round(segment["delay"][0] / self.period)))
                late.append(value)
                value = late[0]
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
        self.last_action, self.steps, self.target = np.zeros(self.width), 0, None
        self.windows.clear()
        self.late.clear()
        return self.observe()

    def step(self, action: Any) -> tuple[dict[str, np.ndarray], float, bool, bool]:
        """Apply one action for a control period: observation, no reward, fallen, time is up."""
        action = np.asarray(action, np.float64).ravel()
        data, wanted = self.data, self._target(action)
        for _ in range(self.substeps):
            self._drive(wanted)
            self.mujoco.mj_step(self.model, data)
        self.mujoco.mj_forward(self.model, data)  # sensors and poses of bodies are one time step behind
        self.last_action, self.steps = action, self.steps + 1
        has_fallen = not np.isfinite(data.qpos).all() or (self.is_free and self._projected_gravity()[2] > UPRIGHT)
        return self.observe(), math.nan, bool(has_fallen), self.steps >= self.limit

    def _target(self, action: np.ndarray) -> np.ndarray:
        """What an action asks of the actuators: positions, velocities, efforts or controls."""
        kind = self.action.get("target", "ctrl")
        if kind == "ctrl":
            return action
        offset = {"position": self.default, "relative_position": 0.0}.get(kind, 0.0)
        given = self.action.get("offset")
        wanted = np.asarray(offset if given is None else given) + np.asarray(self.action.get("scale", [1.0])) * action
        if self.action.get("target_clip"):
            low, high = (
                [end if v is None else v for v in bound]
                for bound, end in zip(self.action["target_clip"], (-np.inf, np.inf), strict=True)
            )
            wanted = np.clip(wanted, low, high)
        if self.action.get("smoothing"):
            weight, before = np.asarray(self.action["smoothing"]), self.target
            wanted = wanted if before is None else weight * wanted + (1 - weight) * before
            self.target = wanted
        return wanted + self.data.qpos[self.joint_pos_at] if kind == "relative_position" else wanted

    def _drive(self, wanted: np.ndarray) -> None:
        """Send a target to the actuators for one time step, as torques where they are no servos."""
        data, kind = self.data, self.action.get("target", "ctrl")
        if kind == "ctrl" or self.are_servos or ("stiffness" not in self.action and not self.is_direct):
            data.ctrl[self.actuators] = wanted
            return
        stiffness, damping = (np.asarray(self.action.get(name, 0.0)) for name in ("stiffness", "damping"))
        velocity = data.qvel[self.joint_vel_at]
        torque = {
            "effort": lambda: wanted,
            "velocity": lambda: damping * (wanted - velocity),
        }.get(kind, lambda: stiffness * (wanted - data.qpos[self.joint_pos_at]) - damping * velocity)()
        torque = np.clip(torque, -self.efforts, self.efforts)
        if self.is_direct:
            data.qfrc_applied[self.joint_vel_at] = torque
        else:
            data.ctrl[self.actuators] = torque

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


def scene_options(model: Any) -> dict[str, Any]:
    """The options of a MuJoCo model that a policy may depend on, under their names in a bundle."""
    mujoco, options = import_mujoco(), model.opt
    kinds = {"integrator": mujoco.mjtIntegrator, "cone": mujoco.mjtCone}
    found = {name: kind(int(getattr(options, name))).name.rpartition("_")[2].lower() for name, kind in kinds.items()}
    return {"timestep": float(options.timestep), **found, "impratio": float(options.impratio)}


def is_close(one: Any, other: Any) -> bool:
    """Whether two options are the same, but for rounding."""
    return math.isclose(one, other, rel_tol=1e-6) if isinstance(one, int | float) else one == other


def push(physics: Any, speed: float, generator: np.random.Generator) -> None:
    """Add a velocity in a random horizontal direction to the base of a MuJoCo robot."""
    model, data = physics
    angle = generator.uniform(0.0, 2.0 * math.pi)
    is_free = model.njnt > 0 and model.jnt_type[0] == 0
    change = [speed * math.cos(angle), speed * math.sin(angle)] if is_free else [speed * (1 if angle < math.pi else -1)]
    data.qvel[: len(change)] += change
