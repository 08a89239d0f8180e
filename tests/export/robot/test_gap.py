"""Delay, gains, friction and armature are found again in the log of a robot that has them."""

import math

import numpy as np
import pytest

from canter.export.robot.controller import Controller
from canter.export.robot.identify import fit_log
from canter.export.robot.log import LogError, LogWriter, read_log
from canter.export.robot.loop import run
from canter.export.robot.simulated import MujocoRobot, Variation

TRUE = Variation(delay=0.015, strength=0.8, damping_gain=1.2, joint_friction=0.3, armature=0.035)


class Sweep:
    """A policy that moves all joints with rising frequency."""

    def reset(self):
        self.step = 0

    def predict(self, obs):
        self.step += 1
        time = 0.02 * self.step
        return np.sin(2 * math.pi * (1.0 + 0.6 * time) * time + np.arange(2))


@pytest.fixture(scope="module")
def log(robot, scene, tmp_path_factory):
    controller = Controller(robot, {"walk": Sweep(), "get_up": Sweep()})
    writer = LogWriter(tmp_path_factory.mktemp("log") / "robot.log", robot)
    controller.request("stand")

    def script(now):
        if abs(now - 0.5) < 0.01:
            controller.request("walk")

    run(controller, MujocoRobot(scene, robot, [0.0, 0.0], variation=TRUE), 5.0, writer, script, show=None)
    writer.close()
    return read_log(writer.path)


def test_the_parameters_of_a_robot_are_found_again(log, robot, scene):
    fit = fit_log(log, robot, scene, count=12)
    assert fit.error < 0.1 * fit.error_before
    assert fit.variation.delay == pytest.approx(TRUE.delay, abs=0.003)
    for name in ("strength", "damping_gain", "joint_friction", "armature"):
        assert getattr(fit.variation, name) == pytest.approx(getattr(TRUE, name), rel=0.15), name
    assert not fit.is_on_ground


def test_a_log_in_which_nothing_was_driven_is_refused(robot, scene, controller, tmp_path):
    writer = LogWriter(tmp_path / "robot.log", robot)
    run(controller, MujocoRobot(scene, robot, [0.0, 0.0]), 1.0, writer, show=None)
    writer.close()
    with pytest.raises(LogError, match="driven"):
        fit_log(read_log(writer.path), robot, scene)
