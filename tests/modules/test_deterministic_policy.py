"""Acting without noise."""

import pytest
import torch

from canter.modules.actor_critic import ActorCritic
from canter.modules.actor_critic_recurrent import ActorCriticRecurrent
from canter.modules.deterministic_policy import DeterministicPolicyMixin


class QuietRecurrent(DeterministicPolicyMixin, ActorCriticRecurrent):
    pass


def test_a_recurrent_one_advances_its_memory():
    policy, obs = QuietRecurrent(3, 2, rnn_hidden_size=8), torch.randn(4, 3)
    first = policy.act(obs)
    assert not torch.equal(policy.act(obs), first)
    policy.reset()
    assert torch.equal(policy.act(obs), first)


def test_it_must_precede_a_class_with_a_mean():
    with pytest.raises(AttributeError, match="Alone: DeterministicPolicyMixin must precede a class with action_mean"):

        class Alone(DeterministicPolicyMixin):
            pass

    with pytest.raises(AttributeError, match="Behind: .*must precede"):

        class Behind(ActorCritic, DeterministicPolicyMixin):
            pass


class Foreign:
    """A policy of another library: `act` sets the distribution and samples."""

    def act(self, obs, scale=1.0):
        self.distribution = torch.distributions.Normal(scale * obs.sum(-1, keepdim=True), 1.0)
        return self.distribution.sample()

    @property
    def action_mean(self):
        return self.distribution.mean


def test_a_policy_of_another_library_acts_by_its_mean():
    class QuietForeign(DeterministicPolicyMixin, Foreign):
        pass

    class Doubled(QuietForeign):
        def act(self, obs):
            return 2.0 * super().act(obs)

    class Derived(Doubled):
        pass

    obs = torch.randn(5, 2)
    total = obs.sum(-1, keepdim=True)
    assert torch.equal(QuietForeign().act(obs, scale=3.0), 3.0 * total)
    assert torch.equal(Derived().act(obs), 2.0 * total)
