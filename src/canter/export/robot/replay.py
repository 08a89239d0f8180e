"""Recomputes what a log says: observations from sensors, actions from observations, and sensors from each other.

A segment that differs is compared with late, permuted and rescaled copies of what it should be, so that the report
names the error: an order of joints, a sign, a scale, an offset or a delay.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from canter.export.robot.controller import OVER, REQUESTED, Observer
from canter.export.robot.description import DERIVED, Robot
from canter.export.robot.log import Log, LogError, log_fields

EXACT = 1e-4  # sensors are logged as float32, and offsets are subtracted from them
MOST_LATE = 8
LEAST_STEPS, LEAST_MEASURED = 20, 100


@dataclasses.dataclass(frozen=True)
class Finding:
    """One comparison: of a segment, of actions, or of a sensor with another one."""

    name: str
    steps: int
    difference: float
    """Largest absolute difference."""
    problems: list[str]
    """What is wrong, in words; empty if nothing is."""


def replay_log(log: Log, robot: Robot, policies: Mapping[str, Any]) -> list[Finding]:
    """Compare a log with what the robot's bundles compute from it.

    Args:
        log: The log, of this control loop or of another one that writes the same file.
        robot: The robot that its bundles describe.
        policies: Policy by mode, with `reset()` and `predict(obs)`.
    """
    if log.header["names"] != robot.names or log.header["fields"] != [list(field) for field in log_fields(robot)]:
        raise LogError(f"{log.path} is of a robot with other joints, sensors or modes: {log.header['names']}")
    found = []
    for number, mode in enumerate(robot.modes):
        steps = np.flatnonzero(log.columns["mode"] == number)
        if mode.bundle is None or not len(steps):
            continue
        hashes = log.header["policies"]
        if hashes.get(mode.name) != mode.bundle.spec["sha256"]:
            found.append(Finding(f"{mode.name}: bundle", len(steps), 0.0, ["the log was made with another bundle"]))
        is_entered = np.isin(log.columns["reason"][steps], (REQUESTED, OVER))
        begins = np.flatnonzero((np.diff(steps, prepend=-9) != 1) | is_entered)
        observed, first = observations(log, robot, number, steps, begins), 0
        logged = log.columns["obs"][steps].astype(np.float64)
        for segment in mode.segments:
            part = slice(first, first + segment.width)
            first += segment.width
            names = [str(column) for column in range(segment.width)]
            if segment.sensor in ("joint_pos", "joint_vel"):
                names = [robot.joints[joint] for joint in segment.columns] * segment.history
            title = f"{mode.name}: {segment.name}"
            found.append(compare(title, observed[:, part], logged[:, part], names, EXACT))
        actions, joints = log.columns["action"][steps][:, : len(mode.actions)], [robot.joints[j] for j in mode.actions]
        given = recomputed_actions(policies[mode.name], logged[:, : mode.obs_width], begins)
        found.append(compare(f"{mode.name}: output of the policy", given, actions.astype(np.float64), joints, EXACT))
    return found + physics(log, robot)


def observations(log: Log, robot: Robot, number: int, steps: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """(T, D) observations of a mode, from the logged sensors and actions."""
    mode, rows = robot.modes[number], []
    observer, values = Observer(robot, mode), np.hstack([log.sensor(name) for name in robot.sensors])
    starts, nothing = set(begins.tolist()), np.zeros(len(robot.joints))
    action = before = nothing
    for row, step in enumerate(steps):
        if row in starts:
            observer.reset()
            action = before = nothing
        w, x, y, z = log.sensor("orientation")[step].astype(np.float64)
        gravity = np.array([2.0 * (w * y - x * z), -2.0 * (y * z + w * x), 2.0 * (x * x + y * y) - 1.0])
        derived = dict(zip(DERIVED, (action, before, gravity), strict=True))
        rows.append(observer(values[step].astype(np.float64), derived))
        action, before = log.columns["action"][step].astype(np.float64), action
    return np.array(rows, np.float64)


def recomputed_actions(policy: Any, obs: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """(T, A) actions of a policy for logged observations."""
    starts, rows = set(begins.tolist()), []
    for row, seen in enumerate(obs.astype(np.float32)):
        if row in starts:
            policy.reset()
        rows.append(np.asarray(policy.predict(seen), np.float64).ravel())
    return np.array(rows)


def compare(name: str, expected: np.ndarray, found: np.ndarray, names: Sequence[str], exact: float) -> Finding:
    """One comparison; errors are named if any number differs by more than `exact`."""
    size = np.maximum(1.0, np.abs(expected))
    difference = float(np.max(np.abs(expected - found), initial=0.0))
    if np.all(np.abs(expected - found) <= exact * size):
        return Finding(name, len(found), difference, [])
    return Finding(name, len(found), difference, diagnose(expected, found, names) or ["differs"])


def diagnose(
    expected: np.ndarray,
    found: np.ndarray,
    names: Sequence[str],
    closeness: float = 0.05,
    least: float = 0.9,
    margin: float = 0.02,
) -> list[str]:
    """Errors of order, sign, scale, offset and delay that turn `expected` (T, W) into `found`.

    Args:
        expected: What should have been there.
        found: What was there.
        names: Name of every column.
        closeness: Relative error of a scale that is none.
        least: Correlation below which a column counts as unexplained.
        margin: By how much another column must correlate better before an order counts as wrong.
    """
    count = expected.shape[1]
    if len(expected) < LEAST_STEPS:
        return [f"{len(expected)} steps are too few to name the error"]
    lags = range(-MOST_LATE, MOST_LATE + 1) if len(expected) > 4 * MOST_LATE else (0,)
    table = np.array([correlations(*shifted(expected, found, lag)) for lag in lags])  # (lags, expected, found)
    order, signs, scales, offsets, delays, unknown = [], [], [], [], [], []
    for column in range(count):
        if found[:, column].std() < 1e-9 or expected[:, column].std() < 1e-9:
            wrong = np.max(np.abs(found[:, column] - expected[:, column]))
            unknown += [names[column]] if wrong > closeness * max(1.0, np.abs(expected[:, column]).max()) else []
            continue
        own = np.abs(table[:, column, column])
        other = np.abs(table[:, :, column])
        # Its own column explains it, unless another one does clearly better.
        source = column if own.max() > other.max() - margin else int(other.max(0).argmax())
        best = np.abs(table[:, source, column])
        if best.max() < least:
            unknown.append(names[column])
            continue
        lag = min((abs(lag), lag) for lag, fit in zip(lags, best, strict=True) if fit > best.max() - 1e-4)[1]
        x, y = (part[:, c] for part, c in zip(shifted(expected, found, lag), (source, column), strict=True))
        slope = float(np.cov(x, y)[0, 1] / x.var(ddof=1))
        offset = float(y.mean() - slope * x.mean())
        order += [f"{names[column]} has the values of {names[source]}"] if source != column else []
        signs += [names[column]] if slope < 0 else []
        scales += [(names[column], abs(slope))] if abs(abs(slope) - 1.0) > closeness else []
        offsets += [f"{names[column]} by {offset:.3g}"] if abs(offset) > closeness * (1.0 + y.std()) else []
        delays += [lag] if lag else []
    problems = [f"order: {'; '.join(order)}"] if order else []
    problems += [f"sign: {'all' if len(signs) == count else ', '.join(signs)}"] if signs else []
    if scales:
        low, high = min(value for _, value in scales), max(value for _, value in scales)
        which = "all" if len(scales) == count else ", ".join(name for name, _ in scales)
        problems.append(f"scale: {which} times {low:.3g}" + (f" to {high:.3g}" if high - low > 0.01 * high else ""))
    problems += [f"offset: {', '.join(offsets)}"] if offsets else []
    if delays:
        low, high = min(delays), max(delays)
        problems.append(f"delay: {low} steps" if low == high else f"delay: {low} to {high} steps")
    return problems + ([f"not explained: {', '.join(unknown)}"] if unknown else [])


def shifted(expected: np.ndarray, found: np.ndarray, lag: int) -> tuple[np.ndarray, np.ndarray]:
    """Both, with `found` later by some steps."""
    if lag >= 0:
        return expected[: len(expected) - lag], found[lag:]
    return expected[-lag:], found[: len(found) + lag]


def correlations(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(columns of x, columns of y) coefficients; 0 for a constant."""
    x, y = x - x.mean(0), y - y.mean(0)
    size = np.sqrt(np.outer((x**2).sum(0), (y**2).sum(0)))
    return np.where(size > 1e-12, x.T @ y / np.maximum(size, 1e-12), 0.0)


