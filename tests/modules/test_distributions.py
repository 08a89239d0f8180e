"""Action distributions against torch.distributions, against integrals, and against sampling."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import distributions as td

from canter.modules.distributions import (
    Beta,
    Categorical,
    Gaussian,
    MultiCategorical,
    SquashedGaussian,
    bounded_std,
    distribution_for,
    init_std,
)

NVEC = [3, 2, 4]


def normal_params(seed, *shape):
    g = torch.Generator().manual_seed(seed)
    return {"mu": torch.randn(shape, generator=g), "sigma": torch.rand(shape, generator=g) + 0.2}


def logits(seed, *shape):
    return {"logits": 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))}


def concentrations(seed, *shape):
    g = torch.Generator().manual_seed(seed)
    return {name: 1 + 4 * torch.rand(shape, generator=g) for name in ("alpha", "beta")}


CASES = {
    "beta": (Beta([-1, 0, -3], [1, 2, 3]), concentrations(0, 4, 5, 3), concentrations(1, 4, 5, 3)),
    "gaussian": (Gaussian(3), normal_params(0, 4, 5, 3), normal_params(1, 4, 5, 3)),
    "squashed": (SquashedGaussian([-1, 0, -3], [1, 2, 3]), normal_params(0, 4, 5, 3), normal_params(1, 4, 5, 3)),
    "categorical": (Categorical(6), logits(0, 4, 5, 6), logits(1, 4, 5, 6)),
    "multi": (MultiCategorical(NVEC), logits(0, 4, 5, 9), logits(1, 4, 5, 9)),
}
every_case = pytest.mark.parametrize("name", CASES)


def test_gaussian_equals_torch_normal():
    dist, old, new = CASES["gaussian"]
    a, p, q = dist.sample(old), td.Normal(old["mu"], old["sigma"]), td.Normal(new["mu"], new["sigma"])
    torch.testing.assert_close(dist.log_prob(old, a), p.log_prob(a).sum(-1))
    torch.testing.assert_close(dist.entropy(old), p.entropy().sum(-1))
    torch.testing.assert_close(dist.kl(old, new), td.kl_divergence(p, q).sum(-1))


def test_categorical_equals_torch_categorical():
    dist, old, new = CASES["categorical"]
    a, p, q = dist.sample(old), td.Categorical(logits=old["logits"]), td.Categorical(logits=new["logits"])
    torch.testing.assert_close(dist.log_prob(old, a), p.log_prob(a))
    torch.testing.assert_close(dist.entropy(old), p.entropy())
    torch.testing.assert_close(dist.kl(old, new), td.kl_divergence(p, q))


def test_multi_categorical_is_the_sum_of_its_choices():
    dist, old, new = CASES["multi"]
    a = dist.sample(old)
    ps, qs = ([td.Categorical(logits=part) for part in x["logits"].split(NVEC, -1)] for x in (old, new))
    torch.testing.assert_close(dist.log_prob(old, a), sum(p.log_prob(a[..., i]) for i, p in enumerate(ps)))
    torch.testing.assert_close(dist.entropy(old), sum(p.entropy() for p in ps))
    torch.testing.assert_close(dist.kl(old, new), sum(td.kl_divergence(p, q) for p, q in zip(ps, qs, strict=True)))
    assert torch.equal(dist.mode(old), torch.stack([p.logits.argmax(-1) for p in ps], -1))


@every_case
def test_the_torch_distribution_is_equivalent(name):
    dist, params, _ = CASES[name]
    actions = dist.sample(params)
    given = dist.torch_distribution(params).log_prob(dist.to_env(actions))
    given = given.sum(-1) if given.dim() > 2 else given
    torch.testing.assert_close(dist.log_prob(params, actions), given, atol=1e-4, rtol=1e-4)


@every_case
def test_kl_is_zero_for_equals_positive_and_not_symmetric(name):
    dist, old, new = CASES[name]
    assert torch.equal(dist.kl(old, old), torch.zeros(4, 5))
    assert (dist.kl(old, new) > 0).all()
    assert (dist.kl(old, new) - dist.kl(new, old)).abs().max() > 0.1


def test_gaussian_kl_by_hand():
    old = {"mu": torch.tensor([0.0]), "sigma": torch.tensor([1.0])}
    new = {"mu": torch.tensor([1.0]), "sigma": torch.tensor([2.0])}
    assert Gaussian(1).kl(old, new).item() == pytest.approx(math.log(2) + 2 / 8 - 0.5, abs=1e-6)
    assert Gaussian(1).kl(new, old).item() == pytest.approx(-math.log(2) + 5 / 2 - 0.5, abs=1e-6)


@every_case
def test_shapes_follow_the_declaration(name):
    dist, params, _ = CASES[name]
    actions = dist.sample(params)
    assert actions.shape == (4, 5, *dist.action_shape)
    assert actions.dtype == dist.action_dtype
    assert {key: tuple(p.shape[2:]) for key, p in params.items()} == dist.param_shapes
    assert dist.mode(params).shape == actions.shape
    for out in (dist.log_prob(params, actions), dist.entropy(params), dist.kl(params, params)):
        assert out.shape == (4, 5)


@every_case
def test_sampling_repeats_with_its_generator_and_leaves_the_global_one(name):
    dist, params, _ = CASES[name]
    before = torch.get_rng_state()
    first = dist.sample(params, torch.Generator().manual_seed(7))
    assert torch.equal(first, dist.sample(params, torch.Generator().manual_seed(7)))
    assert not torch.equal(first, dist.sample(params, torch.Generator().manual_seed(8)))
    assert torch.equal(before, torch.get_rng_state())


def test_samples_have_the_stated_moments_and_frequencies():
    g = torch.Generator().manual_seed(0)
    wide = {"mu": torch.tensor([1.0, -2.0]).expand(50000, 2), "sigma": torch.tensor([0.5, 3.0])}
    drawn = Gaussian(2).sample(wide, g)
    torch.testing.assert_close(drawn.mean(0), torch.tensor([1.0, -2.0]), atol=0.05, rtol=0)
    torch.testing.assert_close(drawn.std(0), torch.tensor([0.5, 3.0]), atol=0.05, rtol=0)
    probs = torch.tensor([0.1, 0.6, 0.0, 0.3])
    chosen = Categorical(4).sample({"logits": probs.log().expand(50000, 4)}, g)
    torch.testing.assert_close(chosen.bincount(minlength=4) / 50000, probs, atol=0.01, rtol=0)
    assert (chosen != 2).all()


def test_forbidden_choices_leave_everything_finite():
    dist = Categorical(3)
    raw = torch.tensor([[0.0, 1.0, -math.inf]], requires_grad=True)
    out = dist.entropy({"logits": raw}) + dist.kl({"logits": raw.detach()}, {"logits": raw})
    two = td.Categorical(logits=torch.tensor([[0.0, 1.0]])).entropy()
    torch.testing.assert_close(out, two)
    out.sum().backward()
    assert torch.isfinite(raw.grad).all()


def test_narrow_choices_of_a_multi_categorical_get_finite_gradients():
    raw = logits(3, 2, 9)["logits"].requires_grad_()
    dist = MultiCategorical(NVEC)
    (dist.entropy({"logits": raw}).sum() + dist.log_prob({"logits": raw}, torch.zeros(2, 3).long()).sum()).backward()
    assert torch.isfinite(raw.grad).all()
    assert (raw.grad != 0).all()


def test_squashed_density_integrates_to_one():
    dist = SquashedGaussian([-2.0], [3.0])
    params = {"mu": torch.tensor([[0.4]]), "sigma": torch.tensor([[0.8]])}
    u = torch.linspace(-8, 8, 20001).unsqueeze(-1)
    a = dist.to_env(u).double().squeeze(-1)
    density = dist.log_prob(params, u).double().exp()
    assert torch.trapezoid(density, a).item() == pytest.approx(1.0, abs=1e-4)


def test_squashed_log_prob_is_right_ten_sigma_out():
    """The direct form log(1 - tanh^2 + eps) is 9 nats wrong here and has no gradient."""
    dist = SquashedGaussian([-1.0], [1.0])
    u = torch.tensor([[12.0]], requires_grad=True)
    params = {"mu": torch.tensor([[2.0]]), "sigma": torch.tensor([[1.0]])}
    got = dist.log_prob(params, u)
    x = 12.0  # log(1 - tanh^2 x) = 2 log 2 - 2x - 2 log(1 + e^-2x)
    exact = -0.5 * 10**2 - 0.5 * math.log(2 * math.pi) - (2 * math.log(2) - 2 * x - 2 * math.log1p(math.exp(-2 * x)))
    assert got.item() == pytest.approx(exact, rel=1e-6)
    got.backward()
    assert u.grad.item() == pytest.approx(-10.0 + 2.0, abs=1e-4)


@pytest.mark.parametrize(("mu", "sigma"), [(0.0, 0.1), (0.5, 1.0), (-2.0, 2.0)])
def test_squashed_entropy_is_the_expected_negative_log_prob(mu, sigma):
    dist = SquashedGaussian([-0.03], [0.03])
    params = {"mu": torch.tensor([mu]), "sigma": torch.tensor([sigma])}
    u = torch.linspace(mu - 9 * sigma, mu + 9 * sigma, 40001, dtype=torch.float64).unsqueeze(-1)
    density = td.Normal(mu, sigma).log_prob(u.squeeze(-1)).exp()
    minus_log_prob = -dist.log_prob({k: v.double() for k, v in params.items()}, u)
    exact = torch.trapezoid(density * minus_log_prob, u.squeeze(-1)).item()
    assert dist.entropy(params).item() == pytest.approx(exact, abs=0.005)


def test_squashed_actions_stay_in_bounds_and_hit_them():
    low, high = np.array([-0.3, 0.1], dtype=np.float32), np.array([0.7, 0.3], dtype=np.float32)
    dist = SquashedGaussian(low, high)
    sent = dist.to_env(torch.tensor([[-50.0, -50.0], [50.0, 50.0], [0.0, 0.0]])).numpy()
    np.testing.assert_array_equal(sent[0], low)
    np.testing.assert_array_equal(sent[1], high)
    np.testing.assert_allclose(sent[2], (low + high) / 2, rtol=1e-6)


@pytest.mark.parametrize(("low", "high"), [([-math.inf], [1.0]), ([-1.0], [math.inf]), ([1.0], [1.0])])
def test_squashing_refuses_bounds_it_cannot_reach(low, high):
    with pytest.raises(ValueError, match="finite bounds"):
        SquashedGaussian(low, high)


def test_constants_made_in_inference_mode_serve_a_backward_pass():
    dist = SquashedGaussian([-1.0], [1.0])
    with torch.inference_mode():
        dist.to_env(torch.zeros(1, 1))
    mu = torch.zeros(1, 1, requires_grad=True)
    dist.entropy({"mu": mu, "sigma": torch.ones(1)}).sum().backward()
    assert mu.grad is not None


@every_case
def test_autocast_does_not_round_the_formulas(name):
    dist, old, new = CASES[name]
    actions = dist.sample(old)
    exact = torch.stack([dist.log_prob(new, actions), dist.entropy(new), dist.kl(old, new)])
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.stack([dist.log_prob(new, actions), dist.entropy(new), dist.kl(old, new)])
    assert torch.equal(got, exact)


def test_distribution_follows_the_action_space():
    box = spaces.Box(-2, 2, (3,))
    assert type(distribution_for(box)) is Gaussian
    assert distribution_for(box).param_shapes == {"mu": (3,), "sigma": (3,)}
    squashed = distribution_for(box, squash=True)
    torch.testing.assert_close(squashed.to_env(torch.full((1, 3), 9.0)), torch.full((1, 3), 2.0))
    assert distribution_for(spaces.Discrete(4)).param_shapes == {"logits": (4,)}
    assert distribution_for(spaces.MultiDiscrete(NVEC)).param_shapes == {"logits": (9,)}
    with pytest.raises(TypeError, match="no distribution"):
        distribution_for(spaces.Text(3))


def test_the_environment_gets_flat_actions_counted_from_zero():
    grid = spaces.Box(-1, 1, (2, 3))
    for squash in (False, True):
        dist = distribution_for(grid, squash)
        assert dist.action_shape == (6,)
        assert dist.to_env(torch.zeros(4, 6)).shape == (4, 6)
    for space in (spaces.Discrete(3, start=10), spaces.MultiDiscrete([3, 2], start=[5, 5])):
        actions = torch.tensor([[0, 1]])
        assert torch.equal(distribution_for(space).to_env(actions), actions)


def test_initial_std_is_one_number_or_one_each():
    assert init_std(3, 0.5).tolist() == [0.5, 0.5, 0.5]
    assert init_std(2, [0.5, 2.0]).tolist() == [0.5, 2.0]
    with pytest.raises(ValueError, match="one number or one each"):
        init_std(3, [1.0, 2.0])
    with pytest.raises(ValueError, match="positive"):
        init_std(2, 0.0)


def test_bounded_std_keeps_its_bounds_and_its_gradient():
    raw = torch.tensor([-0.5, 0.5, 9.0], requires_grad=True)
    std = bounded_std(raw, "scalar", 0.1, 2.0)
    assert std.tolist() == pytest.approx([0.1, 0.5, 2.0])
    std.sum().backward()
    assert raw.grad.tolist() == [1.0, 1.0, 1.0]
    log = bounded_std(torch.tensor([-200.0, 0.0, 5.0]), "log", None, torch.tensor([1.0, 2.0, 3.0]))
    assert log.tolist() == pytest.approx([1e-15, 1.0, 3.0])
    assert (bounded_std(torch.tensor([-1.0, 0.0])) > 0).all()
    with pytest.raises(ValueError, match="'lin'"):
        bounded_std(raw, "lin")


@pytest.mark.gpu
@every_case
def test_captured_sampling_draws_new_actions_and_scores_them(name):
    dist, params, _ = CASES[name]
    params = {key: value.cuda() for key, value in params.items()}
    for _ in range(2):
        actions = dist.sample(params)
        scores = dist.log_prob(params, actions) + dist.entropy(params)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actions = dist.sample(params)
        scores = dist.log_prob(params, actions) + dist.entropy(params)
    graph.replay()
    first = actions.clone()
    torch.testing.assert_close(scores, dist.log_prob(params, first) + dist.entropy(params))
    graph.replay()
    assert not torch.equal(first, actions)
    g = torch.Generator("cuda").manual_seed(1)
    assert dist.sample(params, g).is_cuda


@pytest.mark.parametrize("dist", [Gaussian(1), SquashedGaussian([-1.0], [1.0]), Beta([-1.0], [1.0])])
def test_actions_of_width_one_keep_their_column(dist):
    params = {name: torch.full((3, 1), 2.0) for name in dist.param_shapes}
    actions = torch.tensor([0.2, 0.4, 0.6])
    assert dist.log_prob(params, actions.unsqueeze(1)).shape == (3,)
    with pytest.raises(ValueError, match=r"actions must have shape \(\.\.\., 1\), got \(3,\)"):
        dist.log_prob(params, actions)
