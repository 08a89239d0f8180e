"""Fits a simulation to a robot's log: delay, gains, friction and armature of the joints.

Short pieces of the log are simulated from their measured beginning with the targets that were sent, and the joints'
positions are compared. Where the log has the base's pose and velocity (`base_pos`, `base_lin_vel`), the pieces are
simulated on the ground; otherwise the base is held and nothing is touched, as for a robot that hangs while its joints
move, which is the better experiment.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from canter.export.robot.controller import Command
from canter.export.robot.description import Robot
from canter.export.robot.log import Log, LogError
from canter.export.robot.simulated import MujocoRobot, Variation

NAMES = ("strength", "damping_gain", "joint_friction", "armature")
LOWEST, HIGHEST = np.array([0.2, 0.0, 0.0, 0.0]), np.array([3.0, 5.0, 5.0, 0.3])
STEPS = np.array([0.02, 0.05, 0.02, 0.002])  # of finite differences, and the unit of each parameter


@dataclasses.dataclass(frozen=True)
class Fit:
    """Parameters of a simulation that follows the log best."""

    variation: Variation
    error_before: float
    """Root mean square difference of joint positions at the end of a piece, in rad, with the scene's parameters."""
    error: float
    errors_by_delay: dict[float, float]
    is_on_ground: bool


class Pieces:
    """Short pieces of a log, and their simulation."""

    def __init__(self, log: Log, robot: Robot, scene: Any, count: int, length: int) -> None:
        self.log, self.robot, self.length = log, robot, length
        self.simulated = MujocoRobot(scene, robot)
        model = self.simulated.model
        known = ("base_pos", "base_lin_vel", "base_ang_vel")
        fields = [f"sensor.{name}" for name in known]
        is_known = all(name in log.columns and np.isfinite(log.columns[name]).any() for name in fields)
        self.is_on_ground = is_known and self.simulated.is_free
        if not self.is_on_ground:
            model.geom_contype[:] = 0
            model.geom_conaffinity[:] = 0
        regular = np.abs(np.diff(log.time) - robot.period) < 0.25 * robot.period
        good = (log.columns["mode"][1:] > 0) & (log.columns["mode"][:-1] > 0) & regular
        runs = np.convolve(good, np.ones(length + 4), "valid") == length + 4
        starts = np.flatnonzero(runs) + 4
        if len(starts) < 5:
            raise LogError(f"{log.path} has no {5 + length} steps in a row in which the joints were driven")
        # The pieces with most motion say most.
        speed = np.abs(log.sensor("joint_vel")[starts]).mean(1)
        chosen = starts[np.argsort(-speed, kind="stable")[: 4 * count]]
        self.starts = np.sort(chosen[np.linspace(0, len(chosen) - 1, min(count, len(chosen))).astype(int)])

    def residuals(self, variation: Variation) -> np.ndarray:
        """(pieces, steps, joints) simulated minus measured positions."""
        self.simulated.vary(dataclasses.replace(variation, delay=0.0))
        return np.array([self._piece(int(start), variation.delay) for start in self.starts])

    def _piece(self, start: int, delay: float) -> np.ndarray:
        log, simulated, rows = self.log, self.simulated, []
        simulated.reset()
        self._place(start)
        data, period = simulated.data, self.robot.period
        held = data.qpos[:7].copy(), data.qvel[:6].copy()
        for back in range(4, -self.length, -1):  # commands that were sent before the piece may arrive in it
            at = max(0.0, delay - back * period)
            step = start - back
            sent = Command(*(log.columns[name][step].astype(np.float64) for name in ("target", "kp", "kd")))
            simulated.late.append((at, sent))
        for step in range(1, self.length + 1):
            while data.time + 1e-9 < step * period:
                simulated.advance(data.time + simulated.model.opt.timestep)
                if simulated.is_free and not self.is_on_ground:
                    data.qpos[:7], data.qvel[:6] = held[0], 0.0
            rows.append(data.qpos[simulated.qpos] - log.sensor("joint_pos")[start + step])
        return np.array(rows)

    def _place(self, start: int) -> None:
        """The measured state at a step."""
        log, simulated = self.log, self.simulated
        data = simulated.data
        data.qpos[simulated.qpos] = log.sensor("joint_pos")[start]
        data.qvel[simulated.qvel] = log.sensor("joint_vel")[start]
        if simulated.is_free:
            data.qpos[3:7] = log.sensor("orientation")[start]
            data.qvel[:6] = 0.0
        if self.is_on_ground:
            rotation = np.zeros(9)
            simulated.mujoco.mju_quat2Mat(rotation, data.qpos[3:7])
            data.qpos[:3] = log.sensor("base_pos")[start]
            data.qvel[:3] = rotation.reshape(3, 3) @ log.sensor("base_lin_vel")[start]
            data.qvel[3:6] = log.sensor("base_ang_vel")[start]


