"""A ROS 2 node that runs a bundle: sensors come as topics, joint targets and gains go out as one.

| topic | type | |
|---|---|---|
| `joint_states` | sensor_msgs/JointState | joints by name, in any order |
| `imu` | sensor_msgs/Imu | `orientation` and `base_ang_vel`, in the frame of the base |
| `cmd_vel` | geometry_msgs/Twist | `command`: linear x, linear y, angular z |
| `sensors/<name>` | std_msgs/Float64MultiArray | any other sensor that a policy observes |
| `request` | std_msgs/String | a mode: `damp`, `stand`, `walk` |
| `emergency_stop` | std_msgs/Bool | true damps the robot until the node is started again |
| `joint_commands` | std_msgs/Float64MultiArray | out: targets, stiffnesses, dampings, in the order of the joints |
| `mode` | std_msgs/String | out: the mode and the reason of every change |
"""

import math
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import rclpy  # pyright: ignore[reportMissingImports]
from geometry_msgs.msg import Twist  # pyright: ignore[reportMissingImports]
from rclpy.executors import SingleThreadedExecutor  # pyright: ignore[reportMissingImports]
from rclpy.node import Node  # pyright: ignore[reportMissingImports]
from rclpy.qos import qos_profile_sensor_data  # pyright: ignore[reportMissingImports]
from sensor_msgs.msg import Imu, JointState  # pyright: ignore[reportMissingImports]
from std_msgs.msg import Bool, Float64MultiArray, String  # pyright: ignore[reportMissingImports]

from canter.export.robot.controller import Command, Controller, Sensors
from canter.export.robot.description import load_robot
from canter.export.robot.log import LogWriter
from canter.export.robot.loop import end_on_signals, run
from canter.export.runtime import Policy


class RosRobot:
    """The topics as a transport. Readings are stamped when they arrive, by one steady clock."""

    def __init__(self, node: Any, controller: Controller) -> None:
        robot = controller.robot
        self.controller, self.joints, self.width = controller, list(robot.joints), robot.all_sensors.get("command", 3)
        self.lock, self.readings = threading.Lock(), {}
        subscribe = partial(node.create_subscription, qos_profile=qos_profile_sensor_data)
        subscribe(JointState, "joint_states", self.joint_states)
        subscribe(Imu, "imu", self.imu)
        subscribe(Twist, "cmd_vel", self.cmd_vel)
        own = ("joint_pos", "joint_vel", "joint_torque", "orientation", "base_ang_vel", "command")
        for name in robot.all_sensors:
            if name not in own:
                subscribe(
                    Float64MultiArray, f"sensors/{name}", lambda message, name=name: self.keep(name, message.data)
                )
        node.create_subscription(String, "request", self.request, 10)
        node.create_subscription(Bool, "emergency_stop", self.emergency_stop, 10)
        self.commands = node.create_publisher(Float64MultiArray, "joint_commands", 1)
        self.modes = node.create_publisher(String, "mode", 10)
        self.logger = node.get_logger()

    def keep(self, name: str, values: Any) -> None:
        """Keep a reading with its time."""
        with self.lock:
            self.readings[name] = time.monotonic(), np.array(values, np.float64)

    def joint_states(self, message: Any) -> None:
        """Positions, velocities and torques by name; a message without all joints is left out."""
        places = {name: number for number, name in enumerate(message.name)}
        if not all(joint in places for joint in self.joints):
            self.logger.warning(f"joint_states has {list(message.name)}, without all of {self.joints}", once=True)
            return
        order = [places[joint] for joint in self.joints]
        for name, values in (("joint_pos", message.position), ("joint_vel", message.velocity)):
            if len(values) == len(places):
                self.keep(name, [values[place] for place in order])
        if len(message.effort) == len(places):
            self.keep("joint_torque", [message.effort[place] for place in order])

    def imu(self, message: Any) -> None:
        """Orientation (ROS has x, y, z, w) and angular velocity."""
        q, turning = message.orientation, message.angular_velocity
        self.keep("orientation", [q.w, q.x, q.y, q.z])
        self.keep("base_ang_vel", [turning.x, turning.y, turning.z])

    def cmd_vel(self, message: Any) -> None:
        """The command."""
        self.keep("command", [message.linear.x, message.linear.y, message.angular.z][: self.width])

    def request(self, message: Any) -> None:
        """Ask for a mode."""
        try:
            self.controller.request(message.data)
        except ValueError as error:
            self.logger.error(str(error))

    def emergency_stop(self, message: Any) -> None:
        """Damp the robot for good."""
        if message.data:
            self.controller.emergency_stop()

    def show(self, line: str) -> None:
        """Publish a change of the mode."""
        self.logger.info(line)
        self.modes.publish(String(data=line))

    def read(self) -> Sensors:
        """The newest readings."""
        with self.lock:
            return dict(self.readings)

    def write(self, command: Command) -> None:
        """Publish targets and gains."""
        numbers = np.concatenate([command.target, command.kp, command.kd])
        self.commands.publish(Float64MultiArray(data=numbers.tolist()))

    def wait(self, until: float) -> float:
        """Sleep on the clock of the readings."""
        while (now := time.monotonic()) < until:
            time.sleep(until - now)
        return now

    def close(self) -> None:
        """The node closes the topics."""


def main() -> None:
    """Run the node until Ctrl-C."""
    rclpy.init()
    node = Node("robot")
    defaults = {"bundle": "", "robot": "", "log": "", "modes": ["damp"], "seconds": math.inf}
    given = {name: node.declare_parameter(name, value).value for name, value in defaults.items()}
    robot = load_robot(given["bundle"], given["robot"] or None)
    controller = Controller(robot, {mode.name: Policy(mode.bundle) for mode in robot.modes[2:]})
    transport, waiting = RosRobot(node, controller), list(given["modes"])
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    spinning = threading.Thread(target=executor.spin, daemon=True)
    spinning.start()
    end_on_signals()
    folder = Path(given["log"] or ".")
    log = LogWriter(folder / time.strftime("robot-%Y%m%d-%H%M%S.log"), robot)

    def ask(now: float) -> None:
        if waiting and controller.requested < 0:
            controller.request(waiting.pop(0))

    try:
        transport.logger.info(run(controller, transport, given["seconds"], log, ask, transport.show).text())
    finally:
        log.close()
        executor.shutdown()
        node.destroy_node()
        rclpy.try_shutdown()


if __name__ == "__main__":
    main()
