"""Everyday tensor code, function by function: whatever an `Executor` replays must be what the function gives eagerly.

Every function takes x, a (4, 3) tensor with other values in every call; `expected` is as in `idioms.py`. A function
that keeps a state is made anew for every run.
"""

import copy
import ctypes
import functools
import io
import math
import operator
import pickle
import random
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from idioms import all_tensors, check_executor, check_messages
from torch import nn
from torch.utils.checkpoint import checkpoint

from canter.execution.executor import Executor


class Function(NamedTuple):
    """A function of one tensor: `make()` gives it."""

    name: str
    make: Callable[[], Callable[[torch.Tensor], Any]]
    expected: str
    is_for_gpus: bool


TABLE: list[Function] = []
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def add(name, expected, fn, **gpu):
    """Add a function without a state."""
    TABLE.append(Function(name, lambda: fn, expected, "gpu" not in gpu))


def stateful(expected):
    """Add a function that makes a function with a state."""

    def keep(make):
        TABLE.append(Function(make.__name__.replace("_", " "), make, expected, True))
        return make

    return keep


def inputs(device):
    """(4, 3) tensors of changing sign and size, the last ones with other strides."""
    generator = torch.Generator().manual_seed(0)
    for i in range(16):
        x = torch.randn(4, 3, generator=generator) + (-1.0) ** (i // 3) + 0.1 * i
        x = (3.0 * x if i == 7 else x).to(device)
        yield x if i < 9 else x.t().contiguous().t()


def run_calls(function, execution, device, mode):
    """Results and inputs of all calls, or the error of a call; the executor; the messages."""
    executor, results = Executor(torch.device(device), execution, "fp32"), []
    with warnings.catch_warnings(record=True) as caught, MODES[mode]():
        warnings.simplefilter("always", UserWarning)
        torch.manual_seed(0)
        fn = function.make()
        for x in inputs(device):
            given = x.clone()
            try:
                results.append(all_tensors("", {"result": executor.run(function.name, fn, given), "given": given}))
            except Exception as error:
                results.append({f"{type(error).__name__}: {error}": given})
    return results, executor, [str(w.message) for w in caught]


def check_function(function, execution, device, expected, mode):
    """A function gives what it gives eagerly, and runs as expected."""
    wanted, _, _ = run_calls(function, "eager", device, mode)
    results, executor, messages = run_calls(function, execution, device, mode)
    for i, (ours, theirs) in enumerate(zip(results, wanted, strict=True) if expected != "limit" else ()):
        is_same = ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert is_same, f"call {i}: {ours} instead of {theirs}"
    check_messages(messages, executor.eager_only)
    check_executor(executor, expected, {function.name})


# Values read by Python.
add("if", "same", lambda x: x * 2 if x.mean() > 0 else x)
add("if not any", "same", lambda x: x if not (x > 2.5).any() else x.clamp(max=2.5))
add("bool", "same", lambda x: x * bool(x[0, 0] > 0))
add("and", "same", lambda x: (x[0, 0] > 0 and x[0, 1] > 0) * x)
add("item", "same", lambda x: x * x.mean().item())
add("float", "same", lambda x: x * float(x.mean()))
add("int", "same", lambda x: x * int(x.sum()))
add("complex", "same", lambda x: x * complex(x.mean()).real)
add("round", "same", lambda x: x * round(float(x.mean())))
add("math.sqrt", "same", lambda x: x * math.sqrt(x.square().mean()))
add("math.isnan", "same", lambda x: x * 0 if math.isnan(x.sum()) else x + 1)
add("tolist", "same", lambda x: x * sum(x[0].tolist()))
add("numpy", "same", lambda x: x + np.abs(x.detach().numpy()).sum().item(), gpu=None)
add("numpy after cpu", "same", lambda x: x + float(np.abs(x.detach().cpu().numpy()).sum()))
add("numpy and back", "same", lambda x: torch.from_numpy(np.tanh(x.detach().cpu().numpy())).to(x.device) * 2)
add("np.asarray", "same", lambda x: x + float(np.asarray(x.detach().cpu()).sum()))
add("np.array", "same", lambda x: x + float(np.array(x.detach().cpu()).max()))
add("ufunc of NumPy", "same", lambda x: torch.as_tensor(np.tanh(x.detach().cpu())).to(x.device) * 2)
add("np.mean", "same", lambda x: x * float(np.mean(x.detach().cpu().numpy())))
add("memoryview", "same", lambda x: x + memoryview(x.detach().cpu().numpy())[0, 0])
add("data_ptr", "same", lambda x: x + first_float(x), gpu=None)
add("storage", "same", lambda x: x + x.untyped_storage().tolist()[3], gpu=None)
add("typed storage", "same", lambda x: x + sum(x.storage().tolist()), gpu=None)
add("mask", "same", lambda x: x[x > 0].sum() + x)
add("mask of rows", "same", lambda x: x[x[:, 0] > 0].sum(0) + x)
add("masked_select", "same", lambda x: x.masked_select(x > 0).sum() + x)
add("nonzero", "same", lambda x: x + len((x > 0).nonzero()))
add("argwhere", "same", lambda x: x + torch.argwhere(x > 0).sum())
add("where with one argument", "same", lambda x: x + torch.where(x > 0)[0].sum())
add("count_nonzero in a branch", "same", lambda x: x * 2 if (x > 0).count_nonzero() > 6 else x)
add("is_nonzero", "same", lambda x: x * torch.is_nonzero(x[0, 0].clamp(min=0)))
add("equal", "same", lambda x: x * torch.equal(x, x.abs()))
add("allclose", "same", lambda x: x * torch.allclose(x[0], x[0].abs()))
add("unique", "same", lambda x: x + x.round().unique().sum())
add("unique_consecutive", "same", lambda x: x + x.round().flatten().unique_consecutive().sum())
add("repeat_interleave", "same", lambda x: x[0].repeat_interleave(x[0].long().abs()).sum() + x)
add("bincount", "same", lambda x: x + x.abs().long().flatten().bincount().float().std())
add("split by a tensor", "same", lambda x: x + x.flatten().tensor_split(x[0].abs().long().clamp(max=9).cpu())[0].sum())
add("contains", "same", lambda x: x * (1.0 in x.sign()))
add("max of a list", "same", lambda x: x * max([x[0, 0], x[0, 1], x[0, 2]]))
add("sorted", "same", lambda x: x + sorted(x[0])[0])
add("index of the largest", "same", lambda x: x + x[int(x[:, 0].argmax())])
add("index by a number in a tensor", "same", lambda x: x + x[x[:, 0].argmax()])
add("slice by a tensor", "same", lambda x: x + x[: x[:, 0].argmax() + 1].sum())
add("range of a tensor", "same", lambda x: x + sum(i for i in range(x[:, 0].argmax())))
add("list index by a tensor", "same", lambda x: x * [1.0, 2.0, 3.0, 4.0][x[:, 0].argmax()])
add("shape from a tensor", "same", lambda x: x + torch.ones(int(x[:, 0].argmax()) + 1, device=x.device).sum())
add("shape from a 0-dim tensor", "same", lambda x: x + torch.ones(x[:, 0].argmax() + 1, device=x.device).sum())
add("while", "same", lambda x: halved_until_small(x))
add("assert", "same", lambda x: x * 2 if isfinite_or_raise(x) else x)
add("any of Python", "same", lambda x: x * any(v > 1 for v in x[0]))
add("zip and compare", "same", lambda x: x * sum(1 for a, b in zip(x[0], x[1], strict=True) if a > b))
add("dict by item", "same", lambda x: x * {True: 2.0, False: 1.0}[bool(x[0, 0] > 0)])
add("f-string", "same", lambda x: x * len(f"{x.mean():.1f}"))
add("str", "same", lambda x: x + len(str(x)))
add("print", "same", lambda x: x * 2 if print(x) is None else x)
add("format", "same", lambda x: x + len(f"{x[0, 0]}"))
add("pickle", "same", lambda x: pickle.loads(pickle.dumps(x.detach())) * 2)  # noqa: S301
add("torch.save", "same", lambda x: saved_and_loaded(x) * 2)
add("deepcopy", "same", lambda x: copy.deepcopy(x.detach()) * 2)
add("copy", "same", lambda x: copy.copy(x.detach()) * 2)
add("hash of values", "same", lambda x: x + hash(tuple(x[0].tolist())) % 7)
add("cpu", "same", lambda x: x.cpu().to(x.device) * 2)
add("from_dlpack", "same", lambda x: torch.from_dlpack(x.detach()) * 2)
add("dlpack through NumPy", "same", lambda x: torch.from_numpy(np.from_dlpack(x.detach()).copy()) * 2, gpu=None)
add("cond", "same", lambda x: torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,)))
add("random number of the host", "same", lambda x: x * torch.rand(()).item())
add("exception of a factorisation", "same", lambda x: factorised_or_zero(x))
add("torch._assert", "same", lambda x: x * 2 if torch._assert(x.sum() < 1e9, "large") is None else x)
add("equality of lists", "same", lambda x: x * ([x[0, 0] > 0] == [True]))
add("nan check", "same", lambda x: torch.zeros_like(x) if torch.isnan(x).any() else x * 2)
add("iteration with a break", "same", lambda x: first_positive(x))
add("try int", "same", lambda x: x * operator.index(x[:, 0].argmax()))

