"""Writing a bundle: files of a policy, its description, recorded samples, and the parity check."""

import dataclasses
import hashlib
import json
import math
import os
import platform
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save as save_safetensors
from torch import Tensor

import canter
from canter.envs.vec_env import VecEnv
from canter.envs.wrap import ENV_OPTIONS
from canter.export import runtime
from canter.export.c_code import c_files
from canter.export.c_writer import NotInCError
from canter.export.deploy import deploy_yaml, properties
from canter.export.graph import OPSET, Port, StepModule, need_export_extra, onnx_bytes, torchscript_bytes
from canter.export.parity import check_bundle
from canter.export.readme import readme
from canter.export.robot.package import write_robot_folder
from canter.modules.normalizer import DictNormalization, EmpiricalNormalization
from canter.runners.evaluation import InferencePolicy
from canter.utils.files import atomic_write, make_folder
from canter.utils.tree import tree_leaves

FORMATS = ("onnx", "torchscript", "c")
STEPS, ROWS = 24, 3
ROBOT_ENTRIES = ("obs_groups", "joints", "commands", "physics", "reset_pose")


@dataclasses.dataclass
class Exported:
    """A written bundle."""

    path: Path
    parity: dict[str, float]
    """Largest difference of each file from the recorded samples; `nan` for C that no compiler could check."""
    left_out: dict[str, str]
    """File -> why it could not be written."""
    checked: dict[str, Any] | None = None
    """The comparison of a MuJoCo scene with the simulator, where there was one."""


def export_bundle(
    acting: InferencePolicy, directory: str | Path, env: VecEnv | None = None, formats: Sequence[str] = FORMATS
) -> Exported:
    """Write the bundle of a policy and check every file against recorded samples; a difference above 1e-5 is an error.

    A directory that holds a bundle is replaced, after the new one was checked; any other is refused.

    Args:
        acting: The policy, from `canter.load` or `runner.get_inference_policy()`.
        directory: Where the bundle is written.
        env: Environment in which samples are recorded; without it they are drawn from the normaliser's statistics.
        formats: Some of "onnx", "torchscript" and "c"; ONNX is always written.
    """
    need_export_extra()
    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise ValueError(f"unknown format {unknown[0]!r}; there are {', '.join(FORMATS)}")
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(f"{directory} is a file; a bundle is a directory")
    if directory.exists() and not (directory / "policy.json").is_file() and any(directory.iterdir()):
        raise FileExistsError(f"{directory} exists and is no bundle; choose another directory")
    module = StepModule(acting)
    samples, source = record(module, acting, env)
    spec = describe(module, acting) | {"samples": source}
    if env is not None and (checked := checked_scene(env, spec)) is not None:
        spec["checked"] = checked
    files: dict[str, bytes] = {
        "policy.onnx": onnx_bytes(module, spec, properties(spec)),
        "samples.safetensors": save_safetensors(samples),
    }
    left_out: dict[str, str] = {}
    if "torchscript" in formats:
        files["policy.ts"] = torchscript_bytes(module)
    if "c" in formats:
        try:
            header, code = c_files(module, f"Written by canter {canter.__version__} for {spec['training']['task']}")
            files |= {"policy.h": header.encode(), "policy.c": code.encode()}
        except NotInCError as error:
            left_out["policy.c"] = f"it needs {error}, which the C writer does not have"
    if (deploy := deploy_yaml(spec)) is not None:
        files["deploy.yaml"] = deploy.encode()
    files["runtime.py"] = Path(runtime.__file__).read_bytes()
    files["README.md"] = readme(spec, set(files)).encode()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tmp-export-", dir=directory.parent) as temporary:
        made = Path(temporary) / "bundle"
        made.mkdir()
        write_files(made, spec | {"left_out": left_out}, files)
        parity = check_bundle(made)
        spec |= {"parity": {name: None if math.isnan(value) else value for name, value in parity.items()}}
        write_files(made, spec | {"left_out": left_out}, files)
        write_robot_folder(made)
        if directory.exists():
            os.replace(directory, Path(temporary) / "old") if any(directory.iterdir()) else directory.rmdir()
        os.replace(made, directory)
    return Exported(directory, parity, left_out, spec.get("checked"))


