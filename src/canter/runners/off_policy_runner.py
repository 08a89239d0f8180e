"""The off-policy loop: step the environments once, learn from replay, report now and then."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from canter.algorithms.algorithm import Algorithm
from canter.runners.collecting import CollectingRunner
from canter.runners.run_config import make_plan
from canter.runners.runner import LearnResult
from canter.utils.metrics import gpu_memory

MOST_STEPS = 1000  # vector steps between two reads of the episode statistics


class OffPolicyRunner(CollectingRunner):
    """Trains DQN, SAC and TD3. An iteration is one step of every environment and the learning that is due after it.

    Intervals are environment steps. Metrics are read when a log entry is due; callbacks in between get none.

    Args:
        env: Anything `wrap_env` knows.
        cfg: Config object, whose type says the algorithm, or a training dict.
        algorithm: Registered name, if no config says it.
        q_network_class: Class of DQN's network; see `canter.modules.q_networks`.
        obs_space: Observation space, if not the environment's.
        action_space: Action space, if not the environment's.
        q_network_cfg: Settings of DQN's network.
        agent: A ready algorithm.
        log_dir: The run directory; None writes nothing.
        save_dir: Where checkpoints go, if not to `log_dir`.
        device: Where to learn; None takes a GPU if there is one.
        log_interval: Overrides the config's.
        save_interval: Overrides the config's.
        actor_class: Class of the actor of SAC and TD3.
        critic_class: Class of their critics.
        actor_cfg: Settings of the actor.
        critic_cfg: Settings of the critics.
        eval_env: A separate environment for evaluation.
        eval_interval: Overrides the config's.
        eval_episodes: Overrides the config's.
        run_info: Kept in config.yaml under `run`.
        show_progress: Show progress on the console.
    """

    ways_to_say = "learn(total_timesteps) or max_timesteps"

    def __init__(
        self,
        env: Any,
        cfg: Any = None,
        algorithm: str | None = None,
        q_network_class: Any = None,
        obs_space: spaces.Space | None = None,
        action_space: spaces.Space | None = None,
        q_network_cfg: Mapping[str, Any] | None = None,
        agent: Any = None,
        log_dir: str | Path | None = None,
        save_dir: str | Path | None = None,
        device: torch.device | str | None = None,
        log_interval: int | None = None,
        save_interval: int | None = None,
        actor_class: Any = None,
        critic_class: Any = None,
        actor_cfg: Mapping[str, Any] | None = None,
        critic_cfg: Mapping[str, Any] | None = None,
        *,
        eval_env: Any = None,
        eval_interval: int | None = None,
        eval_episodes: int | None = None,
        run_info: Mapping[str, Any] | None = None,
        show_progress: bool = True,
    ) -> None:
        if isinstance(cfg, Algorithm):
            cfg, agent = None, cfg
        networks = {"q_network_class": q_network_class, "q_network_cfg": q_network_cfg, "actor_class": actor_class}
        networks |= {"critic_class": critic_class, "actor_cfg": actor_cfg, "critic_cfg": critic_cfg}
        plan = make_plan(cfg, None, algorithm, agent, networks, default="dqn")
        overrides = {"log_interval": log_interval, "save_interval": save_interval, "eval_interval": eval_interval}
        overrides |= {"eval_episodes": eval_episodes, "device": device}
        self.set_up(
            env, plan, agent, log_dir=log_dir, save_dir=save_dir, eval_env=eval_env, run_info=run_info,
            show_progress=show_progress, obs_space=obs_space, action_space=action_space, overrides=overrides,
        )  # fmt: skip
        per_log = -(-max(1, self.log_interval) // self.env.num_envs)
        self.num_kept = min(MOST_STEPS, per_log)
        self.keep_stats(self.num_kept)
        self.learning_time = self.collection_time = 0.0
        self.first_of_log: tuple[int, float] | None = None
        self.mean_rewards: list[tuple[float, int]] = []
        """Mean reward and number of vector steps of every read since the last log entry."""

    def new_algorithm(self, agent_class: Any, spaces_given: Mapping[str, Any]) -> Any:
        """On the environment, with the networks that were given."""
        return agent_class(self.env, self.cfg, device=self.device, **self.plan.policy, **spaces_given)

    def steps_per_iteration(self) -> int:
        """One step of every environment."""
        return self.env.num_envs

    def planned_iterations(self) -> int | None:
        """Vector steps of the whole run that the settings say."""
        total = self.cfg.max_timesteps
        return None if total is None else -(-total // self.env.num_envs)

    def is_due(self, interval: int | None) -> bool:
        """Whether the last step crossed a multiple of so many environment steps."""
        before = self.tot_timesteps - self.env.num_envs
        return bool(interval) and self.tot_timesteps // interval > before // interval  # pyright: ignore[reportOptionalOperand]

    def learn(
        self,
        total_timesteps: int | None = None,
        init_at_random_ep_len: bool = False,
        trial: Any = None,
        *,
        num_learning_iterations: int | None = None,
    ) -> LearnResult:
        """Train for more environment steps, rounded up to whole vector steps.

        Args:
            total_timesteps: Environment steps to add.
            init_at_random_ep_len: Start episodes at random ages, so that they do not all end together.
            trial: An Optuna trial or a Ray-style callable that is told whenever a log entry is due.
            num_learning_iterations: Vector steps to add, instead.
        """
        count = self.count_iterations(num_learning_iterations, total_timesteps)
        return self.run(count, init_at_random_ep_len, trial)

    def start(self, init_at_random_ep_len: bool) -> None:
        """The observation to begin with, and the replay buffer, which is refused here if it does not fit."""
        self.alg.prepare()
        super().start(init_at_random_ep_len)
        self.first_of_log = None
        if self.cfg.offline_data is not None and self.alg.num_stored == 0:
            self.alg.fill(self.cfg.offline_data)
            if self.tot_timesteps == 0:
                self.alg.train(self.cfg.offline_gradient_steps)

    # ------------------------------------------------------------------ one iteration
    def run_iteration(self) -> dict[str, float]:
        """Step, learn if that is due, and read the metrics if a log entry is."""
        begin = time.perf_counter()
        if self.first_of_log is None:
            self.first_of_log = (self.tot_timesteps, begin)
        self.fire("pre_rollout")
        with torch.inference_mode(self.cfg.inference_mode_rollout):
            self.obs, self.critic_obs, *_ = self.rollout_step(self.obs, self.critic_obs)
        self.fire("post_rollout", {})
        collected = time.perf_counter()
        self.collection_time += collected - begin
        if (self.iteration + 1) % self.alg.train_freq == 0 and self.alg.can_learn:
            self.fire("pre_update")
            steps = self.alg.gradient_steps
            self.alg.train(self.alg.train_freq * self.env.num_envs if steps < 0 else steps)
            self.fire("post_update", {})
            self.learning_time += time.perf_counter() - collected
        return self._read()

    def choose_actions(self, obs: Any, critic_obs: Any) -> Tensor:
        """The algorithm's own exploration."""
        return self.alg.explore(obs, critic_obs)

    def _read(self) -> dict[str, float]:
        """The metrics since the last log entry, if one is due; the episode statistics before they overflow."""
        after = self.tot_timesteps + self.env.num_envs
        is_due = bool(self.log_interval) and after // self.log_interval > self.tot_timesteps // self.log_interval
        if not is_due and self.stats.tracker.step < self.num_kept:
            return {}
        metrics = self.count_episodes()
        if not is_due:
            return {}
        steps = sum(count for _, count in self.mean_rewards)
        metrics["rollout/mean_reward"] = sum(mean * count for mean, count in self.mean_rewards) / max(1, steps)
        self.mean_rewards.clear()
        kept = {"buffer/size": float(len(self.alg.prepare()))}
        return (
            metrics | self.alg.report() | self.alg.exploration() | kept | self._times(after) | gpu_memory(self.device)
        )

    def count_episodes(self) -> dict[str, float]:
        """Take the steps since the last read into the episode statistics."""
        newest = {"observations": self.obs} if isinstance(self.obs, Tensor) else {}
        count = self.stats.tracker.step
        metrics = self.stats.rollout_metrics(
            self._steps_so_far(), {name: leaf.unsqueeze(0) for name, leaf in newest.items()}
        )
        if count:
            self.mean_rewards.append((metrics["rollout/mean_reward"], count))
        return metrics

    def _times(self, after: int) -> dict[str, float]:
        assert self.first_of_log is not None
        steps, begin = self.first_of_log
        now = time.perf_counter()
        times = {"time/collection": self.collection_time, "time/learning": self.learning_time}
        self.first_of_log = (after, now)
        self.learning_time = self.collection_time = 0.0
        return times | {"time/fps": (after - steps) / max(now - begin, 1e-9)}

    def flush(self) -> None:
        """Count the last episodes too, and let every backend write what it holds back."""
        if self.stats.tracker.step:
            self.count_episodes()
        super().flush()

    def extra_state(self) -> dict[str, Any]:
        """The rewards since the last log entry besides."""
        if self.stats.tracker.step:
            self.count_episodes()
        return super().extra_state() | {"mean_rewards": [list(pair) for pair in self.mean_rewards]}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Continue exactly, or with fresh episodes where the environment cannot be put back."""
        super().load_extra_state(state)
        self.mean_rewards = [(mean, count) for mean, count in state["mean_rewards"]]
