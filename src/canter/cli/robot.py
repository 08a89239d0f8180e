"""`canter replay` and `canter gap`: check a robot's log, and measure what a policy loses in other worlds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from canter.cli.errors import UserError, user_errors
from canter.cli.flags import at_least
from canter.export.robot.description import Robot, load_robot
from canter.export.robot.gap import Subject, gap_page, measure_gap
from canter.export.robot.identify import fit_log
from canter.export.robot.log import read_log
from canter.export.robot.replay import replay_log
from canter.export.robot.simulated import Variation
from canter.export.runtime import Policy

LogPath = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="LOG")]
BundlePath = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="BUNDLE")]
BundlePaths = Annotated[
    tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="BUNDLE...", help_behavior_hint="")
]


def policies_of(robot: Robot) -> dict[str, Any]:
    """The policy of every mode that has one."""
    return {mode.name: Policy(mode.bundle) for mode in robot.modes[2:]}


def replay(log: LogPath, bundle: BundlePath, robot: Path | None = None) -> int:
    """Recompute observations and actions of a robot's log, and name errors of order, sign, scale and delay.

    The exit code is 1 if anything differs.

    Args:
        log: A log that `canter drive`, the ROS 2 node or the loop in C wrote.
        bundle: The bundle that the robot ran.
        robot: Its robot.json; the one in the bundle's folder by default.
    """
    with user_errors():
        described = load_robot(bundle, robot)
        found = read_log(log)
        findings = replay_log(found, described, policies_of(described))
    print(f"  {len(found)} steps, {found.damaged} damaged records")
    for seconds, mode, why in found.events():
        print(f"  {seconds:9.3f} s  {mode:<8} {why}")
    for finding in findings:
        verdict = "; ".join(finding.problems) or "as it should be"
        print(
            f"  {finding.name:<48} {finding.steps:>7} steps   largest difference {finding.difference:.2g}   {verdict}"
        )
    return int(any(finding.problems for finding in findings))


def gap(
    bundles: BundlePaths,
    mujoco: Path,
    robot: Path | None = None,
    out: Path = Path("gap.html"),
    log: Path | None = None,
    mode: str = "walk",
    command: tuple[float, ...] = (0.5, 0.0, 0.0),
    seconds: float = 6.0,
    seeds: int = 2,
    joint_damping: float | None = None,
) -> int:
    """Sweep delay, noise, pushes, friction, mass, motor strength and commands, and write one page about them.

    Args:
        bundles: Bundles to compare, such as those of several checkpoints.
        mujoco: Scene of MuJoCo.
        robot: The robot.json of all bundles; the one in each bundle's folder by default.
        out: Page to write.
        log: A robot's log, which is shown beside the simulation, and to which the simulation is fitted.
        mode: The policy under test.
        command: Command of the sweeps.
        seconds: Time that is measured in each episode.
        seeds: Episodes for each value.
        joint_damping: Passive damping of the joints, instead of the scene's; 0 where the scene has the gain there.
    """
    at_least(1, seeds=seeds)
    if not bundles:
        raise UserError("name the bundles to compare: canter gap BUNDLE... --mujoco SCENE")
    with user_errors():
        robots = [load_robot(bundle, robot) for bundle in bundles]
        subjects = [
            Subject(name, made, policies_of(made)) for name, made in zip(names_of(bundles), robots, strict=True)
        ]
        base, fit, beside = Variation(joint_damping=joint_damping), None, None
        if log is not None:
            beside = read_log(log), subjects[0], mujoco
            fit = fit_log(beside[0], subjects[0].robot, mujoco, base)
        found = measure_gap(
            subjects, mujoco, mode, command, seconds, seeds, base, show=lambda line: print(line, flush=True)
        )
        gap_page(found, out, mujoco.name, beside, fit, base)
    print(f"  {out}")
    return 0


def names_of(paths: Sequence[Path]) -> list[str]:
    """Short names of bundles that differ."""
    names = [path.resolve().name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]
