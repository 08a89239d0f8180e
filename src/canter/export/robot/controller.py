"""One step of the control loop: sensors in, joint targets and gains out. It knows no clock, no robot and no file.

`robot.c` does the same with the same numbers; a change here is a change there. Arithmetic is in float64, one operation
at a time, so that both agree to the last bit.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from canter.export.robot.description import DAMP, DERIVED, STAND, Mode, Robot

Sensors = Mapping[str, tuple[float, Any]]
"""Time of the reading, and its values, by name of the sensor."""

# Why the mode changed, or a request was refused; the number is what a log has.
REASONS = (
    "",
    "requested",
    "emergency stop",
    "the sensor {sensor} is {value:.3f} s old",
    "the sensor {sensor} has no finite reading of the right size",
    "the loop stalled for {value:.3f} s",
    "{value:.0f} steps in a row came late",
    "the base is tilted by {value:.2f} rad",
    "{joint} measures {value:.3f} rad, outside of its limits",
    "{joint} moves at {value:.2f} rad/s, above its limit",
    "{joint} does not follow its target: {value:.2f} rad away",
    "the policy's output {index} is not finite",
    "{mode} cannot be entered from here",
    "the time of the mode is over",
    "the program ended",
)
NONE, REQUESTED, EMERGENCY, STALE, INVALID, STALLED, LATE, TILTED, OUTSIDE, FAST, ASTRAY, NOT_FINITE, REFUSED = range(
    13
)
OVER, ENDED = 13, 14


@dataclasses.dataclass(frozen=True)
class Command:
    """What is sent to the joints: torque = `kp * (target - position) - kd * velocity`."""

    target: np.ndarray
    kp: np.ndarray
    kd: np.ndarray


@dataclasses.dataclass
class Event:
    """A change of mode, or a request that was refused."""

    reason: int = NONE
    index: int = 0
    """Number of the sensor, joint, action or mode that is the reason."""
    value: float = 0.0

    def text(self, names: Mapping[str, Sequence[str]]) -> str:
        """The reason in words, from `Robot.names`."""
        of = {kind: known[self.index] for kind, known in names.items() if self.index < len(known)}
        return REASONS[self.reason].format(index=self.index, value=self.value, **of)


class Observer:
    """Puts the observation of one mode together, with its histories."""

    def __init__(self, robot: Robot, mode: Mode) -> None:
        self.segments = mode.segments
        first = np.cumsum([0, *robot.sensors.values()])
        self.first = {name: int(start) for name, start in zip(robot.sensors, first, strict=False)}
        self.columns = [np.array(segment.columns) + self.first.get(segment.sensor, 0) for segment in mode.segments]
        self.windows: list[np.ndarray | None] = [None] * len(mode.segments)

    def reset(self) -> None:
        """Forget the histories."""
        self.windows = [None] * len(self.segments)

    def __call__(self, values: np.ndarray, derived: Mapping[str, np.ndarray]) -> np.ndarray:
        """The observation from all sensors' values, and those that the loop itself knows by name."""
        parts = []
        for number, segment in enumerate(self.segments):
            own = derived.get(segment.sensor)
            read = values[self.columns[number]] if own is None else own[list(segment.columns)]
            newest = np.clip(segment.sign * read - segment.offset, segment.low, segment.high) * segment.scale
            window = self.windows[number]
            window = np.tile(newest, (segment.history, 1)) if window is None else np.vstack([window[1:], newest])
            self.windows[number] = window
            parts.append(window.ravel())
        return np.concatenate(parts).astype(np.float32)


