"""Actors of SAC and TD3: bounds, exact log-probabilities, initial noise."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from canter.modules.actors import (
    CNNDeterministicActor,
    CNNSquashedGaussianActor,
    MLPDeterministicActor,
    MLPSquashedGaussianActor,
)
from canter.modules.q_networks import ActorQPolicy, QPolicy

OBS = spaces.Box(-1, 1, (3,))


def test_the_density_over_the_box_integrates_to_one():
    space = spaces.Box(-0.5, 2.5, (1,))
    actor = MLPSquashedGaussianActor(OBS, space, {"hidden_dims": [4], "init_std": 0.7})
    params = {"mu": torch.tensor([[0.3]]), "sigma": torch.tensor([[0.7]])}
    actions = torch.linspace(-0.5 + 1e-4, 2.5 - 1e-4, 20_001, dtype=torch.float64)
    raw = torch.atanh((actions - 1.0) / 1.5).float().unsqueeze(1)
    log_prob = actor.distribution.log_prob({name: p.expand(len(raw), 1) for name, p in params.items()}, raw)
    assert torch.trapezoid(log_prob.double().exp(), actions).item() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("u", [0.0, 1.0, 5.0, 9.0, 12.0, -12.0])
def test_log_probabilities_far_out_are_those_of_float64(u):
    actor = MLPSquashedGaussianActor(OBS, spaces.Box(-2, 2, (1,)), {"hidden_dims": [4]})
    mu, sigma = 0.5, 1.5
    x = torch.tensor(u, dtype=torch.float64)
    normal = -0.5 * ((x - mu) / sigma) ** 2 - math.log(sigma) - 0.5 * math.log(2 * math.pi)
    # 1 - tanh(u)^2 = 4 / (e^u + e^-u)^2
    slope = math.log(4.0) - 2 * torch.logaddexp(x, -x) + math.log(2.0)
    raw = torch.tensor([[u]], requires_grad=True)
    got = actor.distribution.log_prob({"mu": torch.tensor([[mu]]), "sigma": torch.tensor([[sigma]])}, raw)
    assert got.item() == pytest.approx((normal - slope).item(), rel=1e-5, abs=1e-5)
    got.sum().backward()
    want = -(u - mu) / sigma**2 + 2 * math.tanh(u)
    assert raw.grad.item() == pytest.approx(want, rel=1e-4, abs=1e-5)


def test_noise_depends_on_the_state_within_its_bounds_and_starts_at_init_std():
    cfg = {"hidden_dims": [8], "init_std": 0.25, "min_log_std": -2.0, "max_log_std": 0.0}
    actor = MLPSquashedGaussianActor(OBS, spaces.Box(-1, 1, (2,)), cfg)
    obs = torch.randn(6, 3)
    sigma = actor.get_params(obs)["sigma"]
    assert torch.allclose(sigma, torch.full_like(sigma, 0.25), rtol=0.05)
    with torch.no_grad():
        for p in actor.network.parameters():
            p.mul_(1000.0)
    sigma = actor.get_params(100 * obs)["sigma"]
    assert sigma.min() >= math.exp(-2.0) - 1e-6
    assert sigma.max() <= 1.0
    assert sigma.unique().numel() > 1


@pytest.mark.parametrize("cls", [MLPSquashedGaussianActor, MLPDeterministicActor])
def test_infinite_bounds_are_refused(cls):
    with pytest.raises(ValueError, match="squashing needs finite bounds"):
        cls(OBS, spaces.Box(-np.inf, np.inf, (2,)))
    with pytest.raises(TypeError, match="needs a Box of actions"):
        cls(OBS, spaces.Discrete(2))


@pytest.mark.parametrize("cls", [CNNSquashedGaussianActor, CNNDeterministicActor])
def test_images_lead_to_actions_within_bounds(cls):
    image = spaces.Box(0, 255, (3, 36, 36), np.uint8)
    actor = cls(image, spaces.Box(-3, 3, (2,)), {"hidden_dims": [16]})
    policy = ActorQPolicy(actor, torch.nn.Identity())
    actions, _ = policy.infer(torch.randint(0, 255, (4, 3, 36, 36), dtype=torch.uint8))
    assert actions.shape == (4, 2)
    assert actions.abs().max() <= 3


def test_policies_act_through_the_one_interface():
    q = torch.nn.Linear(3, 4)
    policy = QPolicy(q, spaces.Discrete(4))
    obs = torch.randn(5, 3)
    assert torch.equal(policy.infer(obs)[0], q(obs).argmax(1))
    assert torch.equal(policy.value(obs)[0], q(obs).amax(1, keepdim=True))
    actor = MLPDeterministicActor(OBS, spaces.Box(-2, 2, (2,)), {"hidden_dims": [4]})
    policy = ActorQPolicy(actor, torch.nn.Identity())
    assert torch.allclose(policy.infer(obs)[0], 2 * torch.tanh(actor.network(obs)))
    with pytest.raises(NotImplementedError, match="score actions"):
        policy.value(obs)
    with pytest.raises(TypeError, match="Linear cannot be used as actor: it lacks get_params, distribution"):
        ActorQPolicy(q, torch.nn.Identity())
