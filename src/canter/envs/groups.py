"""Observations come as a tensor or as named groups; here is who sees which group, and how groups become a vector."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from canter.utils.tree import Obs, tree_leaves

# Names in use for the actor's group, and for the critic's, in order of preference.
ACTOR_GROUPS = ("obs", "policy", "actor", "actor_obs")
CRITIC_GROUPS = ("privileged_obs", "critic_obs", "critic")
# MuJoCo Playground's pair: "state" alone is an ordinary key of a dict observation, so both must be there.
PLAYGROUND_PAIR = ("state", "privileged_state")

Segments = dict[str, tuple[int, ...]]


def group_names(groups: Mapping[str, Any]) -> tuple[str, str | None] | None:
    """The actor's group and the critic's (None if it has none of its own); None if `groups` is one dict observation."""
    if all(name in groups for name in PLAYGROUND_PAIR):
        return PLAYGROUND_PAIR
    actor = next((name for name in ACTOR_GROUPS if name in groups), None)
    if actor is None:
        return None
    return actor, next((name for name in CRITIC_GROUPS if groups.get(name) is not None), None)


def split_groups(obs: Any) -> tuple[Any, Any]:
    """The actor's and the critic's part of an observation; the same object where the critic has none of its own."""
    names = group_names(obs) if isinstance(obs, Mapping) else None
    if names is None:
        return obs, obs
    actor, critic = names
    return obs[actor], obs[actor if critic is None else critic]


def split_space(space: spaces.Space) -> tuple[spaces.Space, spaces.Space]:
    """The spaces of the two parts that `split_groups` makes of an observation."""
    # The Dict space itself would answer `name in space` with whether the name is a sample of it.
    names = group_names(space.spaces) if isinstance(space, spaces.Dict) else None
    if names is None:
        return space, space
    return space[names[0]], space[names[1] or names[0]]  # type: ignore[index]


def resolve_sets(groups: Mapping[str, Any], obs_groups: Mapping[str, Sequence[str]]) -> tuple[list[str], list[str]]:
    """Group names of the actor's and of the critic's observation after the user's `obs_groups` table."""
    found = group_names(groups)
    default_actor = None if found is None else [found[0]]
    default_critic = None if found is None or found[1] is None else [found[1]]
    sets = {name: [value] if isinstance(value, str) else list(value) for name, value in obs_groups.items()}
    actor = sets.get("actor") or sets.get("policy") or default_actor
    if actor is None:
        raise KeyError(f"obs_groups names no 'actor' or 'policy' set and the groups {list(groups)} have neither")
    critic = sets.get("critic") or default_critic or actor
    for name in (*actor, *critic):
        if name not in groups:
            raise KeyError(f"obs_groups asks for the group {name!r}; the environment gives {list(groups)}")
    return actor, critic


def is_flat(leaf: Tensor) -> bool:
    """Whether a leaf is a batch of feature vectors that may be concatenated with others."""
    return leaf.dim() == 2 and leaf.dtype != torch.uint8


def join_groups(groups: Mapping[str, Any], names: Sequence[str]) -> tuple[Obs, Segments | None]:
    """The named groups as one vector with its segments, or as a flat dict if one of them is no vector."""
    leaves = dict(tree_leaves({name: groups[name] for name in names}))
    if len(leaves) == 1:
        return next(iter(leaves.values())), None
    short = [name.rpartition(".")[2] for name in leaves]
    keys = short if len(set(short)) == len(short) else list(leaves)
    named = dict(zip(keys, leaves.values(), strict=True))
    if not all(is_flat(leaf) for leaf in named.values()):
        return named, None
    return torch.cat(list(named.values()), dim=1), {name: tuple(leaf.shape[1:]) for name, leaf in named.items()}


def checked_segments(segments: Mapping[str, Any] | None, width: int, owner: str) -> Segments | None:
    """`segments` with every shape as a tuple, after checking that they fill `width` exactly."""
    if segments is None:
        return None
    shapes = {name: (shape,) if isinstance(shape, int) else tuple(map(int, shape)) for name, shape in segments.items()}
    total = sum(math.prod(shape) for shape in shapes.values())
    if total != width:
        sizes = ", ".join(f"{name} {math.prod(shape)}" for name, shape in shapes.items())
        raise ValueError(f"{owner} add up to {total} values ({sizes}), but the observation has {width}")
    return shapes
