"""Rollout storage: fields, returns, and minibatches whose parts come from the same steps."""

import pytest
import torch
from no_host_sync import NoHostSync

from canter.modules import ActorCriticRecurrent
from canter.storage.rollout_storage import Field, RolloutStorage

T, N = 6, 4


def ids(step):
    """(N,) 100 * env + step."""
    return 100.0 * torch.arange(N) + step


def transition(storage, step, done=None, hidden=None, **more):
    t = storage.Transition()
    t.observations = ids(step).unsqueeze(-1).expand(N, 3)
    t.critic_observations = ids(step).unsqueeze(-1).expand(N, 5)
    t.actions = ids(step).unsqueeze(-1).expand(N, 2)
    t.params = {"mu": ids(step).unsqueeze(-1).expand(N, 2), "sigma": torch.ones(N, 2)}
    t.rewards, t.values, t.actions_log_prob = ids(step), ids(step).unsqueeze(-1), ids(step)
    t.dones = torch.zeros(N, dtype=torch.bool) if done is None else done
    t.valid = torch.ones(N, dtype=torch.bool)
    t.hidden = hidden or {}
    vars(t).update(more)
    return t


def filled(steps=T, dones=None, **kwargs):
    storage = RolloutStorage(N, T, [3], [5], [2], **kwargs)
    for step in range(steps):
        hidden = {name: ids(step).view(N, 1, 1, 1).expand(N, *shape) for name, shape in storage.hidden_shapes.items()}
        storage.add_transitions(transition(storage, step, None if dones is None else dones[step], hidden))
    storage.returns.copy_(storage.rewards)
    storage.advantages.copy_(storage.rewards)
    return storage


def test_dict_observations_keep_structure_and_kind():
    shape = {"joints": (3,), "camera": {"left": Field((2, 2), dtype=torch.uint8)}}
    storage = RolloutStorage(N, T, shape, None, [2])
    t = transition(storage, 7)
    t.observations = {"joints": torch.ones(N, 3), "camera": {"left": torch.full((N, 2, 2), 250, dtype=torch.uint8)}}
    storage.add_transitions(t)
    assert storage.observations["camera"]["left"].dtype == torch.uint8
    batch = next(storage.mini_batch_generator(1, 1))
    assert batch.obs["camera"]["left"].shape == (N, 2, 2)
    assert (batch.obs["camera"]["left"] == 250).all()
    assert batch.critic_obs is batch.obs


def test_one_step_too_many_is_an_overflow():
    storage = filled()
    with pytest.raises(AssertionError, match="Rollout buffer overflow: it holds 6 steps"):
        storage.add_transitions(transition(storage, T))
    storage.clear()
    storage.add_transitions(transition(storage, 50))
    assert storage.step == 1
    assert storage.rewards[0, :, 0].tolist() == [50, 150, 250, 350]


def test_stored_values_are_copies():
    storage = RolloutStorage(N, T, [3], [5], [2])
    t = transition(storage, 1)
    t.observations = torch.ones(N, 3)
    storage.add_transitions(t)
    t.observations.zero_()
    assert (storage.observations[0] == 1).all()


def test_a_misspelt_or_missing_field_is_an_error():
    storage = RolloutStorage(N, T, [3], [5], [2])
    t = transition(storage, 0)
    misspelt = {name: value for name, value in vars(t).items() if name != "rewards"} | {"rewrads": torch.ones(N)}
    with pytest.raises(ValueError, match="lacks rewards; it has observations, .*rewrads"):
        storage.add(misspelt)
    t.rewards = None
    with pytest.raises(ValueError, match="lacks rewards"):
        storage.add_transitions(t)
    assert storage.step == storage.num_finished == 0
    assert not storage.observations.any()
    with pytest.raises(AttributeError, match="no field 'rewrads'"):
        _ = storage.rewrads


def test_a_cleared_transition_holds_nothing():
    t = transition(RolloutStorage(N, T, [3], [5], [2]), 0)
    assert t.action_mean is not None
    assert t.action_sigma is not None
    t.clear()
    assert t.observations is t.rewards is t.valid is t.action_mean is t.action_sigma is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
@pytest.mark.parametrize("shape", [(N,), (N, 1)])
def test_dones_of_any_kind_are_stored_alike(dtype, shape):
    done = torch.tensor([0, 1, 0, 1])
    storage = RolloutStorage(N, T, [3], [5], [2])
    storage.add_transitions(transition(storage, 0, done.to(dtype).view(shape)))
    assert storage.dones[0, :, 0].tolist() == [False, True, False, True]


def test_a_partial_rollout_uses_only_its_rows():
    storage = filled()
    storage.clear()
    for step in range(2):
        storage.add_transitions(transition(storage, step))
    storage.rewards[:2], storage.values[:2] = 1.0, 0.0
    storage.compute_returns(torch.full((N, 1), 10.0), 1.0, 1.0, normalize=False)
    assert storage.returns[:2, 0, 0].tolist() == [12, 11]
    assert storage.advantages[:2, 0, 0].tolist() == [12, 11]
    assert storage.returns[2:].min() >= 2  # untouched
    assert sum(len(batch.obs) for batch in storage.mini_batch_generator(3, 1)) == 2 * N


