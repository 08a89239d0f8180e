"""State estimation: three ways to build it, the estimate in the actor's input, and errors."""

import pytest
import torch

from canter.modules.build import build_normalizer
from canter.modules.state_estimator import StateAc, StateAcRecurrent, rescale
from canter.utils.obs_layout import UnknownSegmentError

SEGMENTS = {"pos": (3,), "height": (1,), "vel": (2,)}
CRITIC_SEGMENTS = {"vel": (2,), "secret": (2,), "height": (1,), "pos": (3,)}
TARGETS = {"estimator_target_components": ["vel"], "estimator_kwargs": {"hidden_sizes": [4]}}


def make(cls=StateAc, **settings):
    torch.manual_seed(0)
    defaults = {"obs_segments": SEGMENTS, "critic_obs_segments": CRITIC_SEGMENTS, "actor_hidden_dims": [8]}
    if cls is StateAcRecurrent:
        defaults["rnn_hidden_size"] = 5
    return cls(6, 8, 2, **defaults | TARGETS | settings)


def seen_by(policy, part="actor"):
    """What goes into a part of the policy in the calls that follow."""
    seen = []
    getattr(policy, part).register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    return seen


def test_targets_that_the_critic_lacks_are_those_of_the_actor():
    policy = make(critic_obs_segments={"secret": (7,), "height": (1,)}, estimator_target_components=["vel", "height"])
    assert policy.estimator_target_components == ["height", "vel"]
    assert policy.estimator_obs_components == ["pos"]
    assert policy.state_estimator.output_size == 3
    with pytest.raises(UnknownSegmentError, match="no segment 'vel'; it has \\['secret', 'height'\\]"):
        make(critic_obs_segments={"secret": (7,), "height": (1,)}, estimator_target_components=["vel", "secret"])


def test_by_default_the_inputs_are_all_components_but_the_targets():
    assert make().estimator_obs_components == ["pos", "height"]


def test_or_it_listens_to_the_actors_memory():
    policy = make(StateAcRecurrent, use_actor_rnn=True)
    assert list(policy.memories) == ["memory_a", "memory_c"]
    assert policy.state_estimator.model[0].in_features == 5
    heard = seen_by(policy)
    obs, hidden = torch.randn(3, 6), policy.initial_hidden(3)
    action, _ = policy.infer(obs, hidden)
    assert torch.equal(policy.infer(obs, hidden)[0], action)  # inference does not sample
    estimate = policy(obs, torch.randn(3, 8), hidden).aux["estimated_state"]
    assert torch.equal(estimate, policy.state_estimator(heard[0]))


def test_replacement_and_the_actors_memory_exclude_each_other():
    with pytest.raises(AssertionError, match="replace_state_prob needs the estimate before the actor's memory"):
        make(StateAcRecurrent, use_actor_rnn=True, replace_state_prob=0.5)
    with pytest.raises(ValueError, match="append_estimate needs the estimate before the actor's memory"):
        make(StateAcRecurrent, use_actor_rnn=True, append_estimate=True)
    with pytest.raises(ValueError, match="use_actor_rnn: StateAc has no memory"):
        make(use_actor_rnn=True)
    with pytest.raises(ValueError, match="either appended or replaces"):
        make(replace_state_prob=0.5, append_estimate=True)


@pytest.mark.parametrize("cls", [StateAc, StateAcRecurrent])
def test_the_actor_sees_the_estimate_in_place_of_the_component(cls):
    policy = make(cls, replace_state_prob=1.0)
    seen = seen_by(policy) if cls is StateAc else seen_by(policy.memory_a, "rnn")
    obs = torch.randn(4, 6)
    given = obs.clone()
    policy.act(obs)
    estimate = policy.get_estimated_state()
    assert estimate.shape == (4, 2)
    assert torch.equal(obs, given)  # the caller's tensor is not written to
    assert torch.equal(seen[0].reshape(4, 6), torch.cat([obs[:, :4], estimate], 1))
    raw = make(cls)
    seen = seen_by(raw) if cls is StateAc else seen_by(raw.memory_a, "rnn")
    raw.act(obs)
    assert torch.equal(seen[0].reshape(4, 6), obs)


def test_the_actors_loss_does_not_teach_the_estimator():
    policy = make(replace_state_prob=1.0)
    out = policy(torch.randn(4, 6), torch.randn(4, 8))
    out.mean.sum().backward(retain_graph=True)
    assert all(p.grad is None for p in policy.state_estimator.parameters())
    out.aux["estimated_state"].sum().backward()
    assert all(p.grad is not None for p in policy.state_estimator.parameters())


