"""The training loop of every runner, with its logging, checkpoints, callbacks and evaluation."""

import contextlib
import copy
import dataclasses
import math
import os
import signal
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import yaml
from gymnasium import spaces

from canter import __version__
from canter.algorithms import REGISTRY
from canter.algorithms.algorithm import NOTHING_NORMALIZED, Algorithm
from canter.envs.vec_env import VecEnv
from canter.envs.workers import WorkerError
from canter.envs.wrap import wrap_env
from canter.envs.wrappers import ClipActions, FlattenObs
from canter.modules.build import build_actor_critic
from canter.modules.normalizer import EmpiricalNormalization
from canter.runners.checkpoints import Checkpoints
from canter.runners.evaluation import InferencePolicy, check_widths, compare_spaces, run_episodes
from canter.runners.health import TrainingHealth
from canter.runners.rsl_rl_config import RSL_RL_MODELS, complete
from canter.runners.run_config import RunPlan, find_algorithm, make_plan
from canter.runners.run_log import (
    Callbacks,
    RunnerLogger,
    StopTraining,
    TrialReporter,
    pruned_exception,
    store_code,
    train_metrics,
)
from canter.utils.checkpoint import damaged_content, find_checkpoints
from canter.utils.config import unused_settings
from canter.utils.console import Console, table
from canter.utils.distributed import RANKS
from canter.utils.files import RunLock, atomic_write
from canter.utils.logging import Logger
from canter.utils.memory import MemoryLimit
from canter.utils.metrics import StepStats
from canter.utils.runtime import HANGUP, StopSignal, preserved_rng, resolve_device
from canter.utils.tree import tree_leaves

MAX_HISTORY = 10_000  # log entries; metrics.jsonl has them all
PARTS = ("actor", "critic", "student", "teacher", "optimizer", "iteration", "rnd")


class LearnResult(NamedTuple("RobotMetrics", [("velrmsd", float), ("CoT", float)])):
    """Result of `learn`: unpacks to (velrmsd, CoT); `history` has the metrics of the last `MAX_HISTORY` log entries."""

    history: list[dict[str, float]]


