"""Scalar and categorical critics: targets, projections and losses."""

import pytest
import torch

from canter.modules.q_networks import CategoricalReturns, ScalarReturns


def test_probabilities_are_shared_between_the_nearest_atoms():
    returns = CategoricalReturns(0.0, 4.0, 5, torch.device("cpu"))
    places, probs = torch.tensor([[0.5, 2.0, 9.0, -3.0]]), torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    # 0.5 lies between 0 and 1; beyond the bounds everything goes to the last atom
    assert returns.project(torch.cat([places, torch.zeros(1, 1)], 1), torch.cat([probs, torch.zeros(1, 1)], 1))[
        0
    ].tolist() == pytest.approx([0.2 + 0.1, 0.2, 0.3, 0.0, 0.2])


def test_the_mean_of_a_target_is_the_scalar_one():
    torch.manual_seed(0)
    returns, scalar = CategoricalReturns(-10.0, 10.0, 101, torch.device("cpu")), ScalarReturns()
    out = torch.randn(2, 6, 101)
    rewards, discounts, bonus = torch.rand(6), torch.tensor([0.8, 0.8, 0.0, 0.5, 0.8, 0.8]), 0.3 * torch.rand(6)
    for reduction in ("min", "mean"):
        target = returns.target(out, rewards, discounts, bonus, reduction)
        assert torch.allclose(target.sum(-1), torch.ones(target.shape[:-1]), atol=1e-5)
        want = scalar.target(returns.values(out), rewards, discounts, bonus, reduction)
        assert torch.allclose((target * returns.atoms).sum(-1), want, atol=1e-4)


def test_a_critic_that_predicts_the_target_has_the_least_loss():
    returns = CategoricalReturns(-1.0, 1.0, 3, torch.device("cpu"))
    target = torch.tensor([[0.2, 0.5, 0.3]])
    right = returns.losses(target.log().unsqueeze(0), target)
    wrong = returns.losses(torch.tensor([[[0.0, 0.0, 0.0]]]), target)
    assert right.shape == (1,)
    assert right.item() == pytest.approx(-(target * target.log()).sum().item(), rel=1e-5)
    assert right < wrong
