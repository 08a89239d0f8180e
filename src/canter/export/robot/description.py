"""What a robot is and what its policies need: `policy.json` of every bundle, and the robot's own `robot.json`.

Vectors are in the robot's order of joints. Everything that the control loop needs is worked out here, once, so that the
loop in Python and the one in C read the same tables.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from canter.export.runtime import Bundle, BundleError

DAMP, STAND = 0, 1  # the first two modes of every robot
# Segments of bundles that do not say what they are -> kind of source.
KINDS = {
    "joint_pos": "joint_position",
    "joint_pos_rel": "joint_position",
    "dof_pos": "joint_position",
    "joint_vel": "joint_velocity",
    "joint_vel_rel": "joint_velocity",
    "dof_vel": "joint_velocity",
    "actions": "last_action",
    "last_action": "last_action",
    "command": "command",
    "commands": "command",
    "velocity_commands": "command",
    "projected_gravity": "gravity",
    "gravity": "gravity",
    "base_lin_vel": "linear_velocity",
    "base_ang_vel": "angular_velocity",
}
# What the control loop itself knows; a policy may observe its last output, or the one before that.
DERIVED: tuple[str, ...] = ("last_action", "action_before", "projected_gravity")
SENSORS = {"linear_velocity": "base_lin_vel", "angular_velocity": "base_ang_vel", "gravity": "projected_gravity"}


@dataclasses.dataclass(frozen=True)
class Safety:
    """Limits of the control loop; entries of `safety` in robot.json. Angles in rad, times in s."""

    max_age: float = 0.1
    """Age of a sensor's reading above which the robot is damped."""
    max_gap: float = 0.1
    """Time between two steps above which the robot is damped."""
    max_late: int = 5
    """Steps in a row that may come half a period late."""
    max_tilt: float = 1.0
    """Angle between the base and upright above which the robot has fallen."""
    position_margin: float = 0.15
    """How far a joint may be measured outside of its limits."""
    velocity_factor: float = 1.5
    """Measured joint velocity, as a multiple of the joint's limit, above which the robot is damped."""
    stand_error: float = 0.5
    """Difference between target and position of a joint in `stand` above which it does not follow."""
    stand_seconds: float = 0.5
    """How long a joint may not follow."""
    ramp_seconds: float = 2.0
    """Time in which `stand` is reached."""
    rate_factor: float = 1.0
    """Largest velocity of a joint target, as a multiple of the joint's velocity limit."""
    damping: float | None = None
    """Damping gain of the safe state; each joint's own gain by default."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """One part of an observation: `(sign * sensor - offset)`, clipped, times `scale`, with its history."""

    name: str
    sensor: str
    """Sensor that is read, or one of `DERIVED`."""
    columns: tuple[int, ...]
    """Columns of the sensor, in the policy's order."""
    sign: float
    offset: np.ndarray
    low: float
    high: float
    scale: np.ndarray
    history: int

    @property
    def width(self) -> int:
        """Columns of the observation."""
        return len(self.columns) * self.history


@dataclasses.dataclass(frozen=True)
class Mode:
    """What the robot can do: `damp`, `stand`, or a policy. Vectors have one number for each joint of the robot."""

    name: str
    bundle: Bundle | None
    segments: tuple[Segment, ...]
    actions: tuple[int, ...]
    """Joint of every action."""
    pose: np.ndarray
    """Targets while an action is 0; joints that a policy does not move stay there."""
    scale: np.ndarray
    """One number for each action."""
    target_low: np.ndarray
    target_high: np.ndarray
    smoothing: np.ndarray
    is_relative: bool
    """Whether actions are added to positions instead of `pose`."""
    kp: np.ndarray
    kd: np.ndarray
    blend: float
    """Seconds in which targets and gains go over from those of the mode before."""
    enter_from: tuple[int, ...]
    max_tilt: float
    seconds: float
    """Time after which `next_mode` begins; infinite for none."""
    next_mode: int

    @property
    def obs_width(self) -> int:
        """Width of the observation."""
        return sum(segment.width for segment in self.segments)


