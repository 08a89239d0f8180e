"""What a runner offers around its loop: evaluation, logging, callbacks and checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from canter.algorithms.algorithm import Algorithm
from canter.envs.vec_env import VecEnv
from canter.runners.callbacks import Callbacks
from canter.runners.checkpoints import Checkpoints
from canter.runners.evaluation import InferencePolicy, frozen, inference_policy, run_episodes, summarize
from canter.runners.run_config import RunPlan, check_run
from canter.runners.run_log import RunLog
from canter.utils.console import table
from canter.utils.logging import Logger
from canter.utils.runtime import preserved_rng


class RunnerTools(ABC):
    """Everything about a run but the loop itself."""

    env: VecEnv
    alg: Algorithm
    device: torch.device

    def __init__(
        self,
        plan: RunPlan,
        log_dir: str | Path | None,
        save_dir: str | Path | None,
        eval_env: VecEnv | None,
        run_info: Mapping[str, Any] | None,
        show_progress: bool,
    ) -> None:
        check_run(plan.cfg)
        self.plan, self.cfg = plan, plan.cfg
        self.log_dir = None if log_dir is None else Path(log_dir)
        self.save_dir = self.log_dir if save_dir is None else Path(save_dir)
        for directory in (self.log_dir, self.save_dir):
            if directory is not None:
                directory.mkdir(parents=True, exist_ok=True)
        self.log_interval, self.save_interval = self.cfg.log_interval, self.cfg.save_interval
        self.eval_env, self.run_info, self.show_progress = eval_env, dict(run_info or {}), show_progress
        self.iteration = 0
        self.tot_timesteps = 0
        self.metrics_velrmsd = self.metrics_CoT = float("nan")
        self.callbacks = Callbacks(self.cfg.callback_errors)
        self.run_log = RunLog(self.log_dir, self.cfg)
        self.checkpoints = Checkpoints(self)

    # ------------------------------------------------------------------ what a subclass adds
    @abstractmethod
    def start(self, init_at_random_ep_len: bool) -> None:
        """Make ready for the first iteration of a `learn` call."""

    @abstractmethod
    def steps_per_iteration(self) -> int:
        """Environment steps one iteration takes."""

    @abstractmethod
    def after_eval(self, was_reset: bool) -> None:
        """Continue after an evaluation, which may have reset the training environment."""

    @abstractmethod
    def extra_state(self) -> dict[str, Any]:
        """What exact continuation needs of the runner's own."""

    @abstractmethod
    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `extra_state` was taken."""

    # ------------------------------------------------------------------ callbacks
    def add_callback(self, event: str, fn: Callable[..., None]) -> None:
        """Call `fn(runner)` before, or `fn(runner, stats)` after, a part of every iteration."""
        self.callbacks.add(event, fn)

    def fire(self, event: str, *stats: Mapping[str, float]) -> None:
        """Run the callbacks of an event."""
        self.callbacks.fire(event, self, *stats)

    # ------------------------------------------------------------------ evaluation
    def evaluation(self) -> None:
        """Read the environment's robot metrics; it is not stepped."""
        self.metrics_velrmsd = robot_metric(self.env, "tracking_error")
        self.metrics_CoT = robot_metric(self.env, "CoT")

    def eval(self, num_episodes: int = 10, max_steps: int | None = None) -> dict[str, float]:
        """Deterministic episodes, the same number in every environment.

        They run in `eval_env` where there is one. Otherwise in the training environment, whose state is put back if it
        can be, and which is reset if not.
        """
        env = self.eval_env or self.env
        state = env.get_state() if env is self.env else None
        try:
            with frozen(self.alg), preserved_rng():
                return summarize(*run_episodes(InferencePolicy(self.policy), env, num_episodes, max_steps))
        finally:
            if env is self.env:
                if state is not None:
                    env.set_state(state)
                self.after_eval(was_reset=state is None)

    def get_inference_policy(self, device: torch.device | str | None = None) -> InferencePolicy:
        """A callable from raw observations to deterministic actions, with `reset(dones)` for recurrent policies."""
        self.alg.eval_mode()
        return inference_policy(self.policy, self.device, device)

    def train_mode(self) -> None:
        """Networks and normalisers learn."""
        self.alg.train_mode()

    def eval_mode(self) -> None:
        """Networks and normalisers stand still."""
        self.alg.eval_mode()

    # ------------------------------------------------------------------ logging
    def init_writer(self, init_at_random_ep_len: bool = False) -> None:
        """Open the logger, if there is a directory and none is open, and make the environment ready."""
        self.run_log.open(self.config())
        self.start(init_at_random_ep_len)

    def config(self) -> dict[str, Any]:
        """The whole configuration in plain containers."""
        return {**self.plan.to_dict(), **({"run": self.run_info} if self.run_info else {})}

    def write_config(self) -> None:
        """Write the configuration as it is now to config.yaml."""
        self.run_log.write_config(self.config())

    def log(self, locs: Mapping[str, Any], width: int = 80, pad: int = 35) -> str:
        """Write the metrics in `locs["metrics"]` to every backend; returns them as a table."""
        metrics = dict(locs["metrics"])
        self.run_log.log({**metrics, "iteration": self.iteration}, self.tot_timesteps)
        return table(metrics, width, pad)

    def flush(self) -> None:
        """Let every backend write what it holds back."""
        self.run_log.flush()

    def add_git_repo_to_log(self, repo_file_path: str) -> None:
        """Record the state of the repository this file is in."""
        self.run_log.git_repos.append(repo_file_path)

    # ------------------------------------------------------------------ checkpoints
    def save(self, path: str | Path, infos: Any = None) -> None:
        """Write a checkpoint."""
        self.checkpoints.save(Path(path), infos)

    def load(self, path: str | Path, load_optimizer: bool = True, map_location: Any = None) -> Any:
        """Continue from a checkpoint; returns the `infos` saved with it."""
        return self.checkpoints.load(Path(path), load_optimizer, map_location)

    def save_checkpoint(self, name: str) -> Path:
        """Write a checkpoint, relative to `save_dir`."""
        path = self.checkpoints.locate(name)
        self.save(path)
        return path

    def load_checkpoint(self, name: str, load_optimizer: bool = True) -> Any:
        """Continue from a checkpoint, relative to `save_dir`."""
        return self.load(self.checkpoints.locate(name), load_optimizer)

    def close(self) -> None:
        """Close the loggers and the environments."""
        self.run_log.close()
        for env in (self.env, self.eval_env):
            if env is not None:
                env.close()

    @property
    def agent(self) -> Algorithm:
        """The algorithm."""
        return self.alg

    @property
    def policy(self) -> Any:
        """The policy that is trained."""
        return self.alg.policy  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def writer(self) -> Logger | None:
        """The logger, while one is open."""
        return self.run_log.writer

    @property
    def current_learning_iteration(self) -> int:
        """How many iterations are completed."""
        return self.iteration


def robot_metric(env: Any, name: str) -> float:
    """Mean of an environment's robot metric; NaN where it has none."""
    value = getattr(env, name, None)
    return float("nan") if value is None else float(torch.as_tensor(value).float().mean())
