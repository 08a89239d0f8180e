"""The on-policy loop: collect a rollout, learn from it, report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from canter.algorithms.algorithm import Algorithm
from canter.envs.vec_env import StepRecord
from canter.modules.build import build_actor_critic
from canter.runners.collecting import CollectingRunner
from canter.runners.run_config import make_plan
from canter.runners.runner import LearnResult
from canter.utils.metrics import gpu_memory

LOSS_NAMES = {"surrogate_loss": "policy_loss", "entropy": "entropy_loss"}


class OnPolicyRunner(CollectingRunner):
    """Trains PPO and its family.

    Two ways in: `OnPolicyRunner(env, train_cfg, log_dir, device)` with a dict, and
    `OnPolicyRunner(env=, algorithm="ppo", actor_class=, critic_class=, cfg=PPOConfig(...))`, or with a ready `agent=`.

    Args:
        env: Anything `wrap_env` knows.
        train_cfg: Training dict, flat or with a `runner` section; or an algorithm.
        log_dir: The run directory; None writes nothing.
        device: Where to learn; None takes a GPU if there is one.
        cfg: Config object instead of a dict.
        algorithm: Registered name.
        actor_class: Class of the actor; see `canter.modules.actors`.
        critic_class: Class of the critic.
        actor_cfg: Settings of the actor.
        critic_cfg: Settings of the critic.
        obs_space: Observation space, if not the environment's.
        action_space: Action space, if not the environment's.
        agent: A ready algorithm.
        save_dir: Where checkpoints go, if not to `log_dir`.
        log_interval: Overrides the config's.
        save_interval: Overrides the config's.
        eval_env: A separate environment for evaluation.
        eval_interval: Overrides the config's.
        eval_episodes: Overrides the config's.
        run_info: Kept in config.yaml under `run`.
        show_progress: Show progress on the console.
    """

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
    ) -> None:
        if isinstance(train_cfg, Algorithm):
            train_cfg, agent = None, train_cfg
        networks = {"actor_class": actor_class, "critic_class": critic_class}
        networks |= {"actor_cfg": actor_cfg, "critic_cfg": critic_cfg}
        plan = make_plan(train_cfg, cfg, algorithm, agent, networks)
        overrides = {"log_interval": log_interval, "save_interval": save_interval, "eval_interval": eval_interval}
        overrides |= {"eval_episodes": eval_episodes, "device": device}
        self.set_up(
            env, plan, agent, log_dir=log_dir, save_dir=save_dir, eval_env=eval_env, run_info=run_info,
            show_progress=show_progress, obs_space=obs_space, action_space=action_space, overrides=overrides,
        )  # fmt: skip
        if not self._fits(self.alg.storage):
            self.alg.prepare(self.env, self.cfg.num_steps_per_env, **plan.storage)
        self.num_steps_per_env = self.alg.rollout.num_transitions_per_env
        self.keep_stats(self.num_steps_per_env)

    # ------------------------------------------------------------------ set-up
    def new_algorithm(self, agent_class: Any, spaces_given: Mapping[str, Any]) -> Any:
        """On a policy of the ActorCritic family, or on an actor and a critic given apart."""
        policy = self.plan.policy
        if "actor_class" not in policy:
            actor_critic = build_actor_critic(self.env, policy["class_name"], policy)
            return agent_class(actor_critic, cfg=self.cfg, device=self.device)
        return agent_class(env=self.env, cfg=self.cfg, device=self.device, **policy, **spaces_given)

    def _fits(self, storage: Any) -> bool:
        """Whether what a ready-made algorithm brings along is for these environments."""
        return (
            storage is not None
            and storage.num_envs == self.env.num_envs
            and storage.num_transitions_per_env == self.cfg.num_steps_per_env
            and storage.has_invalid_steps == self.env.has_invalid_steps
        )

    def steps_per_iteration(self) -> int:
        """T times N."""
        return self.num_steps_per_env * self.env.num_envs

    def start(self, init_at_random_ep_len: bool) -> None:
        """The observation to begin with, and nothing left of a rollout that was interrupted."""
        super().start(init_at_random_ep_len)
        self.alg.rollout.clear()

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
        count = self.count_iterations(num_learning_iterations, total_timesteps)
        return self.run(count, init_at_random_ep_len, trial)

    # ------------------------------------------------------------------ one iteration
    def run_iteration(self) -> dict[str, float]:
        """Collect, learn, and return the iteration's metrics."""
        self.fire("pre_rollout")
        begin = time.perf_counter()
        with torch.inference_mode(self.cfg.inference_mode_rollout):
            self.collect()
        seen = ("observations", "privileged_observations", "rewards")
        data = {name: value for name, value in self.alg.rollout.data.items() if name.startswith(seen)}
        rollout = self.stats.rollout_metrics(self._steps_so_far(), data)
        collected = time.perf_counter()
        self.fire("post_rollout", rollout)
        self.fire("pre_update")
        losses, stats = self.alg.update(self.iteration)
        update = {f"train/{LOSS_NAMES.get(name, name)}": value for name, value in losses.items()}
        update |= {name if "/" in name else f"train/{name}": value for name, value in stats.items()}
        self.fire("post_update", update)
        learned = time.perf_counter()
        times = {
            "time/collection": collected - begin,
            "time/learning": learned - collected,
            "time/fps": self.steps_per_iteration() / max(learned - begin, 1e-9),
        }
        return rollout | update | times | gpu_memory(self.device)

    def collect(self) -> None:
        """One rollout and its returns; as a single graph where environment and learner allow it."""
        if self.captures_rollouts():
            self.obs, self.critic_obs = self.alg.collect(self.env, self.obs, self.critic_obs)
            self.stats.tracker.step = self.num_steps_per_env
            return
        if self.env.overlaps and self.alg.can_lag and self.steps_are_plain:
            self.overlapping_steps()
        else:
            for _ in range(self.num_steps_per_env):
                self.obs, self.critic_obs, *_ = self.rollout_step(self.obs, self.critic_obs)
        self.alg.compute_returns(self.critic_obs)

    @property
    def steps_are_plain(self) -> bool:
        """Whether a step is this class's, and may be taken apart."""
        return type(self).rollout_step is OnPolicyRunner.rollout_step

    def overlapping_steps(self) -> None:
        """Steps that are each kept while the environments are already busy with the next; the same numbers."""
        ready: tuple[StepRecord, dict[str, Any]] | None = None
        for _ in range(self.num_steps_per_env):
            self.env.send(self.choose_actions(self.obs, self.critic_obs))
            acted = self.alg.take_transition()
            try:
                if ready is not None:
                    self.alg.process_step(*ready)
            finally:  # a step that was begun is ended, whatever happens
                record = self.env.recv()
            self.take_record(record)  # guarded before anyone acts on it
            self.obs, self.critic_obs = record.obs, record.critic_obs
            ready = record, acted
        assert ready is not None
        self.alg.process_step(*ready)

    def captures_rollouts(self) -> bool:
        """Whether stepping the environment can be part of a CUDA graph: nothing of a step is needed on the host."""
        can = self.env.capturable and self.alg.executor.uses_graphs and self.steps_are_plain
        return can and self.iteration > 0 and not self.stats.has_extras

    def choose_actions(self, obs: Any, critic_obs: Any) -> Tensor:
        """A sample of the policy."""
        return self.alg.act(obs, critic_obs)
