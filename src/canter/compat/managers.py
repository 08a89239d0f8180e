"""What the manager-based simulators, mjlab and Isaac Lab, know of a robot, in plain containers.

The entries are those of a bundle's policy.json (docs/bundle.md). What a simulator does not state is left out.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from canter.export.sources import import_mujoco

GROUPS = ("actor", "policy")
OWN_MODULES = ("mjlab.", "isaaclab", "omni.isaac.lab")  # of functions whose meaning is known by their name
UNITS = {"velocimeter": "m/s", "gyro": "rad/s", "accelerometer": "m/s^2", "force": "N", "torque": "N m"}
UNITS |= {"framepos": "m", "framelinvel": "m/s", "frameangvel": "rad/s", "framelinacc": "m/s^2", "jointpos": "rad"}
UNITS |= {"jointvel": "rad/s", "rangefinder": "m", "subtreecom": "m", "subtreelinvel": "m/s"}
UNITS |= {"linear_velocity": "m/s", "angular_velocity": "rad/s", "joint_position": "rad", "joint_velocity": "rad/s"}
UNITS |= {"height_scan": "m", "motion_anchor_position": "m"}
TARGETS = {"RelativeJointPosition": "relative_position", "JointPosition": "position", "JointVelocity": "velocity"}
TARGETS |= {"JointEffort": "effort"}
VELOCITIES = {"lin_vel_x": "m/s", "lin_vel_y": "m/s", "ang_vel_z": "rad/s"}


def numbers(values: Any) -> list[Any]:
    """A flat list of plain numbers from an array or a tensor, as exact as they are."""
    array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
    return array.ravel().tolist()


def plain_name(name: Any) -> str:
    """A name of the robot's own model: without the robot's prefix in a scene."""
    return str(name).rpartition("/")[2]


def describe_managers(base: Any, groups: Sequence[str] = ()) -> dict[str, Any]:
    """The robot, its actions, commands and physics, and the terms of the observation groups that a policy reads."""
    observations = base.observation_manager
    names = [name for name in groups if name in observations.active_terms]
    if not names:
        names = [name for name in GROUPS if name in observations.active_terms][:1]
    robot = robot_of(base)
    action = describe_action(base, robot)
    found: dict[str, Any] = {"observation": None, "obs_groups": names, "action": action}
    found["joints"] = describe_joints(base, robot, action)
    if names:
        found["observation"] = [term for name in names for term in group_terms(base, robot, name)]
    if getattr(base, "command_manager", None) is not None:
        found["commands"] = describe_commands(base.command_manager)
    root = getattr(getattr(robot, "data", None), "default_root_state", None)
    if root is not None:
        pose = numbers(root[0])
        found["reset_pose"] = {"position": pose[:3], "orientation": pose[3:7]}
    found["physics"] = describe_physics(base)
    return {name: value for name, value in found.items() if value}


def robot_of(base: Any) -> Any:
    """The entity that the actions move."""
    actions = base.action_manager
    parts = [actions.get_term(name) for name in actions.active_terms]
    keys = ("entity_name", "asset_name")  # of mjlab and of Isaac Lab
    names = [getattr(getattr(part, "cfg", None), key, None) for part in parts for key in keys]
    return base.scene[next(filter(None, names), "robot")]


def group_terms(base: Any, robot: Any, group: str) -> list[dict[str, Any]]:
    """The terms of an observation group in the order of its vector."""
    manager = base.observation_manager
    names, shapes = manager.active_terms[group], manager.group_obs_term_dim[group]
    settings = getattr(manager, "_group_obs_term_cfgs", {}).get(group, [None] * len(names))
    return [describe_term(base, robot, group, *parts) for parts in zip(names, shapes, settings, strict=True)]


def describe_term(base: Any, robot: Any, group: str, name: str, shape: Sequence[int], settings: Any) -> dict[str, Any]:
    """One observation term: what it is, its clip range, scale, delay, history and the noise of the training."""
    term: dict[str, Any] = {"name": str(name), "width": math.prod(shape), "group": group}
    function = getattr(settings, "func", None)
    if function is not None:
        term["source"] = source = describe_source(base, robot, settings)
        unit = UNITS.get(source.get("sensor", source["kind"]), "1")
        if source["kind"] not in ("other", "command"):
            term["unit"] = unit
    for key, setting in (("scale", "scale"), ("clip", "clip"), ("history", "history_length")):
        value = getattr(settings, setting, None)
        if value is None or (key == "history" and not value):
            continue
        term[key] = int(value) if key == "history" else numbers(value)
    lags = [getattr(settings, f"delay_{end}_lag", 0) or 0 for end in ("min", "max")]
    if any(lags):
        term["delay"] = [lag * float(base.step_dt) for lag in lags]
    noise = describe_noise(getattr(settings, "noise", None))
    if (getattr(settings, "params", None) or {}).get("biased"):
        events = (getattr(event, "params", {}) for event in (getattr(base.cfg, "events", None) or {}).values())
        noise |= next(({"bias": numbers(event["bias_range"])} for event in events if "bias_range" in event), {})
    return term | ({"noise": noise} if noise else {})


def describe_noise(noise: Any) -> dict[str, Any]:
    """The distribution of a noise setting, with the range of a bias where a noise model has one."""
    if noise is None:
        return {}
    inner = getattr(noise, "noise_cfg", None)
    if inner is not None:  # a noise model, perhaps with a bias that is drawn when an episode begins
        bias = describe_noise(getattr(noise, "bias_noise_cfg", None))
        found = describe_noise(inner)
        return found | ({"bias": [bias["low"], bias["high"]]} if "low" in bias else {})
    kinds = {"uniform": {"low": "n_min", "high": "n_max"}, "normal": {"mean": "mean", "std": "std"}}
    kinds |= {"constant": {"value": "bias"}}
    for kind, keys in kinds.items():
        if all(hasattr(noise, key) for key in keys.values()):
            values = {name: getattr(noise, key) for name, key in keys.items()}
            values = {n: v if isinstance(v, int | float) else numbers(v) for n, v in values.items()}
            return {"distribution": kind, **values, "operation": getattr(noise, "operation", "add")}
    return {"distribution": type(noise).__name__}


def describe_source(base: Any, robot: Any, settings: Any) -> dict[str, Any]:
    """What an observation term is, from the function that computes it; the function's name where that is unknown."""
    function, parameters = settings.func, dict(getattr(settings, "params", None) or {})
    owner = function if hasattr(function, "__qualname__") else type(function)
    module, name = str(owner.__module__), str(owner.__name__)
    asset = parameters.get("asset_cfg")
    entity = robot if asset is None else base.scene[asset.name]
    body = {"body": plain_name(next(iter(getattr(entity, "body_names", ())), "base"))}
    known: dict[str, Callable[[], dict[str, Any] | None]] = {
        "base_lin_vel": lambda: {"kind": "linear_velocity", **body},
        "base_ang_vel": lambda: {"kind": "angular_velocity", **body},
        "projected_gravity": lambda: {"kind": "gravity", **body},
        "last_action": lambda: {"kind": "last_action"} if parameters.get("action_name") is None else None,
        "generated_commands": lambda: {"kind": "command", "command": parameters["command_name"]},
        "builtin_sensor": lambda: describe_sensor(base, parameters["sensor_name"]),
        "projected_gravity_from_sensor": lambda: describe_sensor(base, parameters["sensor_name"], -1),
        "height_scan": lambda: describe_scan(base, parameters),
    }
    for quantity, kind in (("pos", "joint_position"), ("vel", "joint_velocity")):
        for suffix in ("", "_rel"):
            make = joint_source(entity, asset, kind, f"default_joint_{quantity}" if suffix else None)
            known[f"joint_{quantity}{suffix}"] = make
    for quantity, kind in (("pos", "motion_anchor_position"), ("ori", "motion_anchor_orientation")):
        known[f"motion_anchor_{quantity}_b"] = anchor_source(base, kind, parameters)
    if name in known and module.startswith(OWN_MODULES) and (found := known[name]()) is not None:
        return found
    simple = {key: value for key, value in parameters.items() if isinstance(value, bool | int | float | str)}
    return {"kind": "other", "function": f"{module}:{name}", "parameters": simple}


