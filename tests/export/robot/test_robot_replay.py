"""Replay finds nothing in a correct log, and names each error in a wrong one."""

import dataclasses
import math
import re

import numpy as np
import pytest

from canter.export.robot.controller import Controller
from canter.export.robot.log import LogError, LogWriter, read_log
from canter.export.robot.loop import run
from canter.export.robot.replay import angular_velocity, diagnose, replay_log
from canter.export.robot.simulated import MujocoRobot


@pytest.fixture(scope="module")
def log(robot, scene, policies, tmp_path_factory):
    """Standing up, getting up, and walking twice with commands that change."""
    controller, simulated = Controller(robot, policies), MujocoRobot(scene, robot, command=[0.0, 0.0])
    writer = LogWriter(tmp_path_factory.mktemp("log") / "robot.log", robot)
    requests = {0: "stand", 30: "walk", 110: "get_up", 140: "stand", 165: "walk"}

    def script(now):
        step = round(now / robot.period)
        simulated.command = np.array([2 * math.sin(9 * now), math.cos(7 * now)])
        if step in requests:
            controller.request(requests[step])

    run(controller, simulated, 5.0, writer, script, show=None)
    writer.close()
    return read_log(writer.path)


def changed(log, **columns):
    """The same log with other columns."""
    return dataclasses.replace(log, columns=log.columns | columns)


def problems(log, robot, policies):
    return {finding.name: finding.problems for finding in replay_log(log, robot, policies) if finding.problems}


def walk_segment(log, first, width):
    """A copy of all observations, the columns of a segment in it, and the steps of `walk`."""
    obs = log.columns["obs"].copy()
    return obs, slice(first, first + width), np.flatnonzero(log.columns["mode"] == 2)


def test_a_correct_log_has_no_problems(log, robot, policies):
    assert {"damp", "stand", "walk", "get_up"} >= {mode for _, mode, _ in log.events()}
    assert np.sum(log.columns["mode"] == 2) > 100
    assert problems(log, robot, policies) == {}


def test_an_order_a_sign_a_scale_and_a_delay_are_named_by_segment(log, robot, policies):
    obs, part, steps = walk_segment(log, 4, 3)  # joint_vel
    obs[:, part] = obs[:, part][:, [1, 0, 2]]
    found = problems(changed(log, obs=obs), robot, policies)
    assert found["walk: joint_vel"] == ["order: hip has the values of knee; knee has the values of hip"]

    obs, part, steps = walk_segment(log, 4, 3)
    obs[:, part] *= [1, -1, 1]
    assert problems(changed(log, obs=obs), robot, policies)["walk: joint_vel"] == ["sign: knee"]

    obs, part, steps = walk_segment(log, 4, 3)
    obs[:, part] *= 20.0  # the scale of 0.05 was forgotten
    assert problems(changed(log, obs=obs), robot, policies)["walk: joint_vel"] == ["scale: all times 20"]

    obs, part, steps = walk_segment(log, 17, 2)  # command
    obs[steps, part] = obs[np.maximum(steps - 3, 0), part]
    assert problems(changed(log, obs=obs), robot, policies)["walk: command"] == ["delay: 3 steps"]

    obs, part, steps = walk_segment(log, 0, 4)  # angles, not relative to the default pose
    obs[:, part] += [-0.2, 0.1, -0.2, 0.1]
    found = problems(changed(log, obs=obs), robot, policies)["walk: angles"]
    assert found == ["offset: knee by -0.2, hip by 0.1, knee by -0.2, hip by 0.1"]


def test_actions_of_another_policy_are_named(log, robot, policies):
    actions = log.columns["action"].copy()
    actions[log.columns["mode"] == 2] *= -1.0
    found = problems(changed(log, action=actions), robot, policies)
    assert found["walk: output of the policy"] == ["sign: all"]


def test_wrong_velocities_of_the_robot_are_found_without_another_sensor(log, robot, policies):
    wrong = {"sensor.joint_vel": log.sensor("joint_vel")[:, [0, 2, 1]]}
    found = problems(changed(log, **wrong), robot, policies)
    name = "joint_vel against the change of joint_pos"
    assert found[name] == ["order: knee has the values of ankle; ankle has the values of knee"]


def test_weak_motors_show_in_the_torques(log, robot, policies):
    wrong = {"sensor.joint_torque": 0.5 * log.sensor("joint_torque")}
    found = problems(changed(log, **wrong), robot, policies)["joint_torque against targets and gains"]
    low, high = (float(word) for word in re.fullmatch(r"scale: all times ([\d.]+) to ([\d.]+)", found[0]).groups())
    assert 0.44 < low < high < 0.51


def test_an_angular_velocity_comes_from_the_change_of_orientation():
    time = np.arange(50) * 0.02
    half = 0.5 * 0.8 * time  # 0.8 rad/s about the base's own y, after a turn of 90 degrees about z
    a, b = math.cos(math.pi / 4), math.sin(math.pi / 4)
    turned = np.stack([a * np.cos(half), -b * np.sin(half), a * np.sin(half), b * np.cos(half)], 1)
    np.testing.assert_allclose(angular_velocity(turned, time)[5:-5], np.tile([0, 0.8, 0], (40, 1)), atol=1e-3)


def test_a_column_that_nothing_explains_is_said_to_be_so():
    generator = np.random.default_rng(0)
    expected, found = generator.normal(size=(2, 200, 2))
    found[:, 0] = expected[:, 0]
    assert diagnose(expected, found, ["a", "b"]) == ["not explained: b"]


def test_a_log_of_another_robot_is_refused(log, robot, policies):
    with pytest.raises(LogError, match="joints"):
        replay_log(log, dataclasses.replace(robot, joints=("hip", "knee", "toe")), policies)