# Tensors made inside.
add("tensor of a number", "same", lambda x: x * torch.tensor(2.0, device=x.device))
add("tensor, then written to", "same", lambda x: torch.tensor(0.0, device=x.device).add_(x.sum()) + x)
add("tensor of a list of items", "same", lambda x: x + torch.tensor([v.item() for v in x[0]], device=x.device))
add("tensor of tensors", "same", lambda x: x + torch.tensor([x[0, 0], x[0, 1], 1.0], device=x.device))
add("as_tensor of a list", "same", lambda x: x * torch.as_tensor([1.0, 2.0, 3.0], device=x.device))
add("as_tensor of tensors", "same", lambda x: x + torch.as_tensor([x[0, 0], x[0, 1], 1.0], device=x.device))
add("as_tensor of a tensor", "recorded", lambda x: torch.as_tensor(x) * 2)
add("asarray, then written to", "same", lambda x: torch.asarray([0.0], device=x.device).add_(x.sum()) + x)
add("new_tensor, then written to", "same", lambda x: x.new_tensor([0.0]).add_(x.sum()) + x)
add(
    "from_numpy, then written to",
    "either",
    lambda x: torch.from_numpy(np.zeros(1, np.float32)).to(x.device).add_(x.sum()) + x,
)
add("Tensor, then written to", "same", lambda x: torch.Tensor([0.0]).to(x.device).add_(x.sum()) + x)
add("FloatTensor, then written to", "same", lambda x: torch.FloatTensor([0.0]).to(x.device).add_(x.sum()) + x)
add("new, then written to", "same", lambda x: x.new([0.0]).add_(x.sum()) + x)
add(
    "frombuffer, then written to",
    "either",
    lambda x: torch.frombuffer(bytearray(4), dtype=torch.float32).to(x.device).add_(x.sum()) + x,
)
add("scalar_tensor, then written to", "same", lambda x: torch.scalar_tensor(0.0, device=x.device).add_(x.sum()) + x)
add("zeros, then written to", "recorded", lambda x: torch.zeros((), device=x.device).add_(x.sum()) + x)
add("zeros_like, then written to", "recorded", lambda x: torch.zeros_like(x).add_(x))
add("new_zeros, then written to", "recorded", lambda x: x.new_zeros(3).add_(x[0]) + x)
add("empty, then written to", "recorded", lambda x: torch.empty_like(x).copy_(x) * 2)
add("view of zeros, written to", "recorded", lambda x: written_through_a_view(x))
add("full of a size", "recorded", lambda x: x + torch.full((3,), float(len(x)), device=x.device))
add("arange and eye", "recorded", lambda x: x @ torch.eye(3, device=x.device) + torch.arange(3, device=x.device))
add("NumPy number", "recorded", lambda x: x * float(np.float32(2.5)) + np.float64(0.5))
add("Parameter made inside", "same", lambda x: x * nn.Parameter(torch.ones(3, device=x.device)))
add("module made inside", "same", lambda x: nn.LayerNorm(3, device=x.device)(x))

