"""How much a policy loses where the world differs from its simulation: sweeps of a scene, and one HTML page of them."""

import dataclasses
import itertools
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from canter.export.robot.controller import ENDED, NONE, OVER, REQUESTED, Controller
from canter.export.robot.description import DAMP, Robot
from canter.export.robot.identify import Fit
from canter.export.robot.log import Log, LogWriter, read_log
from canter.export.robot.loop import run
from canter.export.robot.plot import comparison_figure, gap_figure, grid_figure
from canter.export.robot.simulated import MujocoRobot, Variation
from canter.utils.html_page import Page
from canter.utils.plots import COLORS

SWEEPS: dict[str, tuple[str, tuple[float, ...]]] = {
    "delay": ("delay of commands, ms", (0.0, 0.01, 0.02, 0.03, 0.04)),
    "push": ("push every 2 s, m/s", (0.0, 0.5, 1.0, 1.5)),
    "friction": ("friction, times the scene's", (0.3, 0.6, 1.0, 1.5)),
    "mass": ("mass of the base, times the scene's", (0.8, 1.0, 1.25, 1.5)),
    "strength": ("strength of the motors, times the scene's", (0.6, 0.8, 1.0, 1.2)),
}
# Standard deviations of sensors' noise that is usual on legged robots.
NOISE = {"joint_pos": 0.01, "joint_vel": 0.5, "base_ang_vel": 0.1, "orientation": 0.03, "command": 0.0}
OTHER_NOISE = 0.05
NOISE_FACTORS = (1.0, 4.0)
GRID = ((-0.5, 0.0, 0.5, 1.0), (-0.4, 0.0, 0.4), (-0.8, 0.0, 0.8))
SETTLING = 1.0  # seconds after the start of the policy that do not count


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What happened in some episodes."""

    falls: float
    """Share of episodes that ended in damp."""
    error_x: float
    """Root mean square of commanded minus actual velocity, m/s."""
    error_y: float
    error_yaw: float
    torque: float
    """Root mean square of the joints' torques, Nm."""
    power: float
    """Mean mechanical power of all joints, W; braking counts as none."""
    action_rate: float
    """Mean change of an action per second."""


@dataclasses.dataclass
class Subject:
    """A bundle under test."""

    name: str
    robot: Robot
    policies: Mapping[str, Any]


def outcome_of(episodes: Sequence[Outcome]) -> Outcome:
    """Mean over episodes; velocities of those that fell at once are unknown and left out."""
    rows = np.array([dataclasses.astuple(episode) for episode in episodes])
    known = [column[np.isfinite(column)] for column in rows.T]
    return Outcome(*(float(column.mean()) if len(column) else math.nan for column in known))


class Recorder:
    """Measures an episode from the simulation itself, not from the noisy sensors."""

    def __init__(self, simulated: MujocoRobot, controller: Controller, mode: int) -> None:
        self.simulated, self.controller, self.mode = simulated, controller, mode
        self.rows: list[np.ndarray] = []
        self.begin, self.has_fallen = -1.0, False
        controller.request("stand")

    def __call__(self, now: float) -> None:
        """One control step."""
        controller, simulated = self.controller, self.simulated
        if controller.mode == self.mode and self.begin < 0.0:
            self.begin = now
            simulated.next_push = now + SETTLING
        if self.begin < 0.0 and controller.requested < 0 and controller.mode != DAMP:
            controller.requested = self.mode
        self.has_fallen |= self.begin >= 0.0 and controller.mode == DAMP
        if self.begin >= 0.0 and now >= self.begin + SETTLING and not self.has_fallen:
            data = simulated.data
            velocity = np.zeros(3)
            if simulated.is_free:
                local = data.xmat[simulated.base].reshape(3, 3).T @ data.qvel[:3]
                velocity = np.array([local[0], local[1], data.qvel[5]])
            torque = data.actuator_force[simulated.actuators]
            power = np.maximum(0.0, torque * data.qvel[simulated.qvel]).sum()
            self.rows.append(np.concatenate([velocity, [np.mean(torque**2), power], controller.action]))

    def outcome(self, command: np.ndarray) -> Outcome:
        """The figures of the episode."""
        has_failed = self.has_fallen or self.begin < 0.0
        if not self.rows:
            return Outcome(float(has_failed), *(math.nan,) * 6)
        rows = np.array(self.rows)
        wanted = np.zeros(3)
        wanted[: min(3, command.size)] = command[:3]
        x, y, yaw = np.sqrt(np.mean((rows[:, :3] - wanted) ** 2, 0)).tolist()
        rate = np.abs(np.diff(rows[:, 5:], axis=0)).mean() / self.controller.robot.period if len(rows) > 1 else 0.0
        torque, power = float(np.sqrt(rows[:, 3].mean())), float(rows[:, 4].mean())
        return Outcome(float(has_failed), x, y, yaw, torque, power, float(rate))


