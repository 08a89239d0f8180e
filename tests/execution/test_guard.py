"""The check that no hot path waits for the device."""

import numpy as np
import pytest
import torch

from canter.execution.guard import NoHostSync

X, MASK, INDEX = torch.tensor([3.0, -1.0, 2.0]), torch.tensor([True, False, True]), torch.tensor([2, 0])

WAITS = {
    "item": lambda: X[0].item(),
    "bool": lambda: bool(X[0]),
    "float": lambda: float(X[0]),
    "index": lambda: range(9)[INDEX[0]],
    "format": lambda: f"{X[0]:.2f}",
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "asarray": lambda: np.asarray(X),
    "cpu": lambda: X.cpu(),
    "nonzero": lambda: X.nonzero(),
    "where": lambda: torch.where(MASK),
    "mask": lambda: X[MASK],
    "assign by mask": lambda: X.clone().__setitem__(MASK, X[INDEX]),
    "masked_select": lambda: X.masked_select(MASK),
    "unique": lambda: X.unique(),
    "repeat_interleave": lambda: X.repeat_interleave(INDEX.new_ones(3)),
    "bincount": lambda: INDEX.bincount(),
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "a number from Python": lambda: torch.tensor(1.0),
}

HARMLESS = {
    "arithmetic": lambda: (X * 2 + 1).exp().sum(),
    "choice": lambda: torch.where(MASK, X, 0.0),
    "fill": lambda: X.masked_fill(MASK, 0.0),
    "gather": lambda: X[INDEX],
    "scatter": lambda: X.clone().index_copy_(0, INDEX, X[:2]),
    "assign by index": lambda: X.clone().__setitem__(INDEX, X[:2]),
    "slice": lambda: X[1:],
    "constants": lambda: torch.full((3,), 2.0) + torch.zeros(3),
    "noise": lambda: torch.randn(3),
    "shape": lambda: X.reshape(3, 1).shape[0],
}


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_found(name):
    with NoHostSync(), pytest.raises(RuntimeError, match="host sync in a hot path"):
        WAITS[name]()
    WAITS[name]()  # and is allowed again outside


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_not_wait_is_let_through(name):
    with NoHostSync():
        HARMLESS[name]()


def test_a_backward_pass_is_watched_too():
    class Peek(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * grad.sum().item()

    x = X.clone().requires_grad_()
    with NoHostSync():
        (x * x).sum().backward()
        loss = Peek.apply(x).sum()
        with pytest.raises(RuntimeError, match="host sync"):
            loss.backward()
