"""Reads from a MuJoCo model what the segments of a bundle are; the kinds of source are those of docs/bundle.md."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from canter.export.runtime import BundleError

Reader = Callable[[], np.ndarray]
OF_SITES = ("velocimeter", "gyro", "framezaxis", "framequat")  # computed where the scene has no such sensor


class Frame:
    """A frame that is fixed to a body: its pose and velocity in the world."""

    def __init__(
        self, physics: Any, body: int, position: Sequence[float] = (), orientation: Sequence[float] = ()
    ) -> None:
        mujoco, (self.model, self.data) = import_mujoco(), physics
        self.mujoco = mujoco
        self.body, self.offset, turn = body, np.array(position or np.zeros(3), np.float64), np.eye(3).ravel()
        if orientation:
            mujoco.mju_quat2Mat(turn, np.array(orientation, np.float64))
        self.turn = turn.reshape(3, 3)

    def rotation(self) -> np.ndarray:
        """(3, 3) rotation from this frame to the world's."""
        return self.data.xmat[self.body].reshape(3, 3) @ self.turn

    def position(self) -> np.ndarray:
        """Origin in the world."""
        return self.data.xpos[self.body] + self.data.xmat[self.body].reshape(3, 3) @ self.offset

    def velocity(self) -> tuple[np.ndarray, np.ndarray]:
        """Linear velocity of the origin and angular velocity, in this frame."""
        found = np.zeros(6)  # angular, then linear velocity of the body's origin, in the world's axes
        kind = self.mujoco.mjtObj.mjOBJ_XBODY
        self.mujoco.mj_objectVelocity(self.model, self.data, kind, self.body, found, 0)
        away = self.data.xmat[self.body].reshape(3, 3) @ self.offset
        inverse = self.rotation().T
        return inverse @ (found[3:] + np.cross(found[:3], away)), inverse @ found[:3]


