"""The training loop of every runner, with its logging, checkpoints, callbacks and evaluation."""

import contextlib
import signal
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import yaml
from gymnasium import spaces

from canter.algorithms.algorithm import Algorithm
from canter.algorithms.user_code import is_users
from canter.compat.names import RunnerNames
from canter.compat.training_dicts import complete
from canter.envs.workers import WorkerError
from canter.envs.wrap import wrap_env
from canter.runners import construction, ranks, run_log
from canter.runners.checkpoints import Checkpoints
from canter.runners.evaluation import check_widths, compare_spaces, evaluate
from canter.runners.health import TrainingHealth
from canter.runners.run_config import make_plan
from canter.runners.run_log import Callbacks, LearnResult, Progress, StopTraining
from canter.utils.distributed import RANKS
from canter.utils.files import RunLock, atomic_write
from canter.utils.logging import Logger
from canter.utils.memory import MemoryLimit, is_out_of_memory
from canter.utils.metrics import StepStats
from canter.utils.runtime import StopSignal, resolve_device


class Runner(RunnerNames, ABC):
    """Trains an algorithm on vectorised environments. A subclass defines one iteration and one environment step.

    It is created with a training dict, `Runner(env, train_cfg, log_dir, device)`; with a config object and network
    classes, `Runner(env, cfg=PPOConfig(...), actor_class=, critic_class=)`; or with an algorithm, `agent=`.
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
    has_stored_code = False
    """Whether the state of the code is in the run directory."""

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
        """Build the algorithm, its networks and its storage for an environment.

        Args:
            env: Any environment that `wrap_env` accepts, a function that makes one, or a name.
            train_cfg: Training dict, flat or with a `runner` section; or a config object or an algorithm. Without one
                the preset of the task, which also has the number of environments where `env` is a name.
            log_dir: Run directory; None writes nothing.
            device: Training device; None takes a GPU if there is one.
            cfg: A config object, such as `PPOConfig(gamma=0.98)`, instead of a training dict.
            algorithm: Registered name of the algorithm, if no config determines it.
            actor_class: Class of the actor; see `canter.modules.actors`.
            critic_class: Class of the critic.
            actor_cfg: Settings of the actor.
            critic_cfg: Settings of the critic.
            obs_space: Observation space of the networks; the environment's if None.
            action_space: Action space of the networks; the environment's if None.
            agent: A ready algorithm, instead of its class and settings.
            save_dir: Directory of the checkpoints; `log_dir` if None.
            log_interval: Iterations (off-policy: steps) between two log entries; the config's if None.
            save_interval: The same between two checkpoints.
            eval_env: Environments for evaluations; the training environments if None.
            eval_interval: Iterations (off-policy: steps) between two evaluations; the config's if None.
            eval_episodes: Episodes of an evaluation; the config's if None.
            run_info: Saved in config.yaml under `run`.
            show_progress: Show the progress of `learn` in the terminal.
            q_network_class: Class of DQN's network; see `canter.modules.q_networks`.
            q_network_cfg: Settings of DQN's network.
        """
        if isinstance(train_cfg, Algorithm):
            train_cfg, agent = None, train_cfg
        if agent is None and train_cfg is cfg is actor_class is critic_class is q_network_class is None:
            _, train_cfg = construction.preset_of(env, algorithm or self.default_algorithm)
            env = wrap_env(env, device, train_cfg["num_envs"]) if isinstance(env, str) else env
        networks = {"actor_class": actor_class, "critic_class": critic_class, "q_network_class": q_network_class}
        networks |= {"actor_cfg": actor_cfg, "critic_cfg": critic_cfg, "q_network_cfg": q_network_cfg}
        overrides = {"log_interval": log_interval, "save_interval": save_interval, "eval_interval": eval_interval}
        overrides |= {"eval_episodes": eval_episodes, "device": None if device is None else str(device)}
        self.plan = make_plan(train_cfg, cfg, algorithm, agent, networks, self.default_algorithm, self.uses_replay)
        self.cfg = self.plan.override(overrides, train_cfg)
        found = resolve_device(self.cfg.device) if agent is None else agent.device
        self.device: torch.device = RANKS.start(found, self.cfg.rank_timeout)
        self.env = construction.open_env(env, self.device, self.plan)
        self.num_envs: int = self.env.num_envs * RANKS.size
        """Environments of all ranks together."""
        complete(self.plan, self.env)
        self.eval_env = None if eval_env is None else construction.open_env(eval_env, self.device, self.plan)
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
        self.callbacks = Callbacks(self.cfg.callback_errors)
        self.checkpoints = Checkpoints(self)
        self.health = TrainingHealth(self)
        with MemoryLimit("the run"):
            alg = agent or construction.build_algorithm(self.plan, self.env, self.device, obs_space, action_space)
            self.alg = self.agent = alg
            check_widths(alg.policy, self.env)
            alg.trained_by = self
            alg.policy.obs_sets = getattr(self.env, "sets", None)
            self.callbacks.sync = alg.notice_changes
            self.eval_seed: int = alg.stream_seed
            self.set_up()
        if RANKS.size > 1:
            ranks.compare(self)

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
        construction.warn_of_unused(self.alg)
        if self.plan.resume:
            raise ValueError("the training dict says resume=True, but no checkpoint was loaded; call load(path) first")
        last = self.iteration + construction.count_iterations(self, num_learning_iterations, total_timesteps)
        self.horizon = max(last, self.planned_iterations() or 1)
        progress = Progress(self, trial)
        with (
            torch.inference_mode(False),
            torch.enable_grad(),  # learning needs gradients, whatever surrounds it
            RANKS.telling_errors(),
            contextlib.nullcontext() if self.save_dir is None or not RANKS.is_first else RunLock(self.save_dir) as lock,
            StopSignal() as stop,
            progress.console(last),
        ):
            self.checkpoints.lock = lock
            self.init_writer(init_at_random_ep_len)
            self.alg.adjust_learning_rate(self.iteration / self.horizon)
            self.alg.train_mode()
            self.alg.executor.expect_user_code(self.callbacks.has_users() or is_users(self) or self.alg.has_user_code())
            try:
                if RANKS.size > 1:
                    ranks.start(self, stop, trial)
                is_done = False
                while self.iteration < last and not ranks.are_over(stop, is_done):
                    is_done = self._iterate(progress)
                self.health.check_end(progress.newest)
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
        if stop.requested is not None and stop.requested in (signal.SIGTERM, signal.SIGHUP):
            raise SystemExit(128 + stop.requested)
        return progress.result()

    def _iterate(self, progress: Progress) -> bool:
        """Run an iteration; returns whether a callback, or in a single process the environment, ends the training."""
        self.callbacks.is_stop_asked = False
        try:
            self._one_iteration(progress)
        except StopTraining as error:
            if RANKS.size == 1:
                return True
            problem = "StopTraining was raised in the middle of an iteration, which several ranks cannot end together"
            raise RuntimeError(f"{problem}; raise it in a callback") from error
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise self.health.memory_error(error) from error
        return self.callbacks.is_stop_asked

    def _one_iteration(self, progress: Progress) -> None:
        self.callbacks.fire("pre_iteration", self)
        with self.health.explained_errors():
            metrics = self.run_iteration()
        self.health.check(metrics)
        self.iteration += 1
        self.tot_timesteps += self.steps_per_iteration()
        self.alg.executor.progress = self.iteration / self.horizon
        self.alg.adjust_learning_rate(self.iteration / self.horizon)
        if metrics:
            self.evaluation()
            metrics |= self.robot_metrics()
        is_pruned = progress.report(metrics)
        if self.is_due(self.save_interval) or self.checkpoints.is_retry_due:
            self.checkpoints.save_periodic()
        if is_pruned:
            self.checkpoints.save_periodic()
            self.writer = self.writer and self.writer.close()
            raise run_log.pruned_exception(f"pruned at iteration {self.iteration}")

    def start(self, init_at_random_ep_len: bool) -> None:
        """Read the observation from which the next rollout starts."""
        if init_at_random_ep_len:
            construction.randomize_ages(self.env, self.alg.generators["action"])
        if self.obs is None:
            with torch.inference_mode(self.cfg.inference_mode_rollout):
                self.obs, self.critic_obs = self.env.get_observations()
        first = {"first_obs": self.obs, "first_critic_obs": None if self.critic_obs is self.obs else self.critic_obs}
        self.stats.guard.check(self.tot_timesteps // self.num_envs, **first)
        self.stats.tracker.read()  # the steps of an interrupted rollout

    def planned_iterations(self) -> int | None:
        """Iterations of the whole run according to the settings."""
        return self.cfg.max_iterations

    def is_due(self, interval: int | None) -> bool:
        """Whether the completed iterations are a multiple of `interval`."""
        return bool(interval) and self.iteration % interval == 0  # pyright: ignore[reportOperatorIssue]

    def eval(self, num_episodes: int = 10, max_steps: int | None = None) -> dict[str, float]:
        """Run deterministic episodes, the same number in every environment, and return their `eval/` metrics.

        Without an `eval_env` they run in the training environment, whose state is restored, or which is reset.
        """
        return evaluate(self, num_episodes, max_steps)

    def restart_episodes(self) -> None:
        """Reset the environments, the memories of the algorithm and the statistics of unfinished episodes."""
        with torch.inference_mode(self.cfg.inference_mode_rollout):
            self.obs, self.critic_obs = self.env.reset()
        self.alg.end_episodes()
        self.stats.clear_running()

    def init_writer(self, init_at_random_ep_len: bool = False) -> None:
        """Open the logger if there is a run directory, and read the observation from which the next rollout starts."""
        run_log.open_log(self)
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
        return run_log.log_metrics(self, locs, width, pad)

    def flush(self) -> None:
        """Flush every logging backend."""
        if self.writer is not None:
            self.writer.flush()

    def save(self, path: str | Path | None = None, infos: Any = None) -> None:
        """Write a checkpoint; without a path model_<completed iterations>.pt in `save_dir`."""
        self.checkpoints.save(self.checkpoints.numbered() if path is None else Path(path), infos)

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
