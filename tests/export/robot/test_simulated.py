"""The program of the robot runs on a simulated one; motors have the gains that are sent."""

import numpy as np
import pytest
from small_robot import JOINTS

from canter.export.robot.controller import Command
from canter.export.robot.loop import run
from canter.export.robot.simulated import MujocoRobot, Variation

pytest.importorskip("mujoco")


def command(target, kp=40.0, kd=1.0):
    return Command(np.array(target, float), np.full(3, kp), np.full(3, kd))


def settled(scene, robot, **variation):
    simulated = MujocoRobot(scene, robot, variation=Variation(**variation))
    simulated.write(command([0.2, 0.1, -0.3]))
    simulated.wait(3.0)
    return simulated


def test_joints_go_to_their_targets_with_the_gains_that_are_sent(scene, robot):
    found = settled(scene, robot).read()
    np.testing.assert_allclose(found["joint_pos"][1], [0.2, 0.1, -0.3], atol=0.02)
    assert found["joint_pos"][0] == pytest.approx(3.0)
    torque = 40.0 * ([0.2, 0.1, -0.3] - found["joint_pos"][1]) - found["joint_vel"][1]
    np.testing.assert_allclose(found["joint_torque"][1], torque, atol=0.02)


def test_a_delay_holds_commands_back(scene, robot):
    prompt, late = (MujocoRobot(scene, robot, variation=Variation(delay=delay)) for delay in (0.0, 0.05))
    for simulated in (prompt, late):
        simulated.write(command([1.0, 0.0, 0.0]))
        simulated.wait(0.05)
    assert prompt.read()["joint_pos"][1][0] > 0.1
    assert abs(late.read()["joint_pos"][1][0]) < 0.01


def test_weak_motors_give_less_torque(scene, robot):
    strong, weak = (MujocoRobot(scene, robot, variation=Variation(strength=factor)) for factor in (1.0, 0.5))
    torques = []
    for simulated in (strong, weak):
        simulated.write(command([0.3, 0.0, 0.0], kd=0.0))
        simulated.wait(0.002)
        torques.append(simulated.read()["joint_torque"][1][0])
    assert torques[1] == pytest.approx(0.5 * torques[0], rel=0.01)
    strong.write(command([9.0, 0.0, 0.0], kd=0.0))
    strong.wait(0.004)
    assert strong.read()["joint_torque"][1][0] == pytest.approx(20.0)  # the joint's effort


def test_a_cut_sensor_keeps_its_last_reading_and_time(scene, robot):
    simulated = MujocoRobot(scene, robot, command=[0.5, 0.0])
    before = simulated.read()["base_ang_vel"]
    simulated.cut.add("base_ang_vel")
    simulated.wait(0.1)
    assert simulated.read()["base_ang_vel"][0] == before[0] == 0.0
    assert simulated.read()["joint_pos"][0] == pytest.approx(0.1)


def test_the_whole_loop_stands_walks_and_is_damped_by_a_cut_sensor(scene, robot, controller):
    simulated = MujocoRobot(scene, robot, command=[0.5, 0.0])
    lines = []

    def script(now):
        if now == 0.0:
            controller.request("stand")
        elif abs(now - 0.6) < 0.01:
            controller.request("walk")
        elif now > 1.0:
            simulated.cut.add("command")

    timing = run(controller, simulated, 1.6, on_step=script, show=lines.append)
    assert [line.split(" s  ")[1].split()[0] for line in lines] == ["stand", "walk", "damp"]
    assert lines[-1].endswith("the sensor command is 0.120 s old")
    assert (timing.steps, timing.overruns) == (80, 0)
    assert timing.period_mean == pytest.approx(0.02)


def test_in_real_time_the_loop_keeps_its_period(scene, robot, controller):
    controller.request("stand")
    timing = run(controller, MujocoRobot(scene, robot, command=[0.5, 0.0], is_real_time=True), 0.4, show=None)
    assert timing.period_mean == pytest.approx(0.02, rel=0.2)


def test_a_scene_without_a_joint_is_refused(tmp_path, robot):
    (tmp_path / "empty.xml").write_text("<mujoco><worldbody/></mujoco>")
    with pytest.raises(ValueError, match=JOINTS[0]):
        MujocoRobot(tmp_path / "empty.xml", robot)