def episode(
    subject: Subject, scene: Any, mode: str, command: Sequence[float], variation: Variation, seconds: float, seed: int
) -> Outcome:
    """One episode of the robot's own control loop in a scene."""
    robot = subject.robot
    controller = Controller(robot, subject.policies)
    simulated = MujocoRobot(scene, robot, command, variation=variation, seed=seed)
    recorder = Recorder(simulated, controller, robot.mode(mode))
    total = robot.safety.ramp_seconds + SETTLING + seconds
    run(controller, simulated, total, on_step=recorder, show=None)
    return recorder.outcome(simulated.command)


@dataclasses.dataclass
class Gap:
    """Outcomes of all bundles: by sweep and value, and by command."""

    subjects: list[str]
    sweeps: dict[str, list[tuple[float, list[Outcome]]]]
    """Value and outcome by bundle."""
    grid: list[tuple[tuple[float, ...], list[Outcome]]]


def measure_gap(
    subjects: Sequence[Subject],
    scene: Any,
    mode: str = "walk",
    command: Sequence[float] = (0.5, 0.0, 0.0),
    seconds: float = 6.0,
    seeds: int = 2,
    variation: Variation | None = None,
    grid: Sequence[Sequence[float]] = GRID,
    show: Callable[[str], Any] | None = None,
) -> Gap:
    """Run every bundle through all sweeps.

    Args:
        subjects: The bundles.
        scene: MuJoCo's XML file.
        mode: The policy under test.
        command: Command of the sweeps.
        seconds: Time that is measured in each episode.
        seeds: Episodes for each value.
        variation: Differences from the scene that are always there.
        grid: Values of each part of the command.
        show: Called with a line of progress.
    """
    base = variation or Variation()
    jobs: list[tuple[str, float, Variation]] = []
    for name, (_, values) in SWEEPS.items():
        jobs += [(name, value, dataclasses.replace(base, **{name: value})) for value in values]
    sensors = [name for name in subjects[0].robot.sensors if NOISE.get(name, OTHER_NOISE)]
    for name, factor in itertools.product(sensors, NOISE_FACTORS):
        deviation = factor * NOISE.get(name, OTHER_NOISE)
        jobs.append((f"noise of {name}", deviation, dataclasses.replace(base, noise={name: deviation})))

    def outcomes(given: Sequence[float], differing: Variation) -> list[Outcome]:
        return [
            outcome_of([episode(s, scene, mode, given, differing, seconds, seed) for seed in range(seeds)])
            for s in subjects
        ]

    sweeps: dict[str, list[tuple[float, list[Outcome]]]] = {}
    for number, (name, value, differing) in enumerate(jobs):
        sweeps.setdefault(name, []).append((value, outcomes(command, differing)))
        if show is not None:
            show(f"{number + 1:4} of {len(jobs)}  {name} {value:g}")
    points = list(itertools.product(*grid)) if len(command) == len(grid) else []
    table = []
    for number, point in enumerate(points):
        table.append((point, outcomes(point, base)))
        if show is not None:
            show(f"{number + 1:4} of {len(points)}  command {', '.join(f'{part:g}' for part in point)}")
    return Gap([subject.name for subject in subjects], sweeps, table)


HEAD = ("falls", "error x, m/s", "error y, m/s", "error yaw, rad/s", "torque, Nm", "power, W", "action rate, 1/s")


def row_of(outcome: Outcome) -> list[str]:
    """The cells of an outcome."""
    cells = [f"{value:.2f}" if math.isfinite(value) else "-" for value in dataclasses.astuple(outcome)]
    return [f"{100 * outcome.falls:.0f} %", *cells[1:]]


def gap_page(
    gap: Gap,
    path: Path,
    scene: str,
    log: tuple[Log, Subject, Any] | None = None,
    fit: Fit | None = None,
    base: Variation | None = None,
) -> None:
    """Write the report; `log` is a robot's log with its bundle and a scene, and is shown beside the simulation."""
    page = Page("Gap report", f"{', '.join(gap.subjects)} in {scene}, driven by the robot's control loop")
    colors = COLORS[: len(gap.subjects)]
    for name, points in gap.sweeps.items():
        if not name.startswith("noise"):
            label = SWEEPS[name][0]
            shown = 1e3 if label.endswith("ms") else 1.0
            page.section(name.capitalize(), label.capitalize() + ".")
            page.drawing(gap_figure([(shown * value, found) for value, found in points], label, gap.subjects), label)
            rows, dots = table_rows(gap, [(f"{shown * value:g}", found) for value, found in points], colors)
            page.table([label, *HEAD], rows, dots)
    noisy = [
        (f"{n.removeprefix('noise of ')} ± {v:g}", f) for n, p in gap.sweeps.items() if n[:5] == "noise" for v, f in p
    ]
    page.section("Noise", "Standard deviation of normal noise on one sensor at a time.")
    rows, dots = table_rows(gap, noisy, colors)
    page.table(["sensor", *HEAD], rows, dots)
    if gap.grid:
        page.section("Commands", "Forward and sideways in m/s, turning in rad/s.")
        for number, subject in enumerate(gap.subjects if len(gap.grid[0][0]) == 3 else ()):
            one = [(point, found[number]) for point, found in gap.grid]
            page.drawing(grid_figure(one, subject), f"errors of {subject} by command")
        named = [(", ".join(f"{part:g}" for part in point), found) for point, found in gap.grid]
        rows, dots = table_rows(gap, named, colors)
        page.table(["command", *HEAD], rows, dots)
    if log is not None:
        log_section(page, *log, fit, base or Variation())
    page.write(path)


