"""The Beta distribution by hand, in float64 against torch, and as a policy's distribution."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import distributions as td

from canter.modules.actor_critic import ActorCritic
from canter.modules.actor_critic_recurrent import ActorCriticRecurrent
from canter.modules.distributions import Beta, Gaussian, SquashedGaussian, distribution_for

BOX = spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([3.0, 10.0], np.float32))


def params(alpha, beta, dtype=torch.float32):
    return {"alpha": torch.tensor(alpha, dtype=dtype), "beta": torch.tensor(beta, dtype=dtype)}


def test_log_prob_and_entropy_by_hand():
    """Beta(2, 1) on (0, 1) has density 2 u; stretched over a width of 4 it is 2 u / 4."""
    dist, given = Beta([-1.0], [3.0]), params([2.0], [1.0])
    assert dist.log_prob(given, torch.tensor([0.75])).item() == pytest.approx(math.log(2 * 0.75 / 4), abs=1e-6)
    # -integral of 2 u log(2 u) over (0, 1) is 1/2 - log 2
    assert dist.entropy(given).item() == pytest.approx(0.5 - math.log(2) + math.log(4), abs=1e-6)
    assert dist.entropy(params([1.0], [1.0])).item() == pytest.approx(math.log(4), abs=1e-6)  # uniform


def test_kl_by_hand():
    """KL(Beta(2, 1) || uniform) = log 2 - 1/2; the other way round it is 1 - log 2."""
    dist, slope, flat = Beta([0.0], [9.0]), params([2.0], [1.0]), params([1.0], [1.0])
    assert dist.kl(slope, flat).item() == pytest.approx(math.log(2) - 0.5, abs=1e-6)
    assert dist.kl(flat, slope).item() == pytest.approx(1 - math.log(2), abs=1e-6)


def test_every_formula_equals_torch_in_float64():
    g = torch.Generator().manual_seed(0)
    draw = lambda: 1 + 60 * torch.rand(200, 2, generator=g, dtype=torch.float64) ** 3  # noqa: E731
    dist, old, new = Beta(BOX.low, BOX.high), {"alpha": draw(), "beta": draw()}, {"alpha": draw(), "beta": draw()}
    p, q = (td.Beta(x["alpha"], x["beta"]) for x in (old, new))
    actions, volume = p.sample(), math.log(4 * 10)
    torch.testing.assert_close(dist.log_prob(new, actions), q.log_prob(actions).sum(-1) - volume, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(dist.entropy(new), q.entropy().sum(-1) + volume, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(dist.kl(old, new), td.kl_divergence(p, q).sum(-1), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(dist.mode(old), p.mean)


def test_gradients_equal_those_of_torch_in_float64():
    alpha, beta = (torch.tensor([1.5, 7.0], dtype=torch.float64, requires_grad=True) for _ in range(2))
    action = torch.tensor([0.2, 0.9], dtype=torch.float64)
    dist = Beta(BOX.low, BOX.high)
    ours = dist.log_prob({"alpha": alpha, "beta": beta}, action) + dist.entropy({"alpha": alpha, "beta": beta})
    theirs = td.Beta(alpha, beta).log_prob(action).sum() + td.Beta(alpha, beta).entropy().sum()
    for a, b in zip(*(torch.autograd.grad(x, (alpha, beta)) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


def test_float32_is_right_to_a_thousandth_up_to_concentrations_of_a_hundred():
    g = torch.Generator().manual_seed(0)
    exact = {name: 1 + 99 * torch.rand(500, 2, generator=g, dtype=torch.float64) for name in ("alpha", "beta")}
    actions = td.Beta(exact["alpha"], exact["beta"]).sample()
    dist, rounded = Beta(BOX.low, BOX.high), {name: value.float() for name, value in exact.items()}
    off = dist.log_prob(rounded, actions.float()) - dist.log_prob(exact, actions)
    assert off.abs().max() < 1e-3


def test_samples_at_the_edge_keep_finite_densities_and_stay_in_bounds():
    dist = Beta(BOX.low, BOX.high)
    for names in (("alpha", "beta"), ("beta", "alpha")):
        given = dict(zip(names, (torch.full((1000, 2), 1.0), torch.full((1000, 2), 1e9)), strict=True))
        actions = dist.sample(given, torch.Generator().manual_seed(0))
        assert torch.isfinite(dist.log_prob(given, actions)).all()
        assert ((1 - actions > 0) & (1 - actions < 1)).all()  # their mirror images have densities too
    for edge in (torch.zeros(2), torch.ones(2), actions[0]):
        sent = dist.to_env(edge).numpy()
        assert (sent >= BOX.low).all()
        assert (sent <= BOX.high).all()
    assert dist.to_env(torch.tensor([0.25, 0.5])).tolist() == [0.0, 5.0]


@pytest.mark.parametrize("cls", [ActorCritic, ActorCriticRecurrent])
def test_a_policy_takes_the_distribution_by_name(cls):
    policy = cls(4, 4, 2, action_distribution="beta", action_space=BOX)
    assert isinstance(policy.distribution, Beta)
    out = policy(torch.randn(5, 4))
    assert out.params["alpha"].shape == out.params["beta"].shape == (5, 2)
    assert (out.params["alpha"] > 1).all()
    actions = policy.act_inference(torch.randn(5, 4)).detach().numpy()
    assert all(BOX.contains(a) for a in actions)
    assert not hasattr(policy, "std")


def test_names_are_those_of_the_distributions():
    assert type(distribution_for(BOX, name="gaussian")) is Gaussian
    assert type(distribution_for(BOX, name="squashed")) is SquashedGaussian
    assert type(distribution_for(BOX, squash=True)) is SquashedGaussian
    with pytest.raises(ValueError, match="no action distribution 'betta'; a Box can have gaussian, squashed, beta"):
        distribution_for(BOX, name="betta")
    with pytest.raises(ValueError, match="is for a Box"):
        distribution_for(spaces.Discrete(3), name="beta")
    with pytest.raises(ValueError, match="give one of them"):
        distribution_for(BOX, squash=True, name="beta")


def test_a_beta_refuses_actions_without_bounds_and_a_mean_activation():
    with pytest.raises(ValueError, match="a Beta distribution needs finite bounds"):
        ActorCritic(4, 4, 2, action_distribution="beta")
    with pytest.raises(ValueError, match="mu_activation='tanh'"):
        ActorCritic(4, 4, 2, action_distribution="beta", action_space=BOX, mu_activation="tanh")
