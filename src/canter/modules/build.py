"""Building policies from names, settings and an environment's shapes."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from canter.envs.vec_env import VecEnv
from canter.modules.actor_critic import ActorCritic
from canter.modules.conv2d import image_layers, image_shape
from canter.modules.normalizer import DictNormalization, EmpiricalNormalization, NoNormalization, ValueNormalizer
from canter.modules.policy import Policy
from canter.storage.rollout_storage import Field
from canter.utils.config import build
from canter.utils.tree import tree_leaves, tree_map

POLICIES: dict[str, type[Policy]] = {}
"""Policies by class name, for settings and the command line; `canter.modules` registers its own."""
NETWORKS: dict[str, type] = {}
"""Actors, critics and Q networks by class name."""


IMAGE_POLICIES = {
    "ActorCritic": ("VisualActorCritic", "EncoderActorCritic"),
    "ActorCriticRecurrent": ("VisualActorCriticRecurrent", "EncoderActorCriticRecurrent"),
}
"""What a policy for vectors becomes where an observation has one image, and where it has several."""
IMAGE_FEATURES = 512


def register_policy(cls: type[Policy]) -> type[Policy]:
    """Register a policy class under its name; usable as a decorator."""
    POLICIES[cls.__name__] = cls
    return cls


def build_actor_critic(env: Any, policy_class_name: str, policy_cfg: Mapping[str, Any] | None = None) -> Any:
    """A policy by class name; missing settings of the environment (widths, segments, action space) are filled in.

    The setting `action_range`, a pair of numbers, bounds every action.
    """
    if policy_class_name not in POLICIES and not policy_class_name.isidentifier():
        way_out = "derive your class from one of canter's, put @canter.modules.register_policy above it, give its name"
        raise KeyError(f"no policy is registered as {policy_class_name!r}; {way_out}")
    given = {name: value for name, value in (policy_cfg or {}).items() if name != "class_name"}
    if given.get("action_range") is not None:  # of a distribution with bounds, where the environment has none
        low, high = given.pop("action_range")
        given["action_space"] = spaces.Box(low, high, (env.num_actions,))
    defaults = {
        "num_actor_obs": lambda: env.num_obs,
        "num_critic_obs": lambda: env.num_privileged_obs or env.num_obs,
        "num_actions": lambda: env.num_actions,
        "obs_segments": lambda: segments_of(env, "obs"),
        "critic_obs_segments": lambda: segments_of(env, "critic_obs"),
        "action_space": lambda: getattr(env, "action_space", None),
    }
    given |= {name: default() for name, default in defaults.items() if given.get(name) is None}
    if policy_class_name in IMAGE_POLICIES and given.get("actor") is None and given.get("critic") is None:
        policy_class_name, encoders = image_policy(policy_class_name, given)
        given = {**encoders, **given}
    return build(POLICIES, policy_class_name, given)


def image_policy(class_name: str, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The policy class that encodes the images among the segments by convolutions, and its settings for them.

    Without an image that is the class itself. One image that both networks see, or the actor alone, is encoded once.
    """
    segments = (given["obs_segments"] or {}, given["critic_obs_segments"] or {})
    if given["critic_obs_segments"] is None and given["num_critic_obs"] == given["num_actor_obs"]:
        segments = (segments[0], segments[0])
    found = [{name: image for name, shape in part.items() if (image := image_shape_of(shape))} for part in segments]
    actor, critic = found
    if not actor and not critic:
        return class_name, {}
    if len(actor) == 1 and critic in ({}, actor):
        ((name, (_, *size)),) = actor.items()
        layers = {**image_layers(*size), "hidden_sizes": ()}
        settings = {"visual_component_name": name, "visual_kwargs": layers, "visual_latent_size": IMAGE_FEATURES}
        return IMAGE_POLICIES[class_name][0], {**settings, "visual_critic": bool(critic)}
    layers = [[{**image_layers(h, w), "hidden_sizes": ()} for _, h, w in part.values()] for part in found]
    settings = {
        "encoder_component_names": list(actor),
        "encoder_kwargs": layers[0],
        "encoder_output_size": IMAGE_FEATURES,
    }
    settings["encoder_class_name"] = "Conv2dHeadModel"
    settings |= {"critic_encoder_component_names": "shared" if critic == actor else list(critic)}
    return IMAGE_POLICIES[class_name][1], settings | {"critic_encoder_kwargs": layers[1]}


def image_shape_of(shape: Any) -> tuple[int, int, int] | None:
    """(C, H, W) of a segment that is an image; None for any other, whose shape may be a number."""
    return image_shape(shape) if isinstance(shape, Sequence) else None


