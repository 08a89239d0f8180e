"""Checkpoints of a runner: saving, loading and exact continuation."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import secrets
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from canter.algorithms.algorithm import chosen_weights
from canter.compat.checkpoints import import_state
from canter.envs.spec import describe_env
from canter.utils.checkpoint import (
    FINAL_NAME,
    CheckpointError,
    load_checkpoint,
    newest_valid_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from canter.utils.ckpt_manipulator import MANIPULATORS
from canter.utils.config import unknown_name
from canter.utils.distributed import RANKS, RankError
from canter.utils.files import RunLock, RunMovedError, atomic_write, remove_stale_temps, safe_join
from canter.utils.reading import read_limited
from canter.utils.runtime import rng_state, seed_everything, set_rng_state
from canter.utils.tree import tree_map

if TYPE_CHECKING:
    from canter.runners.runner import Runner

PERIODIC = "periodic_checkpoints.json"
# Parts of an algorithm's state that differ between ranks, and the sums over the episodes of each environment in them.
OWN_PARTS = ("replay_buffer", "num_stored", "return_scaler_state_dict", "rnd_state_dict")
OWN_SUMS = "returns"
RETRY_SECONDS = 30.0  # until a failed save is tried again


class Checkpoints:
    """The checkpoints of one runner."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.directory = runner.save_dir
        self.environment: dict[str, Any] | None = None
        """Description of the environment, from which `canter.load` builds the policy without it."""
        self.periodic: list[str] = []
        """Names of the files in `directory` that were written periodically, by this process or an earlier one."""
        self.loaded_config: Any = None
        """The config in the checkpoint that was loaded last, if it is canter's."""
        self.being_saved: Path | None = None
        """The periodic checkpoint that `runner.save` is writing."""
        self.lock: RunLock | None = None
        """The lock of `directory`, while training."""
        self.retry_at = math.inf
        """Time (monotonic) at which a failed periodic save is tried again."""
        if self.directory is not None:
            remove_stale_temps(self.directory)
            # On an error none of the earlier files is ever removed.
            with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
                self.periodic = [
                    str(name) for name in json.loads(read_limited(self.directory / PERIODIC, root=self.directory))
                ]

    def locate(self, name: str) -> Path:
        """Path of a file in the save directory; an absolute path stays as it is."""
        if Path(name).is_absolute():
            return Path(name)
        if self.directory is None:
            raise ValueError(f"there is no directory for {name!r}; give the runner a save_dir or use an absolute path")
        return safe_join(self.directory, name)

    def numbered(self) -> Path:
        """model_<completed iterations>.pt in the save directory."""
        if self.directory is None:
            raise ValueError("the runner has no directory to save in; name the file, as in save('policy.pt')")
        return self.directory / f"model_{self.runner.iteration}.pt"

    def save(self, path: Path, infos: Any = None) -> None:
        """Write a checkpoint that is never removed."""
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a directory; name a file in it to save in")
        place = path.resolve()  # which may be relative, or lead through links
        is_here = self.directory is not None and place.parent == self.directory.resolve()
        is_kept = is_here and place.name in self.periodic and path != self.being_saved
        with all_or_none():
            if is_kept and RANKS.is_first:
                self.periodic.remove(place.name)
                atomic_write(place.parent / PERIODIC, json.dumps(self.periodic).encode())
        self._write(path, infos)

    def shared_tensors(self) -> dict[str, Tensor]:
        """Parameters and statistics that are equal on all ranks, by part and name."""
        parts = {n: part for n, part in self.runner.alg.checkpoint_parts().items() if isinstance(part, nn.Module)}
        tensors = {f"{name}.{key}": value for name, part in parts.items() for key, value in part.state_dict().items()}
        return {name: value for name, value in tensors.items() if name.rpartition(".")[2] != OWN_SUMS}

    def compare(self) -> None:
        """Raise RankError if the parameters, statistics or optimizers of the ranks are not the same, bit by bit."""
        parts = self.runner.alg.checkpoint_parts().items()
        others = {name: part.state_dict() for name, part in parts if not isinstance(part, nn.Module)}
        RANKS.check_equal({**self.shared_tensors(), **others}, "the ranks do not learn the same")

    def _write(self, path: Path, infos: Any = None, is_joint: bool = True) -> None:
        """Write the learned state and the state for exact continuation; of other ranks only what is their own.

        All ranks save together (`is_joint`), and the file of the first, which refers to the others, is the last.
        """
        runner = self.runner
        if RANKS.size > 1 and is_joint:
            RANKS.wait()
            self.compare()
        resume = {"num_envs": runner.env.num_envs, "rng": rng_state(), "env": runner.env.get_state()}
        resume |= {"algorithm": runner.alg.resume_state(), "runner": runner.extra_state()}
        if runner.eval_env is not None:
            resume["eval_env"] = runner.eval_env.get_state()
        counters = runner.env.get_counters()
        resume |= {"counters": counters} if counters else {}
        state = {**runner.alg.state_dict(), "iter": runner.iteration, "total_timesteps": runner.tot_timesteps}
        if self.environment is None:
            self.environment = describe_env(runner.env)
        state |= {"infos": infos, "config": runner.config(), "environment": self.environment}
        root = self.directory if self.directory is not None and path.is_relative_to(self.directory) else None
        if RANKS.size > 1:
            save_id = RANKS.gather(secrets.token_hex(8))[0] if is_joint else None
            resume |= {"ranks": RANKS.size, "save_id": save_id}
            own = {name: state[name] for name in OWN_PARTS if name in state} | {"iter": runner.iteration}
            with all_or_none(is_joint):
                if not RANKS.is_first:
                    save_checkpoint(rank_path(path, RANKS.rank), {**own, "resume": resume}, root)
        with all_or_none(is_joint):
            if RANKS.is_first:
                save_checkpoint(path, {**state, "resume": resume}, root)
        if runner.writer is not None and runner.cfg.upload_model:
            runner.writer.save_model(path, runner.iteration)

    def load(
        self, path: Path, load_optimizer: bool, map_location: Any, load_cfg: Mapping[str, bool] | None, strict: bool
    ) -> Any:
        """Continue from a checkpoint of canter, or load the weights of another library's."""
        runner = self.runner
        where = runner.device if map_location is None else map_location
        state = self._of_this_rank(import_state(load_checkpoint(path, where)), path, where)
        self.loaded_config = state.get("config")
        state = self._manipulated(state, path)
        infos = state.get("infos")
        teacher = getattr(runner.alg, "extensions", {}).get("teacher")
        if teacher is not None and teacher.cfg.teacher_from_load:
            if teacher.load(state, path):
                runner.plan.resume = False
                return infos
            state["teacher_state_dict"] = teacher.policies[0].state_dict()
            if not any(name.startswith("critic.") for name in state["model_state_dict"]):  # a student alone
                own = runner.alg.policy.state_dict()
                state["model_state_dict"] = chosen_weights(own, state["model_state_dict"], {"actor": True}, strict)
        fitted = with_fitting_sums(state, runner.alg.state_dict())
        runner.alg.load_state_dict(fitted, load_optimizer, load_cfg, strict)
        runner.plan.resume = False
        saved = infos.get("env_state") if isinstance(infos, Mapping) else None  # where mjlab's own runner puts them
        if counters := (state.get("resume") or {}).get("counters") or saved:
            # A simulator may reset itself, in the mode in which it was stepped; its observations are new then.
            with torch.inference_mode(runner.cfg.inference_mode_rollout):
                runner.env.set_counters(counters)
            runner.obs = runner.critic_obs = None
        if load_cfg is not None and not load_cfg.get("iteration"):
            return infos
        runner.iteration = int(state.get("iter", 0))
        runner.tot_timesteps = int(state.get("total_timesteps", runner.iteration * runner.steps_per_iteration()))
        if load_optimizer and load_cfg is None and state.get("resume"):
            self._resume(state["resume"])
        runner.resumed_at = runner.tot_timesteps
        return infos

    def _manipulated(self, state: dict[str, Any], path: Path) -> dict[str, Any]:
        """The state that the `ckpt_manipulator` of the training dict makes of a checkpoint; it is written beside it."""
        given = self.runner.plan.ckpt_manipulator
        manipulator: Any = MANIPULATORS.get(given, given)
        if manipulator is None:
            return state
        if isinstance(manipulator, str):
            raise ValueError(unknown_name("ckpt_manipulator", manipulator, [*MANIPULATORS, "a function of your own"]))
        state = manipulator(state, self.runner.alg.state_dict())
        try:
            save_checkpoint(path.with_name(f"manipulated_{path.name}"), dict(state))
        except OSError as error:
            warnings.warn(f"the manipulated checkpoint was not written: {error}", stacklevel=4)
        return state

    def _of_this_rank(self, state: dict[str, Any], path: Path, where: Any) -> dict[str, Any]:
        """The state of a checkpoint with this rank's own parts; with another number of ranks, some rank's."""
        resume = state.get("resume") or {}
        saved = resume.get("ranks", 1)
        if saved == RANKS.size == 1:
            return state
        number = RANKS.rank % saved
        if number:
            try:
                own = load_checkpoint(rank_path(path, number), where)
                if own["resume"]["save_id"] != resume["save_id"]:
                    raise CheckpointError("it belongs to another checkpoint")
                state = {**state, **own}
            except (OSError, CheckpointError) as error:
                warnings.warn(f"rank {RANKS.rank} does not continue exactly: {error}", stacklevel=4)
                return {**state, "resume": {**resume, "ranks": None}}
        if saved != RANKS.size and RANKS.is_first:
            change = f"{saved} rank(s) saved {path.name}, {RANKS.size} continue(s) it"
            warnings.warn(f"{change}: not exactly, but with new episodes and random streams", stacklevel=4)
        return state

    def _resume(self, state: Mapping[str, Any]) -> None:
        """Restore generators, environment and runner; on other environments the run continues with new episodes."""
        runner, env = self.runner, self.runner.env
        set_rng_state(state["rng"])
        has_own = state.get("ranks", 1) == RANKS.size
        own = {name: state.get(name) for name in ("env", "runner", "eval_env")}
        own = tree_map(lambda leaf: leaf.to(runner.device) if torch.is_tensor(leaf) else leaf, own)
        fits = state["env"] is not None and state["num_envs"] == env.num_envs
        is_exact = has_own and fits and env.get_state() is not None
        try:
            runner.alg.load_resume_state(state["algorithm"])
            if is_exact:
                env.set_state(own["env"])
        except (KeyError, ValueError, RuntimeError) as error:  # from another device or environment
            warnings.warn(f"the state was not restored ({error}); the run continues with new episodes", stacklevel=4)
            is_exact = False
        if not has_own:  # streams of another rank would repeat its noise
            fresh = RANKS.seed(runner.alg.stream_seed + runner.iteration)
            seed_everything(fresh % 2**32)
            for number, generator in enumerate(runner.alg.generators.values()):
                generator.manual_seed((fresh + 7919 * number) % 2**63)
        runner.load_extra_state({**own["runner"], "is_exact": is_exact})
        if runner.eval_env is not None and own["eval_env"] is not None:
            try:
                runner.eval_env.set_state(own["eval_env"])
            except (NotImplementedError, KeyError, ValueError, RuntimeError) as error:  # it is another one
                warnings.warn(f"evaluations do not continue exactly: {error}", stacklevel=4)

    def save_periodic(self) -> None:
        """Write a numbered checkpoint; if that fails, the training goes on and the save is tried again later."""
        if self.directory is None:
            return
        try:
            self._check_directory()
            self._save_numbered()
            self.retry_at = math.inf
        except RunMovedError:
            raise
        except OSError as error:
            self.retry_at = time.monotonic() + RETRY_SECONDS
            again = f"the training goes on and saves again in {RETRY_SECONDS:.0f} s"
            warnings.warn(f"no checkpoint could be written ({error}); {again}; {self._newest()}", stacklevel=2)

    @property
    def is_retry_due(self) -> bool:
        """Whether a save that failed is to be tried again, on all ranks."""
        return self.retry_at < math.inf and bool(RANKS.agree(float(time.monotonic() >= self.retry_at)))

    def save_final(self) -> None:
        """Write the last numbered checkpoint and checkpoint_final.pt; if that fails, save elsewhere and say where."""
        if self.directory is None:
            return
        try:
            self._check_directory()
            self._save_numbered()
            self.runner.save(str(self.directory / FINAL_NAME))
        except RunMovedError:
            raise
        except OSError as error:
            text = f"the last checkpoint could not be written ({error}); {self._newest()}; {self._rescue()}"
            raise type(error)(error.errno, text) from error

    def _newest(self) -> str:
        """The newest good checkpoint, for messages."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return f"the newest good one is {newest_valid_checkpoint(self.directory or '.')}"
        except (OSError, CheckpointError):
            return f"there is no good one in {self.directory}"

    def _rescue(self) -> str:
        """Save in the directory for temporary files; returns a sentence about it."""
        try:
            folder = RANKS.on_first(lambda: Path(tempfile.mkdtemp(prefix="canter-")))
            path = folder / f"model_{self.runner.iteration}.pt"
            self._write(path)
        except OSError as error:
            return f"nor could it be saved elsewhere ({error})"
        return f"the state was saved as {path}"

    def _check_directory(self) -> None:
        """End the run if its directory was moved; begin a new one if it was deleted."""
        directory, lock = self.directory, self.lock  # which the first rank has
        found = RANKS.on_first(lambda: directory if lock is None else lock.find_directory())
        if found == directory:
            return
        if found is not None:
            path = found / f"model_{self.runner.iteration}.pt"
            try:
                self._write(path)
                saved = f"the state was saved as {path}; continue with: canter resume {found}"
            except OSError:
                saved = self._rescue()
            raise RunMovedError(f"{self.directory} was moved to {found} during the run, which ends here; {saved}")
        config = self.runner.log_dir and self.runner.log_dir / "config.yaml"
        with all_or_none():
            if config is not None and RANKS.is_first and not config.exists():
                warnings.warn(f"{self.directory} was deleted during the run; it is made again", stacklevel=3)
                self.runner.write_config()
                if self.runner.writer is not None:
                    self.runner.writer.reopen()

    def _save_numbered(self) -> None:
        """Write model_<completed iterations>.pt, and remove old periodic files beyond `keep_checkpoints`."""
        path, keep = self.numbered(), self.runner.cfg.keep_checkpoints
        if keep is None:
            self.runner.save(str(path))
            return
        # The name first: a process killed in between must not leave a file that is never removed. A file that is there
        # already and was not written periodically is the user's, and stays.
        with all_or_none():
            if RANKS.is_first and (path.name in self.periodic or not path.exists()):
                self.periodic = [*(name for name in self.periodic if name != path.name), path.name]
                atomic_write(path.parent / PERIODIC, json.dumps(self.periodic).encode())
        self.being_saved = path
        try:
            self.runner.save(str(path))
        finally:
            self.being_saved = None
        if not RANKS.is_first:
            return
        removed = {old.name for old in prune_checkpoints(path.parent, keep, self.periodic)}
        self.periodic = [name for name in self.periodic if name not in removed]
        for name in removed:
            for part in path.parent.glob(f"{Path(name).stem}.rank*.pt"):
                with contextlib.suppress(OSError):  # as of the checkpoint itself, the save has not failed
                    part.unlink()

    def save_after(self, error: BaseException) -> None:
        """Write the state at an error to crash/, where `resume` does not find it, without hiding the error."""
        is_expected = isinstance(error, (RankError, RunMovedError)) or type(error).__name__ == "TrialPruned"
        if self.directory is None or is_expected:
            return
        try:
            path = self.directory / "crash" / f"model_{self.runner.iteration}.pt"
            self._write(path, {"error": repr(error)}, is_joint=False)
        except Exception as second:
            warnings.warn(f"no emergency checkpoint could be written: {second!r}", stacklevel=2)


@contextlib.contextmanager
def all_or_none(is_joint: bool = True) -> Iterator[None]:
    """Write a file on one or several ranks: if one of them fails, all raise an OSError."""
    failure: OSError | None = None
    try:
        yield
    except OSError as error:
        failure = error
    if is_joint:
        RANKS.wait()
        if RANKS.agree(float(failure is not None)) and failure is None:
            failure = OSError(errno.EIO, "another rank could not write its part of the checkpoint")
    if failure is not None:
        raise failure


def rank_path(path: Path, rank: int) -> Path:
    """The file beside a checkpoint with the state of another rank than the first."""
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def with_fitting_sums(state: Mapping[str, Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
    """Replace sums over unfinished episodes by those of `fresh` if the number of environments differs."""
    fitted = dict(state)
    for part in fresh.keys() & state.keys() & {"return_scaler_state_dict", "rnd_state_dict"}:
        sums = {name: value for name, value in fresh[part].items() if name.rpartition(".")[2] == OWN_SUMS}
        differs = {name for name in sums.keys() & state[part].keys() if len(state[part][name]) != len(sums[name])}
        fitted[part] = {**state[part], **{name: sums[name] for name in differs}}
    return fitted
