"""Replay of state pairs: the newest pairs are kept, and no call reads from the device."""

import pytest
import torch

from canter.storage.replay_buffer import ReplayBuffer


def pairs(first, count, width=2):
    states = torch.arange(first, first + count).float()[:, None].expand(count, width)
    return states, states + 0.5


def content(buffer):
    return sorted(buffer.states[: buffer.num_samples, 0].int().tolist())


@pytest.mark.parametrize("size", [1, 3, 7])
def test_batches_of_any_size_overwrite_the_oldest_pairs(size):
    buffer, written, generator = ReplayBuffer(1, size, "cpu"), [], torch.Generator().manual_seed(size)
    for _ in range(30):
        count = int(torch.randint(0, 2 * size + 2, (), generator=generator))
        buffer.insert(*pairs(len(written), count, 1))
        written += range(len(written), len(written) + count)
        assert content(buffer) == written[-size:]


def test_samples_are_uniform_over_what_was_written_and_stay_pairs():
    buffer = ReplayBuffer(2, 100, "cpu")
    buffer.insert(*pairs(1, 4))
    torch.manual_seed(0)
    drawn = list(buffer.feed_forward_generator(3, 4000))
    assert len(drawn) == 3
    states = torch.cat([s for s, _ in drawn])
    assert torch.equal(torch.cat([n for _, n in drawn]), states + 0.5)
    counts = torch.bincount(states[:, 0].long(), minlength=5)
    assert counts[0] == 0
    assert (counts[1:] - 3000).abs().max() < 200  # four standard deviations


def test_one_seed_controls_the_samples():
    buffer = ReplayBuffer(2, 100, "cpu")
    buffer.insert(*pairs(1, 50))
    a, b = (buffer.sample(10, torch.Generator().manual_seed(3))[0] for _ in range(2))
    assert torch.equal(a, b)


def test_sampling_an_empty_buffer_is_an_error():
    with pytest.raises(ValueError, match="empty"):
        next(ReplayBuffer(2, 5, "cpu").feed_forward_generator(1, 1))


def test_other_widths_are_refused():
    with pytest.raises(ValueError, match="width 2"):
        ReplayBuffer(2, 5, "cpu").insert(torch.zeros(3, 3), torch.zeros(3, 3))
    with pytest.raises(ValueError, match="at least 1"):
        ReplayBuffer(2, 0, "cpu")


@pytest.mark.parametrize("count", [3, 5, 7])  # pairs in a buffer of 5
def test_a_loaded_buffer_continues_exactly(count):
    buffer, other = ReplayBuffer(2, 5), ReplayBuffer(2, 5)
    buffer.insert(*pairs(0, count - 1))
    buffer.insert(*pairs(count - 1, 1))
    other.insert(*pairs(50, 4))
    other.load_state_dict(buffer.state_dict())
    for number in range(2):
        assert (other.step, other.num_samples) == (buffer.step, buffer.num_samples)
        assert torch.equal(other.states[: other.num_samples], buffer.states[: buffer.num_samples])
        assert torch.equal(other.next_states[: other.num_samples], buffer.next_states[: buffer.num_samples])
        for one in (buffer, other):
            one.insert(*pairs(10 + number, 1))


def test_a_buffer_of_another_size_takes_the_newest_pairs():
    buffer = ReplayBuffer(2, 5)
    buffer.insert(*pairs(0, 4))
    buffer.insert(*pairs(4, 3))  # rows 5, 6, 2, 3, 4
    for size, kept, step in ((3, [4, 5, 6], 0), (8, [2, 3, 4, 5, 6], 5)):
        other = ReplayBuffer(2, size)
        other.load_state_dict(buffer.state_dict())
        assert content(other) == kept
        assert other.step == step


@pytest.mark.gpu
def test_captured_inserts_go_on_where_the_last_replay_ended():
    buffer = ReplayBuffer(1, 8, "cuda")
    states = torch.zeros(3, 1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffer.insert(states, states + 0.5)
    for value in (1.0, 2.0, 3.0):
        states.fill_(value)
        graph.replay()
    assert buffer.states[:, 0].tolist() == [3, 1, 1, 2, 2, 2, 3, 3]
    assert (buffer.step, buffer.num_samples) == (1, 8)