@dataclasses.dataclass(frozen=True)
class Robot:
    """A robot with its modes and limits."""

    joints: tuple[str, ...]
    period: float
    sensors: dict[str, int]
    """Width of every sensor that must be there and fresh."""
    extras: dict[str, int]
    """Width of every sensor that is only logged."""
    modes: tuple[Mode, ...]
    position: np.ndarray
    """(J, 2) limits of positions."""
    velocity: np.ndarray
    effort: np.ndarray
    damping: np.ndarray
    """Gain of every joint in the safe state."""
    safety: Safety

    def mode(self, name: str) -> int:
        """Number of a mode."""
        modes = self.names["mode"]
        if name not in modes:
            raise ValueError(f"there is no mode {name!r}; there are {', '.join(modes)}")
        return modes.index(name)

    @property
    def names(self) -> dict[str, list[str]]:
        """Names of joints, sensors and modes by number."""
        modes = [mode.name for mode in self.modes]
        return {"joint": list(self.joints), "sensor": list(self.all_sensors), "mode": modes}

    @property
    def width(self) -> int:
        """Widest observation of all modes."""
        return max(mode.obs_width for mode in self.modes)

    @property
    def all_sensors(self) -> dict[str, int]:
        """Width of every sensor, required ones first."""
        return self.sensors | self.extras


def load_robot(bundle: Any, file: Any = None) -> Robot:
    """The robot that a bundle and a robot.json describe; without `file`, the robot.json beside the bundle's files.

    Args:
        bundle: Folder of a bundle, or a `Bundle`. It is the mode `walk`, unless robot.json names other ones.
        file: A robot.json; its entries go before those of the bundle.
    """
    folder = bundle.path if isinstance(bundle, Bundle) else Path(bundle)
    file = Path(file) if file is not None else folder / "robot.json" if (folder / "robot.json").is_file() else None
    given: dict[str, Any] = {}
    if file is not None:
        try:
            given = json.loads(file.read_bytes())
        except (OSError, ValueError) as error:
            raise BundleError(f"{file} cannot be read: {error}") from error
        folder = file.parent
    known = {"joints", "safety", "sensors", "extras", "modes", "period"}
    if not isinstance(given, dict) or set(given) - known:
        raise BundleError(f"{file} has the entries {sorted(set(given) - known)}; it may have {sorted(known)}")
    named = {"walk": {}, **{name: dict(entry) for name, entry in given.get("modes", {}).items()}}
    stand = named.pop("stand", {})
    if given.get("modes") and "walk" not in given["modes"]:
        del named["walk"]
    bundles = {}
    for name, entry in named.items():
        if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII):
            raise BundleError(f"the name of a mode must be letters, digits and _, got {name!r}")
        path = entry.pop("bundle", None)
        bundles[name] = bundle if path is None else folder / path
        bundles[name] = bundles[name] if isinstance(bundles[name], Bundle) else Bundle(bundles[name])
    return describe_robot(bundles, named, stand, given)


def describe_robot(
    bundles: Mapping[str, Bundle],
    settings: Mapping[str, dict[str, Any]],
    stand: Mapping[str, Any],
    given: Mapping[str, Any],
) -> Robot:
    """The robot of several bundles by mode."""
    specs = {}
    for name, bundle in bundles.items():
        own = settings[name]
        specs[name] = dict(bundle.spec)
        if "observation" in own:
            specs[name]["observation"] = own["observation"]
        specs[name]["action"] = {**bundle.spec["action"], **own.get("action", {})}
    first = next(iter(specs.values()))
    described = given.get("joints") or first.get("joints") or [{"name": n} for n in first["action"].get("names") or []]
    joints = tuple(str(joint["name"]) for joint in described)
    if not joints or len(set(joints)) < len(joints):
        raise BundleError(f"the robot's joints must have different names, got {list(joints)}; name them in robot.json")
    periods = {float(spec["control_period"]) for spec in specs.values() if spec.get("control_period")}
    periods = {float(given["period"])} if "period" in given else periods
    if len(periods) != 1:
        raise BundleError(f"all policies of a robot need one control period, got {sorted(periods)}")
    safety = fields_of(Safety, given.get("safety", {}), "safety")
    limit = lambda key: np.array([float(joint.get(key, math.inf)) for joint in described])  # noqa: E731
    whole = [-math.inf, math.inf]
    position = np.array([joint.get("position", whole) for joint in described], float)
    numbers = {name: number for number, name in enumerate(["damp", "stand", *specs])}
    own_kd = gain_of(first["action"], described, joints, "damping", 0.0)
    damping = own_kd if safety.damping is None else np.full(len(joints), safety.damping)
    if not damping.any():
        raise BundleError("no joint has a damping gain for the safe state; give safety.damping in robot.json")
    default = default_pose(first, described, joints)
    zeros, sensors = np.zeros(len(joints)), {"joint_pos": len(joints), "joint_vel": len(joints), "orientation": 4}
    plain: dict[str, Any] = {"bundle": None, "segments": (), "actions": (), "scale": zeros[:0], "is_relative": False}
    plain |= {"target_low": zeros[:0], "target_high": zeros[:0], "smoothing": zeros[:0]}
    damp = Mode("damp", pose=default, kp=zeros, kd=damping, blend=0.0, enter_from=(), **plain, **ending(numbers, {}))
    kp, kd = (gain_of({**first["action"], **stand}, described, joints, key) for key in ("stiffness", "damping"))
    tilt = ending(numbers, {"max_tilt": safety.max_tilt, **stand})
    everywhere = tuple(numbers.values())
    standing = Mode(
        "stand", pose=default, kp=kp, kd=kd, blend=safety.ramp_seconds, enter_from=everywhere, **plain, **tilt
    )
    modes, renamed = [damp, standing], given.get("sensors", {})  # sensor of a policy -> of the robot
    for name, spec in specs.items():
        mode = policy_mode(name, bundles[name], spec, settings[name], described, joints, numbers, safety)
        segments = [dataclasses.replace(s, sensor=renamed.get(s.sensor, s.sensor)) for s in mode.segments]
        modes.append(dataclasses.replace(mode, segments=tuple(segments)))
        for segment in segments:
            if segment.sensor not in DERIVED:
                width = sensors.setdefault(segment.sensor, len(segment.columns))
                if max(segment.columns) >= width:
                    raise BundleError(f"{segment.name!r} of {name} reads more columns of {segment.sensor} than {width}")
    extras = {name: int(width) for name, width in given.get("extras", {}).items() if name not in sensors}
    return Robot(
        joints=joints,
        period=periods.pop(),
        sensors=sensors,
        extras=extras,
        modes=tuple(modes),
        position=position,
        velocity=limit("velocity"),
        effort=limit("effort"),
        damping=damping,
        safety=safety,
    )


