"""Storages of several rollouts, labels, motion features and next states."""

import pytest
import torch

from canter.storage.queue_rollout_storage import (
    ActionLabelRollout,
    AmpRolloutStorage,
    QueueRolloutStorage,
    SarsaRolloutStorage,
)
from canter.storage.rollout_storage import Field, gae

N, T = 3, 4


def row(t, **more):
    """Step t of N environments: every number is 100 * env + t."""
    number = (100.0 * torch.arange(N) + t).unsqueeze(1)
    base = {
        "observations": number.expand(N, 2),
        "actions": number,
        "rewards": number.squeeze(1),
        "dones": torch.zeros(N),
        "values": number + 0.5,
        "actions_log_prob": torch.zeros(N),
        "params": {"mu": number, "sigma": torch.ones(N, 1)},
    }
    return base | more


def made(cls=QueueRolloutStorage, **settings):
    return cls(N, T, (2,), None, (1,), **settings)


def fill(storage, first, steps=T, **more):
    for t in range(first, first + steps):
        storage.add(row(t, **{name: make(t) for name, make in more.items()}))


def test_a_full_ring_overwrites_the_oldest():
    storage = made(buffer_dilation_ratio=2.5)
    for rollout in range(5):
        fill(storage, rollout * T)
        kept = sorted(storage.rewards[: storage.filled, 1, 0].tolist())
        last = (rollout + 1) * T
        assert kept == [100.0 + t for t in range(max(0, last - 10), last)]
        storage.clear()


@pytest.mark.parametrize("untie", [False, True])
def test_untying_moves_the_oldest_row_to_the_front_in_every_field(untie):
    storage = made(buffer_dilation_ratio=2.5, hidden_shapes={"memory_a": (1, 1, 2)})
    for rollout in range(4):
        fill(storage, rollout * T, hidden=lambda t: {"memory_a": torch.full((N, 1, 1, 2), float(t))})
        if untie:
            storage.untie_buffer_loop()
            assert storage.next_row == (0 if rollout >= 2 else (rollout + 1) * T % storage.capacity)
        storage.clear()
    storage.untie_buffer_loop()
    assert storage.rewards[:, 2, 0].tolist() == [200.0 + t for t in range(6, 16)]
    assert storage.data["hidden.memory_a"][:, 0, 0, 0, 0].tolist() == list(range(6, 16))
    storage.untie_buffer_loop()  # a second time changes nothing
    assert storage.observations[:, 0, 0].tolist() == list(range(6, 16))


def test_only_the_newest_rollout_gets_returns_and_only_it_sees_the_last_values():
    storage, kept = made(buffer_dilation_ratio=2.5), {}
    for rollout in range(4):
        fill(storage, rollout * T)
        last = torch.full((N, 1), 7.0 * rollout)
        storage.compute_returns(last, 0.9, 0.8, normalize=False)
        steps = range(rollout * T, (rollout + 1) * T)
        rewards = torch.stack([row(t)["rewards"].unsqueeze(1) for t in steps])
        values = torch.stack([row(t)["values"] for t in steps])
        alone = gae(rewards, values, torch.zeros(T, N, 1), last, 0.9, 0.8) + values
        kept |= dict(zip(steps, alone, strict=True))
        for position in range(storage.filled):
            t = int(storage.rewards[position, 0, 0])
            torch.testing.assert_close(storage.returns[position], kept[t])
        torch.testing.assert_close(
            storage.advantages[: storage.filled], (storage.returns - storage.values)[: storage.filled]
        )
        storage.clear()


def test_advantages_are_normalised_over_every_row_there_is():
    storage = made(buffer_dilation_ratio=2.0)
    for rollout in range(3):
        fill(storage, rollout * T)
        storage.compute_returns(torch.zeros(N, 1), 0.9, 0.8)
        assert storage.advantages.shape[0] == storage.capacity
        filled = storage.advantages[: storage.filled]
        assert filled.mean().abs() < 1e-5
        assert filled.std() == pytest.approx(1.0, abs=1e-5)
        storage.clear()


def test_a_ratio_of_one_keeps_only_the_last_rollout():
    storage = made()
    fill(storage, 0)
    storage.clear()
    fill(storage, 4, steps=2)
    assert storage.capacity == T
    assert storage.filled == 2
    assert [batch.actions.shape[0] for batch in storage.mini_batch_generator(1, 1)] == [2 * N]
    with pytest.raises(ValueError, match="buffer_dilation_ratio must be at least 1, got 0.5"):
        made(buffer_dilation_ratio=0.5)


