"""A bundle's description for other programs on a robot: Unitree's deploy.yaml, and properties of an ONNX file."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

# Kind of source -> the name of the observation in Unitree's and Isaac Lab's programs; None: relative ones have another.
TERMS = {"gravity": "projected_gravity", "last_action": "last_action", "linear_velocity": "base_lin_vel"}
TERMS |= {"angular_velocity": "base_ang_vel", "command": "velocity_commands", "height_scan": "height_scan"}
SENSORS = {"gyro": "base_ang_vel", "velocimeter": "base_lin_vel", "framezaxis": "projected_gravity"}
CLASSES = {"position": "JointPositionAction", "velocity": "JointVelocityAction", "effort": "JointEffortAction"}
CLASSES |= {"relative_position": "RelativeJointPositionAction"}
HEADER = """# Written by canter in the form of Unitree's deploy.yaml. policy.json says more; what is here is the same.
# Joints are in the policy's order; joint_ids_map has the place of each in the list of motors.
"""


def deploy_yaml(spec: Mapping[str, Any], motors: Sequence[str] | None = None) -> str | None:
    """The text of a deploy.yaml; None for a policy that does not move joints by known gains.

    `motors` are the names of the joints in the order of the robot's motors; by default that of the simulator.
    """
    action, segments = spec["action"], spec.get("observation")
    names = action.get("names")
    if not names or not segments or action.get("target") not in CLASSES or spec.get("control_period") is None:
        return None
    if "position" in action["target"] and "stiffness" not in action:
        return None
    width = len(names)
    order = list(motors or [joint["name"] for joint in spec.get("joints") or []])
    if not set(names) <= set(order):
        order = list(names)
    places = [order.index(name) for name in names]
    content: dict[str, Any] = {"joint_ids_map": places, "step_dt": spec["control_period"]}
    for name in ("stiffness", "damping"):  # in the order of the motors
        gains = wide(action.get(name, 0.0), width)
        content[name] = [gains[places.index(i)] if i in places else 0.0 for i in range(len(order))]
    content["default_joint_pos"] = wide(action.get("default_pose", action.get("offset", 0.0)), width)
    content["commands"] = {command["name"]: command_part(command) for command in spec.get("commands") or []}
    limits: Any = action.get("target_clip")
    clip = None if limits is None else [list(pair) for pair in zip(*limits, strict=True)]
    target: dict[str, Any] = {"joint_names": list(names), "joint_ids": None, "clip": clip}
    offset: Any = action.get("offset", action.get("default_pose", 0.0) if action["target"] == "position" else 0.0)
    target |= {"scale": wide(action.get("scale", 1.0), width), "offset": wide(offset, width)}
    content["actions"] = {CLASSES[action["target"]]: target}
    content["observations"] = {term_name(segment): term_part(segment) for segment in segments}
    return HEADER + yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=110)


def wide(values: Any, width: int) -> list[float]:
    """A list with one number for each joint."""
    given = [float(value) for value in (values if isinstance(values, list | tuple) else [values])]
    return given * width if len(given) == 1 else given


def command_part(command: Mapping[str, Any]) -> dict[str, Any]:
    """The ranges of a command."""
    ranges: dict[str, Any] = {n: [float(end) for end in pair] for n, pair in (command.get("ranges") or {}).items()}
    heading = command.get("heading")
    if command.get("kind") == "velocity":
        ranges["heading"] = None if heading is None else [float(end) for end in heading["range"]]
    return {"ranges": ranges}


def term_name(segment: Mapping[str, Any]) -> str:
    """The name of a segment in Unitree's programs; its own where they have none."""
    source = segment.get("source") or {}
    kind = source.get("kind", "")
    if kind in ("joint_position", "joint_velocity"):
        return ("joint_pos" if kind == "joint_position" else "joint_vel") + ("_rel" if source.get("relative") else "")
    return TERMS.get(kind) or SENSORS.get(source.get("sensor", "")) or segment["name"]


def term_part(segment: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters, clip, scale and history of a segment."""
    source, history = segment.get("source") or {}, segment.get("history") or 1
    parameters = {"command_name": source["command"]} if source.get("kind") == "command" else {}
    scale = wide(segment.get("scale") or 1.0, segment["width"] // history)
    return {"params": parameters, "clip": segment.get("clip"), "scale": scale, "history_length": history}


def properties(spec: Mapping[str, Any]) -> dict[str, str]:
    """The properties of an ONNX file under the names that mjlab's exporter and its readers use, with whole numbers."""
    action, segments = spec["action"], spec.get("observation") or []
    found: dict[str, Any] = {"run_path": (spec.get("training") or {}).get("run") or ""}
    if action.get("names"):
        found |= {"joint_names": action["names"], "default_joint_pos": action.get("default_pose")}
        found |= {"joint_stiffness": action.get("stiffness"), "joint_damping": action.get("damping")}
        found["action_scale"] = action.get("scale")
    if len(segments) > 1:
        found["observation_names"] = [segment["name"] for segment in segments]
        found["observation_terms_scale"] = [";".join(map(text, segment.get("scale") or [1.0])) for segment in segments]
        bounds = [segment.get("clip") or (-math.inf, math.inf) for segment in segments]
        found["observation_terms_clip"] = [";".join(map(text, pair)) for pair in bounds]
        found["observation_terms_history_length"] = [segment.get("history", 0) for segment in segments]
    if spec.get("commands"):
        found["command_names"] = [command["name"] for command in spec["commands"]]
    if spec.get("control_period"):
        found["control_period"] = spec["control_period"]
    return {name: text(value) for name, value in found.items() if value not in (None, "", [])}


def text(value: Any) -> str:
    """A value, or a list of them with commas, as text."""
    if isinstance(value, list | tuple):
        return ",".join(map(text, value))
    return repr(float(value)) if isinstance(value, float) else str(value)
