"""An actor and a critic given apart behave as one policy."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from canter.modules.actor_critic_pair import ActorCriticPair
from canter.modules.actors import ContinuousActor, Critic, MLPActor, MLPCritic, MLPDiscreteActor

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
def test_custom_networks_see_the_dict_and_give_a_policys_output(lead):
    policy = ActorCriticPair(MyActor(OBS, BOX), MyCritic(OBS))
    obs = observation(*lead)
    out = policy(obs)
    assert torch.equal(out.mean, policy.actor.net(obs["joints"]))
    assert (out.std == 0.5).all()
    assert torch.equal(out.value, policy.critic.net(obs["joints"]))
    assert out.value.shape == (*lead, 1)
    assert policy.distribution is policy.actor.distribution


def test_values_without_a_last_dimension_get_one():
    box = spaces.Box(-1, 1, (4,))
    policy = ActorCriticPair(MLPActor(box, BOX), MLPCritic(box))
    assert policy.evaluate(torch.randn(5, 4)).shape == (5, 1)
    assert policy.act(torch.randn(5, 4)).shape == (5, 3)


def test_discrete_actors_give_logits():
    box = spaces.Box(-1, 1, (4,))
    policy = ActorCriticPair(MLPDiscreteActor(box, spaces.Discrete(6)), MLPCritic(box))
    assert policy(torch.randn(5, 4)).params["logits"].shape == (5, 6)
    assert policy.act(torch.randn(5, 4)).dtype == torch.int64
    policy.clip_std(min=0.5)  # nothing to clip


def test_the_noise_of_the_actor_is_clipped():
    box = spaces.Box(-1, 1, (4,))
    policy = ActorCriticPair(MLPActor(box, BOX, {"init_std": 0.1}), MLPCritic(box))
    policy.clip_std(min=torch.tensor(0.5))
    torch.testing.assert_close(policy(torch.randn(5, 4)).std.detach(), torch.full((5, 3), 0.5))


def test_what_cannot_serve_is_refused_with_the_class_to_derive_from():
    with pytest.raises(
        TypeError, match="Linear cannot be used as actor: it lacks get_params, distribution; derive .*Actor"
    ):
        ActorCriticPair(nn.Linear(2, 2), MyCritic(OBS))
    with pytest.raises(TypeError, match="Linear cannot be used as critic: it lacks get_value; derive it .*Critic"):
        ActorCriticPair(MyActor(OBS, BOX), nn.Linear(2, 2))
