"""`check_env`: what canter takes an environment for, which bootstrap that gives, and what looks wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from canter.envs.envpool import EnvPoolAdapter
from canter.envs.gymnasium import GymVecEnv
from canter.envs.inspection import EnvReport, Inspection
from canter.envs.rsl_rl import RslRlAdapter
from canter.envs.vec_env import VecEnv
from canter.envs.vector import GymVectorEnvAdapter
from canter.envs.wrap import wrap_env
from canter.utils.tree import tree_leaves


class Listener:
    """Stands between an adapter and its environment and keeps the raw answers of the last two steps."""

    def __init__(self, env: Any) -> None:
        self.inner = env
        self.answers: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, actions: Any) -> Any:
        """Step and remember."""
        answer = self.inner.step(actions)
        # Both are kept alive: freed memory would be given out again and look like a reused buffer.
        self.answers = [*self.answers[-1:], answer]
        return answer


def describe(space: spaces.Space) -> str:
    """Shapes and dtypes of a space in a line."""
    if isinstance(space, Mapping):
        return ", ".join(f"{name} {leaf.shape} {leaf.dtype}" for name, leaf in tree_leaves(space))
    return f"{space.shape} {space.dtype}" if isinstance(space, spaces.Box) else str(space)


def contract_of(env: VecEnv) -> tuple[str, str]:
    """The contract's name and the autoreset mode."""
    if isinstance(env, EnvPoolAdapter):
        return "EnvPool", "next step (the resetting step is masked)"
    if isinstance(env, GymVectorEnvAdapter):
        how = {"NextStep": "next step (the resetting step is masked)", "SameStep": "same step", "Disabled": "by canter"}
        return f"gymnasium.vector.VectorEnv ({type(env.env).__name__})", how[env.mode.value]
    if isinstance(env, GymVecEnv):
        return "gymnasium.Env", "by canter, in the same step"
    if isinstance(env, RslRlAdapter):
        return f"rsl_rl style, {env.kind}", "same step"
    return f"canter.envs.VecEnv ({type(env).__name__})", "same step"


def random_actions(env: VecEnv, generator: torch.Generator) -> Tensor:
    """One action per environment: uniform where bounded, normal where not."""
    space, n = env.action_space, env.num_envs
    if isinstance(space, spaces.Discrete):
        return torch.randint(int(space.n), (n,), generator=generator).to(env.device)
    if isinstance(space, spaces.MultiDiscrete):
        columns = [torch.randint(int(k), (n,), generator=generator) for k in space.nvec.ravel()]
        return torch.stack(columns, 1).to(env.device)
    assert isinstance(space, spaces.Box)
    noise = torch.randn(n, *space.shape, generator=generator)
    low, high = (torch.as_tensor(np.asarray(bound, np.float32)) for bound in (space.low, space.high))
    bounded = low + (high - low) * torch.rand(n, *space.shape, generator=generator)
    return torch.where(torch.isfinite(bounded), bounded, noise).to(env.device)


def check_env(
    env: Any,
    num_steps: int = 200,
    seed: int = 0,
    device: torch.device | str | None = None,
    obs_groups: Mapping[str, Sequence[str]] | None = None,
) -> EnvReport:
    """Step `env` with random actions and report how canter understands it; resets it before and after."""
    wrapped = wrap_env(env, device=device, obs_groups=obs_groups)
    critic = "the same" if wrapped.critic_obs_space is wrapped.obs_space else describe(wrapped.critic_obs_space)
    report = EnvReport(
        contract="",
        num_envs=wrapped.num_envs,
        device=str(wrapped.device),
        obs=describe(wrapped.obs_space),
        critic_obs=critic,
        actions=str(wrapped.action_space),
        autoreset="",
    )
    inspection = Inspection(wrapped, report)
    inspection.see_space("obs", wrapped.obs_space)
    if isinstance(wrapped, GymVecEnv):
        for name, leaf in tree_leaves(wrapped.raw_obs_space, "obs"):
            if leaf.dtype not in (np.float32, np.uint8):
                inspection.say(f"{name} is {leaf.dtype} and kept as float32", problem=False)
    listens = isinstance(wrapped, (RslRlAdapter, GymVectorEnvAdapter))
    listener = Listener(wrapped.env) if listens else None  # type: ignore[attr-defined]
    try:
        if listener is not None:
            wrapped.env = listener  # type: ignore[attr-defined]
        run(wrapped, inspection, listener, num_steps, seed)
    finally:
        if listener is not None:
            wrapped.env = listener.inner  # type: ignore[attr-defined]
    report.contract, report.autoreset = contract_of(wrapped)
    inspection.conclude()
    return report


def run(env: VecEnv, inspection: Inspection, listener: Listener | None, num_steps: int, seed: int) -> None:
    """Step through, at half time close to the time limit, where episodes can be moved there."""
    generator = torch.Generator().manual_seed(seed)
    env.reset()
    try:
        for step in range(num_steps):
            if (
                step == num_steps // 2
                and hasattr(env, "episode_length_buf")
                and (env.max_episode_length or 0) > num_steps
            ):
                buffer: Tensor = env.episode_length_buf  # type: ignore[attr-defined]
                env.episode_length_buf = torch.full_like(buffer, (env.max_episode_length or 0) - 3)  # type: ignore[attr-defined]
            record = env.step(random_actions(env, generator))
            inspection.report.steps += 1
            if listener is not None and listener.answers:
                inspection.see_raw(listener.answers)
            inspection.see(record)
        env.reset()
    except Exception as error:  # the report is where a user looks for what went wrong
        inspection.say(f"step {inspection.report.steps} raised {type(error).__name__}: {error}")
