"""The control loop of a robot in real time, in Python and in C, against MuJoCo, and its faults.

    canter export RUN --out bundle --robot go1_robot.json
    python benchmarks/robot.py bundle scene.xml --minutes 10 --out results.jsonl

Measured are the period, its jitter, overruns and the time of a step. Then the robot is pushed, a sensor is cut, the
loop is stalled, and joints are named in a wrong order; every log is kept in `--logs` and replayed.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import math
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
from report import report

from canter.export.robot.c_loop import write_c_loop
from canter.export.robot.controller import Command, Controller, Event
from canter.export.robot.description import load_robot
from canter.export.robot.log import LogWriter, read_log
from canter.export.robot.loop import run
from canter.export.robot.replay import replay_log
from canter.export.robot.simulated import MujocoRobot, Variation
from canter.export.runtime import Policy

SHIM = """#include "robot.h"
static robot r;
void start(void) { robot_init(&r); }
void ask(int mode) { robot_request(&r, mode); }
void step(double now, const robot_sensors *sensors, robot_command *command, double *state)
{
    robot_step(&r, now, sensors, command);
    state[0] = r.mode, state[1] = r.reason, state[2] = r.index, state[3] = r.value, state[4] = r.limited;
}
"""


class CController(Controller):
    """The control loop in C, with the calls of the one in Python."""

    def __init__(self, robot, policies, folder):
        super().__init__(robot, policies)
        sources = [str(path) for path in write_c_loop(robot, folder) if path.suffix == ".c"]
        (folder / "shim.c").write_text(SHIM)
        command = ["cc", "-O2", "-std=c99", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", *sources]
        subprocess.run([*command, str(folder / "shim.c"), "-o", str(folder / "loop.so"), "-lm"], check=True)
        self.library = ctypes.CDLL(str(folder / "loop.so"))
        self.library.step.argtypes = [ctypes.c_double, *[ctypes.c_void_p] * 3]
        self.library.start()
        self.state, self.out = np.zeros(5), np.zeros(3 * len(robot.joints))

    def request(self, mode):
        self.library.ask(self.robot.mode(mode))

    def step(self, now, sensors):
        self._read(sensors)
        given = np.concatenate([self.values, self.stamps])
        self.library.step(now, given.ctypes.data, self.out.ctypes.data, self.state.ctypes.data)
        self.mode, self.limited = int(self.state[0]), int(self.state[4])
        self.event = Event(int(self.state[1]), int(self.state[2]), float(self.state[3]))
        self.sent = Command(*self.out.reshape(3, -1).copy())
        return self.sent


def drive(controller, transport, seconds, log, disturb=None):
    """Stand, walk, and be disturbed."""
    begun = []

    def script(now):
        if not begun:
            begun.append(controller.request("stand"))
        elif len(begun) == 1 and now > 0.1:
            begun.append(controller.request("walk"))
        if disturb is not None:
            disturb(now)

    writer = LogWriter(log, controller.robot)
    timing = run(controller, transport, seconds, writer, script)
    writer.close()
    print(f"  {timing.text()}", flush=True)
    return timing, read_log(log)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("scene", type=Path)
    parser.add_argument("--minutes", type=float, default=1.0, help="length of each of the two runs in real time")
    parser.add_argument("--command", nargs=3, type=float, default=[0.6, 0.0, 0.0])
    parser.add_argument("--only", nargs="*", help="some of the runs")
    parser.add_argument("--logs", type=Path, default=Path("robot-logs"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.logs.mkdir(exist_ok=True)
    robot = load_robot(args.bundle)
    policies = {"walk": Policy(robot.modes[2].bundle)}
    servo = Variation(joint_damping=0.0)  # the scene of Go1 has the servos' damping in its joints

    def simulated(**settings):
        return MujocoRobot(args.scene, robot, args.command, is_real_time=True, variation=servo, **settings)

    def push(transport):
        return lambda now: transport.push(2.5, math.pi / 2) if 6.0 <= now < 6.0 + robot.period else None

    def cut(transport):
        return lambda now: transport.cut.add("base_ang_vel") if now > 6.0 else None

    def stall(transport):
        stalled = []
        return lambda now: stalled.append(time.sleep(0.3)) if now > 6.0 and not stalled else None

    legs = [name for part in ("hip", "thigh", "calf") for name in robot.joints if f"_{part}_" in name]
    sides = [robot.joints[(number + 3) % 6 + 6 * (number // 6)] for number in range(12)]
    runs = {
        "python": (60 * args.minutes, {}, None),
        "c": (60 * args.minutes, {}, None),
        "push": (12, {}, push),
        "cut_sensor": (12, {}, cut),
        "stalled_loop": (12, {}, stall),
        "joints_by_type": (4, {"joints": legs}, None),
        "left_for_right": (20, {"joints": sides}, None),
    }
    for name, (seconds, settings, disturb) in runs.items():
        if args.only and name not in args.only:
            continue
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            controller = CController(robot, policies, Path(folder)) if name == "c" else Controller(robot, policies)
            transport = simulated(**settings)
            log = args.logs / f"{name}.log"
            log.unlink(missing_ok=True)
            timing, found = drive(controller, transport, seconds, log, disturb and disturb(transport))
        times = {key: value for key, value in dataclasses.asdict(timing).items() if isinstance(value, float)}
        result = {"arm": name, "steps": timing.steps, "overruns": timing.overruns}
        result |= {f"{key}_ms": float(f"{1e3 * value:.5g}") for key, value in times.items()}
        *events, _ = found.events()
        result["events"] = [f"{at:.2f} s {mode}: {why}" for at, mode, why in events]
        result["end"] = events[-1][2]
        result["limited_steps"] = int(np.sum(found.columns["limited"] > 0))
        if name != "c":  # its observations stay in C
            findings = replay_log(found, robot, policies)
            result["replay"] = "; ".join(f"{f.name}: {p}" for f in findings for p in f.problems) or "as it should be"
        report({"task": "Go1", **result}, args.out)


if __name__ == "__main__":
    main()
