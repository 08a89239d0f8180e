"""Compares what mjlab observes with what a MuJoCo scene reads by a bundle's description, on the same physics states."""

import contextlib
import copy
import hashlib
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from canter.envs.spec import innermost
from canter.envs.vec_env import VecEnv
from canter.export.runtime import BundleError
from canter.export.scene import MujocoScene
from canter.export.sources import import_mujoco

STATES = 24


def check_scene(env: VecEnv, spec: Mapping[str, Any], states: int = STATES) -> dict[str, Any] | None:
    """The entry `checked` of a bundle: the largest difference of every segment; None where there is no MuJoCo model.

    The environment is reset and stepped with random actions, without noise of observations.
    """
    base = innermost(env)
    model = getattr(getattr(base, "sim", None), "mj_model", None)
    if model is None or not hasattr(base, "observation_manager") or not spec.get("observation"):
        return None
    mujoco = import_mujoco()
    found: dict[str, float | None] = {}
    known = []
    for segment in spec["observation"]:
        source, (low, high) = segment.get("source") or {"kind": "other"}, segment.get("delay") or (0.0, 0.0)
        is_known = source["kind"] != "other" and low == high
        found[segment["name"]] = 0.0 if is_known else None
        known += [segment] if is_known else []
    commands = {s["source"]["command"] for s in known if s["source"]["kind"] == "command"}
    try:
        scene = new_scene(model, {**spec, "observation": known}, base, commands)
    except BundleError as error:
        return {"scene": "the simulator's model", "problem": str(error)}
    with without_noise(base):
        generator = torch.Generator().manual_seed(0)
        env.step(torch.zeros(env.num_envs, env.num_actions, device=env.device))  # the first episodes began with noise
        obs: Any = env.reset()[0]
        ended = True
        for _ in range(states):
            if ended:
                scene.windows.clear()
                scene.late.clear()
            copy_state(base, scene, commands)
            values = scene.observe()
            row, first = next(iter(values.values())), 0
            for segment in known:
                ours = row[first : first + segment["width"]].astype(np.float64)
                at = segment["first"]
                theirs = obs[0, at : at + segment["width"]].cpu().double().numpy()
                difference = np.abs(ours - theirs) / np.maximum(1.0, np.abs(theirs))
                found[segment["name"]] = max(found[segment["name"]] or 0.0, float(difference.max()))
                first += segment["width"]
            actions = torch.randn(env.num_envs, env.num_actions, generator=generator).to(env.device)
            step: Any = env.step(0.3 * actions)
            obs, ended = step.obs, bool(step.done[0] | ~step.valid[0])
    content = np.zeros(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, content)
    checked = {"scene": "the simulator's model", "model_sha256": hashlib.sha256(content.tobytes()).hexdigest()}
    return checked | {"engine": f"mujoco {mujoco.__version__}", "states": states, "segments": found}


def new_scene(model: Any, spec: Mapping[str, Any], base: Any, commands: set[str]) -> MujocoScene:
    """A scene of a copy of the simulator's model, whose command is as wide as the simulator's."""
    if len(commands) > 1:
        raise BundleError(f"a scene has one command, and the policy reads {', '.join(sorted(commands))}")
    width = sum(base.command_manager.get_command(name).shape[1] for name in commands)
    policy: Any = SimpleNamespace(spec=spec)
    return MujocoScene(copy.deepcopy(model), policy, 0, np.zeros(width).tolist(), reset_noise=0.0)


def copy_state(base: Any, scene: MujocoScene, commands: set[str]) -> None:
    """Give a scene the state of the simulator's first environment."""
    for name in ("qpos", "qvel", "act"):
        getattr(scene.data, name)[:] = getattr(base.sim.data, name)[0].cpu().numpy() if scene.model.nv else 0.0
    for name in commands:
        scene.command = base.command_manager.get_command(name)[0].cpu().double().numpy()
    for name in getattr(base.command_manager, "active_terms", ()):
        term = base.command_manager.get_term(name)
        if hasattr(term, "anchor_pos_w"):
            pose = (term.anchor_pos_w[0].cpu().double().numpy(), term.anchor_quat_w[0].cpu().double().numpy())
            scene.anchor = pose
    scene.last_action = base.action_manager.action[0].cpu().double().numpy()
    scene.mujoco.mj_forward(scene.model, scene.data)


@contextlib.contextmanager
def without_noise(base: Any) -> Iterator[None]:
    """Switch off noise of observations and the biases of encoders, and put them back."""
    terms = [cfg for group in base.observation_manager._group_obs_term_cfgs.values() for cfg in group]
    noises = [cfg.noise for cfg in terms]
    data = [base.scene[name].data for name in getattr(base.scene, "entities", {})]
    biases = [(part.encoder_bias, part.encoder_bias.clone()) for part in data if hasattr(part, "encoder_bias")]
    for cfg in terms:
        cfg.noise = None
    for bias, _ in biases:
        bias.zero_()
    try:
        yield
    finally:
        for cfg, noise in zip(terms, noises, strict=True):
            cfg.noise = noise
        for bias, before in biases:
            bias.copy_(before)
