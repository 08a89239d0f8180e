"""The control loop in C does what the one in Python does, step by step and to the last bit."""

import ctypes
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from small_robot import readings

from canter.export.robot.c_loop import write_c_loop
from canter.export.robot.controller import Controller
from canter.export.robot.log import log_fields, read_log

STRICT = ["-O2", "-Wall", "-Wextra", "-Werror", "-std=c99"]
CC = shutil.which("cc")
pytestmark = pytest.mark.skipif(CC is None, reason="there is no C compiler")


def build(robot, folder, *more):
    """The program of loop_main.c, and the same policies as a library."""
    sources = [str(path) for path in write_c_loop(robot, folder) if path.suffix == ".c"]
    main = str(Path(__file__).with_name("loop_main.c"))
    program = folder / "loop"
    subprocess.run([CC, *STRICT, *more, f"-I{folder}", main, *sources, "-o", program, "-lm"], check=True)
    return program


@pytest.fixture(scope="module")
def built(robot, tmp_path_factory):
    folder = tmp_path_factory.mktemp("c")
    build(robot, folder)
    policies = [str(path) for path in folder.glob("*_policy.c")]
    subprocess.run([CC, *STRICT, "-fPIC", "-shared", *policies, "-o", folder / "policies.so", "-lm"], check=True)
    return folder


class CPolicy:
    """A policy of the library."""

    def __init__(self, library, name, actions):
        self.library, self.name, self.actions = library, name, actions
        self.state = ctypes.create_string_buffer(1 << 16)
        self.reset()

    def reset(self):
        getattr(self.library, f"{self.name}_policy_reset")(self.state)

    def predict(self, obs):
        found = np.zeros(self.actions, np.float32)
        pointers = [array.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) for array in (obs, found)]
        getattr(self.library, f"{self.name}_policy_step")(self.state, *pointers)
        return found


def story(robot):
    """Time, request, emergency stop and readings of every step: every mode and every fault."""
    generator, steps, now = np.random.default_rng(3), [], 0.0

    def add(count, request=None, stop=False, period=0.02, old=None, **changed):
        nonlocal now
        for step in range(count):
            now += period
            noise = {"joint_pos": generator.normal([0.1, -0.2, 0.3], 0.1), "joint_vel": generator.normal(0, 2, 3)}
            noise["base_ang_vel"], noise["command"] = generator.normal(0, 1, 3), generator.normal(0, 1, 2)
            roll = generator.normal(0, 0.1)
            noise["orientation"] = [math.cos(roll), math.sin(roll), 0.0, 0.0]
            found = readings(now, **{**noise, "joint_torque": [1, 2, 3], **changed})
            found |= {} if old is None else {old: (now - 0.03 * step, found[old][1])}
            steps.append((now, -1 if step or request is None else robot.mode(request), stop, found))

    def stand_and_walk():
        add(25, "stand")
        add(40, "walk")

    add(3)
    add(2, "walk")  # refused
    stand_and_walk()
    add(1, orientation=[math.cos(0.6), math.sin(0.6), 0, 0])
    add(30, "get_up", orientation=[math.cos(0.6), 0, math.sin(0.6), 0])
    add(30, "get_up")
    add(20, "walk")
    add(5, "stand")
    add(25, "walk")
    add(1, command=[math.nan, 0.0])
    stand_and_walk()
    add(8, old="base_ang_vel")
    stand_and_walk()
    add(1, period=0.5)
    stand_and_walk()
    add(8, period=0.035)
    stand_and_walk()
    add(1, joint_vel=[0, 20, 0])
    stand_and_walk()
    add(1, joint_pos=[2.0, 0, 0])
    add(60, "stand", joint_pos=[0.1, 0.9, 0.3])
    stand_and_walk()
    add(3, "damp")
    stand_and_walk()
    add(3, stop=True)
    add(10, "stand")
    return steps


def run_c(program, robot, steps):
    """The log that the program wrote, and its commands (T, 3, J)."""
    frames = []
    for now, request, stop, found in steps:
        stamps = [found[name][0] for name in robot.all_sensors]
        values = np.concatenate([found[name][1] for name in robot.all_sensors])
        frames.append(np.concatenate([[now, request, stop], values, stamps]))
    done = subprocess.run([program], input=np.concatenate(frames).tobytes(), capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return done.stdout, np.frombuffer(done.stderr).reshape(len(steps), 3, len(robot.joints))


def run_python(robot, policies, steps):
    controller = Controller(robot, policies)
    commands, rows = [], []
    for now, request, stop, found in steps:
        if request >= 0:
            controller.request(robot.names["mode"][request])
        if stop:
            controller.emergency_stop()
        sent = controller.step(now, found)
        commands.append([sent.target, sent.kp, sent.kd])
        event = controller.event
        rows.append([controller.mode, event.reason, event.index, event.value, controller.limited])
    return np.array(commands), np.array(rows)


def test_every_command_and_every_reason_is_the_same_to_the_last_bit(robot, built, tmp_path):
    steps = story(robot)
    library = ctypes.CDLL(str(built / "policies.so"))
    policies = {mode.name: CPolicy(library, mode.name, len(mode.actions)) for mode in robot.modes[2:]}
    expected, rows = run_python(robot, policies, steps)
    log_bytes, found = run_c(built / "loop", robot, steps)
    (tmp_path / "c.log").write_bytes(log_bytes)
    log = read_log(tmp_path / "c.log")
    names = ("mode", "reason", "index", "value", "limited")
    np.testing.assert_array_equal(np.stack([log.columns[n] for n in names], 1), rows.astype(np.float32))
    np.testing.assert_array_equal(found, expected)
    assert set(range(14)) <= {int(reason) for reason in rows[:, 1]} | {11}  # outputs of these policies are finite
    assert set(rows[:, 0]) == {0, 1, 2, 3}


def test_the_log_of_the_c_loop_reads_like_that_of_python(robot, built, tmp_path):
    steps = story(robot)[:60]
    log_bytes, commands = run_c(built / "loop", robot, steps)
    (tmp_path / "c.log").write_bytes(log_bytes[:-100])  # a torn tail
    log = read_log(tmp_path / "c.log")
    assert (len(log), log.damaged) == (59, 1)
    assert [list(field) for field in log_fields(robot)] == log.header["fields"]
    np.testing.assert_array_equal(log.time, [step[0] for step in steps[:59]])
    np.testing.assert_array_equal(log.sensor("joint_pos")[7], steps[7][3]["joint_pos"][1].astype(np.float32))
    np.testing.assert_array_equal(log.columns["target"], commands[:59, 0].astype(np.float32))
    assert set(log.columns["overruns"]) == {3.0}


def test_the_loop_in_c_is_clean_under_the_sanitizers(robot, tmp_path):
    flags = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    try:
        program = build(robot, tmp_path, *flags)
    except subprocess.CalledProcessError:
        pytest.skip("the compiler has no sanitizers")
    run_c(program, robot, story(robot))
