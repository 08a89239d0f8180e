"""The control loop ends in its safe state, whatever goes wrong, and says why."""

import json
import math

import numpy as np
import pytest
from small_robot import ROBOT, readings

from canter.export.robot.controller import Controller
from canter.export.robot.description import load_robot
from canter.export.runtime import Bundle, BundleError

PERIOD = 0.02
TILTED = [math.cos(0.75), math.sin(0.75), 0.0, 0.0]  # by 1.5 rad


class Still:
    """A policy whose action is always the same."""

    def __init__(self, *action):
        self.action, self.resets, self.seen = np.array(action), 0, []

    def reset(self):
        self.resets += 1

    def predict(self, obs):
        self.seen.append(obs)
        return self.action


def drive(controller, steps, begin=0.0, **changed):
    """Step with the same readings; the last command."""
    for step in range(steps):
        now = begin + step * PERIOD
        command = controller.step(now, readings(now, **changed))
    return command


@pytest.fixture
def walking(robot):
    """A controller that has stood up and walks, its policy, and the time."""
    policy = Still(0.2, -0.4)
    controller = Controller(robot, {"walk": policy, "get_up": Still(0.0, 0.0, 0.0)})
    controller.request("stand")
    drive(controller, 22)
    controller.request("walk")
    drive(controller, 8, 22 * PERIOD)
    assert controller.mode_name == "walk"
    return controller, policy, 30 * PERIOD


def test_it_begins_without_stiffness_and_with_the_damping_of_every_joint(controller):
    command = drive(controller, 3)
    assert controller.mode_name == "damp"
    assert command.kp.tolist() == [0.0, 0.0, 0.0]
    assert command.kd.tolist() == [1.0, 1.0, 1.0]


def test_the_ramp_begins_at_the_measured_pose_and_ends_at_the_default_pose(controller):
    controller.request("stand")
    away = [0.5, -0.2, 0.3]
    targets = [controller.step(n * PERIOD, readings(n * PERIOD, joint_pos=away)).target for n in range(21)]
    assert targets[0].tolist() == away
    np.testing.assert_allclose(targets[10], [0.3, -0.2, 0.3])  # half of 0.4 s
    np.testing.assert_allclose(targets[20], [0.1, -0.2, 0.3])


def test_a_policy_begins_when_the_ramp_is_over(controller):
    controller.request("stand")
    drive(controller, 2)
    controller.request("walk")
    drive(controller, 18, 2 * PERIOD)
    assert controller.mode_name == "stand"
    drive(controller, 2, 20 * PERIOD)
    assert controller.mode_name == "walk"


def test_a_policy_cannot_be_entered_from_damp(controller, robot):
    controller.request("walk")
    drive(controller, 1)
    assert controller.mode_name == "damp"
    assert controller.event.text(robot.names) == "walk cannot be entered from here"


def test_actions_reach_their_own_joints_with_scale_and_smoothing(walking):
    controller, _, now = walking
    command = drive(controller, 40, now)
    # walk moves knee (scale 0.5) and hip (0.25); the ankle stays at its default
    np.testing.assert_allclose(command.target, [0.1 - 0.4 * 0.25, -0.2 + 0.2 * 0.5, 0.3])


def test_the_observation_has_history_order_scale_clip_sign_and_past_actions(walking):
    controller, policy, now = walking
    drive(controller, 1, now, joint_pos=[0.11, -0.18, 0.3])
    drive(controller, 1, now + PERIOD, joint_pos=[0.12, -0.17, 0.3], joint_vel=[1, 2, 3], base_ang_vel=[0.4, -2.0, 0.1])
    angles = [0.02, 0.01, 0.03, 0.02]  # knee and hip relative to the default, the oldest first
    turning = [-0.1, 0.5, -0.1]
    expected = [*angles, 0.05, 0.1, 0.15, 0, 0, -1, *turning, 0.2, -0.4, 0.2, -0.4, 0.5, 0.0]
    np.testing.assert_allclose(policy.seen[-1], expected, atol=1e-6)


def test_a_mode_that_begins_forgets_actions_memories_and_histories(walking):
    controller, policy, now = walking
    controller.request("stand")
    drive(controller, 22, now)
    controller.request("walk")
    drive(controller, 1, now + 22 * PERIOD, joint_pos=[0.11, -0.18, 0.3])
    assert policy.resets == 2
    np.testing.assert_allclose(policy.seen[-1][:4], [0.02, 0.01, 0.02, 0.01], atol=1e-6)
    assert policy.seen[-1][13:17].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"orientation": TILTED}, "the base is tilted by 1.50 rad"),
        ({"joint_pos": [0.1, 1.7, 0.3]}, "knee measures 1.700 rad, outside of its limits"),
        ({"joint_vel": [0.0, 0.0, -15.5]}, "ankle moves at -15.50 rad/s, above its limit"),
        ({"command": [math.nan, 0.0]}, "the sensor command has no finite reading of the right size"),
        ({"base_ang_vel": [0.0]}, "the sensor base_ang_vel has no finite reading of the right size"),
        ({"orientation": [0.0, 0.0, 0.0, 0.0]}, "the sensor orientation has no finite reading of the right size"),
    ],
)
def test_a_fault_ends_in_damp_in_the_same_step(walking, robot, changed, why):
    controller, _, now = walking
    command = drive(controller, 1, now, **changed)
    assert (controller.mode_name, controller.event.text(robot.names)) == ("damp", why)
    assert not command.kp.any()
    assert command.kd.all()
    assert np.isfinite(command.target).all()


