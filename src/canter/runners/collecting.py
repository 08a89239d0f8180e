"""What runners have in common that step an environment with an algorithm: set-up, the step, and continuing exactly."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from canter.algorithms import REGISTRY
from canter.envs.vec_env import StepRecord
from canter.modules.normalizer import ReturnScaler
from canter.runners.run_config import RunPlan, find_algorithm
from canter.runners.run_env import open_env, randomize_ages, seed_env
from canter.runners.runner import Runner
from canter.runners.step_stats import StepStats
from canter.utils.runtime import resolve_device
from canter.utils.tree import Obs


class CollectingRunner(Runner):
    """Steps an environment and hands every step to the algorithm."""

    stats: StepStats
    obs: Obs | None
    critic_obs: Obs | None

    def set_up(
        self,
        env: Any,
        plan: RunPlan,
        agent: Any,
        *,
        log_dir: str | Path | None,
        save_dir: str | Path | None,
        eval_env: Any,
        run_info: Mapping[str, Any] | None,
        show_progress: bool,
        obs_space: spaces.Space | None,
        action_space: spaces.Space | None,
        overrides: Mapping[str, Any],
    ) -> None:
        """Open the environments and build the algorithm, if it is not there yet."""
        given = {name: value for name, value in overrides.items() if value is not None}
        if "device" in given:
            given["device"] = str(given["device"])
        plan.cfg = dataclasses.replace(plan.cfg, **given)  # the user's own stays as it is
        self.device = resolve_device(plan.cfg.device) if agent is None else agent.device
        self.env = open_env(env, self.device, plan)
        eval_env = None if eval_env is None else open_env(eval_env, self.device, plan)
        super().__init__(plan, log_dir, save_dir, eval_env, run_info, show_progress)
        self.obs = self.critic_obs = None
        self.alg = self._build_algorithm(obs_space, action_space) if agent is None else agent

    def _build_algorithm(self, obs_space: spaces.Space | None, action_space: spaces.Space | None) -> Any:
        agent_class = REGISTRY[find_algorithm(self.plan.algorithm)].agent_class
        with torch.random.fork_rng(devices=[]):
            if self.cfg.seed is not None:
                torch.manual_seed(self.cfg.seed)
                seed_env(self.env, self.cfg.seed)
            return self.new_algorithm(agent_class, {"obs_space": obs_space, "action_space": action_space})

    @abstractmethod
    def new_algorithm(self, agent_class: Any, spaces_given: Mapping[str, Any]) -> Any:
        """The algorithm that the plan means."""

    def keep_stats(self, num_steps: int) -> None:
        """Let the algorithm's steps be noted, `num_steps` of them between two reads."""
        self.stats = StepStats(self.env.num_envs, num_steps, self.device, self.cfg.extra_log_keys)
        self.alg.on_record = [self.stats.note]
        self.alg.executor.forget()  # a ready-made agent may have captured steps that note elsewhere

    def start(self, init_at_random_ep_len: bool) -> None:
        """The observation to begin with."""
        if init_at_random_ep_len:
            randomize_ages(self.env, self.alg.generators["action"])
        if self.obs is None:
            with torch.inference_mode(self.cfg.inference_mode_rollout):
                self.obs, self.critic_obs = self.env.get_observations()
        self.stats.begin(self.obs, self.critic_obs, self._steps_so_far())

    # ------------------------------------------------------------------ one step
    @abstractmethod
    def choose_actions(self, obs: Any, critic_obs: Any) -> Tensor:
        """What the algorithm does in these states while it collects."""

    def rollout_step(self, obs: Any, critic_obs: Any, **kwargs: Any) -> tuple[Obs, Obs, Tensor, Tensor, dict[str, Any]]:
        """Act, step, and hand the step to the algorithm; the observations returned are raw."""
        record = self.env.step(self.choose_actions(obs, critic_obs))
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
        """After a reset the next step starts from fresh observations, memories and episode counts."""
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
