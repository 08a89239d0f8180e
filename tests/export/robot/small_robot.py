"""A robot of three joints with two policies: `walk` moves two joints in another order, `get_up` all of them."""

import numpy as np

JOINTS = ["hip", "knee", "ankle"]
INFO = {"config": {"run": {"task": "canter/Nothing"}}, "environment": {"robot": {"control_period": 0.02}}}
ROBOT = {
    "joints": [
        {"name": name, "default": default, "position": [-1.5, 1.5], "velocity": 10.0, "effort": 20.0}
        | {"stiffness": 40.0, "damping": 1.0}
        for name, default in zip(JOINTS, (0.1, -0.2, 0.3), strict=True)
    ],
    "extras": {"joint_torque": 3},
    "sensors": {"imu_gyro": "base_ang_vel"},
    "modes": {
        "walk": {
            "bundle": "walk",
            "blend": 0.1,
            "observation": [
                {
                    "name": "angles",
                    "width": 4,
                    "history": 2,
                    "source": {"kind": "joint_position", "joints": ["knee", "hip"], "relative": True},
                },
                {
                    "name": "joint_vel",
                    "width": 3,
                    "scale": [0.05],
                    "source": {"kind": "joint_velocity", "joints": JOINTS},
                },
                {"name": "gravity", "width": 3, "source": {"kind": "gravity"}},
                {
                    "name": "turning",
                    "width": 3,
                    "clip": [-1.0, 1.0],
                    "scale": [0.25, 0.5, 1.0],
                    "source": {"kind": "sensor", "name": "imu_gyro", "sign": -1},
                },
                {"name": "last", "width": 2, "source": {"kind": "last_action"}},
                {"name": "before", "width": 2, "source": {"kind": "last_action", "steps": 2}},
                {"name": "command", "width": 2, "source": {"kind": "command"}},
            ],
            "action": {"names": ["knee", "hip"], "target": "position", "scale": [0.5, 0.25], "smoothing": [0.8]},
        },
        "get_up": {
            "bundle": "get_up",
            "from": ["damp", "stand"],
            "max_tilt": None,
            "seconds": 0.5,
            "next": "stand",
            "observation": [
                {"name": "joint_pos", "width": 3, "source": {"kind": "joint_position", "joints": JOINTS}},
                {"name": "gravity", "width": 3, "source": {"kind": "gravity"}},
            ],
            "action": {"names": JOINTS, "target": "relative_position", "scale": [0.1], "offset": [0.0]},
        },
    },
    "safety": {"ramp_seconds": 0.4},
}


def readings(now, **changed):
    """A robot that stands upright in its default pose."""
    found = {
        "joint_pos": [0.1, -0.2, 0.3],
        "joint_vel": [0.0, 0.0, 0.0],
        "orientation": [1.0, 0.0, 0.0, 0.0],
        "base_ang_vel": [0.0, 0.0, 0.0],
        "command": [0.5, 0.0],
    }
    return {name: (now, np.array(value, float)) for name, value in (found | changed).items() if value is not None}


SCENE = """<mujoco><option timestep="0.002" gravity="0 0 0"/><worldbody>
<body name="thigh"><joint name="hip" axis="0 1 0" armature="0.02"/>
<geom type="capsule" size="0.02" fromto="0 0 0 0 0 -0.3" mass="1"/>
<body name="shank" pos="0 0 -0.3"><joint name="knee" axis="0 1 0" armature="0.02"/>
<geom type="capsule" size="0.02" fromto="0 0 0 0 0 -0.3" mass="0.5"/>
<body name="foot" pos="0 0 -0.3"><joint name="ankle" axis="0 1 0" armature="0.02"/>
<geom type="sphere" size="0.03" pos="0.05 0 0" mass="0.1"/></body></body></body><site name="imu"/></worldbody>
<actuator><motor name="hip" joint="hip" gear="30"/></actuator>
<sensor><gyro name="base_ang_vel" site="imu"/></sensor></mujoco>
"""
