"""The on-policy iteration: collect a rollout, then learn from it."""

import time
from typing import Any

import torch
from torch import Tensor

from canter.envs.vec_env import StepRecord
from canter.runners.run_log import train_metrics
from canter.runners.runner import Runner
from canter.utils.metrics import gpu_memory
from canter.utils.tree import Obs

# Steps stored in a row: the code stays in the processor's caches, which a step of the environments would empty.
MAX_WAITING_STEPS = 32


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
        self.keep_stats(self.num_steps_per_env)

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
        rollout = self.stats.rollout_metrics(self.alg.storage.data)
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
        alg, env = self.alg, self.env
        self.stats.first_step = self.tot_timesteps // self.num_envs
        # A `rollout_step` of a subclass or of the user runs as it is written, step by step.
        is_overridden = getattr(self.rollout_step, "__func__", None) is not OnPolicyRunner.rollout_step
        # Where the host needs nothing of a step, the whole rollout is one CUDA graph.
        is_captured = not is_overridden and env.capturable and self.iteration > 0 and not self.stats.has_extras
        if is_captured and alg.executor.uses_graphs and "rollout" not in alg.executor.eager_only:
            self.obs, self.critic_obs = alg.collect(env, self.obs, self.critic_obs)
            self.stats.tracker.step = self.num_steps_per_env
            return
        can_wait = not is_overridden and alg.steps_can_wait
        overlaps = can_wait and env.overlaps  # a step is stored while the environments compute the next one
        stores_many = can_wait and env.makes_new_records and self.device.type == "cpu"  # in a row
        alg.max_waiting_steps = MAX_WAITING_STEPS if overlaps or stores_many else 0
        take_step = self.overlapping_step if overlaps else env.step
        try:
            for _ in range(self.num_steps_per_env):
                if is_overridden:
                    self.obs, self.critic_obs, *_ = self.rollout_step(self.obs, self.critic_obs)
                    continue
                self.actions = alg.act(self.obs, self.critic_obs)
                record = take_step(self.actions)
                self.stats.take(record)  # checked before the policy acts on it
                alg.process_step(record)
                self.obs, self.critic_obs = record.obs, record.critic_obs
            alg.store_waiting_steps()
        finally:
            alg.max_waiting_steps = 0
            alg.waiting_steps.clear()
        alg.compute_returns(self.critic_obs)

    def overlapping_step(self, actions: Tensor) -> StepRecord:
        """Step the environments, and store the step before while they compute."""
        self.env.send(actions)
        try:
            self.alg.store_waiting_steps()
        finally:  # a step that was begun must be ended, also after an error
            record = self.env.recv()
        return record

    def rollout_step(self, obs: Any, critic_obs: Any, **kwargs: Any) -> tuple[Obs, Obs, Tensor, Tensor, dict[str, Any]]:
        """Act, step the environments and store the step; the returned observations are raw."""
        self.actions = self.alg.act(obs, critic_obs)
        record = self.env.step(self.actions)
        self.stats.take(record)
        self.alg.process_step(record)
        return record.obs, record.critic_obs, record.reward, record.terminated | record.truncated, record.extras
