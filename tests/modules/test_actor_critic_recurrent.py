"""Recurrent actor-critics: two memories that never mix."""

import pickle

import pytest
import torch

from canter.modules.actor_critic_recurrent import ActorCriticHiddenState, LstmHiddenState


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_acting_and_evaluating_advance_their_own_memory_only(make_policy, kind):
    policy = make_policy(kind)
    policy.act(torch.randn(4, 3))
    policy.evaluate(torch.randn(4, 5))
    actor, critic = policy.memory_a.state.clone(), policy.memory_c.state.clone()
    policy.evaluate(torch.randn(4, 5))
    assert torch.equal(policy.memory_a.state, actor)
    assert not torch.equal(policy.memory_c.state, critic)
    critic = policy.memory_c.state.clone()
    for call in (policy.act, policy.act_inference):
        call(torch.randn(4, 3))
        assert torch.equal(policy.memory_c.state, critic)
        assert not torch.equal(policy.memory_a.state, actor)
        actor = policy.memory_a.state.clone()


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_evaluating_other_environments_leaves_the_actors_memory(make_policy, kind):
    policy = make_policy(kind)
    assert policy.get_hidden_states() == ActorCriticHiddenState(None, None)
    policy.act(torch.randn(4, 3))
    assert policy.get_hidden_states().critic is None
    before = policy.memory_a.state
    policy.evaluate(torch.randn(7, 5))
    assert policy.memory_a.state is before
    assert len(policy.memory_c.state) == 7


def test_hidden_states_index_assign_and_pickle():
    states = ActorCriticHiddenState(
        LstmHiddenState(torch.arange(8.0).view(1, 4, 2), torch.ones(1, 4, 2)), torch.zeros(1, 4, 2)
    )
    assert "actor" in states
    assert "cell" in states.actor
    assert "teacher" not in states
    part = states[:, 1:3]
    assert part.actor.hidden.flatten().tolist() == [2, 3, 4, 5]
    states[:, 0] = 7.0
    assert states.actor.hidden[0, 0].tolist() == states.critic[0, 0].tolist() == [7, 7]
    again = pickle.loads(pickle.dumps(states))  # noqa: S301 - our own bytes
    assert isinstance(again.actor, LstmHiddenState)
    assert torch.equal(again.actor.hidden, states.actor.hidden)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_reset_reaches_both_memories(make_policy, kind):
    policy = make_policy(kind)
    policy.act(torch.randn(4, 3))
    policy.evaluate(torch.randn(4, 5))
    policy.reset(torch.tensor([0, 1, 0, 0]))
    for memory in policy.memories.values():
        assert [bool((row == 0).all()) for row in memory.state] == [False, True, False, False]
    policy.reset()
    assert all((memory.state == 0).all() for memory in policy.memories.values())


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_branchs_state_may_be_given_alone_or_with_the_other(make_policy, kind):
    policy = make_policy(kind)
    for _ in range(2):
        policy.act(torch.randn(4, 3))
        policy.evaluate(torch.randn(4, 5))
    states = policy.get_hidden_states()
    obs, critic_obs = torch.randn(1, 4, 3), torch.randn(1, 4, 5)
    policy.act(obs, None, states)
    both = policy.action_mean
    policy.act(obs, None, states.actor)
    assert torch.equal(policy.action_mean, both)
    value = policy.evaluate(critic_obs, None, states)
    assert torch.equal(value, policy.evaluate(critic_obs, None, states.critic))
    policy.act(obs[0])  # the kept state is the one both were given
    torch.testing.assert_close(policy.action_mean, both[0])
    torch.testing.assert_close(policy.evaluate(critic_obs[0]), value[0])
