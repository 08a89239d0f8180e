"""The documented stateful calls, and the pure core below them."""

import copy
import pickle

import pytest
import torch

from canter.modules.actor_critic import ActorCritic
from canter.modules.actor_critic_recurrent import ActorCriticRecurrent
from canter.modules.build import build_normalizer
from canter.modules.policy import FINAL_CALLS
from canter.runners.evaluation import InferencePolicy
from canter.storage.trajectories import split_and_pad_trajectories

KINDS = ["mlp", "lstm", "gru", "discrete", "multi_discrete", "squashed", "lstm_discrete", "dict"]
ACTION_SHAPES = {"discrete": (), "lstm_discrete": (), "multi_discrete": (2,)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_calls_that_algorithms_and_runners_use(make_policy, noise_env, kind):
    policy = make_policy(kind)
    obs, critic_obs = noise_env(kind).get_observations()
    actions = policy.act(obs)
    assert actions.shape == (4, *ACTION_SHAPES.get(kind, (2,)))
    assert policy.evaluate(critic_obs).shape == (4, 1)
    assert policy.get_actions_log_prob(actions).shape == (4,)
    assert policy.entropy.shape == (4,)
    assert policy.action_mean.shape == actions.shape
    if "discrete" not in kind:
        assert policy.action_std.shape == (4, 2)
    policy.reset()
    policy.act(obs)
    mean = policy.action_mean
    policy.reset()
    assert torch.equal(policy.act_inference(obs), policy.distribution.to_env(mean))


@pytest.mark.parametrize("kind", KINDS)
def test_actions_are_scored_by_the_distribution_they_came_from(make_policy, noise_env, kind):
    policy = make_policy(kind)
    obs, _ = noise_env(kind).get_observations()
    torch.manual_seed(1)
    actions, log_prob = policy.sample(obs)
    assert torch.equal(log_prob, policy.get_actions_log_prob(actions))
    if kind != "squashed":  # whose torch twin scores the bounded action
        twin = policy.distribution.torch_distribution(policy._last())
        expected = twin.log_prob(actions)
        expected = expected if expected.dim() == 1 else expected.sum(-1)
        torch.testing.assert_close(log_prob, expected)


@pytest.mark.parametrize("kind", ["mlp", "lstm", "gru"])
def test_a_padded_batch_is_scored_as_the_steps_were(make_policy, kind):
    policy = make_policy(kind)
    obs, critic_obs = torch.randn(6, 2, 3), torch.randn(6, 2, 5)
    dones = torch.tensor([[0, 0], [0, 1], [0, 0], [1, 0], [0, 1], [0, 0]]).bool()
    means, values = [], []
    for t in range(6):
        policy.act(obs[t])
        means.append(policy.action_mean)
        values.append(policy.evaluate(critic_obs[t]))
        policy.reset(dones[t])
    padded, masks = split_and_pad_trajectories(obs, dones)
    padded_critic, _ = split_and_pad_trajectories(critic_obs, dones)
    before = policy.hidden(2)
    policy.reset()
    if kind == "mlp":
        states = torch.zeros(1)  # anything but None asks for a batch
    else:
        policy.act(torch.zeros(5, 3))
        policy.evaluate(torch.zeros(5, 5))
        policy.reset()
        states = policy.get_hidden_states()  # zeros for 5 trajectories
        policy.set_hidden(before)
    policy.act(padded, masks, states)
    torch.testing.assert_close(policy.action_mean, torch.stack(means))
    torch.testing.assert_close(policy.evaluate(padded_critic, masks, states), torch.stack(values))


def test_without_having_acted_there_is_no_distribution(make_policy):
    with pytest.raises(RuntimeError, match=r"has not acted yet; call act\(\) first"):
        _ = make_policy("mlp").action_mean


def test_a_feed_forward_policy_has_no_hidden_states(make_policy):
    policy = make_policy("mlp")
    assert policy.get_hidden_states() is None
    assert policy.memories == policy.hidden(4) == {}
    policy.reset(torch.ones(4))


@pytest.mark.parametrize("kind", ["mlp", "lstm"])
def test_normalisers_stand_before_both_networks_in_every_call(make_policy, kind):
    plain, normal = make_policy(kind), make_policy(kind)
    normal.obs_normalizer, normal.critic_obs_normalizer = build_normalizer(3), build_normalizer((5,))
    rows, critic_rows = 4 * torch.randn(50, 3) + 2, 4 * torch.randn(50, 5) + 2
    normal.update_normalizers(rows, critic_rows)
    obs, critic_obs = rows[:4], critic_rows[:4]
    seen, critic_seen = normal.obs_normalizer.normalize(obs), normal.critic_obs_normalizer.normalize(critic_obs)
    out, expected = normal(obs, critic_obs), plain(seen, critic_seen)
    assert torch.equal(out.mean, expected.mean)
    assert torch.equal(out.value, expected.value)
    assert torch.equal(normal.value(critic_obs)[0], expected.value)
    assert torch.equal(normal.infer(obs)[0], expected.mean)
    assert torch.equal(normal.act_inference(obs), expected.mean)
    assert torch.equal(normal.evaluate(critic_obs), expected.value)
    count = normal.obs_normalizer.count.clone()
    normal.act(obs)
    assert normal.obs_normalizer.count == count == 50


@pytest.mark.parametrize("name", ["forward", "act", "act_inference", "evaluate", "value", "infer", "reset", "sample"])
def test_overriding_a_final_call_is_refused_with_the_hook_to_extend(name):
    with pytest.raises(TypeError, match=rf"Mine overrides {name}\(\), which is final; extend .* instead"):
        type("Mine", (ActorCritic,), {name: lambda self, *args: None})
    with pytest.raises(TypeError, match=f"Other overrides {name}"):  # by a mixin that is not a policy
        type("Other", (type("Mixin", (), {name: lambda self, *args: None}), ActorCritic), {})


def test_the_refusal_names_hooks_that_exist():
    with pytest.raises(TypeError, match="extend critic_features, head_value or critic_value instead"):
        type("Mine", (ActorCriticRecurrent,), {"evaluate": lambda self, obs: obs})
    hooks = {"actor_features", "head_params", "actor_params", "critic_features", "head_value", "critic_value"}
    assert all(callable(getattr(ActorCritic, hook)) for hook in hooks | {"sample_action"})
    assert all(callable(getattr(ActorCritic, call)) for call in FINAL_CALLS)


def test_random_masks_are_drawn_with_their_probability(make_policy):
    policy = make_policy("mlp")
    assert policy.draw_random_masks(torch.zeros(4, 3), None) == {}
    policy.random_mask_probs = {"dropped": 0.25, "never": 0.0}
    masks = policy.draw_random_masks({"a": torch.zeros(20_000, 3)}, torch.Generator().manual_seed(0))
    assert {name: (mask.shape, mask.dtype) for name, mask in masks.items()} == {
        "dropped": ((20_000, 1), torch.bool),
        "never": ((20_000, 1), torch.bool),
    }
    assert masks["dropped"].float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert not masks["never"].any()


@pytest.mark.parametrize("kind", ["mlp", "lstm"])
def test_act_with_inference_is_act_inference(make_policy, kind):
    policy, obs = make_policy(kind), torch.randn(4, 3)
    first = policy.act(obs, inference=True)
    policy.reset()
    assert torch.equal(first, policy.act_inference(obs))
    with pytest.raises(ValueError, match="leave out masks, hidden_states"):
        policy.act(obs, masks=torch.ones(1, 4), inference=True)


@pytest.mark.parametrize("kind", ["mlp", "lstm", "gru"])
def test_a_policy_and_its_inference_policy_are_copied_and_pickled_after_acting(make_policy, kind):
    policy, obs = make_policy(kind), torch.ones(4, 3)
    inference = InferencePolicy(policy)
    actions = policy.act_inference(obs)  # with a gradient, which no copy can have
    policy.reset()
    for copied in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):  # noqa: S301 (its own)
        assert torch.equal(copied.act_inference(obs), actions)
    for copied in (copy.deepcopy(inference), pickle.loads(pickle.dumps(inference))):  # noqa: S301 (its own)
        assert torch.equal(copied(obs), actions)
        assert list(copied.policy.followers) == [copied]
    assert list(policy.followers) == [inference]


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_the_memory_of_a_policy_moves_with_its_weights(make_policy, kind):
    policy, obs = make_policy(kind), torch.ones(4, 3)
    actions = [policy.act_inference(obs) for _ in range(2)]
    policy.reset()
    policy.act_inference(obs)
    policy.double()
    torch.testing.assert_close(policy.act_inference(obs.double()).float(), actions[1])
    assert policy.to("meta").act_inference(obs.double().to("meta")).is_meta
