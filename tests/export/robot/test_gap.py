"""Delay, gains, friction and armature are found again in the log of a robot that has them."""

import math

import numpy as np
import pytest

from canter.export.robot.controller import Controller
from canter.export.robot.gap import SWEEPS, Outcome, Subject, gap_page, measure_gap, outcome_of
from canter.export.robot.identify import Fit, fit_log
from canter.export.robot.log import LogError, LogWriter, read_log
from canter.export.robot.loop import run
from canter.export.robot.plot import plot_log
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


def test_a_gap_report_has_every_sweep_noise_and_command_for_every_bundle(log, robot, scene, policies, tmp_path):
    subjects = [Subject("one", robot, policies), Subject("two", robot, policies)]
    gap = measure_gap(subjects, scene, command=(0.5, 0.0), seconds=0.4, seeds=1, grid=((0.0, 0.5), (0.0,)))
    assert list(gap.sweeps)[:5] == list(SWEEPS)
    noisy = {name.removeprefix("noise of ") for name in gap.sweeps if name.startswith("noise")}
    assert noisy == {"joint_pos", "joint_vel", "orientation", "base_ang_vel"}
    assert [point for point, _ in gap.grid] == [(0.0, 0.0), (0.5, 0.0)]
    first, second = gap.sweeps["delay"][0][1]
    assert first == second  # the same policy, the same seeds
    assert first.error_x == 0.5  # the base is fixed
    assert gap.sweeps["strength"][0][1][0].torque != gap.sweeps["strength"][-1][1][0].torque
    page = tmp_path / "gap.html"
    gap_page(gap, page, "scene.xml", (log, subjects[0], scene), Fit(TRUE, 0.1, 0.01, {}, False))
    text = page.read_text()
    for word in ("delay of commands, ms", "joint_friction", "0.015", "two", "joint_vel ± 2", "fitted simulation"):
        assert word in text


def test_a_fall_counts_and_what_came_before_it_is_kept():
    nothing = Outcome(1.0, *(math.nan,) * 6)
    walked = Outcome(0.0, 0.1, 0.2, 0.3, 4.0, 5.0, 6.0)
    assert outcome_of([nothing, walked]) == Outcome(0.5, 0.1, 0.2, 0.3, 4.0, 5.0, 6.0)


def test_a_log_becomes_one_picture(log, tmp_path):
    out = plot_log(log.path, tmp_path / "log.png")
    assert out.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=".txt"):
        plot_log(log.path, tmp_path / "log.txt")