def test_trajectories_end_where_a_rollout_meets_the_next():
    storage = made(buffer_dilation_ratio=2.0, hidden_shapes={"memory_a": (1, 1, 1)})
    for rollout in range(2):
        fill(storage, rollout * T, hidden=lambda t: {"memory_a": torch.full((N, 1, 1, 1), float(t))})
        storage.clear()
    storage.step, storage.older = T, T
    (batch,) = storage.recurrent_mini_batch_generator(1, 1)
    assert batch.actions.shape == (8, N, 1)
    assert batch.trajectories.total == 2 * N
    assert sorted(batch.hidden["memory_a"].flatten().tolist()) == [0.0] * N + [4.0] * N


@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_labels_belong_to_the_steps_of_their_actions(ratio):
    storage = made(ActionLabelRollout, buffer_dilation_ratio=ratio)
    for rollout in range(3):
        fill(storage, rollout * T, action_labels=lambda t: row(t)["actions"] + 0.25)
        storage.untie_buffer_loop()
        for batch in [*storage.mini_batch_generator(2, 1), *storage.recurrent_mini_batch_generator(2, 1)]:
            assert torch.equal(batch.action_labels, batch.actions + 0.25)
            assert not batch.teacher_acted.any()
        storage.clear()
    with pytest.raises(ValueError, match="lacks action_labels"):
        fill(storage, 0)


def amp_row(t):
    number = (100.0 * torch.arange(N) + t).unsqueeze(1)
    return {"action_labels": number, "ref_obs": number + torch.arange(6) * 0.01, "ref_motion": -number.expand(N, 6)}


def test_motion_features_belong_to_their_steps():
    storage = made(AmpRolloutStorage, amp_obs_shape=(2, 3))
    for t in range(T):
        storage.add(row(t) | amp_row(t) | {"ref_valid": torch.tensor([True, t != 2, True])})
    assert storage.ref_obs.shape == (T, N, 6)
    for batch in [*storage.mini_batch_generator(2, 1), *storage.recurrent_mini_batch_generator(2, 1)]:
        assert torch.equal(batch.ref_obs[..., :1], batch.actions)
        assert torch.equal(batch.ref_motion[..., :1], -batch.actions)
        assert torch.equal(batch.ref_valid, batch.actions != 102.0)
    (whole,) = storage.feed_forward_generator_amp(None, 11)
    assert sorted(whole[0][:, 0].tolist()) == [100.0 * e + t for e in range(N) for t in range(T) if 100 * e + t != 102]
    assert [len(b) for (b,) in storage.feed_forward_generator_amp(3, 8)] == [8, 8, 8]


@pytest.mark.parametrize("cls", [QueueRolloutStorage, ActionLabelRollout, AmpRolloutStorage, SarsaRolloutStorage])
def test_every_storage_takes_extra_fields(cls):
    more = {AmpRolloutStorage: {"amp_obs_shape": (6,)}}.get(cls, {})
    more |= {} if cls is SarsaRolloutStorage else {"buffer_dilation_ratio": 2.0}
    storage = made(cls, extra_fields={"marks": Field((1,))}, **more)
    for t in range(T):
        after = {"next_observations": row(t + 1)["observations"]}
        storage.add(row(t) | amp_row(t) | after | {"marks": row(t)["actions"] + 0.25})
    for batch in [*storage.mini_batch_generator(2, 1), *storage.recurrent_mini_batch_generator(2, 1)]:
        assert torch.equal(batch.marks, batch.actions + 0.25)


@pytest.mark.parametrize("privileged", [None, (3,)])
def test_next_states_are_the_states_of_the_next_step(privileged):
    storage = SarsaRolloutStorage(N, T, (2,), privileged, (1,))
    for t in range(T):
        done = torch.tensor([False, t == 1, False])
        state, after = row(t)["observations"], row(t + 1)["observations"]
        final = torch.where(done.unsqueeze(1), after + 1000.0, after)
        more = {"dones": done, "next_observations": after, "final_observations": final}
        if privileged:
            wide = {name: torch.cat([x, x[:, :1]], 1) for name, x in (("", state), ("next_", after), ("final_", final))}
            more |= {f"{name}critic_observations": x for name, x in wide.items()}
        storage.add(row(t, **more))
    assert storage.observations[1:].data_ptr() == storage.next_observations.data_ptr()
    assert torch.equal(storage.next_observations[:-1], storage.observations[1:])
    assert storage.all_observations[-1, 2, 0] == 200.0 + T
    batches = [*storage.mini_batch_generator(2, 1), *storage.recurrent_mini_batch_generator(1, 1)]
    for batch in batches:
        wanted = batch.actions + 1.0 + 1000.0 * (batch.actions == 101.0)
        assert torch.equal(batch.next_obs, wanted.expand_as(batch.next_obs))
        assert torch.equal(batch.next_critic_obs, wanted.expand_as(batch.next_critic_obs))
        assert batch.next_critic_obs.shape[-1] == (3 if privileged else 2)