def segments_of(env: Any, which: str) -> Mapping[str, Any] | None:
    """Names and shapes of an observation's parts: the environment's, else the leaves of a Dict space, or an image."""
    segments = getattr(env, f"{which}_segments", None)
    space = getattr(env, f"{which}_space", None)
    if segments is not None or space is None:
        return segments
    if isinstance(space, spaces.Dict):
        return {name: tuple(leaf.shape) for name, leaf in tree_leaves(space)}
    return {"obs": space.shape} if space.shape is not None and len(space.shape) > 1 else None


def build_pair(
    obs_space: spaces.Space,
    critic_obs_space: spaces.Space,
    action_space: spaces.Space,
    actor_class: type,
    critic_class: type,
    actor_cfg: Mapping[str, Any] | None = None,
    critic_cfg: Mapping[str, Any] | None = None,
) -> ActorCritic:
    """An ApexRL-style actor and critic as one policy."""
    actor = actor_class(obs_space=obs_space, action_space=action_space, cfg=dict(actor_cfg or {}))
    return ActorCritic(actor=actor, critic=critic_class(obs_space=critic_obs_space, cfg=dict(critic_cfg or {})))


def build_policy(
    env: Any,
    actor: Any = None,
    critic: Any = None,
    actor_class: Any = None,
    critic_class: Any = None,
    actor_cfg: Mapping[str, Any] | None = None,
    critic_cfg: Mapping[str, Any] | None = None,
    obs_space: Any = None,
    action_space: Any = None,
) -> Policy:
    """A policy from two networks, or from their classes and settings; spaces not given are the environment's."""
    if actor is not None and critic is not None:
        return ActorCritic(actor=actor, critic=critic)
    missing = [name for name, cls in (("actor_class", actor_class), ("critic_class", critic_class)) if cls is None]
    if env is None and None in (obs_space, action_space):
        missing.append("env (or obs_space and action_space)")
    if missing:
        raise ValueError(f"PPO needs a policy: PPO(actor_critic, ...), or {' and '.join(missing)}")
    networks = (actor_class, critic_class, actor_cfg, critic_cfg)
    if env is None:
        return build_pair(obs_space, obs_space, action_space, *networks)
    return build_pair(obs_space or env.obs_space, env.critic_obs_space, action_space or env.action_space, *networks)


NETWORK_ARGUMENTS = tuple(inspect.signature(build_policy).parameters)[1:]


def space_shapes(space: spaces.Space) -> Any:
    """Shape and dtype of every leaf of an observation space, as the storage declares them."""
    if isinstance(space, spaces.Dict):
        return {name: space_shapes(part) for name, part in space.spaces.items()}
    return Field(tuple(space.shape or ()), dtype=leaf_dtype(space))


def leaf_dtype(space: spaces.Space) -> torch.dtype:
    """The dtype in which a leaf is stored: images and integers as they are, every float as float32."""
    if space.dtype is None or np.issubdtype(space.dtype, np.floating):
        return torch.float32
    return torch.from_numpy(np.zeros(1, dtype=space.dtype)).dtype


def env_shapes(env: VecEnv) -> tuple[Any, Any]:
    """Shapes of the actor's and the critic's observation; None for the critic if it shares the actor's."""
    critic = None if env.critic_obs_space is env.obs_space else space_shapes(env.critic_obs_space)
    return space_shapes(env.obs_space), critic


def build_normalizer(shape: Any, until: float | None = 1e8, **options: Any) -> nn.Module:
    """Running normalisation of a width, a shape, a storage `Field`, or a nested dict of them; images are exempt.

    The options are those of `EmpiricalNormalization`.
    """
    if isinstance(shape, Mapping):
        return DictNormalization(tree_map(vector_shape, shape), until=until, **options)
    size = vector_shape(shape)
    return NoNormalization() if size is None else EmpiricalNormalization(size, until=until, **options)


def install_normalizers(policy: Policy, weights: Mapping[str, torch.Tensor]) -> None:
    """Give a policy the normalisers whose statistics are in saved weights."""
    for name in ("obs_normalizer", "critic_obs_normalizer"):
        mean = weights.get(f"{name}._mean")
        if mean is not None:
            setattr(policy, name, build_normalizer(tuple(mean.shape[1:])))
    if "value_normalizer._mean" in weights:
        policy.value_normalizer = ValueNormalizer()


def vector_shape(leaf: Any) -> tuple[int, ...] | None:
    """Shape of a float vector; None for images and integers, which are not normalised."""
    if isinstance(leaf, Field):
        return leaf.shape if leaf.dtype.is_floating_point and len(leaf.shape) < 3 else None
    return tuple(np.ravel(leaf).tolist())
