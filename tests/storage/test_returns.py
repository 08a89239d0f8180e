"""Advantages against their definition as a sum, and their normalisation."""

import pytest
import torch

from canter.storage.rollout_storage import gae, masked_mean, normalize_advantages


def direct_sum(rewards, values, dones, last_values, gamma, lam):
    """Schulman 2016, eq. 16, term by term: the sum of (gamma lam)^k delta_{t+k} up to the episode's end. O(T^2)."""
    num_steps, num_envs, _ = rewards.shape
    advantages = torch.zeros_like(rewards)
    for n in range(num_envs):
        for t in range(num_steps):
            for k in range(t, num_steps):
                follows = values[k + 1, n, 0] if k + 1 < num_steps else last_values[n, 0]
                delta = rewards[k, n, 0] + (0.0 if dones[k, n, 0] else gamma * follows) - values[k, n, 0]
                advantages[t, n, 0] += (gamma * lam) ** (k - t) * delta
                if dones[k, n, 0]:
                    break
    return advantages


def rollout(seed, num_steps=None, end_prob=0.3):
    g = torch.Generator().manual_seed(seed)
    num_steps = num_steps or int(torch.randint(1, 7, (), generator=g))
    shape = (num_steps, 3, 1)
    rewards, values = (torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(2))
    dones = torch.rand(shape, generator=g) < end_prob
    return rewards, values, dones, torch.randn(3, 1, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("end_prob", [0.0, 0.3, 1.0])
def test_gae_is_the_direct_sum_over_each_episode(end_prob):
    lengths = set()
    for seed in range(200 if end_prob == 0.3 else 20):
        given = rollout(seed, end_prob=end_prob)
        lengths.add(len(given[0]))
        torch.testing.assert_close(gae(*given, 0.97, 0.9), direct_sum(*given, 0.97, 0.9), rtol=0, atol=1e-12)
    assert {1, 6} <= lengths


def test_gae_of_three_steps_by_hand():  # the first step ends an episode, gamma = lam = 0.5
    rewards, values = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1), torch.tensor([4.0, 6.0, 8.0]).view(3, 1, 1)
    dones = torch.tensor([True, False, False]).view(3, 1, 1)
    # t=2: 3 + 0.5*10 - 8 = 0; t=1: 2 + 0.5*8 - 6 + 0.25*0 = 0; t=0: 1 - 4 = -3
    assert gae(rewards, values, dones, torch.tensor([[10.0]]), 0.5, 0.5).flatten().tolist() == [-3.0, 0.0, 0.0]
    # with no end and a last value of 12, t=2: 1; t=1: 0 + 0.25*1; t=0: 1 + 0.5*6 - 4 + 0.25*0.25
    endless = gae(rewards, values, torch.zeros_like(dones), torch.tensor([[12.0]]), 0.5, 0.5)
    assert endless.flatten().tolist() == [0.0625, 0.25, 1.0]


@pytest.mark.parametrize("what", ["rewards", "values", "last"])
def test_one_episode_leaves_the_one_before_bit_identical(what):
    for seed in range(50):
        rewards, values, dones, last = (x.float() if x.is_floating_point() else x for x in rollout(seed, 8))
        dones[3], dones[-1] = True, False
        before = gae(rewards, values, dones, last, 0.99, 0.95)
        changed = {"rewards": rewards.clone(), "values": values.clone(), "last": last.clone()}
        changed[what][() if what == "last" else slice(4, None)] += 100.0
        after = gae(changed["rewards"], changed["values"], dones, changed["last"], 0.99, 0.95)
        assert torch.equal(before[:4], after[:4])
        assert not torch.equal(before[4:], after[4:])


def test_advantages_get_mean_zero_and_unbiased_deviation_one():
    normal = normalize_advantages(torch.tensor([1.0, 2.0, 3.0, 6.0]).view(2, 2, 1))
    # mean 3, deviations -2 -1 0 3, unbiased variance 14/3
    expected = torch.tensor([-2.0, -1.0, 0.0, 3.0]) / (14 / 3) ** 0.5
    torch.testing.assert_close(normal.flatten(), expected)
    torch.testing.assert_close(normal.std(), torch.tensor(1.0))


def test_advantages_are_normalised_over_valid_steps_only():
    x = torch.tensor([1.0, 999.0, 2.0, 3.0, 6.0]).view(5, 1)
    valid = torch.tensor([True, False, True, True, True]).view(5, 1)
    expected = normalize_advantages(x[valid])
    torch.testing.assert_close(normalize_advantages(x, valid)[valid], expected)


@pytest.mark.parametrize("x", [[5.0], [2.0, 2.0, 2.0]])
def test_advantages_without_spread_become_zero(x):  # a batch of one, or of equals
    assert normalize_advantages(torch.tensor(x)).tolist() == [0.0] * len(x)
    assert normalize_advantages(torch.tensor(x), torch.zeros(len(x), dtype=torch.bool)).isfinite().all()


def test_masked_mean_counts_valid_entries_of_any_trailing_shape():
    x = torch.tensor([[1.0, 3.0], [float("inf"), 100.0], [5.0, 7.0]])
    assert masked_mean(x, torch.tensor([True, False, True])) == 4.0
    assert masked_mean(x[0], None) == 2.0
    assert masked_mean(x, torch.zeros(3, dtype=torch.bool)) == 0.0
