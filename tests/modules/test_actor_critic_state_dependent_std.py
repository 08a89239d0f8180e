"""Exploration noise that the actor chooses for each observation."""

import pytest
import torch
from gymnasium import spaces

from canter.modules.actor_critic import ActorCritic
from canter.modules.actor_critic_recurrent import ActorCriticRecurrent


def made(cls=ActorCritic, **settings):
    torch.manual_seed(0)
    return cls(3, 3, 2, actor_hidden_dims=(8,), critic_hidden_dims=(8,), state_dependent_std=True, **settings)


def bias(policy):
    return policy.actor[-1].bias


@pytest.mark.parametrize("kind", ["scalar", "log"])
@pytest.mark.parametrize("cls", [ActorCritic, ActorCriticRecurrent])
@pytest.mark.parametrize("orthogonal", [False, True])
def test_the_noise_starts_at_the_stated_std_everywhere(cls, kind, orthogonal):
    policy = made(cls, noise_std_type=kind, init_noise_std=[0.5, 2.0], orthogonal_init=orthogonal)
    std = policy(torch.randn(7, 3)).std
    torch.testing.assert_close(std, torch.tensor([0.5, 2.0]).expand(7, 2))
    assert not hasattr(policy, "std")
    assert not hasattr(policy, "log_std")


@pytest.mark.parametrize("kind", ["scalar", "log"])
def test_the_noise_is_a_function_of_the_observation_with_a_gradient(kind):
    policy = made(noise_std_type=kind)
    with torch.no_grad():
        policy.actor[-1].weight[2:] = torch.randn(2, 8)
    obs = torch.randn(5, 3)
    std = policy(obs).std
    assert std.unique().numel() == 10
    head = policy.actor(obs)[:, 2:]
    expected = head.exp() if kind == "log" else torch.nn.functional.softplus(head)
    torch.testing.assert_close(std, expected)
    std.sum().backward()
    assert (policy.actor[-1].weight.grad[2:] != 0).all()
    assert (policy.actor[-1].weight.grad[:2] == 0).all()


@pytest.mark.parametrize("kind", ["scalar", "log"])
def test_bounds_hold_and_keep_the_gradient(kind):
    policy = made(noise_std_type=kind)
    policy.clip_std(min=torch.tensor([0.3, 0.1]), max=1.5)
    with torch.no_grad():
        bias(policy)[2:] = torch.tensor([-9.0, 9.0])
    out = policy(torch.zeros(1, 3))
    torch.testing.assert_close(out.std, torch.tensor([[0.3, 1.5]]))
    out.std.sum().backward()
    assert (bias(policy).grad[2:] > 0).all()
    assert not {"std_low", "std_high"} & set(policy.state_dict())  # they are settings of the algorithm


def test_it_is_for_gaussians_alone():
    with pytest.raises(ValueError, match="a Categorical has no standard deviation"):
        made(action_space=spaces.Discrete(2))
    with pytest.raises(ValueError, match="a Beta has no standard deviation"):
        made(action_space=spaces.Box(-1.0, 1.0, (2,)), action_distribution="beta")
    squashed = made(action_space=spaces.Box(-1.0, 1.0, (2,)), squash_actions=True)
    assert squashed(torch.zeros(4, 3)).params["sigma"].shape == (4, 2)
    with pytest.raises(ValueError, match="'scalar' or 'log', got 'lin'"):
        made(noise_std_type="lin")
