"""The control loop in C99 for one robot: robot.c and robot.h, the tables they read, and the policies."""

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from canter.export.robot.description import DERIVED, Mode, Robot, Segment
from canter.export.robot.log import log_header, record_size
from canter.export.runtime import BundleError


def write_c_loop(robot: Robot, folder: str | Path) -> list[Path]:
    """Write the control loop of a robot in C; returns the files, which `cc -std=c99 *.c -lm` compiles."""
    folder = Path(folder)
    files = {name: Path(__file__).with_name(name).read_text() for name in ("robot.h", "robot.c")}
    files |= {"robot_config.h": config_header(robot), "robot_config.c": config_source(robot)}
    for mode in robot.modes:
        if mode.bundle is not None:
            files |= policy_files(mode)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return [folder / name for name in files]


def policy_files(mode: Mode) -> dict[str, str]:
    """A bundle's policy in C, with the mode's name in front of all of its names, so that several can be linked."""
    spec = mode.bundle.spec if mode.bundle is not None else {}
    if mode.bundle is None or "policy.c" not in mode.bundle.files:
        raise BundleError(f"the bundle of {mode.name} has no policy.c: {spec.get('left_out')}")
    if len(spec["outputs"]) != 1 or spec["inputs"][0]["dtype"] != "float32":
        raise BundleError(f"the policy of {mode.name} must have one output in C, got {spec['outputs']}")
    found = {}
    for name in ("policy.h", "policy.c"):
        text = mode.bundle.files[name].decode()
        text = re.sub(r"\b(policy_(?:state|reset|step)\b|POLICY_)", lambda m: renamed(mode, m[0]), text)
        text = text.replace("CANTER_POLICY_H", f"CANTER_{identifier(mode).upper()}_POLICY_H")
        found[f"{identifier(mode)}_{name}"] = text.replace('"policy.h"', f'"{identifier(mode)}_policy.h"')
    return found


def identifier(mode: Mode) -> str:
    """The name of a mode in C."""
    return re.sub(r"\W", "_", mode.name, flags=re.ASCII)


def renamed(mode: Mode, name: str) -> str:
    """A name of policy.h with that of the mode in front."""
    return f"{identifier(mode).upper() if name.isupper() else identifier(mode)}_{name}"


def config_header(robot: Robot) -> str:
    """Sizes, limits and the order of sensors and joints."""
    window = max(1, *(sum(segment.width for segment in mode.segments) for mode in robot.modes))
    safety = robot.safety
    sizes = {
        "ROBOT_JOINTS": len(robot.joints),
        "ROBOT_MODES": len(robot.modes),
        "ROBOT_SENSORS": len(robot.all_sensors),
        "ROBOT_REQUIRED": len(robot.sensors),
        "ROBOT_VALUES": sum(robot.all_sensors.values()),
        "ROBOT_WIDTH": robot.width,
        "ROBOT_WINDOW": window,
        "ROBOT_RECORD": record_size(robot),
        "ROBOT_MAX_LATE": safety.max_late,
    }
    numbers = {
        "ROBOT_PERIOD": robot.period,
        "ROBOT_MAX_AGE": safety.max_age,
        "ROBOT_MAX_GAP": safety.max_gap,
        "ROBOT_POSITION_MARGIN": safety.position_margin,
        "ROBOT_VELOCITY_FACTOR": safety.velocity_factor,
        "ROBOT_STAND_ERROR": safety.stand_error,
        "ROBOT_STAND_SECONDS": safety.stand_seconds,
        "ROBOT_RATE_FACTOR": safety.rate_factor,
    }
    lines = [f"#define {name} {value}" for name, value in sizes.items()]
    lines += [f"#define {name} {number(value)}" for name, value in numbers.items()]
    modes = ", ".join(f"ROBOT_MODE_{identifier(mode).upper()}" for mode in robot.modes)
    places, first = [], 0
    for name, width in robot.all_sensors.items():
        places.append(f"{first:4} {name} ({width})")
        first += width
    return f"""/* Written by canter for one robot and its policies. */
#ifndef CANTER_ROBOT_CONFIG_H
#define CANTER_ROBOT_CONFIG_H

#include <math.h>

{chr(10).join(lines)}

enum {{ {modes} }};

/* place of each sensor's first value, and its width; the first ROBOT_REQUIRED ones must be fresh:
{chr(10).join(comment(place) for place in places)}
   joints, in order:
{chr(10).join(comment(f"{i:4} {joint}") for i, joint in enumerate(robot.joints))} */

#endif
"""


def comment(text: str) -> str:
    """Text that cannot end a comment: names are data."""
    return re.sub(r"[^\w .()/:-]", "_", text, flags=re.ASCII)