def test_a_sensor_that_stops_ends_in_damp_when_its_reading_is_too_old(walking, robot):
    controller, _, now = walking
    for step in range(8):
        sensors = readings(now + step * PERIOD) | {"command": (now, np.array([0.5, 0.0]))}
        controller.step(now + step * PERIOD, sensors)
        if controller.mode_name == "damp":
            break
    assert step == 6
    assert controller.event.text(robot.names) == "the sensor command is 0.120 s old"


def test_a_sensor_that_is_missing_counts_as_old(walking):
    controller, _, now = walking
    drive(controller, 7, now, base_ang_vel=None)
    assert controller.mode_name == "damp"


def test_a_stalled_loop_ends_in_damp(walking, robot):
    controller, _, now = walking
    drive(controller, 1, now + 0.3)
    assert controller.mode_name == "damp"
    assert controller.event.text(robot.names) == "the loop stalled for 0.320 s"


def test_a_loop_that_is_late_again_and_again_ends_in_damp(walking, robot):
    controller, _, now = walking
    for step in range(6):
        controller.step(now + step * 0.035, readings(now + step * 0.035))
        if controller.mode_name == "damp":
            break
    assert controller.event.text(robot.names) == "5 steps in a row came late"


def test_a_joint_that_does_not_follow_in_stand_ends_in_damp(controller, robot):
    controller.request("stand")
    drive(controller, 60, joint_pos=[0.1, 0.6, 0.3])
    assert controller.mode_name == "damp"


def test_an_output_that_is_not_finite_ends_in_damp(walking, robot):
    controller, policy, now = walking
    policy.action = np.array([0.0, math.nan])
    command = drive(controller, 1, now)
    assert (controller.mode_name, controller.event.text(robot.names)) == ("damp", "the policy's output 1 is not finite")
    assert np.isfinite(command.target).all()


def test_after_an_emergency_stop_nothing_moves_the_robot_again(walking, robot):
    controller, _, now = walking
    controller.emergency_stop()
    drive(controller, 1, now)
    assert controller.event.text(robot.names) == "emergency stop"
    for mode in ("stand", "get_up"):
        controller.request(mode)
        command = drive(controller, 3, now + PERIOD)
        assert controller.mode_name == "damp"
        assert not command.kp.any()


def test_a_fallen_robot_may_get_up_but_not_stand(controller, robot):
    controller.request("stand")
    drive(controller, 1, orientation=TILTED)
    assert (controller.mode_name, controller.event.text(robot.names)) == ("damp", "the base is tilted by 1.50 rad")
    controller.request("get_up")
    drive(controller, 1, PERIOD, orientation=TILTED)
    assert controller.mode_name == "get_up"


def test_getting_up_leads_to_stand_when_its_time_is_over(controller, robot):
    controller.request("get_up")
    drive(controller, 25)
    assert controller.mode_name == "get_up"
    drive(controller, 2, 25 * PERIOD)
    assert controller.mode_name == "stand"


def test_targets_keep_the_limits_of_position_rate_and_torque(walking):
    controller, policy, now = walking
    before = controller.sent.target.copy()
    policy.action = np.array([9.0, -9.0])
    command = drive(controller, 1, now)
    most = 10.0 * PERIOD  # 10 rad/s
    np.testing.assert_array_less(np.abs(command.target - before), most + 1e-9)
    for step in range(1, 30):
        command = drive(controller, 1, now + step * PERIOD)
    assert np.abs(command.target).max() <= 1.5
    torque = command.kp * (command.target - [0.1, -0.2, 0.3])
    np.testing.assert_allclose(np.abs(torque).max(), 20.0)  # the joint's effort
    assert controller.limited == 2


def test_what_a_robot_cannot_do_is_refused_when_it_is_described(robot_folder, tmp_path):
    def load(**changed):
        file = tmp_path / "robot.json"
        modes = {name: {**mode, "bundle": str(robot_folder / name)} for name, mode in ROBOT["modes"].items()}
        file.write_text(json.dumps(ROBOT | {"modes": modes} | changed))
        return load_robot(robot_folder / "walk", file)

    load()
    with pytest.raises(BundleError, match="max_tlit"):
        load(safety={"max_tlit": 1.0})
    with pytest.raises(BundleError, match="knee"):
        load(joints=[joint for joint in ROBOT["joints"] if joint["name"] != "knee"])
    with pytest.raises(BundleError, match="default"):
        load(joints=[{key: value for key, value in joint.items() if key != "default"} for joint in ROBOT["joints"]])


def test_a_bundle_that_states_everything_needs_no_robot_json(robot_folder):
    bundle = Bundle(robot_folder / "walk")
    mode, stated = ROBOT["modes"]["walk"], {"commands": [{"name": "twist", "width": 2}], "control_period": 0.02}
    segments = [dict(part) for part in mode["observation"]]
    segments[-1]["source"] = {"kind": "command", "command": "twist"}
    action = {**bundle.spec["action"], **mode["action"], "stiffness": [30.0, 35.0], "delay": [0.0, 0.02]}
    bundle.spec |= {"observation": segments, "action": action, "joints": ROBOT["joints"], **stated}
    robot = load_robot(bundle)
    assert robot.joints == ("hip", "knee", "ankle")
    assert robot.modes[2].kp.tolist() == [35.0, 30.0, 40.0]  # of the action where it has them, else of the joint
    assert robot.effort.tolist() == [20.0, 20.0, 20.0]
    assert robot.sensors == {"joint_pos": 3, "joint_vel": 3, "orientation": 4, "imu_gyro": 3, "command": 2}
