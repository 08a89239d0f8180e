"""Copies of the control loop run without canter; the ROS 2 node and Unitree's transport, against stand-ins."""

import json
import os
import shutil
import subprocess
import sys
import time
import types
from types import SimpleNamespace as Message

import numpy as np
import pytest
from small_robot import JOINTS, ROBOT

from canter.export.robot.controller import Command, Controller
from canter.export.robot.description import load_robot
from canter.export.robot.log import read_log
from canter.export.robot.package import write_ros2


@pytest.fixture
def alone(robot_folder, tmp_path):
    """The bundle of `walk` with a robot.json of its own."""
    folder = shutil.copytree(robot_folder / "walk", tmp_path / "alone")
    mode = {key: value for key, value in ROBOT["modes"]["walk"].items() if key != "bundle"}
    (folder / "robot.json").write_text(json.dumps(ROBOT | {"modes": {"walk": mode}}))
    return folder


def test_a_bundle_drives_a_simulated_robot_without_canter(alone, scene):
    """In a process that cannot import canter or torch."""
    (alone / "sitecustomize.py").write_text("import sys\nsys.modules['canter'] = sys.modules['torch'] = None\n")
    flags = ["--mujoco", scene, "--fast", "--seconds", "1.5", "--command", "0.5", "0", "--modes", "stand", "walk"]
    done = subprocess.run(
        [sys.executable, "-m", "robot", *map(str, flags), "--log", "made.log"],
        cwd=alone, env=os.environ | {"PYTHONPATH": str(alone)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    log = read_log(alone / "made.log")
    assert [mode for _, mode, _ in log.events()] == ["stand", "walk", "damp"]
    assert "75 steps, 0 overruns" in done.stdout


class Topics:
    """What the node needs of rclpy."""

    def __init__(self, name="robot"):
        self.parameters, self.callbacks, self.published = {}, {}, []

    def create_subscription(self, kind, name, callback, qos_profile):
        self.callbacks[name] = callback

    def create_publisher(self, kind, name, depth):
        return Message(publish=lambda message: self.published.append((name, message)))

    def declare_parameter(self, name, value):
        return Message(value=self.parameters.get(name, value))

    def get_logger(self):
        return Message(info=lambda text: None, warning=lambda text, once: None, error=lambda text: None)

    def destroy_node(self):
        self.is_destroyed = True


@pytest.fixture
def ros(monkeypatch):
    """A stand-in of rclpy, because ROS 2 is not on PyPI."""
    node = Topics()
    names = ("JointState", "Imu", "Twist", "Bool", "Float64MultiArray", "String")
    messages = {name: type(name, (Message,), {}) for name in names}
    executor = lambda: Message(add_node=lambda n: None, spin=lambda: None, shutdown=lambda: None)  # noqa: E731
    modules = {
        "rclpy": {"init": lambda: None, "try_shutdown": lambda: None},
        "rclpy.node": {"Node": lambda name: node},
        "rclpy.executors": {"SingleThreadedExecutor": executor},
        "rclpy.qos": {"qos_profile_sensor_data": 10},
        **dict.fromkeys(("geometry_msgs", "sensor_msgs", "std_msgs"), {}),
        **dict.fromkeys(("geometry_msgs.msg", "sensor_msgs.msg", "std_msgs.msg"), messages),
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return node


def send_all(node):
    """One message on every topic; joints in an order of their own."""
    states = Message(
        name=["ankle", "hip", "knee"], position=[0.3, 0.1, -0.2], velocity=[0.0] * 3, effort=[3.0, 1.0, 2.0]
    )
    node.callbacks["joint_states"](states)
    turning = Message(x=0.0, y=0.0, z=0.0)
    node.callbacks["imu"](Message(orientation=Message(w=1.0, x=0.0, y=0.0, z=0.0), angular_velocity=turning))
    node.callbacks["cmd_vel"](Message(linear=Message(x=0.5, y=0.1), angular=Message(z=0.2)))


def test_the_node_reads_topics_by_name_and_publishes_targets_and_gains(ros, controller):
    from canter.export.robot.ros2_node import RosRobot

    transport = RosRobot(ros, controller)
    send_all(ros)
    sensors = transport.read()
    assert sensors["joint_pos"][1].tolist() == [0.1, -0.2, 0.3]
    assert sensors["joint_torque"][1].tolist() == [1.0, 2.0, 3.0]
    assert sensors["command"][1].tolist() == [0.5, 0.1]
    assert abs(sensors["orientation"][0] - time.monotonic()) < 1.0
    transport.write(Command(np.array([1.0, 2.0, 3.0]), np.full(3, 40.0), np.full(3, 0.5)))
    assert ros.published[-1][1].data == [1.0, 2.0, 3.0, 40.0, 40.0, 40.0, 0.5, 0.5, 0.5]
    ros.callbacks["request"](Message(data="stand"))
    assert controller.requested == 1
    ros.callbacks["request"](Message(data="fly"))
    assert controller.requested == 1
    ros.callbacks["emergency_stop"](Message(data=True))
    assert controller.is_stopped


def test_joint_states_without_all_joints_give_no_reading(ros, controller):
    from canter.export.robot.ros2_node import RosRobot

    transport = RosRobot(ros, controller)
    ros.callbacks["joint_states"](Message(name=["hip"], position=[0.1], velocity=[0.0], effort=[]))
    assert transport.read() == {}


def test_the_written_package_runs_and_damps_when_topics_fall_silent(ros, alone, tmp_path, monkeypatch):
    package = tmp_path / "my_robot"
    write_ros2(alone, package)
    monkeypatch.syspath_prepend(str(package))
    from my_robot.node import main

    ros.parameters = {"bundle": str(package / "bundle"), "log": str(tmp_path), "modes": ["stand"], "seconds": 0.5}
    count = 0

    def sleep(seconds, begin=time.sleep):
        nonlocal count
        count += 1
        if count < 12:
            send_all(ros)
        begin(seconds)

    monkeypatch.setattr("time.sleep", sleep)
    main()
    log = read_log(next(tmp_path.glob("robot-*.log")))
    events = [(mode, why) for _, mode, why in log.events()]
    assert ("stand", "requested") in events
    assert any(mode == "damp" and why.startswith("the sensor joint_pos is 0.1") for mode, why in events)
    assert ros.published[-1][1].data[3:6] == [0.0, 0.0, 0.0]
    assert ros.is_destroyed


def test_a_package_has_all_files_that_colcon_needs(alone, tmp_path):
    write_ros2(alone, tmp_path / "my_robot")
    found = {str(path.relative_to(tmp_path / "my_robot")) for path in (tmp_path / "my_robot").rglob("*")}
    assert {"package.xml", "setup.py", "setup.cfg", "resource/my_robot", "launch/robot.launch.py"} <= found
    assert {"config/params.yaml", "my_robot/node.py", "my_robot/robot/controller.py", "bundle/policy.onnx"} <= found
    for path in (tmp_path / "my_robot").rglob("*.py"):
        compile(path.read_text(), path, "exec")
        assert "canter.export" not in path.read_text()
    with pytest.raises(ValueError, match="My-Robot"):
        write_ros2(alone, tmp_path / "My-Robot")


def test_the_transport_of_unitree_fills_its_messages(monkeypatch, robot):
    sent = []
    motor = lambda: Message(mode=0, q=0.0, dq=0.0, tau=0.0, kp=0.0, kd=0.0, tau_est=0.0)  # noqa: E731
    command = Message(head=[0, 0], level_flag=0, motor_cmd=[motor() for _ in range(20)], crc=0)
    publisher = Message(Init=lambda: None, Write=lambda message: sent.append(message.crc), Close=lambda: None)
    subscriber = Message(Init=lambda callback, depth: None, Close=lambda: None)
    modules = {
        "unitree_sdk2py": {},
        "unitree_sdk2py.core": {},
        "unitree_sdk2py.core.channel": {
            "ChannelFactoryInitialize": lambda domain, interface: None,
            "ChannelPublisher": lambda topic, kind: publisher,
            "ChannelSubscriber": lambda topic, kind: subscriber,
        },
        "unitree_sdk2py.idl": {},
        "unitree_sdk2py.idl.default": {"unitree_go_msg_dds__LowCmd_": lambda: command},
        **dict.fromkeys(("unitree_sdk2py.idl.unitree_go", "unitree_sdk2py.idl.unitree_go.msg"), {}),
        "unitree_sdk2py.idl.unitree_go.msg.dds_": {"LowCmd_": None, "LowState_": None},
        "unitree_sdk2py.utils": {},
        "unitree_sdk2py.utils.crc": {"CRC": lambda: Message(Crc=lambda message: 77)},
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    from canter.export.robot.unitree import UnitreeRobot

    transport = UnitreeRobot("eth0", robot, tuple(JOINTS))
    assert transport.read() == {}
    motors = [Message(q=0.1 * n, dq=0.2 * n, tau_est=0.3 * n) for n in range(20)]
    imu = Message(quaternion=[1.0, 0.0, 0.0, 0.0], gyroscope=[0.1, 0.2, 0.3])
    transport.receive(Message(motor_state=motors, imu_state=imu))
    np.testing.assert_allclose(transport.read()["joint_vel"][1], [0.0, 0.2, 0.4])
    transport.write(Command(np.array([1.0, 2.0, 3.0]), np.full(3, 40.0), np.full(3, 0.5)))
    second = command.motor_cmd[1]
    assert (second.mode, second.q, second.kp, second.kd, second.tau) == (1, 2.0, 40.0, 0.5, 0.0)
    assert command.motor_cmd[3].mode == 0
    assert sent == [77]


def test_a_robot_json_beside_the_bundle_is_read(alone):
    assert load_robot(alone).names["mode"] == ["damp", "stand", "walk"]
    assert Controller(load_robot(alone), {"walk": None}).mode_name == "damp"