def physics(log: Log, robot: Robot) -> list[Finding]:
    """Velocities against the change of positions, and torques against what the gains make of the targets."""
    # The longest stretch without a stop, a stall or a lost record.
    is_regular = np.abs(np.diff(log.time, prepend=-np.inf) - robot.period) < 0.4 * robot.period
    breaks = np.flatnonzero(~((log.columns["mode"] > 0) & is_regular))
    edges = np.concatenate([[-1], breaks, [len(log)]])
    longest = int(np.argmax(np.diff(edges)))
    part = slice(edges[longest] + 1, edges[longest + 1])
    if part.stop - part.start < LEAST_MEASURED:
        return []
    time, found = (log.time - log.columns["age"][:, 0])[part], []  # when joint_pos was read
    position, velocity = (log.sensor(name)[part].astype(np.float64) for name in ("joint_pos", "joint_vel"))
    rates = np.gradient(position, time, axis=0)
    found.append(agreement("joint_vel against the change of joint_pos", rates, velocity, robot.joints))
    turning = angular_velocity(log.sensor("orientation")[part].astype(np.float64), time)
    if "sensor.base_ang_vel" in log.columns:
        measured = log.sensor("base_ang_vel")[part].astype(np.float64)
        found.append(agreement("base_ang_vel against the change of orientation", turning, measured, ("x", "y", "z")))
    if "sensor.joint_torque" in log.columns:
        sent = [log.columns[name][part].astype(np.float64)[:-1] for name in ("target", "kp", "kd")]
        torque = sent[1] * (sent[0] - position[1:]) - sent[2] * velocity[1:]
        torque = np.clip(torque, -robot.effort, robot.effort)
        measured = log.sensor("joint_torque")[part][1:].astype(np.float64)
        found.append(agreement("joint_torque against targets and gains", torque, measured, robot.joints))
    return found