def fields_of(kind: Any, given: Mapping[str, Any], what: str) -> Any:
    """A dataclass from an object of JSON; an unknown entry is an error."""
    known = [field.name for field in dataclasses.fields(kind)]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise BundleError(f"{what} has no entry {unknown[0]!r}; it may have {', '.join(known)}")
    return kind(**given)


def spread(value: Any, count: int, what: str) -> np.ndarray:
    """A list of one number, or of one for each of `count`, as a vector."""
    array = np.asarray(value, np.float64).ravel()
    if array.size not in (1, count):
        raise BundleError(f"{what} has {array.size} numbers, expected 1 or {count}")
    return np.full(count, array[0]) if array.size == 1 else array


def gain_of(
    action: Mapping[str, Any],
    described: Sequence[Mapping[str, Any]],
    joints: Sequence[str],
    key: str,
    default: Any = None,
) -> np.ndarray:
    """`stiffness` or `damping` of every joint: of the policy, else of the joint."""
    found = [joint.get(key, default) for joint in described]
    names = action.get("names") or joints
    if action.get(key) is not None:
        for name, value in zip(names, spread(action[key], len(names), key), strict=True):
            found[joints.index(name)] = float(value)
    if any(value is None for value in found):
        raise BundleError(f"the joint {joints[found.index(None)]!r} has no {key}; give it in robot.json")
    return np.array(found, float)


def default_pose(spec: Mapping[str, Any], described: Sequence[Mapping[str, Any]], joints: Sequence[str]) -> np.ndarray:
    """Default position of every joint: of the policy, else of the joint."""
    pose = np.array([float(joint.get("default", math.nan)) for joint in described])
    action = spec["action"]
    given, names = action.get("default_pose", action.get("offset")), action.get("names") or joints
    if given is not None:
        for name, value in zip(names, spread(given, len(names), "default_pose"), strict=True):
            pose[joints.index(name)] = value
    if not np.isfinite(pose).all():
        raise BundleError(f"the joint {joints[int(np.argmax(np.isnan(pose)))]!r} has no default position")
    return pose


def ending(numbers: Mapping[str, int], own: Mapping[str, Any]) -> dict[str, Any]:
    """Tilt, duration and following mode."""
    tilt = own.get("max_tilt", math.inf)
    seconds, following = own.get("seconds", math.inf), own.get("next", "damp")
    if following not in numbers:
        raise BundleError(f"there is no mode {following!r} to come next; there are {', '.join(numbers)}")
    tilt = math.inf if tilt is None else float(tilt)
    return {"max_tilt": tilt, "seconds": float(seconds), "next_mode": numbers[following]}


