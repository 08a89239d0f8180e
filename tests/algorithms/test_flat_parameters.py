"""Parameters in one vector, and the public substitutes for private torch functions."""

import pytest
import torch
from torch import nn

from canter.algorithms import optim
from canter.algorithms.optim import FlatParameters, join_state, split_state
from canter.execution.torch_private import copy_one_by_one, sample_dirichlet


@pytest.mark.parametrize("is_missing", [False, True])
def test_parameters_and_gradients_are_views_of_vectors(monkeypatch, is_missing):
    if is_missing:
        monkeypatch.setattr(optim, "copy_all", copy_one_by_one)
    a, b = nn.Parameter(torch.arange(6.0).view(2, 3)), nn.Parameter(torch.tensor([6.0, 7.0]))
    flat = FlatParameters([a, b])
    assert flat.vector.tolist() == list(range(8))
    flat.vector.data.mul_(10)
    assert a.tolist() == [[0, 10, 20], [30, 40, 50]]
    flat.put_grads([torch.ones(2, 3), torch.full((2,), 2.0)])
    assert flat.vector.grad.tolist() == [1, 1, 1, 1, 1, 1, 2, 2]
    flat.put_grads([None, torch.full((2,), 3.0)])
    assert flat.vector.grad.tolist() == [0, 0, 0, 0, 0, 0, 3, 3]
    assert b.grad.tolist() == [3, 3]
    assert flat.mask([b]).tolist() == [False] * 6 + [True] * 2


def test_an_optimizer_state_is_split_into_parameters_and_joined_again():
    parameters = [nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(4))]
    twins = [nn.Parameter(p.detach().clone()) for p in parameters]
    flats = [FlatParameters(parameters[:2]), FlatParameters(parameters[2:])]
    optimizers = [
        torch.optim.Adam([{"params": [flat.vector]} for flat in flats], lr=0.1),
        torch.optim.Adam([{"params": twins[:2]}, {"params": twins[2:]}], lr=0.1),
    ]
    assert split_state(optimizers[0].state_dict(), flats)["state"] == {}
    for flat, group in zip(flats, (twins[:2], twins[2:]), strict=True):
        grads = [torch.randn_like(p) for p in flat.parameters]
        flat.put_grads(grads)
        for twin, grad in zip(group, grads, strict=True):
            twin.grad = grad
    for optimizer in optimizers:
        optimizer.step()
    state, expected = split_state(optimizers[0].state_dict(), flats), optimizers[1].state_dict()
    assert [group["params"] for group in state["param_groups"]] == [[0, 1], [2]]
    torch.testing.assert_close(state["state"], expected["state"])
    torch.testing.assert_close(join_state(expected, flats)["state"], optimizers[0].state_dict()["state"])


@pytest.mark.parametrize("is_missing", [False, True])
def test_dirichlet_samples_come_from_the_generator_and_have_the_right_mean(monkeypatch, is_missing):
    if is_missing:
        monkeypatch.delattr(torch, "_sample_dirichlet")
        monkeypatch.setattr(torch.distributions.Dirichlet, "sample", lambda self: public_dirichlet(self.concentration))
    before = torch.get_rng_state()
    concentration = torch.tensor([2.0, 6.0]).expand(20000, 2)
    one, other = (sample_dirichlet(concentration, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one, other)
    assert not torch.equal(one, sample_dirichlet(concentration, torch.Generator().manual_seed(4)))
    torch.testing.assert_close(one.sum(-1), torch.ones(20000))
    torch.testing.assert_close(one.mean(0), torch.tensor([0.25, 0.75]), rtol=0.0, atol=0.01)
    assert torch.equal(torch.get_rng_state(), before)


def public_dirichlet(concentration):
    """A later torch's `Dirichlet.sample`, which today calls the private function that the test deletes."""
    draws = torch.distributions.Gamma(concentration, torch.ones(())).sample()
    return draws / draws.sum(-1, keepdim=True)
