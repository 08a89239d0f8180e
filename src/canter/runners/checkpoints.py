"""When and what a runner saves, and how it continues."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from canter.algorithms.foreign import import_state
from canter.utils.checkpoint import load_checkpoint, prune_checkpoints, save_checkpoint
from canter.utils.files import remove_stale_temps, safe_join
from canter.utils.runtime import rng_state, set_rng_state
from canter.utils.tree import tree_map

if TYPE_CHECKING:
    from canter.runners.runner_tools import RunnerTools

Manipulator = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]


class Checkpoints:
    """The checkpoints of one runner."""

    def __init__(self, runner: RunnerTools) -> None:
        self.runner = runner
        self.directory = runner.save_dir
        if self.directory is not None:
            remove_stale_temps(self.directory)

    def locate(self, name: str) -> Path:
        """A file in the save directory, or the absolute path given."""
        if Path(name).is_absolute():
            return Path(name)
        if self.directory is None:
            raise ValueError(f"there is no directory for {name!r}; give the runner a save_dir or use an absolute path")
        return safe_join(self.directory, name)

    def save(self, path: Path, infos: Any = None) -> None:
        """Everything learned, and everything exact continuation needs."""
        runner = self.runner
        state = {
            **runner.alg.state_dict(),
            "iter": runner.iteration,
            "total_timesteps": runner.tot_timesteps,
            "infos": infos,
            "config": runner.config(),
            "resume": {
                "num_envs": runner.env.num_envs,
                "rng": rng_state(),
                "env": runner.env.get_state(),
                "algorithm": runner.alg.resume_state(),
                "runner": runner.extra_state(),
            },
        }
        save_checkpoint(path, state)
        if runner.writer is not None:
            runner.writer.save_model(path, runner.iteration)

    def load(self, path: Path, load_optimizer: bool, map_location: Any) -> Any:
        """Continue from a file of ours, or take over the weights of a foreign one."""
        runner = self.runner
        state = import_state(load_checkpoint(path, runner.device if map_location is None else map_location))
        manipulator = find_manipulator(runner.plan.ckpt_manipulator)
        if manipulator is not None:
            state = manipulator(state, runner.alg.state_dict())
            self._save_manipulated(path, state)
        runner.alg.load_state_dict(with_fitting_sums(state, runner.alg.state_dict()), load_optimizer)
        runner.iteration = int(state.get("iter", 0))
        runner.tot_timesteps = int(state.get("total_timesteps", runner.iteration * runner.steps_per_iteration()))
        if load_optimizer and state.get("resume"):
            self._resume(state["resume"])
        runner.run_log.continue_from(runner.tot_timesteps)
        return state.get("infos")

    def _resume(self, state: Mapping[str, Any]) -> None:
        """Put generators, environment and runner back; a run on other environments continues from fresh episodes."""
        runner, env = self.runner, self.runner.env
        set_rng_state(state["rng"])
        is_exact = state["env"] is not None and state["num_envs"] == env.num_envs and env.get_state() is not None
        try:
            runner.alg.load_resume_state(state["algorithm"])
            if is_exact:
                env.set_state(tree_map(_to(env.device), state["env"]))
        except (KeyError, ValueError, RuntimeError) as error:  # of another device or another environment
            warnings.warn(f"not all could be put back ({error}); the run goes on from new episodes", stacklevel=4)
            is_exact = False
        own = tree_map(_to(runner.device), state["runner"])
        runner.load_extra_state({**own, "is_exact": is_exact})

    def _save_manipulated(self, path: Path, state: Mapping[str, Any]) -> None:
        try:
            save_checkpoint(path.with_name(f"manipulated_{path.name}"), dict(state))
        except OSError as error:
            warnings.warn(f"the manipulated checkpoint was not written: {error}", stacklevel=3)

    def save_periodic(self) -> None:
        """model_<completed iterations>.pt, and no more of them than were asked for."""
        if self.directory is None:
            return
        self.save(self.directory / f"model_{self.runner.iteration}.pt")
        if self.runner.cfg.keep_checkpoints is not None:
            prune_checkpoints(self.directory, self.runner.cfg.keep_checkpoints)

    def save_final(self) -> None:
        """The state at the end of `learn`, under its number and as checkpoint_final.pt."""
        if self.directory is not None:
            self.save_periodic()
            self.save(self.directory / "checkpoint_final.pt")

    def save_after(self, error: BaseException) -> None:
        """Keep what there is, out of the way of `resume`, without ever hiding the error."""
        if self.directory is None or type(error).__name__ == "TrialPruned":
            return
        try:
            (self.directory / "crash").mkdir(exist_ok=True)
            self.save(self.directory / "crash" / f"model_{self.runner.iteration}.pt", {"error": repr(error)})
        except Exception as second:
            warnings.warn(f"no emergency checkpoint could be written: {second!r}", stacklevel=2)


def find_manipulator(given: str | Manipulator | None) -> Manipulator | None:
    """A checkpoint manipulator by name, or as given."""
    if given is None or callable(given):
        return given
    from canter.utils.ckpt_manipulator import MANIPULATORS

    if given not in MANIPULATORS:
        raise ValueError(f"unknown ckpt_manipulator {given!r}; known are {', '.join(MANIPULATORS)}, or give a function")
    return MANIPULATORS[given]


def with_fitting_sums(state: Mapping[str, Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
    """`state` with fresh sums over the episodes under way where it has them for another number of environments."""
    fitted = dict(state)
    for part in fresh.keys() & state.keys() & {"return_scaler_state_dict", "rnd_state_dict"}:
        sums = {name: value for name, value in fresh[part].items() if name.rpartition(".")[2] == "returns"}
        other = {
            name: value for name, value in sums.items() if name in state[part] and len(state[part][name]) != len(value)
        }
        fitted[part] = {**state[part], **other}
    return fitted


def _to(device: torch.device) -> Callable[[Any], Any]:
    return lambda leaf: leaf.to(device) if torch.is_tensor(leaf) else leaf