# Plain tensor code.
add("len and shape", "recorded", lambda x: x * len(x) + x.shape[1])
add("iteration", "recorded", lambda x: sum(row * (i + 1) for i, row in enumerate(x)) + x)
add("unpacking", "recorded", lambda x: functools.reduce(lambda a, b: a * 0.5 + b, [*x]) + x)
add("sum of Python", "recorded", lambda x: sum(x) + x)
add("reversed", "recorded", lambda x: torch.stack(list(reversed(list(x)))))
add("gather by argmax", "recorded", lambda x: x + x.gather(0, x.argmax(0, keepdim=True)))
add("index by a vector", "recorded", lambda x: x[x[:, 0].argsort()])
add("index_select", "recorded", lambda x: x.index_select(0, x[:, 0].argmax(keepdim=True)) + x)
add("where with three arguments", "recorded", lambda x: torch.where(x > 0, x, 0.1 * x))
add("masked_fill", "recorded", lambda x: x.masked_fill(x > 0, 0.5))
add("assignment by mask", "same", lambda x: assigned_by_mask(x))
add("assignment by mask of tensors", "same", lambda x: assigned_tensors_by_mask(x))
add("assignment by index", "recorded", lambda x: assigned_by_index(x))
add("scatter and cumsum", "recorded", lambda x: torch.zeros_like(x).scatter(0, x.argsort(0), x).cumsum(0))
add("topk and sort", "recorded", lambda x: x.topk(2, 0).values.sum(0) + x.sort(0).values)
add("einsum", "recorded", lambda x: torch.einsum("ij,kj->ik", x, x))
add("clamp by tensors", "recorded", lambda x: x.clamp(x[0], x[0].abs()))
add("in-place on a clone", "recorded", lambda x: x.clone().mul_(2).add_(1).relu_())
add("out argument", "recorded", lambda x: torch.mul(x, 2, out=torch.empty_like(x)))
add("linear solver", "same", lambda x: x @ torch.linalg.solve(x.mT @ x + torch.eye(3, device=x.device), x.mT @ x))
# It computes the vectors too while it is recorded, which rounds the values differently.
add("singular values", "limit", lambda x: x + torch.linalg.svdvals(x).sum())
add("distribution", "same", lambda x: torch.distributions.Normal(x, 1.0, validate_args=False).log_prob(x + 1))
add("checked distribution", "same", lambda x: torch.distributions.Normal(x, 1.0, validate_args=True).log_prob(x + 1))
add("dropout", "recorded", lambda x: F.dropout(x, 0.5))
add("rand and randperm", "recorded", lambda x: x[torch.randperm(4, device=x.device)] + torch.rand_like(x))
add("multinomial", "recorded", lambda x: x[x[:, 0].softmax(0).multinomial(4)])
add("autocast", "same", lambda x: under_autocast(x))
add("gradient inside", "recorded", lambda x: gradient_of_cube(x))
add("double backward", "recorded", lambda x: gradient_of_gradient(x))
add("no_grad inside", "recorded", torch.no_grad()(lambda x: x * 2 + 1))
add("inference_mode inside", "same", torch.inference_mode()(lambda x: x * 2 + 1))
add("inference tensor kept", "same", lambda x: x + torch.inference_mode()(lambda x: x * 2)(x))
add("autograd.Function", "recorded", lambda x: gradient_of(Doubled.apply, x))
add("checkpoint", "same", lambda x: gradient_of(lambda x: checkpoint(torch.sin, x, use_reentrant=False), x))
add("checkpoint with dropout", "same", lambda x: gradient_of(dropped_in_a_checkpoint, x))
add("vmap", "same", lambda x: torch.vmap(lambda row: row * row.sum())(x))
add("vmap with noise", "same", lambda x: torch.vmap(lambda r: r + torch.rand_like(r), randomness="different")(x))
add("func.grad", "same", lambda x: torch.func.grad(lambda x: x.pow(3).sum())(x))
add("func.jacrev", "same", lambda x: torch.func.jacrev(lambda r: r.sin())(x[0]) @ x[0] + x)
add("func.jvp", "same", lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1])
add("compiled function", "same", torch.compile(lambda x: x.sin() * 2, backend="eager"))
add("compiled branch", "same", torch.compile(lambda x: x * 2 if x.mean() > 0 else x, backend="eager"))
add("strides", "same", lambda x: x * 2 if x.is_contiguous() else x * 3)
add(
    "view that needs strides",
    "either",
    lambda x: x.view(-1).sum() + x if x.is_contiguous() else x.t().reshape(-1)[1] + x,
)
add("as_strided", "recorded", lambda x: x.contiguous().as_strided((4,), (3,)).sum() + x)
add("branch on grad mode", "recorded", lambda x: x * 2 if torch.is_grad_enabled() else x * 3)
add("branch on inference mode", "recorded", lambda x: x * 2 if torch.is_inference_mode_enabled() else x * 3)
add("input returned", "recorded", lambda x: (x, x * 2))
add("views of the input returned", "recorded", lambda x: (x[0], x.view_as(x), x * 2))
add("in-place on the input", "recorded", lambda x: x.mul_(2))
add("data of the input assigned", "same", lambda x: data_assigned(x))
add("complex numbers", "recorded", lambda x: torch.view_as_real(torch.view_as_complex(x[:, :2].contiguous()) * 1j))
add("fft", "recorded", lambda x: torch.fft.rfft(x, dim=0).abs())
add("sparse", "same", lambda x: x.relu().to_sparse().to_dense() + x)
add("nested tensor", "same", lambda x: torch.nested.nested_tensor([x[0], x[1:].flatten()]).to_padded_tensor(0.0))
add("Python time as a number", "same", lambda x: x + 0.0 * time.monotonic())
add("keyword results", "recorded", lambda x: {"a": x * 2, "b": (x + 1, {"c": x.sum()})})
add("number in the result", "recorded", lambda x: (x * 2, len(x)))
add("nothing", "recorded", lambda x: None)


