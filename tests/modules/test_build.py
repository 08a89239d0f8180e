"""Policies from names, settings and an environment's shapes."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from canter.modules.actor_critic import ActorCritic
from canter.modules.actor_critic_recurrent import ActorCriticRecurrent
from canter.modules.actors import MLPActor, MLPCritic
from canter.modules.build import (
    POLICIES,
    build_actor_critic,
    build_pair,
    leaf_dtype,
    register_policy,
    space_shapes,
)
from canter.storage.rollout_storage import Field

TINY = {"actor_hidden_dims": (8,), "critic_hidden_dims": (8,)}


@pytest.mark.parametrize(("kind", "num_actions"), [("discrete", 4), ("multi_discrete", 5), ("mlp", 2)])
def test_the_actions_are_the_environments(noise_env, kind, num_actions):
    policy = build_actor_critic(noise_env(kind), "ActorCriticRecurrent", {"rnn_hidden_size": 8, **TINY})
    assert isinstance(policy, ActorCriticRecurrent)
    assert policy.actor[-1].out_features == num_actions
    assert ("logits" in policy.distribution.param_shapes) == ("discrete" in kind)


def test_segments_come_from_the_environment_and_the_critic_defaults_to_the_actors_width(noise_env):
    env = noise_env("mlp")
    env.obs_segments, env.critic_obs_segments = {"a": (1,), "b": (2,)}, {"c": (5,)}
    policy = build_actor_critic(env, "ActorCritic", TINY)
    assert policy.obs_segments == {"a": (1,), "b": (2,)}
    assert policy.critic_obs_segments == {"c": (5,)}
    env = noise_env("mlp")
    env.critic_obs_space = env.obs_space
    assert build_actor_critic(env, "ActorCritic", TINY).critic[0].in_features == 3


def test_an_unknown_class_or_setting_is_an_error_with_a_suggestion(noise_env):
    with pytest.raises(KeyError, match="'ActorCritic'"):
        build_actor_critic(noise_env(), "ActorCritik")
    with pytest.raises(KeyError, match="'Zzz'.*ActorCritic"):
        build_actor_critic(noise_env(), "Zzz")
    with pytest.raises(TypeError, match="'actor_hidden_dims'"):
        build_actor_critic(noise_env(), "ActorCritic", {"actor_hiden_dims": (8,)})


def test_a_registered_class_is_found_by_name(noise_env):
    @register_policy
    class OneOfMine(ActorCritic):
        pass

    try:
        assert type(build_actor_critic(noise_env(), "OneOfMine", TINY)) is OneOfMine
    finally:
        del POLICIES["OneOfMine"]


def test_a_pair_takes_the_settings_of_both(noise_env):
    env = noise_env("mlp")
    policy = build_pair(
        env.obs_space,
        env.critic_obs_space,
        env.action_space,
        MLPActor,
        MLPCritic,
        {"hidden_dims": [7]},
        {"hidden_dims": []},
    )
    assert [tuple(p.shape) for p in policy.actor.parameters() if p.dim() == 2] == [(7, 3), (2, 7)]
    assert [tuple(p.shape) for p in policy.critic.parameters() if p.dim() == 2] == [(1, 5)]


def test_shapes_keep_structure_and_kind():
    space = spaces.Dict(
        {
            "eye": spaces.Box(0, 255, (4, 4), np.uint8),
            "body": spaces.Dict({"q": spaces.Box(-1, 1, (2,), np.float64), "gear": spaces.Box(0, 5, (1,), np.int32)}),
        }
    )
    assert space_shapes(space) == {
        "body": {"gear": Field((1,), dtype=torch.int32), "q": Field((2,), dtype=torch.float32)},
        "eye": Field((4, 4), dtype=torch.uint8),
    }
    assert leaf_dtype(spaces.Box(-1, 1, (2,), np.float16)) == torch.float32