def fit_log(
    log: Log,
    robot: Robot,
    scene: Any,
    variation: Variation | None = None,
    count: int = 30,
    length: int = 6,
    delays: Sequence[float] | None = None,
) -> Fit:
    """Delay, gains, friction and armature with which a scene follows a log best.

    Args:
        log: A log in which the joints moved.
        robot: The robot of the log.
        scene: MuJoCo's XML file.
        variation: Where the search begins; what is not fitted stays as it is.
        count: Pieces of the log to simulate.
        length: Control steps of a piece.
        delays: Delays to try, in seconds; by default up to two control periods.
    """
    pieces = Pieces(log, robot, scene, count, length)
    model, joints = pieces.simulated.model, pieces.simulated.qvel
    given = variation or Variation()
    scene_has = {"joint_friction": model.dof_frictionloss[joints], "armature": model.dof_armature[joints]}
    unset = {name: float(values.mean()) for name, values in scene_has.items() if getattr(given, name) is None}
    start = dataclasses.replace(given, **unset)
    before = rms(pieces.residuals(given))
    tried = np.linspace(0.0, 2.0 * robot.period, 9) if delays is None else np.asarray(delays)
    spacing = float(np.diff(tried).min(initial=np.inf))
    near = (-0.5, -0.25, 0.25, 0.5) if np.isfinite(spacing) else ()
    fits = {float(delay): improve(pieces, dataclasses.replace(start, delay=float(delay)), 2) for delay in tried}
    coarse = min(fits, key=lambda delay: fits[delay][1])
    for delay in (max(0.0, coarse + part * spacing) for part in near):
        fits[delay] = improve(pieces, dataclasses.replace(fits[coarse][0], delay=delay), 1)
    best = improve(pieces, fits[min(fits, key=lambda delay: fits[delay][1])][0], 4)
    by_delay = {delay: fits[delay][1] for delay in sorted(fits)}
    return Fit(best[0], before, best[1], by_delay, pieces.is_on_ground)


def improve(pieces: Pieces, variation: Variation, iterations: int) -> tuple[Variation, float]:
    """Some steps of Levenberg and Marquardt's method on the parameters of `NAMES`."""
    at = np.array([getattr(variation, name) for name in NAMES], float)
    make = lambda values: dataclasses.replace(variation, **dict(zip(NAMES, values.tolist(), strict=True)))  # noqa: E731
    residuals, damping = pieces.residuals(make(at)).ravel(), 1e-2
    for _ in range(iterations):
        moved = [pieces.residuals(make(at + STEPS * (np.arange(4) == number))).ravel() for number in range(4)]
        slopes = np.stack([column - residuals for column in moved], 1)
        square = slopes.T @ slopes
        for _ in range(3):
            step = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-12), -slopes.T @ residuals)
            new = np.clip(at + STEPS * step, LOWEST, HIGHEST)
            found = pieces.residuals(make(new)).ravel()
            if found @ found < residuals @ residuals:
                at, residuals, damping = new, found, 0.3 * damping
                break
            damping *= 10.0
    return make(at), rms(residuals)


def rms(values: np.ndarray) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(values**2)))
