"""The feed-forward actor-critic and the documented minimal networks."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from canter.modules.actor_critic import Actor, ActorCritic, Critic
from canter.modules.distributions import Categorical, Gaussian, MultiCategorical, SquashedGaussian


def test_the_mean_can_be_bounded():
    policy = ActorCritic(4, 4, 2, mu_activation="tanh", actor_hidden_dims=())
    with torch.no_grad():
        policy.actor[0].weight.fill_(100.0)
    torch.testing.assert_close(policy(torch.ones(3, 4)).mean, torch.ones(3, 2))


@pytest.mark.parametrize("kind", ["scalar", "log"])
def test_noise_starts_at_init_noise_std(kind):
    policy = ActorCritic(4, 4, 3, init_noise_std=[0.1, 0.2, 0.4], noise_std_type=kind)
    out = policy(torch.ones(2, 4))
    torch.testing.assert_close(out.std.detach(), torch.tensor([[0.1, 0.2, 0.4]]).expand(2, 3))
    assert set(dict(policy.named_parameters())) & {"std", "log_std"} == {"std" if kind == "scalar" else "log_std"}


@pytest.mark.parametrize("kind", ["scalar", "log"])
@pytest.mark.parametrize("low", [0.3, [0.3, 0.5], torch.tensor([0.3, 0.5])])
def test_clipping_the_noise_moves_the_parameter_into_its_bounds(kind, low):
    policy = ActorCritic(4, 2, init_noise_std=[0.1, 4.0], noise_std_type=kind)
    policy.clip_std(min=low, max=2.0)
    torch.testing.assert_close(policy.noise_std().detach(), torch.tensor([0.3, 2.0]))
    policy.clip_std()
    torch.testing.assert_close(policy.noise_std().detach(), torch.tensor([0.3, 2.0]))


def test_noise_that_fell_below_zero_is_lifted():
    policy = ActorCritic(4, 2)
    with torch.no_grad():
        policy.std.fill_(-1.0)
    assert (policy.noise_std() > 0).all()
    policy.clip_std(min=1e-15)
    assert policy.std.tolist() == pytest.approx([1e-15, 1e-15])


@pytest.mark.parametrize(
    ("space", "num_actions", "squash", "expected"),
    [
        (None, 2, False, Gaussian),
        (spaces.Box(-1, 1, (2,)), 2, False, Gaussian),
        (spaces.Box(-1, 1, (2,)), 2, True, SquashedGaussian),
        (spaces.Discrete(4), 4, False, Categorical),
        (spaces.MultiDiscrete([3, 2]), 5, False, MultiCategorical),
    ],
)
def test_the_distribution_follows_the_action_space(space, num_actions, squash, expected):
    policy = ActorCritic(3, 3, num_actions, action_space=space, squash_actions=squash)
    assert type(policy.distribution) is expected
    out = policy(torch.randn(6, 3))
    assert ("logits" in out.params) == (expected in (Categorical, MultiCategorical))
    assert hasattr(policy, "std") == ("sigma" in out.params)
    policy.clip_std(min=0.5)  # nothing to clip is no error


@pytest.mark.parametrize(
    ("space", "text"),
    [(spaces.Discrete(3), "3 logits"), (spaces.MultiDiscrete([3, 2]), "5 logits"), (spaces.Box(-1, 1, (3,)), "3 num")],
    ids=["Discrete", "MultiDiscrete", "Box"],
)
def test_a_number_of_actions_that_does_not_fit_the_space_is_refused(space, text):
    with pytest.raises(ValueError, match=rf"num_actions is 2, but an action of .* has {text}.*; give {text[0]}"):
        ActorCritic(4, 4, 2, action_space=space)


def test_squashed_actions_stay_in_the_space_and_inference_gives_its_centre():
    space = spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 4.0], np.float32))
    policy = ActorCritic(3, 3, 2, action_space=space, squash_actions=True, actor_hidden_dims=(), init_noise_std=9.0)
    with torch.no_grad():
        policy.actor[0].weight.zero_()
        policy.actor[0].bias.zero_()
    torch.testing.assert_close(policy.act_inference(torch.randn(5, 3)), torch.tensor([[0.0, 2.0]]).expand(5, 2))
    bounded = policy.distribution.to_env(policy.act(torch.randn(500, 3)))
    assert (bounded >= torch.tensor([-1.0, 0.0])).all()
    assert (bounded <= torch.tensor([1.0, 4.0])).all()
    assert bounded.std(0).min() > 0.5


def test_an_unknown_setting_is_an_error_with_a_suggestion():
    with pytest.raises(TypeError, match="'init_noise_std'"):
        ActorCritic(3, 3, 2, init_nois_std=0.5)
    ActorCritic(3, 3, 2, rnn_type=None)


def test_segments_have_two_names_for_one_thing():
    policy = ActorCritic(3, 5, 2, obs_segments={"a": 1, "b": [2]}, critic_obs_segments={"a": 1, "c": (2, 2)})
    assert policy.obs_segments == {"a": (1,), "b": (2,)}
    assert policy.critic_obs_segments == policy.privileged_obs_segments == {"a": (1,), "c": (2, 2)}
    with pytest.raises(AttributeError):
        policy.privileged_obs_segments = {}
    assert ActorCritic(3, 3, 2, obs_segments={"a": 3}).critic_obs_segments == {"a": (3,)}
    assert ActorCritic(3, 5, 2).critic_obs_segments == {"obs": (5,)}


def test_orthogonal_weights_have_their_gains():
    policy = ActorCritic(8, 8, 4, actor_hidden_dims=(8,), critic_hidden_dims=(8,), orthogonal_init=True)
    torch.testing.assert_close(policy.actor[0].weight @ policy.actor[0].weight.T, 2 * torch.eye(8), atol=1e-5, rtol=0)
    gram = policy.actor[-1].weight @ policy.actor[-1].weight.T
    torch.testing.assert_close(gram, 1e-4 * torch.eye(4), atol=1e-8, rtol=0)
    assert float(policy.critic[-1].weight.detach().norm()) == pytest.approx(1.0)
    assert all((layer.bias == 0).all() for layer in (*policy.actor, *policy.critic) if isinstance(layer, nn.Linear))


def test_entropy_is_the_closed_form():
    policy = ActorCritic(3, 3, 2, init_noise_std=[0.5, 2.0])
    policy.act(torch.randn(6, 3))
    expected = sum(0.5 * math.log(2 * math.pi * math.e * std**2) for std in (0.5, 2.0))
    torch.testing.assert_close(policy.entropy.detach(), torch.full((6,), expected))


def test_the_layers_of_the_minimal_networks_go_by_their_documented_name():
    actor, critic, obs = Actor(4, 2), Critic(4), torch.randn(3, 4)
    assert torch.equal(actor.mean(actor.fc(obs)), actor(obs).mean)
    assert torch.equal(critic.fc(obs), critic(obs))
    assert [type(layer).__name__ for layer in actor.fc] == ["Linear", "Tanh", "Linear", "Tanh"]
    assert {"fc.0.weight", "fc.2.bias", "mean.weight", "log_std"} <= actor.state_dict().keys()
    assert critic.state_dict()["fc.4.weight"].shape == (1, 64)