def checked_scene(env: VecEnv, spec: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a MuJoCo scene reads by the description, compared with a simulator that has a MuJoCo model."""
    if find_spec("mujoco") is None:
        return None
    from canter.compat.scene_parity import check_scene

    try:
        return check_scene(env, spec)
    except Exception as error:  # a simulator's attributes may be anything, and the files are right without the check
        return {"scene": "the simulator's model", "problem": repr(error)}


def write_files(directory: Path, spec: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
    """Write the files and a policy.json with their hashes and its own."""
    for name, content in files.items():
        atomic_write(directory / name, content)
    hashes = {n: {"sha256": hashlib.sha256(c).hexdigest(), "bytes": len(c)} for n, c in sorted(files.items())}
    whole = json.loads(json.dumps({**spec, "files": hashes}, allow_nan=False))
    whole["sha256"] = runtime.spec_hash(whole)
    atomic_write(directory / "policy.json", f"{json.dumps(whole, indent=2, allow_nan=False)}\n".encode())


def record(
    module: StepModule, acting: InferencePolicy, env: VecEnv | None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Observations (T, N, ...), resets (T, N) and every result of the steps, and where the observations come from."""
    next_obs = drawn_observations(module, acting) if env is None else env_observations(module, env)
    rows = ROWS if env is None else env.num_envs
    inputs: list[list[Tensor]] = []
    outputs: list[dict[str, Tensor]] = []
    resets: list[Tensor] = []
    memories = [torch.zeros(rows, *memory.shape) for memory in module.memories]
    actions: Tensor | None = None
    with torch.no_grad():
        for step in range(STEPS):
            obs, ended = next_obs(actions)
            # Episodes rarely end within the samples, so every row is reset once more, one after the other.
            ended = ended | (torch.arange(rows) == step - 5) if step else torch.zeros(rows, dtype=torch.bool)
            memories = [state.masked_fill(ended.view(-1, 1, 1, 1), 0.0) for state in memories]
            found = dict(zip((port.name for port in module.results), module(*obs, *memories), strict=True))
            memories = [found.pop(memory.name) for memory in module.memories]
            actions = found["actions"]
            inputs.append(obs)
            outputs.append(found)
            resets.append(ended)
    arrays = {f"input.{port.name}": stacked(obs[i] for obs in inputs) for i, port in enumerate(module.observations)}
    arrays |= {f"output.{name}": stacked(found[name] for found in outputs) for name in outputs[0]}
    source = "normaliser statistics" if env is None else "the training environment"
    return arrays | {"resets": stacked(resets)}, {"steps": STEPS, "rows": rows, "source": source}


def stacked(parts: Any) -> np.ndarray:
    """One array, with time first."""
    return np.ascontiguousarray(torch.stack(list(parts)).numpy())


def env_observations(module: StepModule, env: VecEnv) -> Callable[[Tensor | None], tuple[list[Tensor], Tensor]]:
    """A function that steps the environment with the last actions, and returns observations and ended episodes."""

    def leaves(obs: Any) -> list[Tensor]:
        found = [leaf.detach().cpu() for _, leaf in tree_leaves(obs)]
        wanted = [port.shape for port in module.observations]
        if [tuple(leaf.shape[1:]) for leaf in found] != wanted:
            given = [tuple(leaf.shape[1:]) for leaf in found]
            raise ValueError(f"the environment's observations have the shapes {given}, the policy wants {wanted}")
        return found

    def next_obs(actions: Tensor | None) -> tuple[list[Tensor], Tensor]:
        if actions is None:
            return leaves(env.reset()[0]), torch.zeros(env.num_envs, dtype=torch.bool)
        step = env.step(actions.to(env.device))
        return leaves(step.obs), (step.done | ~step.valid).cpu()

    return next_obs


def drawn_observations(
    module: StepModule, acting: InferencePolicy
) -> Callable[[Tensor | None], tuple[list[Tensor], Tensor]]:
    """A function that draws observations with the normaliser's mean and standard deviation, or 0 and 1."""
    generator, normalizer = torch.Generator().manual_seed(0), acting.policy.obs_normalizer

    def draw(port: Port) -> Tensor:
        if port.dtype == "uint8":
            return torch.randint(0, 256, (ROWS, *port.shape), dtype=torch.uint8, generator=generator)
        noise = torch.randn(ROWS, *port.shape, generator=generator)
        known = normalizer.leaf(port.name) if isinstance(normalizer, DictNormalization) else normalizer
        if isinstance(known, EmpiricalNormalization):
            noise = known.mean.cpu().view(port.shape) + known.std.cpu().view(port.shape) * noise
        return noise

    return lambda actions: ([draw(port) for port in module.observations], torch.zeros(ROWS, dtype=torch.bool))


def describe(module: StepModule, acting: InferencePolicy) -> dict[str, Any]:
    """The content of policy.json without hashes, samples and parity."""
    results = module.results[: len(module.results) - len(module.memories)]
    environment = acting.info.get("environment") or {}
    robot = environment.get("robot") or {}
    return {
        "format": runtime.FORMAT,
        "version": runtime.VERSION,
        "inputs": [plain_port(port) for port in module.observations],
        "outputs": [plain_port(port) for port in results],
        "memories": [plain_port(memory) for memory in module.memories],
        "observation": segments_of(module, acting, robot),
        "obs_group": environment.get("obs_group"),
        "action": describe_action(acting, robot, environment),
        "control_period": robot.get("control_period"),
        **{name: robot[name] for name in ROBOT_ENTRIES if name in robot},
        "training": describe_training(acting),
        "versions": versions(),
    }


def plain_port(port: Port) -> dict[str, Any]:
    """A port in plain containers."""
    return {"name": port.name, "shape": list(port.shape), "dtype": port.dtype}


def segments_of(module: StepModule, acting: InferencePolicy, robot: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Parts of a flat observation in order, with what each of them is; None for images and dicts."""
    if len(module.observations) != 1 or len(module.observations[0].shape) != 1:
        return None
    width = module.observations[0].shape[0]
    named = getattr(acting.policy, "obs_layout", None) or acting.parts
    own = [{"name": name, "width": math.prod(shape), "shape": list(shape)} for name, shape in named.shapes.items()]
    segments = known_segments(own, robot.get("observation") or [])
    if sum(segment["width"] for segment in segments) != width:
        segments = [{"name": "obs", "width": width}]
    first = 0
    for segment in segments:
        segment["first"] = first
        first += segment["width"]
    return segments


def known_segments(own: Sequence[dict[str, Any]], terms: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The policy's segments with what the simulator says of them; a whole group becomes the group's terms."""
    if len(own) <= 1 and terms:
        return [dict(term) for term in terms]
    by_name = {term["name"]: term for term in terms}
    found: list[dict[str, Any]] = []
    for segment in own:
        parts = [dict(term) for term in terms if term.get("group") == segment["name"]]
        if segment["name"] in by_name:
            found.append({**by_name[segment["name"]], **segment})
        elif sum(part["width"] for part in parts) == segment["width"]:
            found += parts
        else:
            found.append(segment)
    return found


def describe_action(
    acting: InferencePolicy, robot: Mapping[str, Any], environment: Mapping[str, Any]
) -> dict[str, Any]:
    """Kind and bounds of the action, and what the environment knows of it; an infinite bound is None."""
    distribution = acting.policy.distribution
    action: dict[str, Any] = {"distribution": type(distribution).__name__}
    action["kind"] = "continuous" if distribution.action_dtype.is_floating_point else "discrete"
    space = environment.get("action_space")
    if space is not None:
        action["space"] = json.loads(json.dumps(space).replace("-Infinity", "null").replace("Infinity", "null"))
    if acting.action_bounds is not None:
        bounds = [np.asarray(bound, np.float64).ravel().tolist() for bound in acting.action_bounds]
        action["clip"] = [[value if math.isfinite(value) else None for value in bound] for bound in bounds]
    return action | dict(robot.get("action") or {})


def describe_training(acting: InferencePolicy) -> dict[str, Any]:
    """The run, its task and settings, the commit and the checkpoint."""
    info, config = acting.info, acting.info.get("config") or {}
    file = Path(info["checkpoint"]) if "checkpoint" in info else None
    run = config.get("run") or {}
    return {
        "task": run.get("task"),
        **{name: run.get(name) for name in ENV_OPTIONS},
        "algorithm": (config.get("algorithm") or {}).get("class_name"),
        "policy": type(acting.policy).__name__,
        "run": None if file is None else file.parent.name,
        "commit": None if file is None else commit_of(file.parent),
        "checkpoint": None if file is None else file.name,
        "checkpoint_sha256": info.get("checkpoint_sha256"),
        "iteration": info.get("iteration"),
        "timesteps": info.get("timesteps"),
    }


def commit_of(run: Path) -> str | None:
    """The commit of the code that a run was trained with, from its record of the code."""
    for path in sorted((run / "git").glob("*.diff")):
        found = re.search(
            r"^commit: ([0-9a-f]{7,64})$", path.read_text(encoding="utf-8", errors="replace")[:2000], re.M
        )
        if found:
            return found[1]
    return None


def versions() -> dict[str, Any]:
    """Versions of everything that made the files."""
    import onnx
    import onnxruntime
    import onnxscript

    modules = {"torch": torch, "onnx": onnx, "onnxscript": onnxscript, "onnxruntime": onnxruntime, "numpy": np}
    found: dict[str, Any] = {name: str(module.__version__) for name, module in modules.items()}
    return {"canter": canter.__version__, "python": platform.python_version(), "opset": OPSET, **found}


def export_on_save(runner: Any, formats: Sequence[str] = FORMATS, upload: bool = False) -> None:
    """Export a bundle to `<run>/export/model_<iteration>` at every periodic checkpoint of a runner.

    With `upload` its files are stored with the run by the logging backends that store files, such as W&B.
    """
    if runner.save_dir is None:
        raise ValueError("there is no run directory to export to; give the runner a log_dir or save_dir")

    make_folder(runner.save_dir / "export", runner.save_dir)

    def export(runner: Any, _: Any) -> None:
        if runner.is_due(runner.save_interval):
            made = export_runner(runner, runner.save_dir / "export" / f"model_{runner.iteration}", formats)
            if upload:
                upload_bundle(made, runner.writer, runner.tot_timesteps)

    runner.add_callback("post_iteration", export)


def export_runner(runner: Any, directory: str | Path, formats: Sequence[str] = FORMATS) -> Exported:
    """Write the bundle of the policy that a runner trains, without stepping its environment."""
    return export_bundle(runner_policy(runner), directory, formats=formats)


def runner_policy(runner: Any) -> InferencePolicy:
    """The policy of a runner with its description; training continues unchanged."""
    from canter.envs.spec import describe_env

    env = runner.env
    info = {"config": runner.config(), "environment": describe_env(env)}
    info |= {"iteration": runner.iteration, "timesteps": runner.tot_timesteps}
    bounds, space = env.action_bounds, env.action_space
    return InferencePolicy(runner.policy, env.obs_space, env.obs_segments, bounds, info, action_space=space)


def upload_bundle(made: Exported, logger: Any, step: int) -> None:
    """Store the files of a bundle with the run, and its parity as metrics."""
    if logger is None:
        return
    for path in sorted(filter(Path.is_file, made.path.iterdir())):
        logger.save_file(path)
    parity = {f"export/difference_{name.partition('.')[2]}": value for name, value in made.parity.items()}
    logger.log_scalars(parity, step)