class SourceReader:
    """Makes functions that read sources from a scene.

    `scene` has a `model`, `data`, `command`, `last_action`, and `anchor`, the pose of a reference motion or None.
    Objects are found by their name in the bundle, with or without the prefix that a scene gives its robot.
    """

    def __init__(self, scene: Any) -> None:
        self.scene, self.model, self.data = scene, scene.model, scene.data
        self.notes: list[str] = []
        """What differs from the bundle's description."""

    def find(self, kind: str, name: str) -> int | None:
        """The number of a body, joint, site or sensor by its name."""
        counts = {"body": "nbody", "joint": "njnt", "site": "nsite", "sensor": "nsensor"}
        labels = [getattr(self.model, kind)(i).name for i in range(getattr(self.model, counts[kind]))]
        exact = [i for i, label in enumerate(labels) if label == name]
        return next(iter(exact or [i for i, label in enumerate(labels) if label.rpartition("/")[2] == name]), None)

    def frame(self, source: Mapping[str, Any]) -> Frame:
        """The frame of a source; the base's if the scene has no body of that name."""
        number = self.find("body", str(source.get("body")))
        if number is None:
            number = self.base()
            note = f"the scene has no body {source.get('body')!r}: {self.model.body(number).name!r} is read instead"
            self.notes += [note] if note not in self.notes else []
        return Frame((self.model, self.data), number, source.get("position") or (), source.get("orientation") or ())

    def base(self) -> int:
        """The body of the first free joint."""
        for joint in range(self.model.njnt):
            if self.model.jnt_type[joint] == 0:
                return int(self.model.jnt_bodyid[joint])
        raise BundleError("the scene has no free joint, so a floating base cannot be found in it; name its body")

    def __call__(self, segment: Mapping[str, Any]) -> Reader:
        """The function that reads the newest values of a segment."""
        source, name = segment["source"], segment["name"]
        make = getattr(self, f"_{source['kind']}", None)
        if make is None:
            what = source.get("function", source["kind"])
            way_out = f"--terms '{{{name}: TERM}}' names a quantity of the scene"
            raise BundleError(f"the segment {name!r} is {what!r}, which a scene does not have; {way_out}")
        read = make(source)
        width = segment["width"] // (segment.get("history") or 1)
        if (found := np.size(read())) != width:
            hint = "; give the command: --command" if source["kind"] == "command" else ""
            raise BundleError(f"the segment {name!r} is {width} wide, but its source has {found} values{hint}")
        return lambda: np.array(read(), np.float64)

    def _linear_velocity(self, source: Mapping[str, Any]) -> Reader:
        frame = self.frame(source)
        return lambda: frame.velocity()[0]

    def _angular_velocity(self, source: Mapping[str, Any]) -> Reader:
        frame = self.frame(source)
        return lambda: frame.velocity()[1]

    def _gravity(self, source: Mapping[str, Any]) -> Reader:
        frame = self.frame(source)
        return lambda: -frame.rotation()[2]

    def _joints(self, source: Mapping[str, Any], addresses: np.ndarray) -> np.ndarray:
        found = {joint: self.find("joint", joint) for joint in source["joints"]}
        if missing := [joint for joint, number in found.items() if number is None]:
            raise BundleError(f"the scene has no joint {missing[0]!r}")
        return addresses[np.array(list(found.values()), np.int64)]

    def _joint_position(self, source: Mapping[str, Any]) -> Reader:
        at, offset = self._joints(source, self.model.jnt_qposadr), np.asarray(source.get("offset", 0.0))
        return lambda: self.data.qpos[at] - offset

    def _joint_velocity(self, source: Mapping[str, Any]) -> Reader:
        at, offset = self._joints(source, self.model.jnt_dofadr), np.asarray(source.get("offset", 0.0))
        return lambda: self.data.qvel[at] - offset

    def _last_action(self, source: Mapping[str, Any]) -> Reader:
        return lambda: self.scene.last_action

    def _command(self, source: Mapping[str, Any]) -> Reader:
        return lambda: self.scene.command

    def _sensor(self, source: Mapping[str, Any]) -> Reader:
        number, sign, kind = self.find("sensor", source["name"]), source.get("sign", 1), source["sensor"]
        if number is not None:
            first, width = int(self.model.sensor_adr[number]), int(self.model.sensor_dim[number])
            return lambda: sign * self.data.sensordata[first : first + width]
        place = source.get("object") or {}
        if kind not in OF_SITES or "body" not in place:
            raise BundleError(f"the scene has no sensor {source['name']!r}; add the {kind} to its XML file")
        frame = self.frame(place)
        reference = self.frame(source["reference"]) if source.get("reference") else None
        turn: Reader = frame.rotation if reference is None else lambda: reference.rotation().T @ frame.rotation()
        readings: dict[str, Reader] = {
            "velocimeter": lambda: frame.velocity()[0],
            "gyro": lambda: frame.velocity()[1],
            "framezaxis": lambda: turn()[:, 2],
            "framequat": lambda: quaternion(turn()),
        }
        return lambda: sign * readings[kind]()

    def _anchor(self) -> tuple[np.ndarray, np.ndarray]:
        if self.scene.anchor is None:
            raise BundleError("the policy follows a motion, which a scene lacks; simulate it in its own simulator")
        return self.scene.anchor

    def _motion_anchor_position(self, source: Mapping[str, Any]) -> Reader:
        frame = self.frame(source)
        return lambda: frame.rotation().T @ (self._anchor()[0] - frame.position())

    def _motion_anchor_orientation(self, source: Mapping[str, Any]) -> Reader:
        frame = self.frame(source)
        return lambda: (frame.rotation().T @ rotation(self._anchor()[1]))[:, :2].ravel()

    def _height_scan(self, source: Mapping[str, Any]) -> Reader:
        mujoco = import_mujoco()
        frame, body = self.frame(source), self.find("body", source["body"])
        rays, direction = np.asarray(source["rays"], np.float64), np.asarray(source["direction"], np.float64)
        groups = source.get("geom_groups")
        mask = None if groups is None else np.array([i in groups for i in range(mujoco.mjNGROUP)], np.uint8)
        hit = np.zeros(1, np.int32)

        def read() -> np.ndarray:
            turn, origin, height = aligned(frame.rotation(), source["alignment"]), frame.position(), []
            for offset in rays:
                start, towards = origin + turn @ offset, turn @ direction
                exclude = -1 if body is None else body
                distance = mujoco.mj_ray(self.model, self.data, start, towards, mask, 1, exclude, hit)
                is_hit = 0 <= distance <= source["max_distance"]
                fallen = origin[2] - (start + distance * towards)[2] - source["offset"]
                height.append(fallen if is_hit else source["miss_value"])
            return np.array(height)

        return read


def rotation(orientation: Any) -> np.ndarray:
    """(3, 3) rotation of a quaternion w, x, y, z."""
    matrix = np.zeros(9)
    import_mujoco().mju_quat2Mat(matrix, np.array(orientation, np.float64))
    return matrix.reshape(3, 3)


def quaternion(matrix: np.ndarray) -> np.ndarray:
    """The quaternion w, x, y, z of a rotation."""
    found = np.zeros(4)
    import_mujoco().mju_mat2Quat(found, np.ascontiguousarray(matrix).ravel())
    return found


def aligned(matrix: np.ndarray, alignment: str) -> np.ndarray:
    """The rotation of rays: of the whole frame, of its heading alone, or none."""
    if alignment == "base":
        return matrix
    if alignment == "world":
        return np.eye(3)
    forward = matrix[:2, 0]
    if np.linalg.norm(forward) < 0.1:  # x points up or down: y has the heading
        forward = np.array([matrix[1, 1], -matrix[0, 1]])
    c, s = forward / np.linalg.norm(forward)
    return np.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]])


def import_mujoco() -> Any:
    """MuJoCo, or an error with the install command."""
    try:
        import mujoco
    except ImportError as error:
        raise ImportError('a scene needs MuJoCo: pip install "canter[mujoco]"') from error
    return mujoco
