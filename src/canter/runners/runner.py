"""The outer loop of every runner."""

from __future__ import annotations

import contextlib
import math
import signal
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from canter.runners.runner_tools import RunnerTools
from canter.runners.trials import StopTraining, pruned_exception, report_trial
from canter.utils.console import Console
from canter.utils.files import RunLock
from canter.utils.runtime import StopSignal


class _Metrics(NamedTuple):
    velrmsd: float
    CoT: float


class LearnResult(_Metrics):
    """What `learn` returns: unpacks to (velrmsd, CoT); `history` has one dict of metrics per logged iteration."""

    history: list[dict[str, float]]


class Runner(RunnerTools):
    """Runs an algorithm on an environment. A subclass says what one iteration is."""

    alg: Any

    @abstractmethod
    def run_iteration(self) -> dict[str, float]:
        """Collect, learn, and return the iteration's metrics; none where nothing was read."""

    def take_extras(self) -> dict[str, float]:
        """Metrics gathered over the steps since the last log."""
        return {}

    @abstractmethod
    def learn(self, *args: Any, **kwargs: Any) -> LearnResult:
        """Train for longer."""

    def run(self, iterations: int, init_at_random_ep_len: bool, trial: Any) -> LearnResult:
        """The loop of `learn`: so many iterations more."""
        last = self.iteration + iterations
        self.horizon = max(last, self.planned_iterations() or 1)
        history: list[dict[str, float]] = []
        with (
            self._lock(),
            StopSignal() as stop,
            Console(last, self._title(), self.show_progress, self.iteration) as console,
        ):
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
                if not stop.is_urgent:
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
        self.fire("pre_iteration")
        metrics = self.run_iteration()
        self.iteration += 1
        self.tot_timesteps += self.steps_per_iteration()
        self.alg.adjust_learning_rate(self.iteration / self.horizon)
        should_stop = False
        if metrics:
            self.evaluation()
            robot = {"eval/velrmsd": self.metrics_velrmsd, "eval/CoT": self.metrics_CoT}
            metrics |= {name: value for name, value in robot.items() if not math.isnan(value)}
        if self.is_due(self.cfg.eval_interval):
            metrics |= self.eval(self.cfg.eval_episodes)
        if metrics:
            should_stop = self._report_trial(trial, metrics)
        if self.is_due(self.log_interval):
            metrics |= self.take_extras()
            self.log({"metrics": metrics})
            history.append(metrics)
        console.update(self.iteration, self.tot_timesteps, metrics)
        if self.is_due(self.save_interval):
            self.checkpoints.save_periodic()
        self.run_log.store_code()
        self.fire("post_iteration", metrics)
        if should_stop:
            self.checkpoints.save_periodic()
            self.run_log.close()
            raise pruned_exception(f"pruned at iteration {self.iteration}")

    def count_iterations(self, iterations: int | None, timesteps: int | None) -> int:
        """Iterations meant by a call of `learn`."""
        if iterations is not None:
            return int(iterations)
        if timesteps is not None:
            return -(-int(timesteps) // self.steps_per_iteration())
        planned = self.planned_iterations()
        if planned is not None:
            return max(0, planned - self.iteration)
        raise ValueError(f"say how long to train: {self.ways_to_say}")

    ways_to_say = "learn(iterations), learn(total_timesteps=...) or max_iterations"

    def planned_iterations(self) -> int | None:
        """Length of the whole run that the settings say."""
        return self.cfg.max_iterations

    def is_due(self, interval: int | None) -> bool:
        """Whether something that happens every `interval` iterations happens now."""
        return bool(interval) and self.iteration % interval == 0  # pyright: ignore[reportOperatorIssue]

    def _report_trial(self, trial: Any, metrics: Mapping[str, float]) -> bool:
        if trial is None:
            return False
        values = {
            "velrmsd": float(self.metrics_velrmsd),
            "CoT": float(self.metrics_CoT),
            "mean_reward": metrics.get("episode/mean_reward", float("nan")),
        }
        return report_trial(trial, self.cfg.trial_metric, values, self.iteration)

    def _lock(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.save_dir is None else RunLock(self.save_dir)

    def _title(self) -> str:
        return str(self.run_info.get("task", type(self.alg).__name__))