def test_masks_are_drawn_while_collecting_and_never_in_inference():
    policy = make(replace_state_prob=0.5)
    assert policy.random_mask_probs == {"estimated_state": 0.5}
    obs, critic_obs = torch.randn(200, 6), torch.randn(200, 8)
    seen = seen_by(policy)
    policy.generator = torch.Generator().manual_seed(0)
    policy.act(obs)
    replaced = (seen[-1][:, 4:] != obs[:, 4:]).all(1)
    assert 70 < replaced.sum() < 130
    for _ in range(2):
        policy.act_inference(obs)
        assert torch.equal(seen[-1][:, 4:], policy.get_estimated_state())
    masks = {"estimated_state": replaced.unsqueeze(1)}
    policy(obs, critic_obs, None, None, masks)
    assert torch.equal((seen[-1][:, 4:] != obs[:, 4:]).all(1), replaced)
    assert make(replace_state_prob=1.0).random_mask_probs == make().random_mask_probs == {}


def test_several_targets_keep_their_names_through_other_orders():
    """The critic has vel before pos, the actor after it: the estimate of vel must not be put at pos."""
    policy = make(
        estimator_obs_components=["height"], estimator_target_components=["pos", "vel"], replace_state_prob=1.0
    )
    assert list(policy.estimates["estimator"].target.shapes) == ["vel", "pos"]
    seen, obs = seen_by(policy), torch.randn(3, 6)
    policy.act(obs)
    estimate = policy.get_estimated_state()  # vel, pos
    assert torch.equal(seen[0], torch.cat([estimate[:, 2:], obs[:, 3:4], estimate[:, :2]], 1))


def test_a_padded_batch_is_estimated_as_its_steps_were():
    policy = make(StateAcRecurrent, replace_state_prob=1.0)
    states = []
    obs = torch.randn(3, 2, 6)
    for t in range(3):
        policy.act(obs[t])
        states.append(policy.get_estimated_state())
    policy.reset()
    policy.evaluate(torch.zeros(2, 8))
    zeros = policy.get_hidden_states()
    policy.act(obs, torch.ones(3, 2, dtype=torch.bool), zeros)
    torch.testing.assert_close(policy.get_estimated_state(), torch.stack(states))
    with pytest.raises(ValueError, match="must be the EstimatorActorHiddenState"):
        policy.act(obs, None, zeros.actor.actor)


def test_estimates_are_in_the_scale_that_the_policy_sees_and_can_be_brought_back():
    policy = make(estimator_target_components=["vel", "secret"])
    policy.obs_normalizer, policy.critic_obs_normalizer = build_normalizer(6), build_normalizer(8)
    obs = torch.randn(100, 6) * torch.tensor([1, 1, 1, 1, 5.0, 6.0]) + 2
    critic_obs = torch.randn(100, 8) * 9 - 4
    policy.update_normalizers(obs, critic_obs)
    target = policy.estimates["estimator"].target
    seen = rescale(policy, target, critic_obs[:, :4])
    by_actor = (critic_obs[:, :2] - obs[:, 4:].mean(0)) / (obs[:, 4:].std(0, correction=0) + 0.01)
    torch.testing.assert_close(seen[:, :2], by_actor, rtol=1e-4, atol=1e-4)
    by_critic = policy.critic_obs_normalizer.normalize(critic_obs)[:, 2:4]
    torch.testing.assert_close(seen[:, 2:], by_critic)
    torch.testing.assert_close(rescale(policy, target, seen, inverse=True), critic_obs[:, :4])
    policy.act(obs)
    raw, physical = policy.get_estimated_state(), policy.get_estimated_state(denormalize=True)
    torch.testing.assert_close(rescale(policy, target, physical), raw)
    assert not torch.allclose(raw, physical)


def test_wrong_settings_are_named():
    with pytest.raises(ValueError, match=r"no components to estimate; set estimator_target_components"):
        make(estimator_target_components=None)
    with pytest.raises(UnknownSegmentError, match="no segment 'speed'; it has"):
        make(estimator_target_components=["speed"])
    with pytest.raises(UnknownSegmentError, match="no segment 'heigth'"):
        make(estimator_obs_components=["heigth"])
    with pytest.raises(ValueError, match="estimate of 'secret' .* cannot replace it .* where it is not there"):
        make(estimator_target_components=["secret"], replace_state_prob=0.5)
    with pytest.raises(ValueError, match="has 'vel' already"):
        make(append_estimate=True)
    with pytest.raises(ValueError, match="a probability is from 0 to 1, got 1.5"):
        make(replace_state_prob=1.5)
    with pytest.raises(ValueError, match="there is nothing to estimate from"):
        make(estimator_obs_components=[])
    with pytest.raises(RuntimeError, match="has not estimated anything yet"):
        make().get_estimated_state()
    with pytest.raises(ValueError, match=r"no estimate 'adaptor'; it has \['estimator'\]"):
        make().get_estimated_state("adaptor")
