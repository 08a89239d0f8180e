"""What a runner is made of: the environment in the policy's form, the algorithm, and checks before training."""

import math
import warnings
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from canter.algorithms import REGISTRY
from canter.algorithms.algorithm import NOTHING_NORMALIZED
from canter.envs.vec_env import VecEnv
from canter.envs.wrap import wrap_env
from canter.envs.wrappers import ClipActions, FlattenObs
from canter.modules.build import POLICIES, build_actor_critic
from canter.modules.normalizer import EmpiricalNormalization
from canter.runners.run_config import RunPlan, find_algorithm
from canter.utils.config import unused_settings
from canter.utils.distributed import RANKS
from canter.utils.tree import tree_leaves


def preset_of(env: Any, algorithm: str) -> tuple[Any, dict[str, Any]]:
    """The runner class and the preset for an environment or its name; without a known task the algorithm's defaults."""
    from canter.presets import FALLBACK, load_preset  # presets are made of configs
    from canter.runners import RUNNERS  # which imports this module

    name = env if isinstance(env, str) else getattr(getattr(env, "spec", None), "id", None)
    uses_replay = REGISTRY[find_algorithm(algorithm)].agent_class.learns_from_replay
    return RUNNERS["OffPolicyRunner" if uses_replay else "OnPolicyRunner"], load_preset(name or FALLBACK, algorithm)


def open_env(env: Any, device: torch.device, plan: RunPlan) -> VecEnv:
    """Wrap an environment, with observations in the form that the policy of the plan takes."""
    wrapped = wrap_env(env, device, obs_groups=plan.obs_groups)
    if plan.clip_actions is not None:
        wrapped = ClipActions(wrapped, plan.clip_actions)
    both = (wrapped.obs_space, wrapped.critic_obs_space)
    has_dict = any(isinstance(space, spaces.Dict) for space in both)
    has_images = any(leaf.dtype == np.uint8 for space in both for _, leaf in tree_leaves(space))
    # The ActorCritic family takes one vector with segments; with images it flattens itself, so that bytes are stored.
    name = plan.policy.get("class_name")
    takes_vector = name is not None and not getattr(POLICIES.get(name), "takes_groups", False)
    return FlattenObs(wrapped) if has_dict and takes_vector and not has_images else wrapped


def build_algorithm(
    plan: RunPlan, env: VecEnv, device: torch.device, obs_space: spaces.Space | None, action_space: spaces.Space | None
) -> Any:
    """The algorithm of a plan with its networks, whose first weights follow from the seed."""
    agent_class, policy, cfg = REGISTRY[find_algorithm(plan.algorithm)].agent_class, plan.policy, plan.cfg
    common = {"cfg": cfg, "device": device}
    is_seeded = cfg.seed is not None
    if is_seeded:
        # For environments that draw from torch's generator, now and later.
        torch.manual_seed(RANKS.seed(cfg.seed))
        try:
            env.seed(cfg.seed + RANKS.rank * env.num_envs)
        except NotImplementedError as error:
            warnings.warn(f"{error}: its episodes may differ from run to run", stacklevel=4)
        env.reset()  # running episodes were started without the seed
    # Weights do not depend on the numbers that the environment draws, nor these on the size of the networks.
    with torch.random.fork_rng(devices=[], enabled=is_seeded):
        if is_seeded:
            torch.manual_seed(cfg.seed)
        if "class_name" in policy:
            return agent_class(build_actor_critic(env, policy["class_name"], policy), **common)
        return agent_class(env=env, obs_space=obs_space, action_space=action_space, **common, **policy)


def count_iterations(runner: Any, iterations: Any, timesteps: Any) -> int:
    """Iterations that the arguments of `learn` ask for."""
    if iterations is not None and timesteps is not None:
        both = f"{iterations!r} iterations and total_timesteps={timesteps!r}"
        raise ValueError(f"the length of the training is given twice, as {both}; leave one out")
    for length in (given for given in (iterations, timesteps) if given is not None):
        is_number = isinstance(length, (int, float, np.integer, np.floating)) and not isinstance(length, bool)
        if not is_number or not 0 <= length < math.inf or length != int(length):
            raise ValueError(f"the length of the training must be a whole number of at least 0, got {length!r}")
    if iterations is not None:
        return int(iterations)
    if timesteps is not None:
        return -(-int(timesteps) // runner.steps_per_iteration())
    if (planned := runner.planned_iterations()) is not None:
        return max(0, planned - runner.iteration)
    raise ValueError(f"the length of the training is not given; use {runner.ways_to_set_length}")


def warn_of_unused(alg: Any) -> None:
    """Name settings that do nothing, once training begins: a run that is only loaded has them for the record."""
    if not RANKS.is_first:
        return
    for name, reason in unused_settings(alg.cfg).items():
        warnings.warn(f"{name}={getattr(alg.cfg, name)!r} has no effect with {reason}", stacklevel=3)
    asked = [name for name in NOTHING_NORMALIZED if getattr(alg.cfg, name, None)]
    both = (alg.policy.obs_normalizer, alg.policy.critic_obs_normalizer)
    if asked and not any(isinstance(part, EmpiricalNormalization) for side in both for part in side.modules()):
        reason = "images and whole numbers are not normalised, and the observations are nothing else"
        warnings.warn(f"{asked[0]}=True has no effect: {reason}", stacklevel=3)


def randomize_ages(env: VecEnv, generator: torch.Generator) -> None:
    """Let running episodes have random ages, so that they do not all end together; warn where that is impossible."""
    lengths, limit = getattr(env, "episode_length_buf", None), env.max_episode_length
    try:
        if lengths is None or limit is None:
            raise AttributeError("it does not exist, or there is no limit")
        ages = torch.randint(int(limit), lengths.shape, generator=generator, device=generator.device)
        env.episode_length_buf = ages.to(lengths)  # pyright: ignore[reportAttributeAccessIssue]
    except AttributeError as error:
        warnings.warn(f"episodes start at age 0: episode_length_buf cannot be set ({error})", stacklevel=6)
