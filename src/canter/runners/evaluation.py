"""Deterministic policies and the statistics of their episodes."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.envs.vec_env import VecEnv
from canter.modules.policy import Hidden, Policy, batch_size
from canter.utils.tree import Obs


class InferencePolicy:
    """`actions = policy(obs)`: deterministic actions for raw observations; keeps its own recurrent state.

    `actor_obs` takes the actor's part of a mapping of observation groups, a TensorDict for example. Resetting the
    policy for some environments resets this state too.
    """

    def __init__(self, policy: Policy, actor_obs: Callable[[Any], Obs] | None = None) -> None:
        self.policy, self.actor_obs = policy, actor_obs
        self.hidden: Hidden | None = None
        policy.followers.add(self)

    @torch.no_grad()
    def __call__(self, obs: Any) -> Tensor:
        """Return the actions of one step."""
        if self.actor_obs is not None and isinstance(obs, Mapping):
            obs = self.actor_obs(obs)
        if self.hidden is None or any(len(state) != batch_size(obs) for state in self.hidden.values()):
            self.hidden = self.policy.initial_hidden(batch_size(obs))
        actions, self.hidden = self.policy.infer(obs, self.hidden)
        return actions

    def reset(self, dones: Tensor | None = None) -> None:
        """Clear the recurrent state of environments whose episode ended; of all if None."""
        if dones is None or self.hidden is None:
            self.hidden = None
        else:
            ended = dones.bool().view(-1, 1, 1, 1)
            fitting = {name: state for name, state in self.hidden.items() if len(state) == len(ended)}
            self.hidden |= {name: state.masked_fill(ended.to(state.device), 0.0) for name, state in fitting.items()}


@torch.inference_mode()
def run_episodes(
    act: Any, env: VecEnv, num_episodes: int, max_steps: int | None = None, on_step: Any = None
) -> tuple[list[float], list[int]]:
    """Returns and lengths of `num_episodes` episodes after a reset; `on_step(env)` is called after every step."""
    if num_episodes < 1:
        raise ValueError(f"num_episodes must be at least 1, got {num_episodes}")
    # The episodes to count are fixed for each environment, so that short episodes are not over-represented.
    left = num_episodes // env.num_envs + (np.arange(env.num_envs) < num_episodes % env.num_envs)
    limit = max_steps or int(left.max()) * ((env.max_episode_length or 10_000) + 2)
    total, length = np.zeros(env.num_envs), np.zeros(env.num_envs, dtype=np.int64)
    returns: list[float] = []
    lengths: list[int] = []
    act.reset()
    obs, _ = env.reset()
    for _ in range(limit):
        record = env.step(act(obs))
        obs, done, valid = record.obs, record.done.cpu().numpy(), record.valid.cpu().numpy()
        act.reset(record.done | ~record.valid)
        total += np.where(valid, record.reward.cpu().numpy(), 0.0)
        length += valid
        if on_step is not None:
            on_step(env)
        for i in np.nonzero(done)[0]:
            if left[i] > 0:
                returns.append(float(total[i]))
                lengths.append(int(length[i]))
                left[i] -= 1
        total[done], length[done] = 0.0, 0
        if not left.any():
            return returns, lengths
    result = f"only {len(returns)} of {num_episodes} evaluation episodes ended within {limit} steps"
    raise RuntimeError(f"{result}; give max_steps, or a time limit to the environment")
