"""The off-policy iteration: one step of the environments, then learning from the replay buffer."""

import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from canter.compat.arguments import documented
from canter.runners import construction
from canter.runners.run_log import LearnResult
from canter.runners.runner import Runner
from canter.utils.distributed import RANKS
from canter.utils.metrics import gpu_memory
from canter.utils.tree import Obs

MOST_STEPS = 1000  # vector steps between two reads of the episode statistics


class OffPolicyRunner(Runner):
    """Trains DQN, SAC and TD3. An iteration is one step of every environment and the learning that is due after it.

    `cfg` is a config object, whose type determines the algorithm, or a training dict. Intervals are environment steps.
    Metrics are read when a log entry is due; callbacks in between get `rollout/mean_reward` alone.
    """

    default_algorithm = "dqn"
    uses_replay = True
    ways_to_set_length = "learn(total_timesteps) or max_timesteps"

    @documented(
        *(
            "env",
            "cfg",
            "algorithm",
            "q_network_class",
            "obs_space",
            "action_space",
            "q_network_cfg",
            "agent",
            "log_dir",
        ),
        *("save_dir", "device", "log_interval", "save_interval", "actor_class", "critic_class", "actor_cfg"),
        "critic_cfg",
    )
    def __init__(self, env: Any, cfg: Any = None, algorithm: str | None = None, **options: Any) -> None:
        super().__init__(env, cfg, algorithm=algorithm, **options)

    def set_up(self) -> None:
        """Allocate the statistics."""
        self.num_kept = min(MOST_STEPS, -(-max(1, self.log_interval) // self.num_envs))
        self.keep_stats(self.num_kept)
        self.learning_time = self.collection_time = 0.0
        self.log_start = (0, 0.0)  # timesteps and clock at the last log entry
        self.mean_rewards: list[tuple[float, int]] = []
        """Mean reward and number of vector steps of every read since the last log entry."""

    def planned_iterations(self) -> int | None:
        """Vector steps of the whole run according to the settings."""
        total = self.cfg.max_timesteps
        return None if total is None else -(-total // self.num_envs)

    def is_due(self, interval: int | None) -> bool:
        """Whether the last vector step reached a multiple of `interval` environment steps."""
        before = self.tot_timesteps - self.num_envs
        return bool(interval) and self.tot_timesteps // interval > before // interval  # pyright: ignore[reportOptionalOperand]

    def learn(  # pyright: ignore[reportIncompatibleMethodOverride] (this order is documented)
        self, total_timesteps: int | None = None, init_at_random_ep_len: bool = False, trial: Any = None, **length: Any
    ) -> LearnResult:
        """Train for more environment steps, rounded up to whole vector steps, or for `num_learning_iterations` more."""
        end = self.iteration + construction.count_iterations(
            self, length.get("num_learning_iterations"), total_timesteps
        )
        left = (max(end, self.planned_iterations() or 0) - self.iteration) * self.env.num_envs  # steps of this rank
        needed = self.alg.steps_before_learning - self.alg.num_stored
        if 0 < left < needed and self.cfg.offline_data is None and RANKS.is_first:
            settings = f"learning_starts={self.alg.learning_starts}, batch_size={self.alg.batch_size}"
            problem = f"the {left} steps of this training only fill the replay buffer, learning begins after {needed:g}"
            warnings.warn(f"{problem} ({settings})", stacklevel=2)
        length |= {"init_at_random_ep_len": init_at_random_ep_len, "trial": trial}
        return super().learn(total_timesteps=total_timesteps, **length)

    def start(self, init_at_random_ep_len: bool) -> None:
        """Allocate the replay buffer and read the first observation; fill the buffer from `offline_data`."""
        self.alg.prepare()
        super().start(init_at_random_ep_len)
        if self.cfg.offline_data is not None and self.alg.num_stored == 0:
            self.alg.fill(self.cfg.offline_data)
            if self.tot_timesteps == 0:
                self.alg.train(self.cfg.offline_gradient_steps)
        self.log_start = (self.tot_timesteps, time.perf_counter())

    def run_iteration(self) -> dict[str, float]:
        """Step, learn if that is due, and read the metrics if a log entry is due."""
        begin = time.perf_counter()
        self.callbacks.fire("pre_rollout", self)
        self.stats.first_step = self.tot_timesteps // self.num_envs - self.stats.tracker.step
        with torch.inference_mode(self.cfg.inference_mode_rollout):
            self.obs, self.critic_obs, *_ = self.rollout_step(self.obs, self.critic_obs)
        self.callbacks.fire("post_rollout", self, {})
        collected = time.perf_counter()
        self.collection_time += collected - begin
        settings = self.alg.cfg
        if (self.iteration + 1) % settings.train_freq == 0 and self.alg.can_learn:
            self.callbacks.fire("pre_update", self)
            steps = settings.gradient_steps
            self.alg.train(settings.train_freq * self.num_envs if steps < 0 else steps)
            self.callbacks.fire("post_update", self, {})
            self.learning_time += time.perf_counter() - collected
        return self._read()

    def rollout_step(self, obs: Any, critic_obs: Any, **kwargs: Any) -> tuple[Obs, Obs, Tensor, Tensor, dict[str, Any]]:
        """Explore, step the environments and store the step; the returned observations are raw."""
        self.actions = self.alg.explore(obs, critic_obs)
        record = self.env.step(self.actions)
        self.stats.take(record)
        self.alg.process_step(record)
        done = record.terminated | record.truncated
        return record.obs, record.critic_obs, record.reward, done, record.extras

    def _read(self) -> dict[str, float]:
        """Metrics since the last log entry, if one is due; reads the episode statistics before their buffer is full."""
        after = self.tot_timesteps + self.num_envs
        is_due = bool(self.log_interval) and after // self.log_interval > self.tot_timesteps // self.log_interval
        if not is_due and self.stats.tracker.step < self.num_kept:
            return {}
        metrics = self.count_episodes()
        if not is_due:
            return {}
        steps = sum(count for _, count in self.mean_rewards)
        metrics["rollout/mean_reward"] = sum(mean * count for mean, count in self.mean_rewards) / max(1, steps)
        self.mean_rewards.clear()
        metrics |= self.alg.report() | self.alg.exploration() | {"buffer/size": float(len(self.alg.prepare()))}
        (before, begin), self.log_start = self.log_start, (after, time.perf_counter())
        metrics["time/fps"] = (after - before) / max(self.log_start[1] - begin, 1e-9)
        metrics |= {"time/collection": self.collection_time, "time/learning": self.learning_time}
        self.learning_time = self.collection_time = 0.0
        return metrics | gpu_memory(self.device)

    def count_episodes(self) -> dict[str, float]:
        """Add the steps since the last read to the episode statistics."""
        count = self.stats.tracker.step
        if not count:
            return {}
        is_flat = isinstance(self.obs, Tensor)
        metrics = self.stats.rollout_metrics({"observations": self.obs.unsqueeze(0)} if is_flat else {})
        if self.log_interval:  # else they are never used
            self.mean_rewards.append((metrics["rollout/mean_reward"], count))
        return metrics

    def flush(self) -> None:
        """Count the last episodes and flush every logging backend."""
        self.count_episodes()
        super().flush()

    def extra_state(self) -> dict[str, Any]:
        """State of the runner for exact continuation, with the rewards since the last log entry."""
        self.count_episodes()
        return super().extra_state() | {"mean_rewards": [list(pair) for pair in self.mean_rewards]}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `extra_state`."""
        super().load_extra_state(state)
        self.mean_rewards = [(mean, count) for mean, count in state["mean_rewards"]]
