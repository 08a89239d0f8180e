"""Host reads are found by NoHostSync, and those that a replay would not make by the recorder."""

import re

import numpy as np
import pytest
import torch
from no_host_sync import NoHostSync

from canter.execution import record as record_module

X, MASK, INDEX = torch.tensor([3.0, -1.0, 2.0]), torch.tensor([True, False, True]), torch.tensor([2, 0])
ARRAY = np.ones(2)

HOST_READS = {
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
    "is_nonzero": lambda: torch.is_nonzero(X[0]),
    "nonzero as tuple": lambda: X.nonzero(as_tuple=True),
    "argwhere": lambda: torch.argwhere(X),
    "contains": lambda: 3.0 in X,
    "index by a tensor": lambda: X[INDEX[1]],
    "slice by a tensor": lambda: X[INDEX[1] :],
    "print": lambda: str(X),
    "tensor": lambda: torch.tensor(1.0),
    "as_tensor": lambda: torch.as_tensor(ARRAY),
    "from_numpy": lambda: torch.from_numpy(ARRAY),
    "new_tensor": lambda: X.new_tensor([1.0]),
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
    "repeat": lambda: X.repeat_interleave(2),
    "as_tensor of a tensor": lambda: torch.as_tensor(X),
}


# A GPU waits for them, and a replay on a CPU may do without: their results are part of the graph.
ONLY_ON_A_GPU = {"assign by mask", "cpu", "tensor", "as_tensor", "from_numpy", "new_tensor"}


def record(fn):
    return record_module.record(lambda x: (fn(), x + 1)[1], (X,), [X])


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", HOST_READS)
def test_host_reads_are_refused(name, inference):
    with torch.inference_mode(inference):
        with NoHostSync(), pytest.raises(RuntimeError, match="host sync in a hot path"):
            HOST_READS[name]()
        HOST_READS[name]()  # allowed again outside


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", [name for name in HOST_READS if name not in ONLY_ON_A_GPU])
def test_functions_with_host_reads_are_not_replayed(name, inference):
    with torch.inference_mode(inference):
        result, reason = record(HOST_READS[name])
    assert re.search(r"reads values on the host at .*test_host_reads.py:\d+$", reason)
    assert torch.equal(result, X + 1)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", HARMLESS)
def test_operations_without_host_reads_are_allowed(name, inference):
    with torch.inference_mode(inference):
        with NoHostSync():
            HARMLESS[name]()
        _, recording = record(HARMLESS[name])
        assert torch.equal(recording.replay([X + 1]), X + 2)


def test_host_reads_in_a_backward_pass_are_refused():
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
