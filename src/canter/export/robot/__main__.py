"""`python -m robot BUNDLE`, and `canter drive BUNDLE`: run a bundle on a robot, real or simulated."""

import argparse
import contextlib
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from canter.export.robot.controller import Controller
from canter.export.robot.description import load_robot
from canter.export.robot.log import LogWriter
from canter.export.robot.loop import end_on_signals, run
from canter.export.robot.simulated import MujocoRobot, Variation
from canter.export.runtime import BundleError, Policy

HELP = """While it runs, write a mode (stand, walk, damp), numbers for the command (0.5 0 0), or stop for the emergency
stop. Ctrl-C damps the robot and ends the program."""


def arguments(args: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(prog="drive", description=__doc__, epilog=HELP)
    parser.add_argument(
        "bundle", nargs="?", type=Path, default=Path(__file__).parent.parent, help="folder of the bundle"
    )
    parser.add_argument("--robot", type=Path, help="robot.json; the one in the bundle's folder by default")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--mujoco", type=Path, metavar="SCENE", help="run in this scene of MuJoCo")
    where.add_argument("--unitree", metavar="INTERFACE", help="run on a Unitree robot behind this network interface")
    parser.add_argument("--modes", nargs="*", default=["stand"], help="modes to enter one after the other")
    parser.add_argument("--command", nargs="*", type=float, default=[0.0, 0.0, 0.0], help="the command of the policy")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time after which to end")
    parser.add_argument("--log", type=Path, help="file to write what happens to; robot-<time>.log by default")
    parser.add_argument("--fast", action="store_true", help="in MuJoCo: as fast as possible, not in real time")
    parser.add_argument("--joint-damping", type=float, help="in MuJoCo: passive damping of the joints, for the scene's")
    return parser.parse_args(args)


def connect(given: argparse.Namespace, robot: Any) -> Any:
    """The connection that the flags ask for."""
    if given.unitree is not None:
        from canter.export.robot.unitree import UnitreeRobot

        return UnitreeRobot(given.unitree, robot)
    variation = Variation(joint_damping=given.joint_damping)
    return MujocoRobot(given.mujoco, robot, given.command, not given.fast, variation)


class Operator:
    """Enters modes one after the other, and those that are written to standard input."""

    def __init__(self, controller: Controller, transport: Any, modes: Sequence[str]) -> None:
        self.controller, self.transport, self.waiting = controller, transport, list(modes)
        for mode in modes:
            controller.robot.mode(mode)  # an unknown one is an error now, not later
        self.lines = threading.Thread(target=self.listen, daemon=True)

    def listen(self) -> None:
        """Read requests until the input ends."""
        with contextlib.suppress(OSError):  # there may be no standard input
            for line in sys.stdin or ():
                self.obey(line.split())

    def obey(self, words: Sequence[str]) -> None:
        """Do what one line asks for."""
        if words[:1] == ["stop"]:
            self.controller.emergency_stop()
        elif words and words[0] in self.controller.robot.names["mode"]:
            self.waiting = [words[0]]
        elif words:
            try:
                self.transport.command = np.array([float(word) for word in words])
            except ValueError:
                sys.stderr.write(f"{HELP}\n")

    def __call__(self, now: float) -> None:
        """Before every step: ask for the next mode when the last one was entered."""
        if self.waiting and self.controller.requested < 0:
            self.controller.request(self.waiting.pop(0))


def main(args: Sequence[str] | None = None) -> int:
    """Run a bundle on a robot, real or simulated."""
    given = arguments(args)
    try:
        robot = load_robot(given.bundle, given.robot)
        policies = {mode.name: Policy(mode.bundle) for mode in robot.modes[2:]}
    except (BundleError, ImportError) as error:
        sys.stderr.write(f"{error}\n")
        return 6
    for policy in policies.values():
        policy.latency(100)  # ONNX Runtime allocates in its first steps
    controller, transport = Controller(robot, policies), connect(given, robot)
    log = LogWriter(given.log or Path(time.strftime("robot-%Y%m%d-%H%M%S.log")), robot)
    operator = Operator(controller, transport, given.modes)
    operator.lines.start()
    end_on_signals()
    show = lambda line: sys.stdout.write(f"{line}\n")  # noqa: E731
    try:
        show(run(controller, transport, given.seconds, log, operator, show).text())
    finally:
        log.close()
        show(f"log: {log.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