def agreement(name: str, expected: np.ndarray, found: np.ndarray, names: Sequence[str]) -> Finding:
    """A comparison of two measurements of the same quantity, which noise and sampling keep apart."""
    used = np.isfinite(found).all(1) & np.isfinite(expected).all(1)
    expected, found = expected[used], found[used]
    if len(found) < LEAST_MEASURED:
        return Finding(name, len(found), 0.0, [])
    moves = (expected.std(0) > 0.02) | (found.std(0) > 0.02)
    expected, found = expected[:, moves], found[:, moves]
    kept = [column for column, is_moving in zip(names, moves, strict=True) if is_moving]
    problems = diagnose(expected, found, kept, closeness=0.4, least=0.8, margin=0.25)
    sampling = ("offset", "not explained", "delay: -1 ", "delay: 1 ", "delay: -1 to 1 ")  # impacts between two steps
    problems = [text for text in problems if not text.startswith(sampling)]
    return Finding(name, len(found), float(np.abs(expected - found).max(initial=0.0)), problems)


def angular_velocity(orientation: np.ndarray, time: np.ndarray) -> np.ndarray:
    """(T, 3) in the frame of the base: twice the vector part of conj(q) times dq/dt."""
    signs = np.cumprod(np.where(np.sum(orientation[1:] * orientation[:-1], 1) < 0, -1.0, 1.0))
    q = orientation * np.concatenate([[1.0], signs])[:, None]
    rate = np.gradient(q, time, axis=0)
    vector = q[:, :1] * rate[:, 1:] - rate[:, :1] * q[:, 1:] - np.cross(q[:, 1:], rate[:, 1:])
    return 2.0 * vector
