"""Making environments ready for a run."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from canter.envs.vec_env import VecEnv
from canter.envs.wrap import wrap_env
from canter.envs.wrappers import FlattenObs
from canter.runners.run_config import RunPlan
from canter.utils.tree import tree_leaves


def open_env(env: Any, device: torch.device, plan: RunPlan) -> VecEnv:
    """The environments behind the one contract, with observations as the planned policy wants them."""
    wrapped = wrap_env(env, device, obs_groups=plan.obs_groups)
    both = (wrapped.obs_space, wrapped.critic_obs_space)
    has_dict = any(isinstance(space, spaces.Dict) for space in both)
    # Policies of the ActorCritic family see one vector with named segments. They make it themselves where there are
    # pictures, which are stored as the bytes they are.
    if has_dict and "class_name" in plan.policy and not any(map(has_pictures, both)):
        wrapped = FlattenObs(wrapped)
    return wrapped


def has_pictures(space: spaces.Space) -> bool:
    """Whether an observation has a part that is made of bytes."""
    return any(leaf.dtype == np.uint8 for _, leaf in tree_leaves(space))


def seed_env(env: VecEnv, seed: int) -> None:
    """Begin every episode anew from a seed; an environment that has no use for one is a warning."""
    try:
        env.seed(seed)
    except NotImplementedError as error:
        warnings.warn(f"{error}: its episodes will differ from run to run", stacklevel=5)
    else:
        env.reset()  # the episodes under way were begun without the seed


def randomize_ages(env: VecEnv, generator: torch.Generator) -> None:
    """Let running episodes be of random ages, so that they do not all end together."""
    lengths, limit = getattr(env, "episode_length_buf", None), env.max_episode_length
    try:
        if lengths is None or limit is None:
            raise AttributeError("it is not there, or there is no limit")
        ages = torch.randint(int(limit), lengths.shape, generator=generator, device=generator.device)
        env.episode_length_buf = ages.to(lengths)  # pyright: ignore[reportAttributeAccessIssue]
    except AttributeError as error:
        warnings.warn(f"episodes start at age 0: episode_length_buf cannot be set ({error})", stacklevel=5)