class Controller:
    """The state machine of a robot: `damp`, `stand` and its policies.

    It begins in `damp`, which holds no position and only brakes. Every fault leads back to it, at once.

    Args:
        robot: Joints, limits and modes.
        policies: Policy of every further mode by name, with `reset()` and `predict(obs)`, such as `runtime.Policy`.
    """

    def __init__(self, robot: Robot, policies: Mapping[str, Any]) -> None:
        missing = [mode.name for mode in robot.modes[2:] if mode.name not in policies]
        if missing:
            raise ValueError(f"the mode {missing[0]} has no policy")
        self.robot = robot
        self.policies = [None, None, *(policies[mode.name] for mode in robot.modes[2:])]
        self.observers = [Observer(robot, mode) for mode in robot.modes]
        count = len(robot.joints)
        self.values = np.zeros(sum(robot.all_sensors.values()))
        """Last reading of every sensor, one after the other, as the log has them."""
        self.stamps = np.full(len(robot.all_sensors), -math.inf)
        self.mode, self.entered, self.requested, self.is_stopped = DAMP, 0.0, -1, False
        self.event = Event()
        """What happened in the last step."""
        self.last, self.late, self.astray = -math.inf, 0, 0.0
        self.obs, self.action, self.action_before = np.zeros(robot.width, np.float32), np.zeros(count), np.zeros(count)
        self.before, self.sent = [Command(np.zeros(count), np.zeros(count), robot.damping)] * 2
        self.filtered, self.aim = np.zeros(count), np.zeros(count)  # targets of the policy, and before the limits
        self.limited = 0
        """Targets that were limited in the last step."""

    @property
    def mode_name(self) -> str:
        """Name of the current mode."""
        return self.robot.modes[self.mode].name

    def request(self, mode: str) -> None:
        """Ask for a mode; `damp` is entered in the next step, a policy when `stand` is reached."""
        self.requested = self.robot.mode(mode)

    def emergency_stop(self) -> None:
        """Damp the robot in the next step, for good: only a new `Controller` moves it again."""
        self.is_stopped, self.requested = True, DAMP

    def step(self, now: float, sensors: Sensors) -> Command:
        """One control step at the time `now`, in seconds of the sensors' clock."""
        robot, self.event = self.robot, Event()
        self._read(sensors)
        positions, velocities = self._joints()
        gravity = self._gravity()
        fault = self._fault(now, positions, velocities, gravity)
        self.last = now
        self._change(now, fault, positions)
        if self.mode == DAMP:
            return self._damp(positions)
        mode = robot.modes[self.mode]
        wanted, self.limited = mode.pose.copy(), 0
        if self.mode > STAND:
            index = list(mode.actions)
            wanted[index] = self._act(mode, positions[index], gravity)
            if not np.isfinite(self.action).all():
                self._enter(DAMP, now, positions, Event(NOT_FINITE, int(np.argmin(np.isfinite(self.action)))))
                return self._damp(positions)
        weight = self._weight(now, mode)
        before = self.before
        self.aim = target = before.target + weight * (wanted - before.target)
        kp = before.kp + weight * (mode.kp - before.kp)
        kd = before.kd + weight * (mode.kd - before.kd)
        self.sent = Command(self._limit(target, kp, kd, positions, velocities), kp, kd)
        return self.sent

    def end(self, reason: int = ENDED) -> Command:
        """The last command of a program: damp."""
        self.event, self.mode, self.requested = Event(reason), DAMP, -1
        return self._damp(self._joints()[0])

    def _read(self, sensors: Sensors) -> None:
        first = 0
        for number, (name, width) in enumerate(self.robot.all_sensors.items()):
            found = sensors.get(name)
            if found is not None:
                given = np.asarray(found[1], np.float64).ravel()
                self.values[first : first + width] = given if given.size == width else math.nan
                self.stamps[number] = found[0]
            elif number >= len(self.robot.sensors):
                self.values[first : first + width] = math.nan
            first += width

    def _joints(self) -> tuple[np.ndarray, np.ndarray]:
        count = len(self.robot.joints)
        return self.values[:count], self.values[count : 2 * count]

    def _gravity(self) -> np.ndarray:
        """Direction of gravity in the frame of the base."""
        first = 2 * len(self.robot.joints)
        w, x, y, z = self.values[first : first + 4].tolist()
        return np.array([2.0 * (w * y - x * z), -2.0 * (y * z + w * x), 2.0 * (x * x + y * y) - 1.0])

    def _fault(self, now: float, positions: np.ndarray, velocities: np.ndarray, gravity: np.ndarray) -> Event:
        """The first thing that is wrong."""
        gap = now - self.last
        self.late = self.late + 1 if 1.5 * self.robot.period < gap < math.inf else 0
        if self.is_stopped:
            return Event(EMERGENCY)
        found = self._sensor_fault(now)
        if found.reason:
            return found
        if self.robot.safety.max_gap < gap < math.inf:
            return Event(STALLED, 0, gap)
        if self.late >= self.robot.safety.max_late:
            return Event(LATE, 0, self.late)
        # In damp, the mode that is asked for is the one whose limit counts.
        mode = max(self.requested, STAND) if self.mode == DAMP else self.mode
        angle = math.acos(min(1.0, max(-1.0, -gravity[2])))
        if angle > self.robot.modes[mode].max_tilt:
            return Event(TILTED, 0, angle)
        found = self._joint_fault(positions, velocities)
        return found if found.reason else self._astray(positions)

    def _sensor_fault(self, now: float) -> Event:
        """The first sensor without a fresh and finite reading."""
        first = 0
        for number, width in enumerate(self.robot.sensors.values()):
            if not now - self.stamps[number] <= self.robot.safety.max_age:
                return Event(STALE, number, now - self.stamps[number])
            if not np.isfinite(self.values[first : first + width]).all():
                return Event(INVALID, number)
            first += width
        w, x, y, z = self.values[2 * len(self.robot.joints) :][:4].tolist()
        return Event(INVALID, 2) if abs(w * w + x * x + y * y + z * z - 1.0) > 0.1 else Event()

    def _joint_fault(self, positions: np.ndarray, velocities: np.ndarray) -> Event:
        """The first joint outside of its limits."""
        limits, margin, factor = (
            self.robot.position,
            self.robot.safety.position_margin,
            self.robot.safety.velocity_factor,
        )
        for joint, position in enumerate(positions):
            if not limits[joint, 0] - margin <= position <= limits[joint, 1] + margin:
                return Event(OUTSIDE, joint, position)
            if abs(velocities[joint]) > factor * self.robot.velocity[joint]:
                return Event(FAST, joint, velocities[joint])
        return Event()

    def _astray(self, positions: np.ndarray) -> Event:
        """The joint that has not followed its target in `stand` for a while."""
        if self.mode != STAND:
            self.astray = 0.0
            return Event()
        errors = np.abs(self.aim - positions)
        worst = int(np.argmax(errors))
        self.astray = self.astray + self.robot.period if errors[worst] > self.robot.safety.stand_error else 0.0
        return Event(ASTRAY, worst, errors[worst]) if self.astray > self.robot.safety.stand_seconds else Event()

    def _change(self, now: float, fault: Event, positions: np.ndarray) -> None:
        """Enter another mode where there is a fault, a request, or an end of the mode's time."""
        mode, wanted = self.robot.modes[self.mode], self.requested
        if fault.reason and self.mode != DAMP:
            self._enter(DAMP, now, positions, fault)
        elif wanted == DAMP:
            self._enter(DAMP, now, positions, fault if fault.reason else Event(REQUESTED))
        elif wanted >= 0 and fault.reason:
            self.event, self.requested = fault, -1
        elif wanted >= 0 and self.mode not in self.robot.modes[wanted].enter_from:
            self.event, self.requested = Event(REFUSED, wanted), -1
        elif wanted >= 0 and (wanted == STAND or self.mode != STAND or self._weight(now, mode) >= 1.0):
            self._enter(wanted, now, positions, Event(REQUESTED))
        elif wanted < 0 and self.mode != DAMP and now - self.entered >= mode.seconds:
            self._enter(mode.next_mode, now, positions, Event(OVER))

    def _enter(self, mode: int, now: float, positions: np.ndarray, event: Event) -> None:
        """Begin a mode, from where the joints are or were sent."""
        if self.mode == DAMP:  # full gains at once: the targets begin where the joints are
            self.sent = Command(positions.copy(), self.robot.modes[mode].kp, self.robot.modes[mode].kd)
        self.before, self.event, self.mode, self.entered, self.requested = self.sent, event, mode, now, -1
        self.aim = self.sent.target
        self.astray, self.action = 0.0, np.zeros(len(self.robot.modes[mode].actions))
        self.action_before = self.action
        self.filtered = self.sent.target[list(self.robot.modes[mode].actions)]
        self.observers[mode].reset()
        policy: Any = self.policies[mode]
        if policy is not None:
            policy.reset()

    def _weight(self, now: float, mode: Mode) -> float:
        """Share of the current mode, against the one before."""
        return min(1.0, (now - self.entered) / mode.blend) if mode.blend > 0.0 else 1.0

    def _act(self, mode: Mode, positions: np.ndarray, gravity: np.ndarray) -> np.ndarray:
        """Targets of the policy's joints."""
        derived: dict[str, np.ndarray] = dict(zip(DERIVED, (self.action, self.action_before, gravity), strict=True))
        self.obs = self.observers[self.mode](self.values, derived)
        policy: Any = self.policies[self.mode]
        self.action_before = self.action
        self.action = np.asarray(policy.predict(self.obs), np.float64).ravel()
        origin = positions if mode.is_relative else mode.pose[list(mode.actions)]
        new = np.clip(origin + mode.scale * self.action, mode.target_low, mode.target_high)
        self.filtered = self.filtered + mode.smoothing * (new - self.filtered)
        return self.filtered

    def _limit(
        self, target: np.ndarray, kp: np.ndarray, kd: np.ndarray, positions: np.ndarray, velocities: np.ndarray
    ) -> np.ndarray:
        """Targets within the limits of position, rate and torque."""
        robot, sent = self.robot, self.sent.target
        limited = np.clip(target, robot.position[:, 0], robot.position[:, 1])
        most = robot.safety.rate_factor * robot.velocity * robot.period
        limited = np.clip(limited, sent - most, sent + most)
        torque = kp * (limited - positions) - kd * velocities
        excess = torque - np.clip(torque, -robot.effort, robot.effort)
        has_gain = kp > 0.0
        limited = np.where(has_gain, limited - excess / np.where(has_gain, kp, 1.0), limited)
        self.limited = int(np.sum(limited != target))
        return limited

    def _damp(self, positions: np.ndarray) -> Command:
        """Brake: no stiffness, the damping of the safe state."""
        self.limited = 0
        target = np.where(np.isfinite(positions), positions, 0.0)
        self.sent = Command(target, np.zeros(len(target)), self.robot.damping)
        return self.sent
