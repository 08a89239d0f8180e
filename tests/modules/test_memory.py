"""Recurrent memory: one step at a time or a padded batch at once, and resets that reach the right environments."""

import pytest
import torch

from canter.modules.actor_critic_recurrent import LstmHiddenState, Memory
from canter.storage.trajectories import Trajectories, episode_starts, split_and_pad_trajectories, trajectory_index

KINDS = ["lstm", "gru"]
DONES = torch.tensor([[0, 0], [0, 1], [0, 0], [1, 0], [0, 1], [0, 0]]).bool()  # (T, N) = (6, 2)


def made(kind="lstm", layers=1, hidden=4):
    torch.manual_seed(0)
    return Memory(3, kind, layers, hidden)


def stepwise(memory, x, dones=None):
    """Outputs and states before each step, resetting after dones."""
    outs, states = [], []
    memory.state = torch.randn_like(memory.zero_state(x.shape[1]))  # a past
    for t, row in enumerate(x):
        states.append(memory.state)
        outs.append(memory(row))
        if dones is not None:
            memory.reset(dones[t])
    return torch.stack(outs), torch.stack(states)


def test_another_kind_is_refused():
    with pytest.raises(ValueError, match="rnn_type must be one of lstm, gru, got 'transformer'"):
        Memory(3, "transformer")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [1, 2])
def test_a_batch_gives_the_outputs_of_single_steps(kind, layers):
    memory, x = made(kind, layers), torch.randn(6, 5, 3)
    for row in torch.randn(2, 5, 3):
        memory(row)  # a past, so that the initial state matters
    initial, state = memory.hidden_states, memory.state
    outs = torch.stack([memory(row) for row in x])
    kept = memory.state
    torch.testing.assert_close(memory(x, hidden_states=initial), outs)
    assert memory.state is kept  # a batch leaves the kept state alone
    batch, new = memory.run(x, state)
    torch.testing.assert_close(batch, outs)
    torch.testing.assert_close(new, kept)


@pytest.mark.parametrize("kind", KINDS)
def test_a_split_batch_gives_the_outputs_of_steps_with_resets(kind):
    memory, x = made(kind), torch.randn(6, 2, 3)
    outs, states = stepwise(memory, x, DONES)
    starts = episode_starts(DONES)
    row, column = trajectory_index(starts)
    first = torch.stack([states[t, n] for n in range(2) for t in range(6) if starts[t, n]])
    batch, _ = memory.run(x, first, Trajectories(row, column, 5))
    torch.testing.assert_close(batch, outs)
    padded, masks = split_and_pad_trajectories(x, DONES)
    torch.testing.assert_close(memory(padded, masks, memory.unpack(first)), outs)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
@pytest.mark.parametrize("shape", [(5,), (5, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_reaches_exactly_the_environments_that_ended(kind, shape, dtype):
    memory = made(kind)
    memory(torch.randn(5, 3))
    before = memory.state.clone()
    memory.reset(torch.tensor([0, 0, 0, 1, 0]).to(dtype).view(shape))
    assert (memory.state[3] == 0).all()
    assert torch.equal(memory.state[[0, 1, 2, 4]], before[[0, 1, 2, 4]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_without_a_mask_reaches_all_even_under_autograd(kind):
    memory = made(kind)
    memory.reset()  # nothing to do yet
    assert memory.hidden_states is None
    memory(torch.randn(5, 3))
    assert memory.state.requires_grad
    memory.reset()
    assert (memory.state == 0).all()
    with torch.inference_mode():
        memory(torch.randn(5, 3))
        memory.reset(torch.tensor([True, False, False, False, False]))
    assert (memory.state[0] == 0).all()
    memory(torch.randn(5, 3)).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_another_number_of_environments_starts_from_zero(kind):
    memory, x = made(kind), torch.randn(4, 3)
    fresh = memory(x)
    memory(x)
    memory(torch.randn(7, 3))
    assert torch.equal(memory(x), fresh)


@pytest.mark.parametrize("layers", [1, 2])
def test_states_are_layer_major_outside_and_env_major_inside(layers):
    lstm, gru = made("lstm", layers), made("gru", layers)
    for memory in (lstm, gru):
        memory(torch.randn(5, 3))
    assert lstm.state.shape == (5, 2, layers, 4)
    assert gru.state.shape == (5, 1, layers, 4)
    assert isinstance(lstm.hidden_states, LstmHiddenState)
    assert lstm.hidden_states.hidden.shape == lstm.hidden_states.cell.shape == (layers, 5, 4)
    assert gru.hidden_states.shape == (layers, 5, 4)
    assert torch.equal(lstm.hidden_states.cell[layers - 1, 3], lstm.state[3, 1, layers - 1])
    for memory in (lstm, gru):
        assert torch.equal(memory.pack(memory.hidden_states), memory.state)