def first_float(x):
    return ctypes.c_float.from_address(x.data_ptr()).value


def halved_until_small(x):
    while x.norm() > 1:
        x = x * 0.5
    return x


def isfinite_or_raise(x):
    assert torch.isfinite(x).all()
    return True


def saved_and_loaded(x):
    file = io.BytesIO()
    torch.save(x.detach(), file)
    file.seek(0)
    return torch.load(file)


def factorised_or_zero(x):
    try:
        return torch.linalg.cholesky(x.mT @ x + x[0, 0] * torch.eye(3, device=x.device))
    except torch.linalg.LinAlgError:
        return torch.zeros(3, 3, device=x.device)


def first_positive(x):
    for row in x:
        if row[0] > 0:
            return row * 2
    return x[0]


def written_through_a_view(x):
    made = torch.zeros(4, 3, device=x.device)
    made[1:, 0].add_(x[1:, 1])
    return made


def assigned_by_mask(x):
    y = x.clone()
    y[y > 0] = 0.5
    return y


def assigned_tensors_by_mask(x):
    y = x.clone()
    y[y > 0] = x[x > 0] * 2
    return y


def assigned_by_index(x):
    y = x.clone()
    y[x[:, 0].argsort()[:2], 1] = x[:2, 2]
    y[0] += 1
    return y


