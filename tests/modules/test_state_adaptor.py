"""Privileged adaptation, alone and beside a state estimator."""

import pytest
import torch

from canter.modules.actor_critic import ActorCritic
from canter.modules.actor_critic_recurrent import ActorCriticRecurrent
from canter.modules.state_adaptor import (
    PrivilegeEstimatorMixin,
    PrivilegeStateAc,
)

SEGMENTS = {"pos": (3,), "friction": (1,), "vel": (2,)}
CRITIC_SEGMENTS = {"mass": (2,), "friction": (1,), "vel": (2,), "pos": (3,)}
ADAPTOR = {"adaptor_obs_components": ["pos"], "adaptor_target_components": ["friction"]}
ESTIMATOR = {"estimator_obs_components": ["pos", "friction"], "estimator_target_components": ["vel"]}


class PrivilegeAc(PrivilegeEstimatorMixin, ActorCritic):
    pass


def make(cls, **settings):
    torch.manual_seed(0)
    defaults = {"obs_segments": SEGMENTS, "critic_obs_segments": CRITIC_SEGMENTS, "actor_hidden_dims": [8], **ADAPTOR}
    if issubclass(cls, ActorCriticRecurrent):
        defaults["rnn_hidden_size"] = 5
    if cls.__name__.startswith("PrivilegeState"):
        defaults |= ESTIMATOR
    return cls(6, 8, 2, **defaults | settings)


@pytest.mark.parametrize("prob", [0.0, 1.0])
def test_the_prediction_replaces_the_component_with_its_probability(prob):
    policy, seen = make(PrivilegeAc, privilege_replace_state_prob=prob), []
    policy.actor.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    obs = torch.randn(4, 6)
    policy.act(obs)
    expected = torch.cat([obs[:, :3], policy.get_adapted_state(), obs[:, 4:]], 1) if prob else obs
    assert torch.equal(seen[0], expected)


def test_both_estimates_are_kept_separately():
    policy = make(PrivilegeStateAc, privilege_replace_state_prob=1.0)
    obs = torch.randn(4, 6)
    policy.act(obs)
    adapted, estimated = policy.get_adapted_state(), policy.get_estimated_state()
    assert torch.equal(adapted, policy.adaptor(obs[:, :3]))
    # The adaptor comes first: the estimator gets its prediction.
    assert torch.equal(estimated, policy.state_estimator(torch.cat([obs[:, :3], adapted], 1)))
    assert torch.equal(policy.get_estimated_state("adaptor"), adapted)
    assert {name: list(e.target.shapes) for name, e in policy.estimates.items()} == {
        "estimator": ["vel"],
        "adaptor": ["friction"],
    }
    assert torch.equal(make(PrivilegeAc).estimates["adaptor"].target.width * torch.ones(1), torch.ones(1))


def test_without_an_estimator_the_estimated_state_is_the_adaptors():
    policy = make(PrivilegeAc)
    policy.act(torch.randn(4, 6))
    assert policy.get_estimated_state() is policy.get_adapted_state()


def test_a_component_that_cannot_be_replaced_is_named():
    with pytest.raises(ValueError, match="estimate of 'mass' .* where it is not there; append"):
        make(PrivilegeAc, adaptor_target_components=["mass"], privilege_replace_state_prob=0.5)
    with pytest.raises(ValueError, match="no components to estimate; set adaptor_target_components"):
        make(PrivilegeAc, adaptor_target_components=())
    policy = make(PrivilegeAc, adaptor_target_components=["mass"], append_adapted_state=True)
    assert policy.actor[0].in_features == 8
