"""Unitree's Go2, B2, H1 and G1 behind the interface of `loop.Transport`, through unitree_sdk2py.

An example to adapt: it is tested against a stand-in of the SDK, not on a robot. Before the first run, switch the
robot's own controller off (`MotionSwitcherClient`), hang the robot up, and keep the remote control in hand.
"""

import threading
import time
from typing import Any

import numpy as np

from canter.export.robot.controller import Command, Sensors
from canter.export.robot.description import Robot

# Motors in the order of the SDK. Humanoids: give `motors`, from Unitree's documentation of the robot.
GO2_MOTORS = tuple(f"{leg}_{part}_joint" for leg in ("FR", "FL", "RR", "RL") for part in ("hip", "thigh", "calf"))
SERVO = 0x01  # mode of a motor that follows q, kp, kd


class UnitreeRobot:
    """A robot on Unitree's `rt/lowstate` and `rt/lowcmd`.

    Sensors: `joint_pos`, `joint_vel`, `joint_torque`, `orientation`, `base_ang_vel`, and `command`, which is the
    attribute `command` of this object. A policy that observes `base_lin_vel` needs an estimator of your own.

    Args:
        interface: Network interface of the robot, such as `eth0`.
        robot: The robot of the bundle.
        motors: Joint of every motor, in the order of the SDK.
    """

    def __init__(self, interface: str, robot: Robot, motors: tuple[str, ...] = GO2_MOTORS) -> None:
        from unitree_sdk2py.core.channel import ChannelFactoryInitialize, ChannelPublisher, ChannelSubscriber  # pyright: ignore[reportMissingImports]
        from unitree_sdk2py.idl.default import unitree_go_msg_dds__LowCmd_  # pyright: ignore[reportMissingImports]
        from unitree_sdk2py.idl.unitree_go.msg.dds_ import LowCmd_, LowState_  # pyright: ignore[reportMissingImports]
        from unitree_sdk2py.utils.crc import CRC  # pyright: ignore[reportMissingImports]

        ChannelFactoryInitialize(0, interface)
        self.joints = list(motors)
        self.command = np.zeros(robot.all_sensors.get("command", 3))
        self.crc, self.message = CRC(), unitree_go_msg_dds__LowCmd_()
        self.message.head[0], self.message.head[1], self.message.level_flag = 0xFE, 0xEF, 0xFF
        self.lock, self.state = threading.Lock(), (float("-inf"), None)
        self.publisher: Any = ChannelPublisher("rt/lowcmd", LowCmd_)
        self.publisher.Init()
        self.subscriber: Any = ChannelSubscriber("rt/lowstate", LowState_)
        self.subscriber.Init(self.receive, 10)

    def receive(self, state: Any) -> None:
        """Keep the newest state; the SDK calls this from its own thread."""
        with self.lock:
            self.state = time.monotonic(), state

    def read(self) -> Sensors:
        """The newest state; nothing before the first one, which keeps the robot in damp."""
        with self.lock:
            stamp, state = self.state
        if state is None:
            return {}
        motors: Any = state.motor_state[: len(self.joints)]
        return {
            "joint_pos": (stamp, np.array([motor.q for motor in motors])),
            "joint_vel": (stamp, np.array([motor.dq for motor in motors])),
            "joint_torque": (stamp, np.array([motor.tau_est for motor in motors])),
            "orientation": (stamp, np.array(state.imu_state.quaternion)),  # w, x, y, z
            "base_ang_vel": (stamp, np.array(state.imu_state.gyroscope)),
            "command": (time.monotonic(), self.command),
        }

    def write(self, command: Command) -> None:
        """Send targets and gains to the motors."""
        parts = zip(command.target, command.kp, command.kd, strict=True)
        for motor, (target, kp, kd) in zip(self.message.motor_cmd, parts, strict=False):
            motor.mode, motor.q, motor.kp, motor.dq, motor.kd, motor.tau = SERVO, target, kp, 0.0, kd, 0.0
        self.message.crc = self.crc.Crc(self.message)
        self.publisher.Write(self.message)

    def wait(self, until: float) -> float:
        """Sleep on the clock that stamps the states."""
        while (now := time.monotonic()) < until:
            time.sleep(until - now)
        return now

    def close(self) -> None:
        """End the connection."""
        self.subscriber.Close()
        self.publisher.Close()
