"""An actor-critic around an actor and a critic that are given as modules."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from canter.modules.actor_critic import ActorCritic
from canter.modules.actors import ContinuousActor, Critic, MLPCritic, MLPDiscreteActor

OBS = spaces.Dict({"joints": spaces.Box(-1, 1, (2,)), "eye": spaces.Box(0, 255, (4, 4, 1), np.uint8)})
BOX = spaces.Box(-1.0, 1.0, (3,))


class MyActor(ContinuousActor):
    """As a user writes one: a distribution from a dict of observations."""

    def __init__(self, obs_space, action_space, cfg=None):
        super().__init__(obs_space, action_space, cfg)
        self.net = nn.Linear(2, 3)

    def get_action_dist(self, obs):
        return torch.distributions.Normal(self.net(obs["joints"]), 0.5)


class MyCritic(Critic):
    def __init__(self, obs_space, cfg=None):
        super().__init__(obs_space, cfg)
        self.net = nn.Linear(2, 1)

    def forward(self, obs):
        return self.net(obs["joints"])  # (..., 1): either shape will do


def observation(*lead):
    return {"joints": torch.randn(*lead, 2), "eye": torch.zeros(*lead, 4, 4, 1, dtype=torch.uint8)}


@pytest.mark.parametrize("lead", [(5,), (6, 5)])
def test_custom_networks_get_the_dict_and_give_a_policys_output(lead):
    policy = ActorCritic(actor=MyActor(OBS, BOX), critic=MyCritic(OBS))
    obs = observation(*lead)
    out = policy(obs)
    assert torch.equal(out.mean, policy.actor.net(obs["joints"]))
    assert (out.std == 0.5).all()
    assert torch.equal(out.value, policy.critic.net(obs["joints"]))
    assert out.value.shape == (*lead, 1)
    assert policy.distribution is policy.actor.distribution


def test_discrete_actors_give_logits():
    box = spaces.Box(-1, 1, (4,))
    policy = ActorCritic(actor=MLPDiscreteActor(box, spaces.Discrete(6)), critic=MLPCritic(box))
    assert policy(torch.randn(5, 4)).params["logits"].shape == (5, 6)
    assert policy.act(torch.randn(5, 4)).dtype == torch.int64
    policy.clip_std(min=0.5)  # nothing to clip


class Column(nn.Module):
    """A critic whose output is (B,) or (B, 1)."""

    def __init__(self, keeps_column):
        super().__init__()
        self.net, self.keeps_column = nn.Linear(4, 1), keeps_column

    def forward(self, obs):
        value = self.net(obs)
        return value if self.keeps_column else value.squeeze(-1)


@pytest.mark.parametrize("keeps_column", [True, False])
@pytest.mark.parametrize("lead", [(5,), (1,), (6, 5), (6, 1)])
def test_plain_modules_give_the_mean_and_the_value(lead, keeps_column):
    actor, critic = nn.Linear(4, 3), Column(keeps_column)
    policy = ActorCritic(4, 3, actor=actor, critic=critic, init_noise_std=0.5)
    assert {name.partition(".")[0] for name in policy.state_dict()} == {"std", "actor", "critic"}
    obs = torch.randn(*lead, 4)
    out = policy(obs)
    assert torch.equal(out.mean, actor(obs))
    assert (out.std == 0.5).all()
    assert torch.equal(out.value, critic.net(obs))


def test_a_plain_actor_gives_logits_where_actions_are_discrete():
    actor, critic = nn.Linear(4, 6), Column(keeps_column=False)
    for policy in (
        ActorCritic(actor=actor, critic=critic, action_space=spaces.Discrete(6)),
        ActorCritic(4, 4, 6, actor=actor, critic=critic, action_space=spaces.Discrete(6)),
    ):
        obs = torch.randn(5, 4)
        assert torch.equal(policy(obs).params["logits"], actor(obs))
        assert policy.evaluate(obs).shape == (5, 1)
        assert policy.num_actions == 6


def test_an_actor_with_a_state_dependent_std_keeps_its_weights():
    actor = nn.Linear(4, 6)
    before = actor.weight.detach().clone()
    policy = ActorCritic(4, 3, actor=actor, critic=Column(True), state_dependent_std=True, orthogonal_init=True)
    assert torch.equal(actor.weight, before)
    obs = torch.randn(5, 4)
    torch.testing.assert_close(policy(obs).std, nn.functional.softplus(actor(obs)[:, 3:]))


def test_incomplete_modules_and_settings_of_a_replaced_network_are_refused():
    half = nn.Linear(2, 2)
    half.get_params = lambda obs: {}
    with pytest.raises(TypeError, match="Linear cannot be used as actor: it lacks distribution; derive .*Actor"):
        ActorCritic(actor=half, critic=MyCritic(OBS))
    with pytest.raises(TypeError, match="needs num_actions or action_space to choose a distribution"):
        ActorCritic(actor=nn.Linear(2, 2), critic=MyCritic(OBS))
    with pytest.raises(TypeError, match=r"needs num_critic_obs to build the critic, or critic=<module>"):
        ActorCritic(actor=MyActor(OBS, BOX))
    with pytest.raises(TypeError, match="needs num_actor_obs and num_critic_obs, or neither"):
        ActorCritic(None, 4, 3, actor=nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"activation 'tanh' is for the MLP of the critic, but critic=<module>"):
        ActorCritic(4, 3, critic=Column(True), critic_activation="tanh")