def table_rows(
    gap: Gap, points: Sequence[tuple[str, list[Outcome]]], colors: Sequence[str]
) -> tuple[list[list[str]], list[str]]:
    """Rows of a table, a line for each bundle, and the colours of their dots."""
    rows = [[name, *row_of(outcome)] for name, found in points for outcome in found]
    return rows, list(colors) * len(points) if len(gap.subjects) > 1 else []


def log_section(page: Page, log: Log, subject: Subject, scene: Any, fit: Fit | None, base: Variation) -> None:
    """The robot beside the simulation, as it is and as it was fitted."""
    page.section(
        "The robot beside the simulation", f"{log.path.name}: {len(log)} steps, {log.damaged} damaged records."
    )
    runs = {"robot": figures(log, subject.robot)}
    again = {"simulation": base} | ({} if fit is None else {"fitted simulation": fit.variation})
    replayed = {name: resimulate(log, subject, scene, variation) for name, variation in again.items()}
    runs |= {name: figures(found, subject.robot) for name, found in replayed.items()}
    names = list(next(iter(runs.values())))
    page.table(["", *names], [[name, *(f"{found[key]:.3f}" for key in names)] for name, found in runs.items()])
    page.drawing(
        comparison_figure({"robot": log, **replayed}, subject.robot), "joint positions of robot and simulation"
    )
    if fit is not None:
        values = dataclasses.asdict(fit.variation)
        kept = ("delay", "strength", "damping_gain", "joint_friction", "armature")
        units = ("s", "times kp and kd", "times kd", "Nm", "kg m²")
        if fit.error > 0.5 * fit.error_before:
            page.text("The fitted simulation does not follow either: the log does not show what differs.")
        page.text(
            f"Fitted to pieces of the log {'on the ground' if fit.is_on_ground else 'with the base held'}: "
            f"the difference of joint positions falls from {fit.error_before:.4f} to {fit.error:.4f} rad."
        )
        rows = [[name, f"{values[name]:.4g}", unit] for name, unit in zip(kept, units, strict=True)]
        page.table(["parameter", "value", "unit"], rows)


def figures(log: Log, robot: Robot) -> dict[str, float]:
    """Figures of a log that can be compared."""
    driven = log.columns["mode"] > 1
    result = {
        "s of policy": float(driven.sum() * robot.period),
        "stops": float(np.sum(~np.isin(log.columns["reason"], (NONE, REQUESTED, OVER, ENDED)))),
    }
    rate = np.abs(np.diff(log.columns["action"], axis=0))[driven[1:]]
    result["action rate, 1/s"] = float(rate.mean() / robot.period) if len(rate) else 0.0
    result["joint velocity, rad/s"] = (
        float(np.sqrt(np.mean(log.sensor("joint_vel")[driven] ** 2))) if driven.any() else 0
    )
    if "sensor.joint_torque" in log.columns and driven.any():
        torque = log.sensor("joint_torque")[driven]
        result["torque, Nm"] = float(np.sqrt(np.nanmean(torque**2)))
        power = np.maximum(0.0, torque * log.sensor("joint_vel")[driven]).sum(1)
        result["power, W"] = float(np.nanmean(power))
    return result


def resimulate(log: Log, subject: Subject, scene: Any, variation: Variation) -> Log:
    """The log of a simulation with the same commands and modes at the same times."""
    controller = Controller(subject.robot, subject.policies)
    simulated = MujocoRobot(scene, subject.robot, variation=variation)
    time = log.time - log.time[0]
    entered = np.flatnonzero(np.isin(log.columns["reason"], (REQUESTED, OVER)))
    changes = [(time[step], int(log.columns["mode"][step])) for step in entered]

    def follow(now: float) -> None:
        step = int(np.clip(np.searchsorted(time, now - 1e-6), 0, len(time) - 1))
        if "sensor.command" in log.columns:
            simulated.command = log.sensor("command")[step].astype(np.float64)
        while changes and changes[0][0] <= now + 1e-6:
            controller.requested = changes.pop(0)[1]

    with tempfile.TemporaryDirectory() as folder:
        writer = LogWriter(Path(folder) / "simulated.log", subject.robot)
        run(controller, simulated, float(time[-1]), writer, follow, show=None)
        writer.close()
        return read_log(writer.path)
