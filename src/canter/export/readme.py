"""The README of a bundle: what the policy takes and gives, and how to run it in Python, C++ and C."""

import math
from collections.abc import Mapping
from typing import Any

from canter.export.c_code import identifier
from canter.export.runtime import first_action

C_TYPES = {"float32": "float", "uint8": "unsigned char", "int64": "int"}
CPP_TYPES = {"float32": "float", "uint8": "uint8_t", "int64": "int64_t"}


def readme(spec: Mapping[str, Any], files: set[str]) -> str:
    """The text of README.md."""
    training, period = spec["training"], spec["control_period"]
    title = training["task"] or training["policy"]
    parts = [
        f"# {title}\n",
        f"{training['policy']}, trained with {training['algorithm']} of canter; `policy.json` has every detail.\n",
        ports_table(spec),
        observation_table(spec),
        action_table(spec),
        numbering(spec),
        "Observations are raw: normalisation, squashing, scaling and clipping are inside.",
        f"The control period is {period:g} s.\n" if period else "The control period is not known.\n",
    ]
    if spec["memories"]:
        parts.append("Memories are zero when an episode begins; every step gets those that the step before returned.\n")
    parts += [python_part(spec), cpp_part(spec)]
    if "policy.c" in files:
        parts.append(c_part(spec))
    if "deploy.yaml" in files:
        parts.append("`deploy.yaml` has gains, poses, ranges and observations in the form of Unitree's programs.\n")
    parts.append("Check the bundle with `python runtime.py`, or all formats with `canter export --check .`\n")
    return "\n".join(part for part in parts if part)


def ports_table(spec: Mapping[str, Any]) -> str:
    """Inputs and outputs with their shapes."""
    rows = ["| | name | shape | type |", "|---|---|---|---|"]
    memories = [{**m, "name": f"{m['name']}_{end}"} for end in ("in", "out") for m in spec["memories"]]
    half = len(spec["memories"])
    groups = (("input", [*spec["inputs"], *memories[:half]]), ("output", [*spec["outputs"], *memories[half:]]))
    for kind, ports in groups:
        for port in ports:
            shape = " x ".join(map(str, ["batch", *port["shape"]]))
            rows.append(f"| {kind} | `{port['name']}` | {shape} | {port['dtype']} |")
    return "\n".join(rows) + "\n"


def observation_table(spec: Mapping[str, Any]) -> str:
    """Segments of the observation."""
    segments = spec["observation"] or []
    if [segment["name"] for segment in segments] in ([], ["obs"]):
        return ""
    segments = [{**segment, "what it is": meaning(segment)} for segment in segments]
    keys = ("what it is", "unit", "clip", "scale", "delay", "history")
    more = [key for key in keys if any(segment.get(key) for segment in segments)]
    rows = [" | ".join(["| observation", "first", "width", *more]) + " |", "|---" * (len(more) + 3) + "|"]
    for segment in segments:
        shape = segment.get("shape") or ()
        width = f"{segment['width']} ({' x '.join(map(str, shape))})" if len(shape) > 1 else segment["width"]
        cells = [f"| {segment['name']}", str(segment["first"]), str(width), *(cell(segment.get(key)) for key in more)]
        rows.append(" | ".join(cells) + " |")
    applied = "Values are clipped, then multiplied by `scale`; a history is so many of them, the oldest first. "
    applied += "A delay is in seconds, as it was drawn in training.\n" if "delay" in more else "\n"
    more = [key for key in more if key in ("clip", "scale", "history", "delay")]
    return "\n".join(rows) + "\n" + (f"\n{applied}" if more else "")


def meaning(segment: Mapping[str, Any]) -> str:
    """A few words on the source of a segment."""
    source = segment.get("source") or {}
    kind, body = source.get("kind", ""), source.get("body")
    if kind == "sensor":
        place = source.get("object") or {}
        return f"{source['sensor']} `{source['name']}`" + (f" at {place['type']} `{place['name']}`" if place else "")
    if kind in ("joint_position", "joint_velocity"):
        relative = ", minus the default pose" if source.get("relative") and kind == "joint_position" else ""
        return f"{kind.replace('_', ' ')} of {len(source['joints'])} joints{relative}"
    if kind == "command":
        return f"command `{source['command']}`"
    if kind == "other":
        return f"`{source['function']}`"
    known = {"gravity": "direction of gravity", "last_action": "last output of the policy"}
    words = known[kind] if kind in known else str(kind)
    return words.replace("_", " ") + (f" in the frame of `{body}`" if body else "")


