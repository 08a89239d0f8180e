"""The on-policy loop: collect a rollout, learn from it, report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from canter.algorithms import REGISTRY
from canter.algorithms.algorithm import Algorithm
from canter.envs.vec_env import StepRecord
from canter.modules.build import build_actor_critic
from canter.modules.normalizer import ReturnScaler
from canter.runners.run_config import find_algorithm, make_plan
from canter.runners.run_env import open_env, randomize_ages, seed_env
from canter.runners.runner import Runner
from canter.runners.step_stats import StepStats
from canter.utils.devices import resolve_device
from canter.utils.metrics import gpu_memory
from canter.utils.tree import Obs

LOSS_NAMES = {"surrogate_loss": "policy_loss", "entropy": "entropy_loss"}


class OnPolicyRunner(Runner):
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
        plan = make_plan(train_cfg, cfg, algorithm, agent, (actor_class, critic_class, actor_cfg, critic_cfg))
        overrides = {"log_interval": log_interval, "save_interval": save_interval, "eval_interval": eval_interval}
        overrides |= {"eval_episodes": eval_episodes, "device": None if device is None else str(device)}
        given = {name: value for name, value in overrides.items() if value is not None}
        plan.cfg = dataclasses.replace(plan.cfg, **given)  # the user's own stays as it is
        self.device = resolve_device(plan.cfg.device) if agent is None else agent.device
        self.env = open_env(env, self.device, plan)
        eval_env = None if eval_env is None else open_env(eval_env, self.device, plan)
        super().__init__(plan, log_dir, save_dir, eval_env, run_info, show_progress)
        self.alg = self._build_algorithm(obs_space, action_space) if agent is None else agent
        if not self._fits(self.alg.storage):
            self.alg.prepare(self.env, self.cfg.num_steps_per_env, **plan.storage)
        self.num_steps_per_env = self.alg.rollout.num_transitions_per_env
        self.stats = StepStats(self.env.num_envs, self.num_steps_per_env, self.device, self.cfg.extra_log_keys)
        self.alg.on_record = [self.stats.note]
        self.alg.executor.forget()  # a ready-made agent may have captured steps that note elsewhere
        self.obs: Obs | None = None
        self.critic_obs: Obs | None = None

    # ------------------------------------------------------------------ set-up
    def _build_algorithm(self, obs_space: spaces.Space | None, action_space: spaces.Space | None) -> Any:
        seed, policy = self.cfg.seed, self.plan.policy
        agent_class = REGISTRY[find_algorithm(self.plan.algorithm)].agent_class
        with torch.random.fork_rng(devices=[]):
            if seed is not None:
                torch.manual_seed(seed)
                seed_env(self.env, seed)
            if "actor_class" not in policy:
                actor_critic = build_actor_critic(self.env, policy["class_name"], policy)
                return agent_class(actor_critic, cfg=self.cfg, device=self.device)
            spaces_given = {"obs_space": obs_space, "action_space": action_space}
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
        if init_at_random_ep_len:
            randomize_ages(self.env, self.alg.generators["action"])
        if self.obs is None:
            with torch.inference_mode(self.cfg.inference_mode_rollout):
                self.obs, self.critic_obs = self.env.get_observations()
        self.alg.rollout.clear()
        self.stats.begin(self.obs, self.critic_obs, self._steps_so_far())

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
        for _ in range(self.num_steps_per_env):
            self.obs, self.critic_obs, *_ = self.rollout_step(self.obs, self.critic_obs)
        self.alg.compute_returns(self.critic_obs)

    def captures_rollouts(self) -> bool:
        """Whether stepping the environment can be part of a CUDA graph: nothing of a step is needed on the host."""
        is_own = type(self).rollout_step is OnPolicyRunner.rollout_step
        can = self.env.capturable and self.alg.executor.uses_graphs and is_own
        return can and self.iteration > 0 and not self.stats.has_extras

    def rollout_step(self, obs: Any, critic_obs: Any, **kwargs: Any) -> tuple[Obs, Obs, Tensor, Tensor, dict[str, Any]]:
        """Act, step, and hand the step to the algorithm; the observations returned are raw."""
        record = self.env.step(self.alg.act(obs, critic_obs))
        self.take_record(record)
        self.alg.process_step(record)
        return record.obs, record.critic_obs, record.reward, record.done, record.extras

    def take_record(self, record: StepRecord) -> None:
        """Guard and count one step."""
        self.stats.take(record, self._steps_so_far())

    def _steps_so_far(self) -> int:
        return self.tot_timesteps // self.env.num_envs

    def take_extras(self) -> dict[str, float]:
        """Means of the environment's extras since the last log."""
        return self.stats.take_extras()

    # ------------------------------------------------------------------ continuing
    def after_eval(self, was_reset: bool) -> None:
        """After a reset the next rollout starts from fresh observations, memories and episode counts."""
        if was_reset:
            with torch.inference_mode(self.cfg.inference_mode_rollout):
                self.obs, self.critic_obs = self.env.reset()
            self.policy.reset()
            self.stats.clear_running()
            for part in (part for module in self.alg.modules() for part in module.modules()):
                if isinstance(part, ReturnScaler):
                    part.returns.zero_()  # of episodes that were broken off

    def extra_state(self) -> dict[str, Any]:
        """Episode counts and the observation to act on next."""
        state = {**self.stats.state_dict(), "obs": self.obs, "critic_obs": None}
        if self.critic_obs is not self.obs:
            state["critic_obs"] = self.critic_obs
        return state

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Continue exactly, or with fresh episodes where the environment cannot be put back."""
        self.stats.load_state_dict(state, running=state["is_exact"])
        if state["is_exact"]:
            self.obs = state["obs"]
            self.critic_obs = state["obs"] if state["critic_obs"] is None else state["critic_obs"]
        else:
            self.after_eval(was_reset=True)

    @property
    def rewbuffer(self) -> Any:
        """Returns of the last 100 episodes."""
        return self.stats.tracker.rewbuffer

    @property
    def lenbuffer(self) -> Any:
        """Lengths of the last 100 episodes."""
        return self.stats.tracker.lenbuffer

    @property
    def rframebuffer(self) -> Any:
        """Rewards of the last 2000 steps that did not end an episode."""
        return self.stats.tracker.rframebuffer