def under_autocast(x):
    with torch.autocast(x.device.type, torch.bfloat16):
        return (x @ x.mT).float()


def gradient_of(fn, x):
    with torch.enable_grad():
        leaf = torch.empty_like(x).copy_(x).requires_grad_() if not x.is_inference() else x * 1.0
        if not leaf.requires_grad:  # under inference_mode there are no gradients
            return fn(leaf)
        return torch.autograd.grad(fn(leaf).sum(), leaf)[0]


def gradient_of_cube(x):
    return gradient_of(lambda x: x.pow(3), x)


def gradient_of_gradient(x):
    def penalty(leaf):
        if not leaf.requires_grad:
            return leaf
        return torch.autograd.grad(leaf.sin().sum(), leaf, create_graph=True)[0].square()

    return gradient_of(penalty, x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def dropped_in_a_checkpoint(x):
    return checkpoint(lambda x: F.dropout(x.sin(), 0.5), x, use_reentrant=False)


def data_assigned(x):
    y = x.clone()
    y.data = x.abs()
    return y * 2


# Functions with a state.
@stateful("same")
def a_counter():
    count = 0

    def fn(x):
        nonlocal count
        count += 1
        return x * count

    return fn


@stateful("limit")
def a_counter_that_acts_late():
    state = {"count": 0}

    def fn(x):
        state["count"] += 1
        return x * (2.0 if state["count"] > 6 else 1.0)

    return fn


@stateful("same")
def a_list_of_tensors():
    kept = []

    def fn(x):
        kept.append(x.detach().clone())
        return x + kept[0] + len(kept)

    return fn


@stateful("same")
def a_rebound_average():
    mean = torch.zeros(())

    def fn(x):
        nonlocal mean
        mean = 0.9 * mean.to(x.device) + 0.1 * x.detach().mean()
        return x - mean

    return fn


@stateful("recorded")
def an_average_in_place():
    means = {}

    def fn(x):
        if x.device not in means:
            means[x.device] = torch.zeros((), device=x.device)
        return x - means[x.device].mul_(0.9).add_(x.detach().mean())

    return fn


@stateful("same")
def a_dictionary_as_cache():
    cache = {}

    def fn(x):
        cache.setdefault("first", x.detach().clone())
        return x - cache["first"]

    return fn


@stateful("same")
def an_lru_cache_by_item():
    @functools.lru_cache
    def doubled(number):
        return 2 * number

    return lambda x: x * doubled(round(x.mean().item()))


@stateful("same")
def a_tensor_cached_by_shape():
    @functools.lru_cache
    def weights(size, device):
        return torch.arange(size, device=device) + 1.0

    return lambda x: x * weights(x.shape[1], x.device)


@stateful("same")
def random_numbers_of_python():
    random.seed(0)
    return lambda x: x * random.random()


@stateful("same")
def rare_random_numbers_of_python():
    random.seed(1)
    return lambda x: x * 2 if random.random() < 0.2 else x


@stateful("same")
def random_numbers_of_numpy():
    np.random.seed(0)
    return lambda x: x + float(np.random.rand())


@stateful("limit")
def a_generator_of_numpy():
    rng = np.random.default_rng(0)
    return lambda x: x * 2 if rng.random() < 0.2 else x


@stateful("same")
def reseeded():
    def fn(x):
        torch.manual_seed(3)
        return x + torch.rand_like(x)

    return fn


@stateful("same")
def random_state_saved_and_restored():
    def fn(x):
        with torch.random.fork_rng(devices=[x.device] if x.device.type == "cuda" else []):
            torch.manual_seed(5)
            noise = torch.rand_like(x)
        return x + noise

    return fn


@stateful("same")
def a_scripted_function():
    def tanh(x: torch.Tensor) -> torch.Tensor:
        return x.tanh() * 2

    scripted = torch.jit.script(tanh)
    return lambda x: scripted(x)


def branch(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if bool(x.mean() > 0) else x


def number(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.mean())


def loop(x: torch.Tensor) -> torch.Tensor:
    for _ in range(int(x.abs().max())):
        x = x * 0.5
    return x


@stateful("same")
def a_scripted_branch():
    scripted = torch.jit.script(branch)
    return lambda x: scripted(x)


@stateful("same")
def a_scripted_number():
    scripted = torch.jit.script(number)
    return lambda x: scripted(x)


@stateful("same")
def a_scripted_loop():
    scripted = torch.jit.script(loop)
    return lambda x: scripted(x)


@stateful("same")
def a_traced_function():
    traced = torch.jit.trace(lambda x: x.tanh() * 2, torch.zeros(4, 3))
    return lambda x: traced(x)


@stateful("recorded")
def a_batch_norm():
    with torch.random.fork_rng():
        norms = {
            name: nn.BatchNorm1d(3, device=name)
            for name in ("cpu", "cuda")
            if name != "cuda" or torch.cuda.is_available()
        }
    return lambda x: norms[x.device.type](x)


@stateful("recorded")
def a_linear_layer_on_transposed_rows():
    """Which kernel torch takes depends on whether the weight requires a gradient."""
    layers = {}

    def fn(x):
        if x.device not in layers:
            with torch.inference_mode(False):
                layers[x.device] = nn.Linear(24, 5, device=x.device)
        rows = x.repeat(1, 8)
        return layers[x.device](torch.stack([rows, 2 * rows, rows - 1]).transpose(0, 1))

    return fn


@stateful("same")
def a_forward_hook_that_counts():
    count, identity = [], nn.Identity()
    identity.register_forward_hook(lambda module, args, out: count.append(0))
    return lambda x: identity(x) * (1 + len(count))
