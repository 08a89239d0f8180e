"""mjlab's environments, bare or in its `RslRlVecEnvWrapper`: resets are ours, so that final observations are known."""

import contextlib
import dataclasses
import importlib
import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from canter.compat.batched_envs import ObsGroups, RslRlAdapter, read_step
from canter.envs.records import to_obs
from canter.envs.vec_env import Device
from canter.utils.config import unknown_name


def is_mjlab(env: Any) -> bool:
    """Whether `env` is an mjlab `ManagerBasedRlEnv` or a wrapper around one."""
    inner = type(getattr(env, "unwrapped", env))
    return any(base.__module__.startswith("mjlab.envs") for base in inner.__mro__) and hasattr(env, "step")


class MjlabAdapter(RslRlAdapter):
    """An mjlab environment as a `VecEnv`.

    With `final_obs` it switches `cfg.auto_reset` off and resets ended episodes itself, after it has read the
    observation in which they ended: time-outs are then bootstrapped from the true final state. That costs one more
    evaluation of the observations in steps that end an episode.
    """

    adapter = "mjlab"

    def __init__(
        self,
        env: Any,
        device: Device | None = None,
        seed: int | None = None,
        obs_groups: ObsGroups | None = None,
        *,
        final_obs: bool = True,
    ) -> None:
        self.simulator = env.unwrapped
        self.simulator.cfg.auto_reset = not final_obs
        super().__init__(env, device, seed, obs_groups)

    def _set_contract(self, kind: str) -> None:
        self.contract = "mjlab, resets by canter" if not self.simulator.cfg.auto_reset else "mjlab"

    def _find_action_space(self) -> spaces.Space:
        return spaces.Box(-np.inf, np.inf, (int(self.simulator.action_manager.total_action_dim),))

    def _simulate(self, actions: Tensor) -> tuple[Any, ...]:
        obs, _, rewards, _, extras = read_step(self.env.step(actions))
        simulator = self.simulator
        terminated, truncated = simulator.reset_terminated.clone(), simulator.reset_time_outs.clone()
        if simulator.cfg.is_finite_horizon:  # a limit that belongs to the task ends an episode for good
            terminated, truncated = terminated | truncated, torch.zeros_like(truncated)
        if not simulator.cfg.auto_reset:
            ended = simulator.reset_buf.nonzero().squeeze(-1)
            if len(ended):
                final, rewards, log = to_obs(obs, copy=True), rewards.clone(), dict(extras.get("log") or {})
                obs, more = simulator.reset(env_ids=ended)
                extras = {**more, "log": {**log, **more.get("log", {})}, "final_obs": final}
        return obs, rewards, terminated, truncated, extras

    def get_counters(self) -> dict[str, Any]:
        """The steps of the simulator, and the difficulty of each environment's terrain."""
        levels = getattr(getattr(self.simulator.scene, "terrain", None), "terrain_levels", None)
        return super().get_counters() | ({} if levels is None else {"terrain_levels": levels.clone()})

    def set_counters(self, counters: dict[str, Any]) -> None:
        """Continue curricula from a result of `get_counters`: new episodes start at the difficulty reached."""
        super().set_counters(counters)
        curriculum = getattr(self.simulator, "curriculum_manager", None)
        if not counters or curriculum is None:
            return
        curriculum.compute()  # ranges of commands and weights of rewards, by the number of steps
        terrain, levels = getattr(self.simulator.scene, "terrain", None), counters.get("terrain_levels")
        current = getattr(terrain, "terrain_levels", None)
        if terrain is not None and levels is not None and current is not None and current.shape == levels.shape:
            current.copy_(levels)
            terrain.env_origins[:] = terrain.terrain_origins[current, terrain.terrain_types]
        # Robots do not stand on their terrain yet; a curriculum would take the distance to it for a walk.
        self.simulator.curriculum_manager = SimpleNamespace(compute=lambda env_ids: None, reset=lambda env_ids: {})
        try:
            self._is_new = False
            self.reset()
        finally:
            self.simulator.curriculum_manager = curriculum


def registry() -> Any:
    """The registry of mjlab's tasks."""
    try:
        importlib.import_module("mjlab.tasks")  # registers them
        return importlib.import_module("mjlab.tasks.registry")
    except ImportError as error:
        raise ImportError("environments named mjlab/<task> need mjlab: pip install 'canter[mjlab]'") from error


def require_task(tasks: Any, task: str) -> None:
    """Raise an error that names the nearest task if mjlab has none of this name."""
    known = tasks.list_tasks()
    if task not in known:
        raise ValueError(unknown_name("task", f"mjlab/{task}", [f"mjlab/{name}" for name in known], "mjlab"))


def make_mjlab(
    task: str, num_envs: int, device: Any, seed: int | None, render_mode: str | None, **options: Any
) -> MjlabAdapter:
    """Make a task that is registered with mjlab; further options are entries of its configuration.

    A name with dots is an entry further down: `commands.motion.motion_file`.
    """
    tasks = registry()
    require_task(tasks, task)
    cfg = tasks.load_env_cfg(task)
    cfg.scene.num_envs, cfg.seed = num_envs, seed
    for name, value in options.items():
        set_entry(cfg, name, value, task)
    if getattr(cfg.commands.get("motion"), "motion_file", None) == "":
        way_out = "--env-kwargs '{commands.motion.motion_file: FILE}'"
        raise ValueError(f"mjlab's task {task!r} follows a motion and has no motion_file; give it by {way_out}")
    where = str(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    quieten_warp()
    with contextlib.redirect_stdout(io.StringIO()):  # tables of every manager
        env = importlib.import_module("mjlab.envs").ManagerBasedRlEnv(cfg=cfg, device=where, render_mode=render_mode)
        return MjlabAdapter(env, device, obs_groups=tasks.load_rl_cfg(task).obs_groups)


def quieten_warp() -> None:
    """Leave out Warp's line for every kernel that it loads, unless its messages for debugging are on."""
    warp = importlib.import_module("warp")
    if hasattr(warp.config, "log_level"):
        is_usual = warp.config.log_level == warp.LOG_INFO
        warp.config.log_level = warp.LOG_WARNING if is_usual else warp.config.log_level
    else:  # before 1.15
        warp.config.quiet = not warp.config.verbose


def set_entry(cfg: Any, name: str, value: Any, task: str) -> None:
    """Set the entry of nested dataclasses and dicts that a name with dots leads to."""
    entries: dict[str, Any] = {}
    node, parts = cfg, name.split(".")
    for part in parts:
        entries = node if isinstance(node, dict) else getattr(node, "__dict__", {})
        if part not in entries:
            known = ", ".join(entries) or "none"
            raise ValueError(f"{name}: the configuration of mjlab's task {task!r} has no {part!r} there, but {known}")
        node = entries[part]
    entries[parts[-1]] = value


def mjlab_training_dict(task: str) -> dict[str, Any]:
    """The training dict that mjlab registers for a task, logged to files instead of to a service."""
    own = ("logger", "wandb_project", "wandb_tags", "upload_model", "experiment_name", "load_run", "load_checkpoint")
    tasks = registry()
    require_task(tasks, task)
    given = dataclasses.asdict(tasks.load_rl_cfg(task))
    return {name: value for name, value in given.items() if name not in (*own, "class_name", "run_name", "resume")}