def cell(value: Any) -> str:
    """A number or a short list as text."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    return ", ".join(f"{v:.6g}" if isinstance(v, (int, float)) else str(v) for v in values)


def action_table(spec: Mapping[str, Any]) -> str:
    """Actions in order, with what the environment knows of each."""
    action = spec["action"]
    names = action.get("names") or []
    if len(names) != math.prod(spec["outputs"][0]["shape"]):
        return ""
    columns = {key: action.get(key) for key in ("default_pose", "scale", "stiffness", "damping")}
    columns |= dict(zip(("lowest", "highest"), action.get("clip") or ((), ()), strict=True))
    known = {key: v * len(names) if len(v) == 1 else v for key, v in columns.items() if v and len(v) in (1, len(names))}
    rows = [" | ".join(["| action", "name", *(key.replace("_", " ") for key in known)]) + " |"]
    rows.append("|---" * (len(known) + 2) + "|")
    for number, name in enumerate(names):
        rows.append(" | ".join([f"| {number}", str(name), *(cell(values[number]) for values in known.values())]) + " |")
    targets = "The target of a joint is `default pose + scale * action`.\n"
    return "\n".join(rows) + "\n" + (f"\n{targets}" if action.get("target") == "position" else "")


def numbering(spec: Mapping[str, Any]) -> str:
    """A sentence on discrete actions of an environment that does not number them from 0."""
    start = first_action(spec)
    if not start.any():
        return ""
    add = "`policy.predict` of `runtime.py` adds it; other programs must"
    return f"Actions of the files are numbered from 0, those of the environment from {cell(start.tolist())}: {add}.\n"


def python_part(spec: Mapping[str, Any]) -> str:
    """How to run it in Python."""
    return """## Python

Needs numpy and onnxruntime.

```python
from runtime import Policy

policy = Policy(".")
policy.reset()                   # when an episode begins
actions = policy.predict(obs)    # once in every control period
```
"""


def cpp_part(spec: Mapping[str, Any]) -> str:
    """How to run it in C++ with ONNX Runtime."""
    ports = [*spec["inputs"], *({**m, "name": f"{m['name']}_in"} for m in spec["memories"])]
    arrays, tensors = [], []
    for port in ports:
        name, kind, size = identifier(port["name"]), CPP_TYPES[port["dtype"]], math.prod(port["shape"])
        shape = ", ".join(map(str, [1, *port["shape"]]))
        arrays.append(f"std::vector<{kind}> {name}({size});\nstd::vector<int64_t> {name}_shape{{{shape}}};")
        data = f"{name}.data(), {name}.size(), {name}_shape.data(), {name}_shape.size()"
        tensors.append(f"inputs.push_back(Ort::Value::CreateTensor<{kind}>(memory, {data}));")
    outputs = [port["name"] for port in spec["outputs"]] + [f"{m['name']}_out" for m in spec["memories"]]
    lists = [", ".join(f'"{name}"' for name in names) for names in ([port["name"] for port in ports], outputs)]
    first = CPP_TYPES[spec["outputs"][0]["dtype"]]
    keep = ""
    for number, port in enumerate(spec["memories"], start=len(spec["outputs"])):
        name = identifier(f"{port['name']}_in")
        size = math.prod(port["shape"])
        keep += f"std::copy_n(outputs[{number}].GetTensorData<float>(), {size}, {name}.begin());\n"
    return (
        "## C++ with ONNX Runtime\n\nNeeds ONNX Runtime's headers and library: "
        "`c++ -O2 -std=c++17 main.cpp -lonnxruntime`.\n\n```cpp\n"
        + "\n".join(
            [
                "#include <onnxruntime_cxx_api.h>",
                "#include <algorithm>",
                "#include <vector>",
                "",
                "Ort::Env env;",
                "Ort::SessionOptions options;",
                "options.SetIntraOpNumThreads(1);",
                'Ort::Session session(env, "policy.onnx", options);',
                "auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);",
                *arrays,
                f"const char *input_names[] = {{{lists[0]}}};",
                f"const char *output_names[] = {{{lists[1]}}};",
                "",
                "// once in every control period",
                "std::vector<Ort::Value> inputs;",
                *tensors,
                "auto outputs = session.Run(Ort::RunOptions{nullptr}, input_names, inputs.data(), inputs.size(),",
                f"                           output_names, {len(outputs)});",
                f"const {first} *actions = outputs[0].GetTensorData<{first}>();",
                *([keep.rstrip()] if keep else []),
            ]
        )
        + "\n```\n\nlibtorch loads `policy.ts` with `torch::jit::load`; inputs and outputs come in the same order.\n"
    )


def c_part(spec: Mapping[str, Any]) -> str:
    """How to run it in C."""
    arrays = []
    for port in [*spec["inputs"], *spec["outputs"]]:
        name = identifier(port["name"])
        arrays.append(f"{C_TYPES[port['dtype']]} {name}[POLICY_{name.upper()}];")
    call = ", ".join(identifier(port["name"]) for port in [*spec["inputs"], *spec["outputs"]])
    return (
        "## C\n\nNo dependency, no allocation: `cc -O3 -std=c99 main.c policy.c -lm`.\n\n```c\n"
        + "\n".join(
            [
                '#include "policy.h"',
                "",
                "static policy_state state;",
                *arrays,
                "",
                "policy_reset(&state);    /* when an episode begins */",
                f"policy_step(&state, {call});    /* once in every control period */",
            ]
        )
        + "\n```\n"
    )