class Runner(ABC):
    """Trains an algorithm on vectorised environments. A subclass defines one iteration and one environment step.

    It is created with a training dict, `Runner(env, train_cfg, log_dir, device)`; with a config object and network
    classes, `Runner(env, cfg=PPOConfig(...), actor_class=, critic_class=)`; or with an algorithm, `agent=`.

    Args:
        env: Any environment that `wrap_env` accepts.
        train_cfg: Training dict, flat or with a `runner` section; or a config object or an algorithm.
        log_dir: Run directory; None writes nothing.
        device: Training device; None takes a GPU if there is one.
        algorithm: Registered name of the algorithm, if no config determines it.
        actor_class: Class of the actor, as `critic_class`, with settings in `actor_cfg`; see `canter.modules.actors`.
        obs_space: Observation space; the environment's if None, as with `action_space`.
        save_dir: Directory of the checkpoints; `log_dir` if None.
        log_interval: Overrides the config, as do the other intervals and `eval_episodes`.
        run_info: Saved in config.yaml under `run`.
        q_network_class: Class of DQN's network, with settings in `q_network_cfg`; see `canter.modules.q_networks`.
    """

    default_algorithm = "ppo"
    uses_replay: ClassVar[bool | None] = None
    """Whether the runner is for algorithms with a replay buffer, or for those without; None takes both."""
    ways_to_set_length = "learn(iterations), learn(total_timesteps=...) or max_iterations"

    stats: StepStats
    num_steps_per_env = 1
    is_pretraining: bool = False
    """Whether the next iteration learns from a dataset."""
    obs: Any = None
    critic_obs: Any = None
    actions: Any = None
    """The actions that the environments got last."""
    num_evals = 0
    writer: Logger | None = None
    """The logger, while it is open."""
    stopped_by: int | None = None
    """The signal that ended the last `learn`, on any rank."""
    resumed_at: int | None = None
    """Timesteps of a loaded checkpoint, until later log entries are removed."""
    _has_stored_code = False

    def __init__(
        self,
        env: Any,
        train_cfg: Any = None,
        log_dir: str | Path | None = None,
        device: torch.device | str | None = None,
        *,
        cfg: Any = None,
        algorithm: str | None = None,
        actor_class: Any = None,
        critic_class: Any = None,
        actor_cfg: Mapping[str, Any] | None = None,
        critic_cfg: Mapping[str, Any] | None = None,
        obs_space: spaces.Space | None = None,
        action_space: spaces.Space | None = None,
        agent: Any = None,
        save_dir: str | Path | None = None,
        log_interval: int | None = None,
        save_interval: int | None = None,
        eval_env: Any = None,
        eval_interval: int | None = None,
        eval_episodes: int | None = None,
        run_info: Mapping[str, Any] | None = None,
        show_progress: bool = True,
        q_network_class: Any = None,
        q_network_cfg: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(train_cfg, Algorithm):
            train_cfg, agent = None, train_cfg
        networks = {"actor_class": actor_class, "critic_class": critic_class, "q_network_class": q_network_class}
        networks |= {"actor_cfg": actor_cfg, "critic_cfg": critic_cfg, "q_network_cfg": q_network_cfg}
        self.plan = make_plan(train_cfg, cfg, algorithm, agent, networks, self.default_algorithm, self.uses_replay)
        overrides = {"log_interval": log_interval, "save_interval": save_interval, "eval_interval": eval_interval}
        overrides |= {"eval_episodes": eval_episodes, "device": None if device is None else str(device)}
        given = {name: value for name, value in overrides.items() if value is not None}
        self.cfg = self.plan.cfg = dataclasses.replace(self.plan.cfg, **given)  # the user's object stays unchanged
        self.cfg.training_dict = train_cfg if isinstance(train_cfg, Mapping) else {}
        found = resolve_device(self.cfg.device) if agent is None else agent.device
        self.device: torch.device = RANKS.start(found, self.cfg.rank_timeout)
        self.env = open_env(env, self.device, self.plan)
        self.num_envs: int = self.env.num_envs * RANKS.size
        """Environments of all ranks together."""
        complete(self.plan, self.env)
        self.eval_env = None if eval_env is None else open_env(eval_env, self.device, self.plan)
        if self.eval_env is not None:
            compare_spaces(self.env, self.eval_env)
        # Absolute, because a program may change its working directory.
        self.log_dir = None if log_dir is None else Path(log_dir).absolute()
        self.save_dir = self.log_dir if save_dir is None else Path(save_dir).absolute()
        for directory in filter(None, (self.log_dir, self.save_dir)):
            directory.mkdir(parents=True, exist_ok=True)
        self.log_interval, self.save_interval = self.cfg.log_interval, self.cfg.save_interval
        self.run_info, self.show_progress = dict(run_info or {}), show_progress and RANKS.is_first
        self.git_repos: list[str] = [__file__]
        self.iteration = self.tot_timesteps = 0
        self.metrics_velrmsd = self.metrics_CoT = math.nan
        self.callbacks = Callbacks(self.cfg.callback_errors)
        self.checkpoints = Checkpoints(self)
        self.health = TrainingHealth(self)
        with MemoryLimit("the run"):
            alg = self._build_algorithm(obs_space, action_space) if agent is None else agent
            self.alg = self.agent = alg
            check_widths(alg.policy, self.env)
            alg.trained_by = self
            alg.policy.obs_sets = getattr(self.env, "sets", None)
            names = ("iteration", "tot_timesteps", "env", "cfg", "rewbuffer", "lenbuffer")
            alg.executor.counters["runner"] = (self, names)
            self.callbacks.sync = alg.notice_changes if alg.executor.replays else alg.sync_settings
            self.eval_seed: int = alg.stream_seed
            self.set_up()
        if RANKS.size > 1:
            self._compare_ranks()

    def _build_algorithm(self, obs_space: spaces.Space | None, action_space: spaces.Space | None) -> Any:
        agent_class, policy = REGISTRY[find_algorithm(self.plan.algorithm)].agent_class, self.plan.policy
        common = {"cfg": self.cfg, "device": self.device}
        is_seeded = self.cfg.seed is not None
        if is_seeded:
            # For environments that draw from torch's generator, now and later.
            torch.manual_seed(RANKS.seed(self.cfg.seed))
            try:
                self.env.seed(self.cfg.seed + RANKS.rank * self.env.num_envs)
            except NotImplementedError as error:
                warnings.warn(f"{error}: its episodes may differ from run to run", stacklevel=4)
            self.env.reset()  # running episodes were started without the seed
        # Weights do not depend on the numbers that the environment draws, nor these on the size of the networks.
        with torch.random.fork_rng(devices=[], enabled=is_seeded):
            if is_seeded:
                torch.manual_seed(self.cfg.seed)
            if "class_name" in policy:
                return agent_class(build_actor_critic(self.env, policy["class_name"], policy), **common)
            return agent_class(env=self.env, obs_space=obs_space, action_space=action_space, **common, **policy)

    def _compare_ranks(self) -> None:
        """Raise an error if the ranks have other settings, versions or sizes of networks."""
        RANKS.wait()  # some build their environments faster
        cfg = {f"setting {name}": repr(value) for name, value in vars(self.cfg).items()}
        cfg = {name: value for name, value in cfg.items() if name not in ("setting device", "setting training_dict")}
        found = {"num_envs": self.env.num_envs, "torch": torch.__version__, "canter": __version__}
        found |= {**cfg, "algorithm": type(self.alg).__name__}
        # Tensors of other sizes would abort the process in the first collective, without a word about the cause.
        found |= {f"shape of {name}": list(value.shape) for name, value in self.checkpoints.shared_tensors().items()}
        RANKS.check_equal(found, "the ranks were started differently", code=2)

    def _start_ranks(self, stop: StopSignal, trial: Any) -> None:
        """Start every rank from the parameters and statistics of the first."""
        if trial is not None:
            raise ValueError(f"a trial of a search runs in one process, this is one of {RANKS.size} ranks")
        RANKS.is_stopping = lambda: stop.requested is not None
        RANKS.wait()
        RANKS.broadcast(self.checkpoints.shared_tensors())
        self.checkpoints.compare()

    def keep_stats(self, num_steps: int) -> None:
        """Record the statistics of the algorithm's steps, up to `num_steps` between two reads."""
        self.stats = StepStats(self.env.num_envs, num_steps, self.device, self.cfg.extra_log_keys)
        self.stats.guard.check_policy = self.health.raise_if_diverged
        is_host = self.device.type == "cpu"
        self.alg.on_record = [] if is_host else [self.stats.tracker.write]
        self.alg.on_step = [self.stats.tracker.put] if is_host else []
        self.alg.executor.forget()  # an agent that was given may have captured steps that write elsewhere
        self.rewbuffer, self.lenbuffer = self.stats.tracker.rewbuffer, self.stats.tracker.lenbuffer
        self.rframebuffer = self.stats.tracker.rframebuffer

    @abstractmethod
    def set_up(self) -> None:
        """Prepare the algorithm and the statistics for these environments."""

    @abstractmethod
    def run_iteration(self) -> dict[str, float]:
        """Collect, learn, and return the iteration's metrics, or an empty dict if none were read."""

    def steps_per_iteration(self) -> int:
        """Environment steps of one iteration, of all ranks together."""
        return self.num_steps_per_env * self.num_envs

    def learn(
        self,
        num_learning_iterations: int | None = None,
        init_at_random_ep_len: bool = False,
        trial: Any = None,
        *,
        total_timesteps: int | None = None,
    ) -> LearnResult:
        """Train for more iterations, or for more environment steps rounded up to whole iterations.

        With `init_at_random_ep_len` episodes start at random ages, so that they do not all end together. Metrics are
        reported to the hyperparameter search `trial`; see `TrialReporter`.
        """
        self.alg.check_can_learn(has_labels=self.is_pretraining)
        self._warn_of_unused()
        if self.plan.resume:
            raise ValueError("the training dict says resume=True, but no checkpoint was loaded; call load(path) first")
        last = self.iteration + self.count_iterations(num_learning_iterations, total_timesteps)
        self.horizon = max(last, self.planned_iterations() or 1)
        reporter = None if trial is None else TrialReporter(trial, self.cfg.trial_metric, self.cfg.eval_interval)
        history: deque[dict[str, float]] = deque(maxlen=MAX_HISTORY)
        title = str(self.run_info.get("task", type(self.alg).__name__))
        with (
            torch.inference_mode(False),
            torch.enable_grad(),  # learning needs gradients, whatever surrounds it
            RANKS.telling_errors(),
            contextlib.nullcontext() if self.save_dir is None or not RANKS.is_first else RunLock(self.save_dir) as lock,
            StopSignal() as stop,
            Console(last, title, self.show_progress, self.iteration, path=self.log_dir) as console,
        ):
            self.checkpoints.lock = lock
            self.init_writer(init_at_random_ep_len)
            self.alg.adjust_learning_rate(self.iteration / self.horizon)
            self.alg.train_mode()
            console.update(self.iteration, self.tot_timesteps, {})
            try:
                if RANKS.size > 1:
                    self._start_ranks(stop, trial)
                is_done = False
                while self.iteration < last and not self._is_over(stop, is_done):
                    is_done = self._iterate(reporter, console, history)
            except WorkerError as error:
                if stop.requested is None or RANKS.size > 1:
                    self.checkpoints.save_after(error)
                    raise
                warnings.warn(f"stopped without the rollout that had begun: {error}", stacklevel=2)
            except BaseException as error:
                if not stop.is_urgent:
                    self.checkpoints.save_after(error)
                raise
            finally:
                self.flush()
            self.checkpoints.save_final()
        self.stopped_by = stop.requested
        if stop.requested is not None and stop.requested in (signal.SIGTERM, HANGUP):
            raise SystemExit(128 + stop.requested)
        if reporter is not None:
            reporter.warn_if_unused()
        result = LearnResult(float(self.metrics_velrmsd), float(self.metrics_CoT))
        result.history = list(history)
        return result

    def _is_over(self, stop: StopSignal, is_done: bool) -> bool:
        """Whether a signal or `StopTraining` ends the run, on this rank or on another."""
        if RANKS.size > 1:
            found = int(RANKS.agree(stop.requested or is_done))
            is_done = found == 1
            stop.requested = found if found > 1 else None  # the others end as the rank that got the signal
        return is_done or stop.requested is not None

    def _iterate(self, reporter: TrialReporter | None, console: Console, history: deque[dict[str, float]]) -> bool:
        """Run an iteration; returns whether a callback, or in a single process the environment, ends the training."""
        self.callbacks.is_stop_asked = False
        try:
            self._one_iteration(reporter, console, history)
        except StopTraining as error:
            if RANKS.size == 1:
                return True
            problem = "StopTraining was raised in the middle of an iteration, which several ranks cannot end together"
            raise RuntimeError(f"{problem}; raise it in a callback") from error
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise self.health.memory_error(error) from error
        return self.callbacks.is_stop_asked

    def _one_iteration(
        self, reporter: TrialReporter | None, console: Console, history: deque[dict[str, float]]
    ) -> None:
        self.callbacks.fire("pre_iteration", self)
        with self.health.explained_errors():
            metrics = self.run_iteration()
        self.health.check(metrics)
        self.iteration += 1
        self.tot_timesteps += self.steps_per_iteration()
        self.alg.adjust_learning_rate(self.iteration / self.horizon)
        if metrics:
            self.evaluation()
            metrics |= self._robot_metrics()
        evaluated: dict[str, float] = {}
        if self.is_due(self.cfg.eval_interval):
            evaluated = RANKS.on_first(lambda: self.eval(self.cfg.eval_episodes))
            metrics |= evaluated
        if is_logged := self.is_due(self.log_interval):
            metrics |= self.stats.extras.take() | self.stats.components.take()
            if RANKS.size > 1:
                metrics = RANKS.mean_metrics({**metrics, "time/collectives": RANKS.take_seconds()})
        is_pruned = False
        if metrics and reporter is not None:
            is_pruned = reporter.report(metrics, self.metrics_velrmsd, self.metrics_CoT, self.iteration)
        try:
            self.callbacks.fire("post_iteration", self, metrics)  # what it adds to the metrics is logged
        finally:
            if is_logged or (evaluated and self.log_interval):  # an evaluation is logged between two entries too
                entry = metrics if is_logged else evaluated
                self.log({"metrics": entry, "console": console})
                history.append(entry)
            console.update(self.iteration, self.tot_timesteps, metrics)
        if self.is_due(self.save_interval) or self.checkpoints.is_retry_due:
            self.checkpoints.save_periodic()
        if self.log_dir is not None and self.writer is not None and not self._has_stored_code:
            self._has_stored_code = True
            store_code(self.log_dir, self.git_repos, self.cfg.git_diff, self.writer)
        if is_pruned:
            self.checkpoints.save_periodic()
            self.writer = self.writer and self.writer.close()
            raise pruned_exception(f"pruned at iteration {self.iteration}")

    def start(self, init_at_random_ep_len: bool) -> None:
        """Read the observation from which the next rollout starts."""
        if init_at_random_ep_len:
            lengths, limit = getattr(self.env, "episode_length_buf", None), self.env.max_episode_length
            generator = self.alg.generators["action"]
            try:
                if lengths is None or limit is None:
                    raise AttributeError("it does not exist, or there is no limit")
                ages = torch.randint(int(limit), lengths.shape, generator=generator, device=generator.device)
                self.env.episode_length_buf = ages.to(lengths)  # pyright: ignore[reportAttributeAccessIssue]
            except AttributeError as error:
                warnings.warn(f"episodes start at age 0: episode_length_buf cannot be set ({error})", stacklevel=5)
        if self.obs is None:
            with torch.inference_mode(self.cfg.inference_mode_rollout):
                self.obs, self.critic_obs = self.env.get_observations()
        first = {"first_obs": self.obs, "first_critic_obs": None if self.critic_obs is self.obs else self.critic_obs}
        self.stats.guard.check(self.tot_timesteps // self.num_envs, **first)
        self.stats.tracker.read()  # the steps of an interrupted rollout

    def _warn_of_unused(self) -> None:
        """Name settings that do nothing, once training begins: a run that is only loaded has them for the record."""
        for name, reason in unused_settings(self.alg.cfg).items() if RANKS.is_first else ():
            warnings.warn(f"{name}={getattr(self.alg.cfg, name)!r} has no effect with {reason}", stacklevel=3)
        asked = [name for name in NOTHING_NORMALIZED if getattr(self.alg.cfg, name, None)]
        both = (self.policy.obs_normalizer, self.policy.critic_obs_normalizer)
        normalizes = any(isinstance(part, EmpiricalNormalization) for side in both for part in side.modules())
        if asked and not normalizes and RANKS.is_first:
            reason = "images and whole numbers are not normalised, and the observations are nothing else"
            warnings.warn(f"{asked[0]}=True has no effect: {reason}", stacklevel=3)

    def count_iterations(self, iterations: int | None, timesteps: int | None) -> int:
        """Iterations that the arguments of `learn` ask for."""
        if iterations is not None and timesteps is not None:
            both = f"{iterations!r} iterations and total_timesteps={timesteps!r}"
            raise ValueError(f"the length of the training is given twice, as {both}; leave one out")
        for length in (given for given in (iterations, timesteps) if given is not None):
            is_number = isinstance(length, (int, float, np.integer, np.floating)) and not isinstance(length, bool)
            if not is_number or not 0 <= length < math.inf or length != int(length):
                raise ValueError(f"the length of the training must be a whole number of at least 0, got {length!r}")
        if iterations is not None:
            return int(iterations)
        if timesteps is not None:
            return -(-int(timesteps) // self.steps_per_iteration())
        planned = self.planned_iterations()
        if planned is not None:
            return max(0, planned - self.iteration)
        raise ValueError(f"the length of the training is not given; use {self.ways_to_set_length}")

    def planned_iterations(self) -> int | None:
        """Iterations of the whole run according to the settings."""
        return self.cfg.max_iterations

    def is_due(self, interval: int | None) -> bool:
        """Whether the completed iterations are a multiple of `interval`."""
        return bool(interval) and self.iteration % interval == 0  # pyright: ignore[reportOperatorIssue]

    def add_callback(self, event: str, fn: Callable[..., None]) -> None:
        """Call `fn(runner)` at a `pre_*` event, or `fn(runner, stats)` at a `post_*` event, of every iteration."""
        self.callbacks.add(event, fn)

    def evaluation(self) -> None:
        """Read the robot metrics of the environment, which is not stepped."""
        for name, source in (("metrics_velrmsd", "tracking_error"), ("metrics_CoT", "CoT")):
            value = getattr(self.env, source, None)
            setattr(self, name, math.nan if value is None else float(torch.as_tensor(value).float().mean()))

    def _robot_metrics(self) -> dict[str, float]:
        values = {"eval/velrmsd": self.metrics_velrmsd, "eval/CoT": self.metrics_CoT}
        return {name: value for name, value in values.items() if not math.isnan(value)}

    def eval(self, num_episodes: int = 10, max_steps: int | None = None) -> dict[str, float]:
        """Run deterministic episodes, the same number in every environment, and return their `eval/` metrics.

        Without an `eval_env` they run in the training environment, whose state is restored, or which is reset.
        """
        env = self.eval_env or self.env
        state = env.get_state() if env is self.env else None
        modes = [(module, module.training) for module in self.alg.modules()]
        self.alg.eval_mode()
        self.num_evals += 1
        try:
            with preserved_rng():
                self._seed_evaluation()
                episodes = run_episodes(InferencePolicy(self.policy), env, num_episodes, max_steps)
            reductions = {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}
            rewards = {f"eval/{name}_reward": float(reduce(episodes.returns)) for name, reduce in reductions.items()}
            return rewards | {"eval/mean_length": float(np.mean(episodes.lengths))}
        finally:
            for module, was_training in modes:
                module.train(was_training)
            if state is not None:
                env.set_state(state)
            elif env is self.env:
                self.restart_episodes()

    def _seed_evaluation(self) -> None:
        """Seed an `eval_env` whose random streams no checkpoint can hold, with another seed for every evaluation."""
        if self.eval_env is not None and self.eval_env.get_state() is None:
            seed = np.random.SeedSequence((abs(self.eval_seed), self.num_evals)).generate_state(1)[0]
            with contextlib.suppress(NotImplementedError):
                self.eval_env.seed(int(seed))

    def restart_episodes(self) -> None:
        """Reset the environments, the memories of the algorithm and the statistics of unfinished episodes."""
        with torch.inference_mode(self.cfg.inference_mode_rollout):
            self.obs, self.critic_obs = self.env.reset()
        self.alg.end_episodes()
        self.stats.clear_running()

    def get_inference_policy(self, device: torch.device | str | None = None) -> InferencePolicy:
        """A callable from raw observations to deterministic actions, with `reset(dones)` for recurrent policies."""
        self.alg.eval_mode()
        is_here = device is None or torch.device(device) == self.device
        policy = self.policy if is_here else copy.deepcopy(self.policy).to(device)
        more = {"action_space": self.env.action_space, "env_bounds": self.env.action_bounds}
        return InferencePolicy(policy, self.env.obs_space, self.env.obs_segments, **more)

    def export_policy_to_onnx(self, path: str | Path, filename: str = "policy.onnx", verbose: bool = False) -> None:
        """Write the policy as a checked ONNX file; `canter export` writes a whole bundle."""
        from canter.export.rsl_rl import write_onnx  # the exporters load slowly

        write_onnx(self, Path(path) / filename)

    def export_policy_to_jit(self, path: str | Path, filename: str = "policy.pt") -> None:
        """Write a checked TorchScript file: `module(obs)` gives actions, `module.reset()` clears memories."""
        from canter.export.rsl_rl import write_jit

        write_jit(self, Path(path) / filename)

    def train_mode(self) -> None:
        """Switch networks and normalisers to training mode."""
        self.alg.train_mode()

    def eval_mode(self) -> None:
        """Switch networks and normalisers to evaluation mode."""
        self.alg.eval_mode()

    def init_writer(self, init_at_random_ep_len: bool = False) -> None:
        """Open the logger if there is a run directory, and read the observation from which the next rollout starts."""
        if self.writer is None and self.log_dir is not None and RANKS.is_first:
            if self.tot_timesteps == 0 and self.resumed_at is None:
                warn_of_earlier_run(self.save_dir or self.log_dir)
            self.write_config()
            self.writer = Logger(self.cfg.logger_backend, self.log_dir, self.cfg.logger_kwargs, self.config())
        if self.writer is not None and self.resumed_at is not None:
            self.writer.truncate_after(self.resumed_at)
            self.resumed_at = None
        self.start(init_at_random_ep_len)

    def config(self) -> dict[str, Any]:
        """The whole configuration in plain containers."""
        return {**self.plan.to_dict(), **({"run": self.run_info} if self.run_info else {})}

    def write_config(self) -> None:
        """Write config.yaml, from which the run can be built again."""
        if self.log_dir is not None:
            atomic_write(self.log_dir / "config.yaml", yaml.safe_dump(self.config(), sort_keys=False).encode())

    def log(self, locs: Mapping[str, Any], width: int = 80, pad: int = 35) -> str:
        """Write metrics to every logging backend, print them as a table and return the table.

        `locs` is `{"metrics": {...}}`, or the `locals()` of a training loop: the dicts `losses` and `stats` and every
        float are logged, with the statistics of the newest rollout and the robot metrics.
        """
        metrics = locs.get("metrics")
        if not isinstance(metrics, Mapping):
            dicts = (locs[name] if isinstance(locs.get(name), Mapping) else {} for name in ("losses", "stats"))
            named = train_metrics(*dicts).items()
            named = {name: float(value) for name, value in named if not torch.is_tensor(value) or value.numel() == 1}
            floats = {name: value for name, value in locs.items() if isinstance(value, float)}
            metrics = self.stats.newest | self._robot_metrics() | floats | named
        if self.writer is not None:
            self.writer.log_scalars({**metrics, "iteration": self.iteration}, self.tot_timesteps)
        text = table(metrics, width, pad)
        if locs.get("console") is None:  # within `learn` the progress display shows the metrics
            print(text)  # noqa: T201 (documented)
        return text

    def flush(self) -> None:
        """Flush every logging backend."""
        if self.writer is not None:
            self.writer.flush()

    def add_git_repo_to_log(self, repo_file_path: str) -> None:
        """Record the state of the git repository that contains this file."""
        self.git_repos.append(repo_file_path)

    def save(self, path: str | Path | None = None, infos: Any = None) -> None:
        """Write a checkpoint; without a path model_<completed iterations>.pt in `save_dir`."""
        self.checkpoints.save(self.checkpoints.numbered() if path is None else Path(path), infos)

    def load(
        self,
        path: str | Path,
        load_optimizer: bool | Mapping[str, bool] | None = True,
        map_location: Any = None,
        *others: Any,
        load_cfg: Mapping[str, bool] | None = None,
        strict: bool = True,
    ) -> Any:
        """Continue from a checkpoint of canter or of rsl_rl; returns the `infos` saved with it.

        `load_cfg` selects parts, as in rsl_rl 5.x: `{"actor": True}` loads the actor with its normaliser alone;
        "critic", "optimizer", "iteration" and "rnd" are the others. Without `strict`, tensors that one side lacks keep
        their values. By position, the arguments are those of rsl_rl 5.x (path, load_cfg, strict, map_location) or of
        3.x (path, load_optimizer, map_location).
        """
        if isinstance(load_optimizer, Mapping):  # rsl_rl's second argument
            load_optimizer, load_cfg = True, load_optimizer
        if isinstance(map_location, bool):
            strict, map_location, others = map_location, others[0] if others else None, others[1:]
        if others:
            raise TypeError(f"load takes path, load_cfg, strict and map_location; {others[0]!r} is one too many")
        if unknown := [name for name in load_cfg or () if name not in PARTS]:
            raise ValueError(f"load_cfg has no part {unknown[0]!r}; parts of a checkpoint are {', '.join(PARTS)}")
        path = Path(path)
        with damaged_content(path):
            return self.checkpoints.load(path, load_optimizer is not False, map_location, load_cfg, strict)

    def save_checkpoint(self, name: str) -> Path:
        """Write a checkpoint to a path relative to `save_dir`."""
        path = self.checkpoints.locate(name)
        self.save(path)
        return path

    def load_checkpoint(self, name: str, load_optimizer: bool = True) -> Any:
        """Continue from a checkpoint at a path relative to `save_dir`."""
        return self.load(self.checkpoints.locate(name), load_optimizer)

    def extra_state(self) -> dict[str, Any]:
        """State of the runner for exact continuation: statistics, current observations, the next evaluation's seed."""
        critic_obs = None if self.critic_obs is self.obs else self.critic_obs
        own = {"obs": self.obs, "critic_obs": critic_obs, "eval_seed": self.eval_seed, "num_evals": self.num_evals}
        executor = self.alg.executor
        return {**self.stats.state_dict(), **own, "executed": executor.past_iterations + executor.iteration}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `extra_state`, with new episodes where the environment's state could not be restored."""
        self.stats.load_state_dict(state, running=state["is_exact"])
        self.eval_seed, self.num_evals = state.get("eval_seed", self.eval_seed), state.get("num_evals", 0)
        self.alg.executor.past_iterations = state.get("executed", 0)  # of which one is that in which it compiles
        if state["is_exact"]:
            self.obs = state["obs"]
            self.critic_obs = state["obs"] if state["critic_obs"] is None else state["critic_obs"]
        else:
            self.restart_episodes()

    def close(self) -> None:
        """Close the loggers and the environments."""
        self.writer = self.writer and self.writer.close()
        for env in (self.env, self.eval_env):
            if env is not None:
                env.close()

    @property
    def policy(self) -> Any:
        """The policy that is trained."""
        return self.alg.policy

    @property
    def current_learning_iteration(self) -> int:
        """Number of completed iterations."""
        return self.iteration

    @current_learning_iteration.setter
    def current_learning_iteration(self, iteration: int) -> None:
        self.iteration = int(iteration)

    @property
    def logger(self) -> RunnerLogger:
        """The attributes of rsl_rl's logger that launch scripts and subclasses read."""
        return RunnerLogger(self)

    @property
    def gpu_world_size(self) -> int:
        """Number of processes that torchrun started."""
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def gpu_global_rank(self) -> int:
        """Number of this process."""
        return int(os.environ.get("RANK", "0"))

    @property
    def gpu_local_rank(self) -> int:
        """Number of this process on its machine."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def is_distributed(self) -> bool:
        """Whether torchrun started several processes."""
        return self.gpu_world_size > 1

    @property
    def disable_logs(self) -> bool:
        """Whether another process writes the logs."""
        return self.is_distributed and self.gpu_global_rank != 0


def warn_of_earlier_run(directory: Path) -> None:
    """Warn if a new run is about to write its files between those of another one."""
    if directory.is_dir() and (found := find_checkpoints(directory)):
        problem = f"{directory} has checkpoints of an earlier run, up to {found[-1][1].name}; this run adds its own"
        warnings.warn(f"{problem}: use another log_dir, or load a checkpoint to continue that run", stacklevel=4)


def open_env(env: Any, device: torch.device, plan: RunPlan) -> VecEnv:
    """Wrap an environment, with observations in the form that the policy of the plan takes."""
    wrapped = wrap_env(env, device, obs_groups=plan.obs_groups)
    if plan.clip_actions is not None:
        wrapped = ClipActions(wrapped, plan.clip_actions)
    both = (wrapped.obs_space, wrapped.critic_obs_space)
    has_dict = any(isinstance(space, spaces.Dict) for space in both)
    has_images = any(leaf.dtype == np.uint8 for space in both for _, leaf in tree_leaves(space))
    # The ActorCritic family takes one vector with segments; with images it flattens itself, so that bytes are stored.
    takes_vector = "class_name" in plan.policy and plan.policy["class_name"] != RSL_RL_MODELS
    return FlattenObs(wrapped) if has_dict and takes_vector and not has_images else wrapped
