"""Recurrent actor-critics: two memories that never mix."""

import pickle

import pytest
import torch
from torch import nn

from canter.modules.actor_critic_recurrent import ActorCriticHiddenState, ActorCriticRecurrent, LstmHiddenState


def test_defaults_are_an_lstm_of_256():
    policy = ActorCriticRecurrent(3, 5, 2)
    assert policy.is_recurrent
    for memory, width in ((policy.memory_a, 3), (policy.memory_c, 5)):
        assert isinstance(memory.rnn, nn.LSTM)
        assert (memory.rnn.input_size, memory.rnn.hidden_size, memory.rnn.num_layers) == (width, 256, 1)
    assert policy.actor[0].in_features == policy.critic[0].in_features == 256
    assert policy.rnn_type == "lstm"


def test_a_gru_of_another_size():
    policy = ActorCriticRecurrent(3, 5, 2, rnn_type="gru", rnn_hidden_size=16, rnn_num_layers=2)
    assert isinstance(policy.memory_a.rnn, nn.GRU)
    assert policy.memory_c.rnn.num_layers == 2
    assert policy.actor[0].in_features == 16
    assert policy.initial_hidden(7)["memory_a"].shape == (7, 1, 2, 16)


def test_two_numbers_give_both_memories_the_same_observation():
    policy = ActorCriticRecurrent(3, 2, rnn_hidden_size=8)
    assert policy.memory_a.rnn.input_size == policy.memory_c.rnn.input_size == 3
    assert policy.actor[-1].out_features == 2


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


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_hidden_states_have_the_documented_structure(make_policy, kind):
    policy = make_policy(kind, rnn_num_layers=2)
    empty = policy.get_hidden_states()
    assert isinstance(empty, ActorCriticHiddenState)
    assert empty.actor is None
    policy.act(torch.randn(4, 3))
    policy.evaluate(torch.randn(4, 5))
    states = policy.get_hidden_states()
    leaves = (
        (states.actor, states.actor.hidden, states.critic.cell) if kind == "lstm" else (states.actor, states.critic)
    )
    if kind == "lstm":
        assert isinstance(states.actor, LstmHiddenState)
        leaves = leaves[1:]
    assert all(leaf.shape == (2, 4, 8) for leaf in leaves)


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


def test_an_unknown_setting_names_the_recurrent_class_and_its_settings():
    with pytest.raises(TypeError, match="'rnn_type'"):
        ActorCriticRecurrent(3, 5, 2, rnn_typ="gru")