def test_returns_are_no_inference_tensors():
    storage = filled(steps=T - 1)
    with torch.inference_mode():
        storage.add_transitions(transition(storage, 5))
        storage.compute_returns(torch.zeros(N, 1), 0.9, 0.9)
    assert not any(data.is_inference() for data in storage.data.values())


@pytest.mark.parametrize("normalize", [False, True])
def test_returns_take_gamma_and_lambda_as_numbers_or_as_tensors(normalize):
    one, other = filled(dones=DONES), filled(dones=DONES)
    one.compute_returns(torch.ones(N, 1), 0.9, 0.8, normalize)
    last_values, gamma, lam = torch.ones(N, 1), torch.tensor(0.9), torch.tensor(0.8)
    with NoHostSync():
        other.compute_returns(last_values, gamma, lam, normalize)
    torch.testing.assert_close(one.returns, other.returns)
    torch.testing.assert_close(one.advantages, other.advantages)


def flat_ids(batch):
    return batch.actions[..., 0].flatten().long().tolist()


@pytest.mark.parametrize("num_mini_batches", [1, 3, 5, 24])
def test_each_epoch_is_a_new_permutation_of_every_step(num_mini_batches):
    storage = filled()
    batches = list(storage.mini_batch_generator(num_mini_batches, 3, torch.Generator().manual_seed(0)))
    assert len(batches) == 3 * num_mini_batches
    sizes = [len(batch.obs) for batch in batches]
    assert max(sizes) - min(sizes) <= 1
    epochs = [
        sum((flat_ids(b) for b in batches[i : i + num_mini_batches]), [])
        for i in range(0, len(batches), num_mini_batches)
    ]
    everything = sorted(100 * n + t for n in range(N) for t in range(T))
    assert all(sorted(epoch) == everything for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_every_part_of_a_sample_comes_from_the_same_step():
    for batch in filled().mini_batch_generator(4, 1):
        tag = batch.obs[:, :1]
        parts = (batch.critic_obs[:, :1], batch.actions[:, :1], batch.values, batch.returns, batch.advantages)
        for part in (*parts, batch.old_actions_log_prob, batch.old_params["mu"][:, :1]):
            assert torch.equal(part, tag)
        assert batch.valid is None
        assert batch.hidden == {}
        assert batch.trajectories is batch.masks is None


@pytest.mark.parametrize("num_mini_batches", [0, 25])
def test_a_number_of_minibatches_that_does_not_fit_is_an_error(num_mini_batches):
    with pytest.raises(ValueError, match=f"num_mini_batches={num_mini_batches} does not fit 24 steps"):
        next(filled().mini_batch_generator(num_mini_batches, 1))
    with pytest.raises(ValueError, match="does not fit 4 environments"):
        next(filled().recurrent_mini_batch_generator(5, 1))


def test_the_documented_names_of_a_gaussian_are_those_of_its_parameters():
    storage = RolloutStorage(N, T, [3], [5], [2])
    t = transition(storage, 0, params={})
    t.action_mean, t.action_sigma = ids(0).unsqueeze(-1).expand(N, 2), torch.full((N, 2), 0.5)
    assert t.params.keys() == {"mu", "sigma"}
    storage.add_transitions(t)
    batch = next(storage.mini_batch_generator(1, 1))
    assert torch.equal(batch.old_mu, batch.actions)
    assert (batch.old_sigma == 0.5).all()
    assert batch.hidden_states is None
    with pytest.raises(AttributeError):
        batch.old_mu = batch.actions
    discrete = RolloutStorage(N, T, [3], None, [], param_shapes={"logits": (2,)})
    discrete.add_transitions(transition(discrete, 0, actions=ids(0), params={"logits": torch.zeros(N, 2)}))
    batch = next(discrete.mini_batch_generator(1, 1))
    assert batch.old_mu is batch.old_sigma is None


HIDDEN = {"memory_a": (2, 1, 3), "memory_c": (1, 2, 3)}


def ended(pattern):
    return torch.tensor([[c == "x" for c in row] for row in pattern.split()]).T


DONES = ended("...x.. .x..x. ...... xxxxxx")  # one word per environment


@pytest.mark.parametrize("num_mini_batches", [1, 2, 3, 4])
def test_recurrent_minibatches_contain_whole_environments(num_mini_batches):
    storage = filled(dones=DONES, hidden_shapes=HIDDEN)
    generator = torch.Generator().manual_seed(0)
    batches = list(storage.recurrent_mini_batch_generator(num_mini_batches, 4, generator))
    assert len(batches) == 4 * num_mini_batches
    dealt = [[int(n) // 100 for n in batch.obs[0, :, 0]] for batch in batches]
    for i in range(0, len(dealt), num_mini_batches):
        assert sorted(sum(dealt[i : i + num_mini_batches], [])) == [0, 1, 2, 3]
    if num_mini_batches > 1:
        assert dealt[:num_mini_batches] != dealt[num_mini_batches : 2 * num_mini_batches]
    for batch in batches:
        assert torch.equal(batch.obs[..., 0] % 100, torch.arange(6.0)[:, None].expand_as(batch.obs[..., 0]))
        assert torch.equal(batch.returns[..., 0], batch.obs[..., 0])
        assert torch.equal(batch.old_params["mu"][..., 0], batch.obs[..., 0])


@pytest.mark.parametrize("num_mini_batches", [1, 2, 4])
def test_each_trajectory_starts_from_the_state_stored_at_its_first_step(num_mini_batches):
    lengths = {0: [4, 2], 1: [2, 3, 1], 2: [6], 3: [1] * 6}
    storage = filled(dones=DONES, hidden_shapes=HIDDEN)
    for batch in storage.recurrent_mini_batch_generator(num_mini_batches, 2):
        envs = [int(n) // 100 for n in batch.obs[0, :, 0]]
        expected_lengths = sum((lengths[n] for n in envs), [])
        assert batch.masks.sum(0).tolist() == expected_lengths
        assert batch.trajectories.total == len(expected_lengths)
        firsts = sum(([100 * n + sum(lengths[n][:i]) for i in range(len(lengths[n]))] for n in envs), [])
        for name, shape in HIDDEN.items():
            assert batch.hidden[name].shape == (len(firsts), *shape)
            assert batch.hidden[name].flatten(1)[:, 0].tolist() == firsts


@pytest.mark.parametrize("rnn_type", ["lstm", "gru"])
def test_a_recurrent_minibatch_serves_the_documented_call_of_a_policy(rnn_type):
    policy = ActorCriticRecurrent(
        3, 5, 2, rnn_type=rnn_type, rnn_hidden_size=8, actor_hidden_dims=[4], critic_hidden_dims=[4]
    )
    shapes = {name: memory.state_shape for name, memory in policy.memories.items()}
    storage = filled(dones=DONES, hidden_shapes=shapes)
    for name in shapes:
        storage.data[f"hidden.{name}"].normal_()
    storage.observations.normal_()
    storage.privileged_observations.normal_()
    for batch in storage.recurrent_mini_batch_generator(2, 1):
        out = policy(batch.obs, batch.critic_obs, batch.hidden, batch.trajectories)
        for states in (batch.hidden_states, batch.hidden_states.actor):
            actions = policy.act(batch.obs, masks=batch.masks, hidden_states=states)
            assert actions.shape == batch.actions.shape
            torch.testing.assert_close(policy.action_mean, out.params["mu"])
        value = policy.evaluate(batch.critic_obs, masks=batch.masks, hidden_states=batch.hidden_states.critic)
        torch.testing.assert_close(value, out.value)


def test_extra_fields_arrive_in_minibatches_at_their_steps():
    fields = {
        "marks": Field((1,)),
        "windows": Field((2, 3), batch="motion.windows", source="motion.window", dtype=torch.float64),
        "is_marked": Field((), dtype=torch.bool, default=True),
    }
    storage = RolloutStorage(N, T, [3], [5], [2], extra_fields=fields)
    for step in range(T):
        window = ids(step).view(N, 1, 1).expand(N, 2, 3)
        storage.add_transitions(transition(storage, step, DONES[step], marks=ids(step), motion={"window": window}))
    assert storage.marks.shape == (T, N, 1)
    for batch in [*storage.mini_batch_generator(3, 2), *storage.recurrent_mini_batch_generator(2, 2)]:
        tag = batch.actions[..., :1]
        assert torch.equal(batch.marks, tag)
        assert torch.equal(batch.motion["windows"], tag.unsqueeze(-1).double().expand(*tag.shape[:-1], 2, 3))
        assert batch.is_marked.shape == tag.shape[:-1]
        assert batch.is_marked.all()


def test_a_missing_extra_field_and_a_taken_name_are_errors():
    storage = RolloutStorage(N, T, [3], [5], [2], extra_fields={"marks": Field((1,))})
    with pytest.raises(ValueError, match="the transition lacks marks"):
        storage.add_transitions(transition(storage, 0))
    for taken in ("rewards", "obs"):
        with pytest.raises(ValueError, match=f"extra_fields: '{taken}'"):
            RolloutStorage(N, T, [3], [5], [2], extra_fields={taken: Field((1,))})


def test_trajectory_statistics_count_steps_and_leave_dones_alone():
    storage = filled(dones=DONES)
    before = storage.dones.clone()
    length, reward = storage.get_statistics()
    assert length == pytest.approx(24 / 12)  # 2 + 3 + 1 + 6 trajectories
    assert reward == pytest.approx(storage.rewards.mean())
    assert torch.equal(storage.dones, before)


def test_trajectory_statistics_leave_out_steps_that_only_reset():
    storage = filled(dones=ended("...... ...xx. ...... ......"), has_invalid_steps=True)
    storage.valid[4, 1] = False
    storage.rewards.fill_(1.0)
    storage.rewards[4, 1] = 0.0
    length, reward = storage.get_statistics()
    assert length == pytest.approx(23 / 5)  # 6 + (4, 1) + 6 + 6
    assert reward == 1.0
