"""Statistics of returns by hand, and the values of a critic that learns normalised returns."""

import copy

import pytest
import torch
from torch import nn

from canter.modules.actor_critic import ActorCritic
from canter.modules.normalizer import ValueNormalizer, install_value_normalizer


def column(*values):
    return torch.tensor(values).unsqueeze(-1)


def made(**settings):
    torch.manual_seed(0)
    return ActorCritic(3, 3, 2, actor_hidden_dims=(8,), critic_hidden_dims=(8,), **settings)


def test_the_first_rollout_sets_mean_and_std():
    normalizer = ValueNormalizer(eps=0.0)
    normalizer.update(column(1.0, 2.0, 3.0, 6.0))
    assert normalizer.mean.item() == 3.0
    assert normalizer.scale.item() == pytest.approx(3.5**0.5)  # (4 + 1 + 0 + 9) / 4
    torch.testing.assert_close(normalizer.normalize(column(3.0, 6.0)), column(0.0, 3 / 3.5**0.5))
    torch.testing.assert_close(normalizer.inverse(column(0.0, 2.0)), column(3.0, 3 + 2 * 3.5**0.5))


def test_a_rollout_weighs_at_least_one_in_memory():
    normalizer = ValueNormalizer(memory=4)
    for _ in range(50):
        normalizer.update(column(0.0, 0.0))
    normalizer.update(column(8.0, 8.0))
    assert normalizer.mean.item() == pytest.approx(2.0)
    normalizer.update(column(8.0, 8.0))
    assert normalizer.mean.item() == pytest.approx(2.0 + 6.0 / 4)
    early = ValueNormalizer(memory=4)
    early.update(column(0.0))
    early.update(column(8.0))
    assert early.mean.item() == pytest.approx(4.0)  # equal weights until there are four


def test_steps_that_do_not_count_teach_nothing():
    normalizer = ValueNormalizer()
    normalizer.update(column(1.0, 900.0, 3.0), torch.tensor([True, False, True]))
    assert normalizer.mean.item() == 2.0
    before = copy.deepcopy(normalizer.state_dict())
    normalizer.update(column(5.0), torch.tensor([False]))
    normalizer.update(column(float("nan")))
    normalizer.eval()
    normalizer.update(column(5.0))
    after = normalizer.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in ("_mean", "_var", "_std"))
    assert int(after["count"]) == 2


def test_popart_moves_the_statistics_and_no_value():
    policy, obs = made(), torch.randn(50, 3)
    install_value_normalizer(policy, "popart")
    before, output = policy.value(obs)[0], policy.critic(obs)
    for scale in (1000.0, 0.01, 7.0):
        policy.value_normalizer.update(scale * torch.randn(64, 1) + 3 * scale)
        torch.testing.assert_close(policy.value(obs)[0], before, rtol=1e-4, atol=1e-3)
    assert (policy.critic(obs) - output).abs().max() > 0.1


def test_running_statistics_alone_move_the_values():
    policy, obs = made(), torch.randn(5, 3)
    install_value_normalizer(policy, "running")
    output = policy.critic(obs)
    torch.testing.assert_close(policy.value(obs)[0], output, rtol=1e-3, atol=1e-3)  # mean 0 and std 1 at first
    policy.value_normalizer.update(column(90.0, 110.0))
    torch.testing.assert_close(policy.critic(obs), output)
    torch.testing.assert_close(policy.value(obs)[0], 100 + 10 * output, rtol=1e-3, atol=1e-3)


def test_every_way_to_ask_for_a_value_gives_the_same():
    policy, obs = made(), torch.randn(5, 3)
    install_value_normalizer(policy, "running")
    policy.value_normalizer.update(column(90.0, 110.0))
    expected = policy(obs).value
    assert torch.equal(policy.value(obs)[0], expected)
    assert torch.equal(policy.evaluate(obs), expected)
    assert torch.equal(policy.evaluate_actions(obs, torch.zeros(5, 2))[2], expected)


def test_a_copied_policy_rescales_its_own_critic():
    policy, obs = made(), torch.randn(5, 3)
    install_value_normalizer(policy, "popart")
    copied = copy.deepcopy(policy)
    before, original = copied.value(obs)[0], policy.critic[-1].weight.clone()
    copied.value_normalizer.update(column(90.0, 110.0))
    torch.testing.assert_close(copied.value(obs)[0], before, rtol=1e-4, atol=1e-3)
    assert torch.equal(policy.critic[-1].weight, original)


def test_installing_again_keeps_the_statistics():
    policy = made()
    install_value_normalizer(policy, "running")
    policy.value_normalizer.update(column(90.0, 110.0))
    install_value_normalizer(policy, "popart")
    assert policy.value_normalizer.mean.item() == 100.0
    assert policy.value_normalizer.preserved == (policy.critic[-1],)
    assert not any("preserved" in name for name in policy.state_dict())


def test_popart_refuses_a_critic_without_a_suitable_last_layer():
    policy = made()
    policy.critic = nn.Sequential(nn.Linear(3, 1, bias=False))
    with pytest.raises(ValueError, match="ActorCritic does not have; use value_normalization='running'"):
        install_value_normalizer(policy, "popart")
