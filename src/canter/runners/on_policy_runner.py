"""The on-policy iteration: collect a rollout, then learn from it."""

import time
from typing import Any

import torch
from torch import Tensor

from canter.algorithms.building import is_replaced, process_as_documented
from canter.algorithms.ppo import PPO
from canter.runners.run_log import train_metrics
from canter.runners.runner import Runner
from canter.utils.metrics import gpu_memory
from canter.utils.tree import Obs


class OnPolicyRunner(Runner):
    """Trains PPO and its variants. An iteration is one rollout and the update after it."""

    uses_replay = False

    def set_up(self) -> None:
        """Allocate the storage, unless the algorithm has one that fits, and the statistics."""
        names = ("num_envs", "num_transitions_per_env", "has_invalid_steps")
        needed = [self.env.num_envs, self.cfg.num_steps_per_env, self.env.has_invalid_steps]
        if [getattr(self.alg.storage, name, None) for name in names] != needed:
            self.alg.prepare(self.env, self.cfg.num_steps_per_env, **self.plan.storage)
        self.num_steps_per_env = self.alg.rollout.num_transitions_per_env
        self.keep_stats(0)  # the storage has the steps

    def start(self, init_at_random_ep_len: bool) -> None:
        """Read the first observation and remove the steps of an interrupted rollout."""
        super().start(init_at_random_ep_len)
        self.alg.rollout.clear()

    def run_iteration(self) -> dict[str, float]:
        """Collect, learn, and return the iteration's metrics."""
        self.callbacks.fire("pre_rollout", self)
        begin = time.perf_counter()
        with torch.inference_mode(self.cfg.inference_mode_rollout):
            self.collect()
        storage = self.alg.storage
        rollout = self.stats.rollout_metrics(storage.data, storage.env_steps())
        collected = time.perf_counter()
        self.callbacks.fire("post_rollout", self, rollout)
        self.callbacks.fire("pre_update", self)
        update = train_metrics(*self.alg.update(self.iteration))
        self.callbacks.fire("post_update", self, update)
        learned = time.perf_counter()
        times = {"time/collection": collected - begin, "time/learning": learned - collected}
        times["time/fps"] = self.steps_per_iteration() / max(learned - begin, 1e-9)
        return rollout | update | times | gpu_memory(self.device)

    def collect(self) -> None:
        """Collect one rollout and compute its returns."""
        alg, stats = self.alg, self.stats
        stats.first_step = self.tot_timesteps // self.num_envs
        # A `rollout_step` of a subclass or of the user runs as it is written, step by step.
        if getattr(self.rollout_step, "__func__", None) is not OnPolicyRunner.rollout_step:
            for _ in range(self.num_steps_per_env):
                self.obs, self.critic_obs, *_ = self.rollout_step(self.obs, self.critic_obs)
            alg.finish(self.critic_obs)
            return
        is_checked = self.iteration > 0 and not stats.has_extras and not stats.guard.is_immediate
        self.obs, self.critic_obs = alg.collect(
            self.env, self.obs, self.critic_obs, None if is_checked and self.env.capturable else stats.take
        )
        self.actions = alg.storage.data["actions"][alg.storage.newest][-1]

    def rollout_step(self, obs: Any, critic_obs: Any, **kwargs: Any) -> tuple[Obs, Obs, Tensor, Tensor, dict[str, Any]]:
        """Act, step the environments and store the step; the returned observations are raw."""
        self.actions = self.alg.act(obs, critic_obs)
        record = self.env.step(self.actions)
        self.stats.take(record)
        if is_replaced(self.alg, PPO, "process_env_step"):
            process_as_documented(self.alg, record)
        else:
            self.alg.process_step(record)
        return record.obs, record.critic_obs, record.reward, record.terminated | record.truncated, record.extras