def config_source(robot: Robot) -> str:
    """The tables of robot.h."""
    lines: list[str] = ['#include "robot.h"', ""]
    policies = [mode for mode in robot.modes if mode.bundle is not None]
    lines += [f'#include "{identifier(mode)}_policy.h"' for mode in policies]
    for mode in policies:
        name = identifier(mode)
        lines += ["", f"static {name}_policy_state {name}_state;"]
        lines += [f"static void {name}_reset(void) {{ {name}_policy_reset(&{name}_state); }}"]
        lines += [f"static void {name}_step(const float *obs, float *action)", "{"]
        lines += [f"    {name}_policy_step(&{name}_state, obs, action);", "}"]
    first, starts = 0, {}
    for sensor, width in robot.sensors.items():
        starts[sensor] = first
        first += width
    rows = []
    for mode in robot.modes:
        lines += ["", *segment_tables(mode, starts)]
        rows.append(mode_row(mode, lines))
    lines += ["", "const robot_mode robot_modes[ROBOT_MODES] = {", *rows, "};"]
    lines += [f"const int robot_sensor_width[ROBOT_SENSORS] = {{{listed(robot.all_sensors.values())}}};"]
    limits = {"low": robot.position[:, 0], "high": robot.position[:, 1], "velocity": robot.velocity}
    for name, values in (limits | {"effort": robot.effort, "damping": robot.damping}).items():
        lines.append(f"const double robot_{name}[ROBOT_JOINTS] = {{{numbers(values)}}};")
    header = log_header(robot)
    escaped = [f'"{"".join(f"{chr(92)}{byte:03o}" for byte in header[i : i + 24])}"' for i in range(0, len(header), 24)]
    lines += ["const char robot_log_header[] =", *(f"    {text}" for text in escaped)]
    lines[-1] += ";"
    lines.append(f"const unsigned robot_log_header_size = {len(header)};")
    return "\n".join(lines) + "\n"


def segment_tables(mode: Mode, starts: dict[str, int]) -> list[str]:
    """The segments of a mode's observation."""
    name, lines, rows, window = identifier(mode), [], [], 0
    special = dict(zip(DERIVED, ("ROBOT_LAST_ACTION", "ROBOT_ACTION_BEFORE", "ROBOT_GRAVITY"), strict=True))
    for i, segment in enumerate(mode.segments):
        lines += [f"/* {comment(segment.name)} */"]
        lines += [f"static const int {name}_columns{i}[] = {{{listed(segment.columns)}}};"]
        lines += [f"static const double {name}_offset{i}[] = {{{numbers(segment.offset)}}};"]
        lines += [f"static const double {name}_scale{i}[] = {{{numbers(segment.scale)}}};"]
        sensor = special.get(segment.sensor) or starts[segment.sensor]
        tables = f"{name}_columns{i}, {name}_offset{i}, {name}_scale{i}"
        rows.append(f"    {{{sensor}, {segment_shape(segment)}, {window}, {tables}, {segment_range(segment)}}},")
        window += segment.width
    if rows:
        lines += [f"static const robot_segment {name}_segments[] = {{", *rows, "};"]
    return lines


def segment_shape(segment: Segment) -> str:
    """Count and history."""
    return f"{len(segment.columns)}, {segment.history}"


def segment_range(segment: Segment) -> str:
    """Sign and clip range."""
    return numbers((segment.sign, segment.low, segment.high))


def mode_row(mode: Mode, lines: list[str]) -> str:
    """A mode in the table of modes; its vectors are added to `lines`."""
    name = identifier(mode)
    vectors = ("pose", "scale", "target_low", "target_high", "smoothing", "kp", "kd")
    used = [vector for vector in vectors if getattr(mode, vector).size]
    lines += [f"static const double {name}_{vector}[] = {{{numbers(getattr(mode, vector))}}};" for vector in used]
    if mode.actions:
        lines.append(f"static const int {name}_actions[] = {{{listed(mode.actions)}}};")
    tables = ", ".join(f"{name}_{vector}" if vector in used else "0" for vector in vectors)
    is_policy = mode.bundle is not None
    enter_from = sum(1 << origin for origin in mode.enter_from)
    counts = f"{len(mode.segments)}, {len(mode.actions)}, {int(mode.is_relative)}, {mode.next_mode}, {enter_from}u"
    actions = f"{name}_actions" if mode.actions else "0"
    ends = numbers((mode.blend, mode.max_tilt, mode.seconds))
    segments, calls = (f"{name}_segments", f"{name}_reset, {name}_step") if is_policy else ("0", "0, 0")
    return f"    {{{segments}, {counts}, {actions}, {tables}, {ends}, {calls}}},"


def number(value: float) -> str:
    """A double, exactly."""
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    return repr(float(value))


def numbers(values: Iterable[float]) -> str:
    """Doubles, separated by commas."""
    return ", ".join(number(value) for value in values)


def listed(values: Iterable[int] | Sequence[int]) -> str:
    """Whole numbers, separated by commas."""
    return ", ".join(str(int(value)) for value in values)