def joint_source(entity: Any, asset: Any, kind: str, default: str | None) -> Callable[[], dict[str, Any]]:
    """A function that describes positions or velocities of joints, relative to a default pose if there is one."""

    def describe() -> dict[str, Any]:
        names, ids = list(entity.joint_names), getattr(asset, "joint_ids", slice(None))
        chosen = list(range(len(names)))[ids] if isinstance(ids, slice) else [int(i) for i in ids]
        values = [0.0] * len(names) if default is None else numbers(getattr(entity.data, default)[0])
        joints, offset = [plain_name(names[i]) for i in chosen], [values[i] for i in chosen]
        return {"kind": kind, "joints": joints, "relative": default is not None, "offset": offset}

    return describe


def anchor_source(base: Any, kind: str, parameters: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    """A function that describes a pose of the reference motion's anchor."""

    def describe() -> dict[str, Any]:
        command = parameters["command_name"]
        body = base.command_manager.get_term(command).cfg.anchor_body_name
        return {"kind": kind, "command": command, "body": plain_name(body)}

    return describe


def describe_sensor(base: Any, name: str, sign: int = 1) -> dict[str, Any]:
    """A sensor of the MuJoCo model: its type, and the object that it is attached to."""
    model = base.sim.mj_model
    number = model.sensor(name).id
    found = {"kind": "sensor", "sensor": sensor_type(model.sensor_type[number]), "name": plain_name(name), "sign": sign}
    for key, kind, which in (
        ("object", model.sensor_objtype[number], model.sensor_objid[number]),
        ("reference", model.sensor_reftype[number], model.sensor_refid[number]),
    ):
        if which >= 0 and (described := describe_object(model, int(kind), int(which))):
            found[key] = described
    return found


def sensor_type(number: int) -> str:
    """MuJoCo's name of a type of sensor, as in an XML file."""
    return import_mujoco().mjtSensor(int(number)).name.removeprefix("mjSENS_").lower()


def describe_object(model: Any, kind: int, number: int) -> dict[str, Any]:
    """An object of a MuJoCo model, with its body and its pose in that; nothing for the world."""
    mujoco = import_mujoco()
    name = mujoco.mjtObj(kind).name.removeprefix("mjOBJ_").lower()
    label = mujoco.mj_id2name(model, kind, number)
    if label is None:
        return {}
    found: dict[str, Any] = {"type": name, "name": plain_name(label)}
    poses = {"site": ("site_bodyid", "site_pos", "site_quat"), "geom": ("geom_bodyid", "geom_pos", "geom_quat")}
    if name in poses:
        body, position, orientation = (getattr(model, attribute)[number] for attribute in poses[name])
        found["body"] = plain_name(model.body(int(body)).name)
        found |= {"position": numbers(position), "orientation": numbers(orientation)}
    elif name in ("body", "xbody"):
        found["body"] = found["name"]
    return found


def describe_scan(base: Any, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rays of mjlab's height scan below one frame; None for others."""
    sensor = base.scene[parameters["sensor_name"]] if "sensor_name" in parameters else None
    cfg, model = getattr(sensor, "cfg", None), getattr(getattr(base, "sim", None), "mj_model", None)
    frame = getattr(cfg, "frame", None)
    if cfg is None or model is None or frame is None or isinstance(frame, tuple | list):
        return None
    rays, directions = cfg.pattern.generate_rays(model, "cpu")
    prefix = f"{frame.entity}/" if frame.entity else ""
    kinds = {"body": 1, "xbody": 2, "geom": 5, "site": 6}  # mjtObj
    found = describe_object(model, kinds[frame.type], getattr(model, frame.type)(f"{prefix}{frame.name}").id)
    miss = parameters.get("miss_value")
    return {
        "kind": "height_scan",
        "body": found["body"],
        "position": found.get("position", [0.0, 0.0, 0.0]),
        "alignment": cfg.ray_alignment,
        "rays": rays.tolist(),
        "direction": directions[0].tolist(),
        "offset": float(parameters.get("offset", 0.0)),
        "max_distance": float(cfg.max_distance),
        "miss_value": float(cfg.max_distance if miss is None else miss),
        "geom_groups": None if cfg.include_geom_groups is None else list(cfg.include_geom_groups),
    }


def describe_action(base: Any, robot: Any) -> dict[str, Any]:
    """Joints and targets of the actions in their order, with scales, offsets, gains, clips and delays."""
    manager = base.action_manager
    parts = [manager.get_term(name) for name in manager.active_terms]
    joints = list(getattr(robot, "joint_names", ()))
    owned = [list(getattr(part, "target_names", getattr(part, "_joint_names", None)) or ()) for part in parts]
    names = [plain_name(name) for part in owned for name in part] or [plain_name(name) for name in joints]
    kinds = {next((kind for key, kind in TARGETS.items() if key in type(p).__name__), "position") for p in parts}
    action: dict[str, Any] = {"names": names, "target": kinds.pop() if len(kinds) == 1 else "other"}
    data = getattr(robot, "data", None)
    sources = {"default_pose": "default_joint_pos"}
    if action["target"] != "effort":
        sources |= {"stiffness": "joint_stiffness", "damping": "joint_damping"}
    for name, source in sources.items():
        value = getattr(data, source, None)
        if value is not None:
            values = numbers(value[0])
            by_joint = {plain_name(joint): number for joint, number in zip(joints, values, strict=False)}
            action[name] = [by_joint[target] for target in names if target in by_joint] or values
    if "stiffness" not in action and action["target"] != "effort":
        action |= gains_of_actuators(base, robot, names)
    for key in ("scale", "offset"):
        found: list[Any] = [getattr(part, key, getattr(part, f"_{key}", None)) for part in parts]
        if found and all(value is not None for value in found):  # two dimensions: one row for each environment
            rows = [numbers(value[0] if getattr(value, "ndim", 0) == 2 else value) for value in found]
            widths = zip(rows, owned, strict=True)
            wide = [number for row, part in widths for number in (row * len(part) if len(row) == 1 else row)]
            action[key] = rows[0] if len(rows) == 1 else wide
    clips = [
        getattr(part, "_clip", None) if getattr(getattr(part, "cfg", None), "clip", None) else None for part in parts
    ]
    if len(clips) == 1 and clips[0] is not None:
        bounds = np.asarray(clips[0][0].detach().cpu(), np.float64)  # (actions, 2)
        limits = [[value if math.isfinite(value) else None for value in column] for column in bounds.T.tolist()]
        action["target_clip"] = limits
    if len(parts) == 1 and (alpha := getattr(parts[0], "_alpha", None)) is not None:  # Isaac Lab's moving average
        action["smoothing"] = numbers(alpha[0] if getattr(alpha, "ndim", 0) == 2 else alpha)
    lags = [lag for actuator in actuators_of(robot) for lag in [actuator_delay(actuator)] if lag is not None]
    if lags:
        step = float(getattr(base, "physics_dt", 0.0) or 0.0)
        action["delay"] = [min(low for low, _ in lags) * step, max(high for _, high in lags) * step]
    return action


def actuators_of(robot: Any) -> list[Any]:
    """The actuator objects of a robot."""
    found = getattr(robot, "actuators", None) or ()
    return list(found.values() if isinstance(found, Mapping) else found)


def actuator_delay(actuator: Any) -> tuple[int, int] | None:
    """Fewest and most physics steps by which targets reach an actuator late; None where it does not say."""
    cfg = getattr(actuator, "cfg", None)
    for low, high in (("delay_min_lag", "delay_max_lag"), ("min_delay", "max_delay")):  # mjlab, Isaac Lab
        if hasattr(cfg, high):
            return int(getattr(cfg, low)), int(getattr(cfg, high))
    return None


def gains_of_actuators(base: Any, robot: Any, joints: Sequence[str]) -> dict[str, Any]:
    """Stiffness and damping of these joints: of the actuators' settings, or of the position servos in the model."""
    found: dict[str, dict[str, float]] = {"stiffness": {}, "damping": {}}
    model = getattr(getattr(base, "sim", None), "mj_model", None)
    if model is not None and hasattr(robot, "spec"):
        for actuator in robot.spec.actuators:
            stiffness, bias = float(model.actuator_gainprm[actuator.id, 0]), model.actuator_biasprm[actuator.id]
            if stiffness > 0 and math.isclose(bias[1], -stiffness, rel_tol=1e-6):
                found["stiffness"][plain_name(actuator.target)] = stiffness
                found["damping"][plain_name(actuator.target)] = -float(bias[2])
    for actuator in actuators_of(robot):
        for name, gains in found.items():
            value = getattr(getattr(actuator, "cfg", None), name, None)
            if isinstance(value, int | float):
                gains |= {plain_name(target): float(value) for target in getattr(actuator, "target_names", ())}
    is_whole = all(all(joint in gains for joint in joints) for gains in found.values())
    return {name: [gains[joint] for joint in joints] for name, gains in found.items()} if is_whole else {}


def describe_joints(base: Any, robot: Any, action: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every joint of the robot with its default position, limits, gains and what the model knows of it."""
    names, data = list(getattr(robot, "joint_names", ())), getattr(robot, "data", None)
    joints: list[dict[str, Any]] = [{"name": plain_name(name)} for name in names]
    sources = {"default": "default_joint_pos", "velocity": "joint_vel_limits", "effort": "joint_effort_limits"}
    sources |= {"armature": "joint_armature", "friction": "joint_friction_coeff", "position": "joint_pos_limits"}
    for key, source in sources.items():
        values = getattr(data, source, None)
        if values is not None:
            for joint, value in zip(joints, np.asarray(values[0].detach().cpu(), np.float64).tolist(), strict=False):
                joint[key] = value
    model = getattr(getattr(base, "sim", None), "mj_model", None)
    if model is not None and hasattr(model, "jnt_dofadr"):
        add_model_joints(joints, names, model)
    add_actuator_limits(joints, robot)
    for key in ("stiffness", "damping"):
        gains = dict(zip(action["names"], action.get(key) or (), strict=False))
        for joint in joints:
            joint |= {key: gains[joint["name"]]} if joint["name"] in gains else {}
    return [{key: value for key, value in joint.items() if is_finite(value)} for joint in joints]


def add_actuator_limits(joints: Sequence[dict[str, Any]], robot: Any) -> None:
    """Add the velocity and effort limits in the settings of a robot's actuators."""
    for actuator in actuators_of(robot):
        cfg, targets = getattr(actuator, "cfg", None), {plain_name(n) for n in getattr(actuator, "target_names", ())}
        for key, setting in (("velocity", "velocity_limit"), ("effort", "effort_limit")):
            value: Any = getattr(cfg, setting, None)
            for joint in joints if isinstance(value, int | float) else ():
                if joint["name"] in targets:
                    joint[key] = float(value)


def is_finite(value: Any) -> bool:
    """Whether a limit is a number, or a pair of them: an infinite one is not a limit."""
    return not isinstance(value, float | list) or all(map(math.isfinite, value if isinstance(value, list) else [value]))


def add_model_joints(joints: Sequence[dict[str, Any]], names: Sequence[str], model: Any) -> None:
    """Add armature, friction, damping and the largest force of every joint in a MuJoCo model."""
    known = {model.joint(i).name: i for i in range(model.njnt)}
    by_joint = {int(model.actuator_trnid[i, 0]): i for i in range(model.nu)}
    for joint, name in zip(joints, names, strict=True):
        number = next((i for label, i in known.items() if plain_name(label) == plain_name(name)), None)
        if number is None:
            continue
        dof, actuator = int(model.jnt_dofadr[number]), by_joint.get(number)
        joint |= {"armature": float(model.dof_armature[dof]), "friction": float(model.dof_frictionloss[dof])}
        joint["passive_damping"] = float(model.dof_damping[dof])
        if actuator is not None and model.actuator_forcelimited[actuator]:
            joint["effort"] = float(np.abs(model.actuator_forcerange[actuator]).max())
        elif model.jnt_actfrclimited[number]:
            joint["effort"] = float(np.abs(model.jnt_actfrcrange[number]).max())


def describe_commands(manager: Any) -> list[dict[str, Any]]:
    """The commands of a task: their values, ranges as they are now, and how they are drawn."""
    found = []
    for name in manager.active_terms:
        term = manager.get_term(name)
        cfg = term.cfg
        ranges = getattr(cfg, "ranges", None)
        is_velocity = all(hasattr(ranges, part) for part in VELOCITIES)
        is_motion = hasattr(cfg, "motion_file")
        kind = "velocity" if is_velocity else "motion" if is_motion else type(term).__name__
        command: dict[str, Any] = {"name": str(name), "kind": kind, "width": int(term.command.shape[1])}
        if is_velocity:
            command |= {"components": list(VELOCITIES), "units": list(VELOCITIES.values())}
            command["ranges"] = {part: numbers(getattr(ranges, part)) for part in VELOCITIES}
            command |= {"standing_share": float(cfg.rel_standing_envs), "heading": describe_heading(cfg)}
        if is_motion:
            command |= {"body": plain_name(cfg.anchor_body_name), "bodies": [plain_name(b) for b in cfg.body_names]}
        resampling = getattr(cfg, "resampling_time_range", None)
        found.append(command | ({} if resampling is None else {"resampling": numbers(resampling)}))
    return found


def describe_heading(cfg: Any) -> dict[str, Any] | None:
    """How turning follows a heading, for the share of robots that are given one."""
    if not getattr(cfg, "heading_command", False):
        return None
    share, stiffness = float(cfg.rel_heading_envs), float(cfg.heading_control_stiffness)
    return {"share": share, "stiffness": stiffness, "range": numbers(cfg.ranges.heading)}


def describe_physics(base: Any) -> dict[str, Any]:
    """Time step, decimation and MuJoCo's options, where there are any."""
    step, decimation = getattr(base, "physics_dt", None), getattr(getattr(base, "cfg", None), "decimation", None)
    model = getattr(getattr(base, "sim", None), "mj_model", None)
    found: dict[str, Any] = {}
    if isinstance(step, int | float) and isinstance(decimation, int):
        found = {"timestep": float(step), "decimation": decimation}
    if hasattr(model, "opt"):
        found = {"engine": "mujoco_warp", **found} | mujoco_options(model)
    return found


def mujoco_options(model: Any) -> dict[str, Any]:
    """The options of a MuJoCo model that a policy may depend on."""
    mujoco, options = import_mujoco(), model.opt
    kinds = {"integrator": mujoco.mjtIntegrator, "cone": mujoco.mjtCone, "solver": mujoco.mjtSolver}
    found: dict[str, Any] = {"timestep": float(options.timestep)}
    for name, kind in kinds.items():
        found[name] = kind(int(getattr(options, name))).name.rpartition("_")[2].lower()
    found |= {"iterations": int(options.iterations), "ls_iterations": int(options.ls_iterations)}
    return found | {"impratio": float(options.impratio), "gravity": numbers(options.gravity)}