def policy_mode(
    name: str,
    bundle: Bundle,
    spec: Mapping[str, Any],
    own: Mapping[str, Any],
    described: Sequence[Mapping[str, Any]],
    joints: tuple[str, ...],
    numbers: Mapping[str, int],
    safety: Safety,
) -> Mode:
    """The mode of one bundle."""
    known = {"blend", "from", "max_tilt", "seconds", "next", "observation", "action"}
    if set(own) - known:
        raise BundleError(f"the mode {name} has the entries {sorted(set(own) - known)}; it may have {sorted(known)}")
    action = spec["action"]
    target, names = action.get("target", "position"), tuple(action.get("names") or joints)
    if target not in ("position", "relative_position") or action.get("kind") != "continuous":
        raise BundleError(f"the control loop sends joint targets; the policy of {name} commands {target!r}")
    missing = [joint for joint in names if joint not in joints]
    if missing:
        raise BundleError(f"the policy of {name} moves {missing[0]!r}, which the robot does not have: {list(joints)}")
    count, width = len(names), math.prod(spec["outputs"][0]["shape"])
    if count != width:
        raise BundleError(f"the policy of {name} has {width} actions for {count} joints")
    default = default_pose(spec, described, joints)
    pose, index = default.copy(), [joints.index(joint) for joint in names]
    if target == "relative_position":
        pose[index] = spread(action.get("offset", [0.0]), count, "offset")
    elif "offset" in action:
        pose[index] = spread(action["offset"], count, "offset")
    low, high = action.get("target_clip") or ([-math.inf], [math.inf])
    segments = tuple(segment_of(part, spec, joints, names, default) for part in spec.get("observation") or ())
    if not segments or len(spec["inputs"]) != 1:
        raise BundleError(f"the observation of {name} has no segments, so no sensor can be read for it")
    unknown = [origin for origin in own.get("from", []) if origin not in numbers]
    if unknown:
        raise BundleError(f"{name} cannot be entered from {unknown[0]!r}; there are {', '.join(numbers)}")
    origins = own.get("from", [mode for mode in numbers if mode != "damp"])
    return Mode(
        name,
        bundle,
        segments,
        actions=tuple(index),
        pose=pose,
        scale=spread(action.get("scale", [1.0]), count, "scale"),
        target_low=spread(low, count, "target_clip"),
        target_high=spread(high, count, "target_clip"),
        smoothing=spread(action.get("smoothing") or [1.0], count, "smoothing"),
        is_relative=target == "relative_position",
        kp=gain_of(action, described, joints, "stiffness"),
        kd=gain_of(action, described, joints, "damping"),
        blend=float(own.get("blend", 0.2)),
        enter_from=tuple(numbers[origin] for origin in origins),
        **ending(numbers, {"max_tilt": safety.max_tilt, **own}),
    )


def segment_of(
    part: Mapping[str, Any],
    spec: Mapping[str, Any],
    joints: tuple[str, ...],
    actions: tuple[str, ...],
    pose: np.ndarray,
) -> Segment:
    """One segment of policy.json as columns of a sensor."""
    name, history = part["name"], int(part.get("history") or 1)
    count = int(part["width"]) // history
    source = part.get("source") or {"kind": KINDS.get(name, "other")}
    kind, offset = source["kind"], source.get("offset")
    columns: tuple[int, ...] = tuple(range(count))
    if kind in ("joint_position", "joint_velocity"):
        sensor = "joint_pos" if kind == "joint_position" else "joint_vel"
        names = source.get("joints") or actions
        columns = tuple(joints.index(joint) for joint in names if joint in joints)
        if len(columns) != count:
            raise BundleError(f"the segment {name!r} is {count} wide and names the joints {list(names)}")
        if offset is None and kind == "joint_position" and source.get("relative", True):
            offset = pose[list(columns)]
    elif kind == "last_action":
        sensor = DERIVED[0 if int(source.get("steps", 1)) == 1 else 1]
    elif kind == "command":
        sensor = str(source.get("command", "command")) if len(spec.get("commands") or ()) > 1 else "command"
    else:
        sensor = SENSORS.get(kind) or str(source.get("name") or name)
    low, high = part.get("clip") or (-math.inf, math.inf)
    return Segment(
        name,
        sensor,
        columns,
        float(source.get("sign", 1.0)),
        spread([0.0] if offset is None else offset, count, f"offset of {name}"),
        float(low),
        float(high),
        spread(part.get("scale") or [1.0], count, f"scale of {name}"),
        history,
    )
