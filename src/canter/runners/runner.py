"""What every runner shares: the outer loop, callbacks, logging, evaluation, trials and checkpoints."""

from __future__ import annotations

import copy
import math
import signal
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from canter.algorithms.algorithm import Algorithm
from canter.envs.vec_env import VecEnv
from canter.runners.checkpoints import Checkpoints
from canter.runners.evaluation import InferencePolicy, run_episodes, summarize
from canter.runners.run_config import RunPlan
from canter.runners.trials import StopTraining, pruned_exception, report_trial
from canter.utils.console import Console, table
from canter.utils.files import RunLock, atomic_write
from canter.utils.git_state import store_code_state
from canter.utils.logging import Logger
from canter.utils.signals import StopSignal

EVENTS = ("pre_iteration", "post_iteration", "pre_rollout", "post_rollout", "pre_update", "post_update")


class _Metrics(NamedTuple):
    velrmsd: float
    CoT: float


class LearnResult(_Metrics):
    """What `learn` returns: unpacks to (velrmsd, CoT); `history` has one dict of metrics per logged iteration."""

    history: list[dict[str, float]]


class Runner(ABC):
    """Runs an algorithm on an environment. A subclass says what one iteration is."""

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
        self.tot_time = 0.0
        self.metrics_velrmsd = self.metrics_CoT = float("nan")
        self.writer: Logger | None = None
        self.callbacks: dict[str, list[Callable[..., None]]] = {event: [] for event in EVENTS}
        self.git_repos: list[str] = [__file__]
        self.has_stored_git = False
        self.checkpoints = Checkpoints(self)

    # ------------------------------------------------------------------ what a subclass adds
    @abstractmethod
    def run_iteration(self) -> dict[str, float]:
        """Collect, learn, and return the iteration's metrics."""

    @abstractmethod
    def steps_per_iteration(self) -> int:
        """Environment steps one iteration takes."""

    @abstractmethod
    def start(self, init_at_random_ep_len: bool) -> None:
        """Make ready for the first iteration of a `learn` call."""

    @abstractmethod
    def after_eval(self, was_reset: bool) -> None:
        """Continue after an evaluation, which may have reset the training environment."""

    @property
    def agent(self) -> Algorithm:
        """The algorithm."""
        return self.alg

    @property
    def current_learning_iteration(self) -> int:
        """How many iterations are completed."""
        return self.iteration

    # ------------------------------------------------------------------ the loop
    def learn(
        self,
        num_learning_iterations: int | None = None,
        init_at_random_ep_len: bool = False,
        trial: Any = None,
        *,
        total_timesteps: int | None = None,
    ) -> LearnResult:
        """Train for more iterations, or for more environment steps rounded up to whole iterations.

        Args:
            num_learning_iterations: Iterations to add.
            init_at_random_ep_len: Start episodes at random ages, so that they do not all end together.
            trial: An Optuna trial or a Ray-style callable that is told every iteration.
            total_timesteps: Environment steps to add, if `num_learning_iterations` is not given.
        """
        last = self.iteration + self.count_iterations(num_learning_iterations, total_timesteps)
        self.horizon = max(last, self.cfg.max_iterations or 0)
        history: list[dict[str, float]] = []
        with self._lock(), StopSignal() as stop, Console(last, self._title(), self.show_progress) as console:
            self.init_writer(init_at_random_ep_len)
            self.alg.adjust_learning_rate(self.iteration / self.horizon)
            self.alg.train_mode()
            console.update(self.iteration, self.tot_timesteps, {})
            try:
                while self.iteration < last and stop.requested is None:
                    self._one_iteration(trial, console, history)
            except StopTraining:
                pass
            except BaseException as error:
                self.checkpoints.save_after(error)
                raise
            finally:
                self.flush()
            self.checkpoints.save_final()
        if stop.requested == signal.SIGTERM:
            raise SystemExit(143)
        result = LearnResult(float(self.metrics_velrmsd), float(self.metrics_CoT))
        result.history = history
        return result

    def _one_iteration(self, trial: Any, console: Console, history: list[dict[str, float]]) -> None:
        begin = time.perf_counter()
        self.fire("pre_iteration")
        metrics = self.run_iteration()
        self.iteration += 1
        self.tot_timesteps += self.steps_per_iteration()
        self.alg.adjust_learning_rate(self.iteration / self.horizon)
        self.evaluation()
        robot = {"eval/velrmsd": self.metrics_velrmsd, "eval/CoT": self.metrics_CoT}
        metrics |= {name: value for name, value in robot.items() if not math.isnan(value)}
        if self.cfg.eval_interval and self.iteration % self.cfg.eval_interval == 0:
            metrics |= self.eval(self.cfg.eval_episodes)
        self.tot_time += time.perf_counter() - begin
        should_stop = self._report_trial(trial, metrics)
        if self.log_interval and self.iteration % self.log_interval == 0:
            metrics |= self.take_extras()
            self.log({"metrics": metrics})
            history.append(metrics)
        console.update(self.iteration, self.tot_timesteps, metrics)
        if self.save_interval and self.iteration % self.save_interval == 0:
            self.checkpoints.save_periodic()
        self._store_git()
        self.fire("post_iteration", metrics)
        if should_stop:
            self.checkpoints.save_periodic()
            raise pruned_exception(f"pruned at iteration {self.iteration}")

    def count_iterations(self, iterations: int | None, timesteps: int | None) -> int:
        """Iterations meant by a call of `learn`."""
        if iterations is not None:
            return int(iterations)
        if timesteps is not None:
            return -(-int(timesteps) // self.steps_per_iteration())
        if self.cfg.max_iterations is not None:
            return max(0, self.cfg.max_iterations - self.iteration)
        raise ValueError("say how long to train: learn(iterations), learn(total_timesteps=...) or max_iterations")

    def take_extras(self) -> dict[str, float]:
        """Metrics gathered over the steps since the last log."""
        return {}

    # ------------------------------------------------------------------ callbacks
    def add_callback(self, event: str, fn: Callable[..., None]) -> None:
        """Call `fn(runner)` before, or `fn(runner, stats)` after, a part of every iteration."""
        if event not in EVENTS:
            raise ValueError(f"unknown event {event!r}; events are {', '.join(EVENTS)}")
        self.callbacks[event].append(fn)

    def fire(self, event: str, *stats: Mapping[str, float]) -> None:
        """Run the callbacks of an event in the order they were added."""
        for fn in self.callbacks[event]:
            try:
                fn(self, *stats)
            except StopTraining:
                raise
            except Exception as error:
                if self.cfg.callback_errors == "raise":
                    raise
                warnings.warn(f"the {event} callback {fn!r} failed: {error!r}", stacklevel=2)

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
        was_training = [module.training for module in self.alg.modules()]
        self.alg.eval_mode()
        try:
            result = summarize(*run_episodes(InferencePolicy(self.policy), env, num_episodes, max_steps))
        finally:
            for module, training in zip(self.alg.modules(), was_training, strict=True):
                module.train(training)
            if env is self.env:
                if state is not None:
                    env.set_state(state)
                self.after_eval(was_reset=state is None)
        return result

    @property
    def policy(self) -> Any:
        """The policy that is trained."""
        return self.alg.policy  # pyright: ignore[reportAttributeAccessIssue]

    def get_inference_policy(self, device: torch.device | str | None = None) -> InferencePolicy:
        """A callable from raw observations to deterministic actions, with `reset(dones)` for recurrent policies."""
        self.alg.eval_mode()
        if device is None or torch.device(device) == self.device:
            return InferencePolicy(self.policy)
        return InferencePolicy(copy.deepcopy(self.policy).to(device))

    def train_mode(self) -> None:
        """Networks and normalisers learn."""
        self.alg.train_mode()

    def eval_mode(self) -> None:
        """Networks and normalisers stand still."""
        self.alg.eval_mode()

    # ------------------------------------------------------------------ logging
    def init_writer(self, init_at_random_ep_len: bool = False) -> None:
        """Open the logger, if there is a directory and none is open, and make the environment ready."""
        if self.writer is None and self.log_dir is not None:
            self.write_config()
            self.writer = Logger(self.cfg.logger_backend, self.log_dir, self.cfg.logger_kwargs, self.config())
        self.start(init_at_random_ep_len)

    def config(self) -> dict[str, Any]:
        """The whole configuration in plain containers."""
        return {**self.plan.to_dict(), **({"run": self.run_info} if self.run_info else {})}

    def write_config(self) -> None:
        """Write config.yaml, from which the run can be built again."""
        assert self.log_dir is not None
        text = yaml.safe_dump(self.config(), sort_keys=False)
        atomic_write(self.log_dir / "config.yaml", lambda file: file.write(text.encode()) and None)

    def log(self, locs: Mapping[str, Any], width: int = 80, pad: int = 35) -> str:
        """Write the metrics in `locs["metrics"]` to every backend; returns them as a table."""
        metrics = dict(locs["metrics"])
        if self.writer is not None:
            self.writer.log_scalars({**metrics, "iteration": self.iteration}, self.tot_timesteps)
        return table(metrics, width, pad)

    def flush(self) -> None:
        """Let every backend write what it holds back."""
        if self.writer is not None:
            self.writer.flush()

    def add_git_repo_to_log(self, repo_file_path: str) -> None:
        """Record the state of the repository this file is in."""
        self.git_repos.append(repo_file_path)

    def _store_git(self) -> None:
        if self.has_stored_git or self.log_dir is None:
            return
        self.has_stored_git = True
        for path in store_code_state(self.log_dir, self.git_repos, self.cfg.git_diff):
            if self.writer is not None:
                self.writer.save_file(path)

    def _report_trial(self, trial: Any, metrics: Mapping[str, float]) -> bool:
        if trial is None:
            return False
        values = {
            "velrmsd": float(self.metrics_velrmsd),
            "CoT": float(self.metrics_CoT),
            "mean_reward": metrics.get("episode/mean_reward", float("nan")),
        }
        return report_trial(trial, self.cfg.trial_metric, values, self.iteration)

    def _lock(self) -> Any:
        return _NoLock() if self.save_dir is None else RunLock(self.save_dir)

    def _title(self) -> str:
        return str(self.run_info.get("task", type(self.alg).__name__))

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

    def extra_state(self) -> dict[str, Any]:
        """What exact continuation needs of the runner's own. Extended by subclasses."""
        return {"tot_time": self.tot_time}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `extra_state` was taken."""
        self.tot_time = state["tot_time"]

    def close(self) -> None:
        """Close the loggers and the environments."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None
        for env in (self.env, self.eval_env):
            if env is not None:
                env.close()


class _NoLock:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *args: object) -> None:
        return None


def robot_metric(env: Any, name: str) -> float:
    """Mean of an environment's robot metric; NaN where it has none."""
    value = getattr(env, name, None)
    return float("nan") if value is None else float(torch.as_tensor(value).float().mean())
