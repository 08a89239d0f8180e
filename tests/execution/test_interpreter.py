"""Recorded graphs in torch's interpreter: every kind of argument and result, and effects outside the graph."""

import pytest
import torch
from torch import fx

from canter.execution import record as record_module
from canter.execution.interpreter import to_interpreter

FIRST = torch.zeros(1, dtype=torch.long)


def record(fn, *inputs):
    result, recording = record_module.record(fn, inputs, inputs)
    recording.result = result
    return recording


def with_lists(x):
    first, second = x.split([1, 2])
    low, high = torch.aminmax(x)
    return torch.cat([second, first]), torch.stack([low, high]), x.view(1, 3)[:, FIRST]


def with_formats_and_types(x):
    image = x.view(1, 3, 1, 1).expand(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    return image, x.to(torch.float64), x.new_zeros(2, dtype=torch.int32), torch.arange(3, device=x.device)


def with_numbers(x):
    return x.clamp(0, 1), torch.nn.functional.elu(x, 2), torch.add(x, x, alpha=3), x.div(2, rounding_mode="floor"), x**2


def with_booleans(x):
    mask = x > 0
    return mask.masked_fill(x > 1, False), torch.full_like(mask, True), x.masked_fill(mask, True)


def with_a_dropped_result(x):
    return torch.sort(x).indices, x.unbind()[2], x[None, :, None]


@pytest.mark.parametrize("fn", [with_lists, with_formats_and_types, with_numbers, with_booleans, with_a_dropped_result])
def test_arguments_and_results_of_every_kind_are_replayed(fn):
    inner = torch.inference_mode if fn is with_lists else torch.no_grad
    with inner():
        recording = record(fn, torch.tensor([1.5, -2.0, 0.25]))
        assert recording.uncompiled.__module__ == "canter.execution.torch_private"
        x = torch.tensor([0.5, 3.0, -1.0])
        for again, expected in zip(recording.replay([x]), fn(x), strict=True):
            assert torch.equal(again, expected)
            assert (again.dtype, again.stride()) == (expected.dtype, expected.stride())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_operations_with_numbers_compute_the_same_bits(dtype):
    def fn(x):
        floats = [x * 0.1, 0.3 - x.float(), x / 3, x + 1e-8, x * 0.0, (x + 1) * -0.0, (x + 1) / 0.0, (x + 1) / -0.0]
        return *floats, x + 2, x * 7, x.float().exp().mul_(0.7).add_(1), torch.add(x, 3, alpha=2)

    recording = record(fn, torch.ones(256).to(dtype))
    assert recording.uncompiled.__module__ == "canter.execution.torch_private"
    x = torch.arange(256).to(dtype)
    for _ in range(3):  # TorchScript changes a graph when it has run
        for again, expected in zip(recording.replay([x]), fn(x), strict=True):
            assert again.dtype == expected.dtype
            assert torch.equal(again.view(torch.uint8), expected.view(torch.uint8))  # also of zeros, whose signs differ


def test_an_argument_that_no_operation_uses_may_be_anything():
    graph = fx.Graph()
    x, _ = graph.placeholder("x"), graph.placeholder("generator")
    graph.output((graph.call_function(torch.ops.aten.neg.default, (x,)),))
    assert to_interpreter(graph)(torch.ones(2), torch.Generator())[0].tolist() == [-1, -1]


def test_an_unused_draw_of_several_results_is_drawn():
    def draw(x):
        torch.native_dropout(x, 0.5, True)
        return torch.rand(3)

    torch.manual_seed(0)
    expected = [draw(torch.ones(3)) for _ in range(2)]
    torch.manual_seed(0)
    recording = record(draw, torch.ones(3))
    assert torch.equal(recording.result, expected[0])
    assert torch.equal(recording.replay([torch.ones(3)]), expected[1])


def test_another_operation_than_the_recorded_one_is_refused():
    """TorchScript chooses among overloads by the types of the arguments, and None has the type of every option."""
    graph = fx.Graph()
    graph.output((graph.call_function(torch.ops.aten.clamp.Tensor, (graph.placeholder("x"), None, None)),))
    with pytest.raises(TypeError, match=r"would run aten::clamp\(.* for aten::clamp.Tensor"):
        to_interpreter(graph)


@pytest.mark.parametrize("is_input", [False, True])
def test_autograd_notices_that_a_replay_wrote_to_a_tensor(is_input):
    weight, x = torch.ones(2), torch.ones(2, requires_grad=True)
    recording = record(lambda y: (y if is_input else weight).mul_(3.0), torch.ones(2))
    loss = (x * weight).sum()  # its backward pass needs the weight
    recording.replay([weight if is_input else torch.ones(2)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_results_of_a_replay_can_be_differentiated_through():
    recording = record(lambda x: x.view(3, 1) * 2.0, torch.ones(3))
    result = recording.replay([torch.ones(3)]).requires_grad_()
    (slope,) = torch.autograd.grad((result**2).sum(), result)
    assert slope.flatten().tolist() == [4, 4, 4]


def test_a_replay_restores_the_setting_of_torchscript():
    recording = record(lambda x: x + 1, torch.ones(2))
    with torch.jit.optimized_execution(True):
        recording.replay([torch.ones(2)])
        assert torch._C._get_graph_executor_optimize()


def test_an_operation_that_the_interpreter_lacks_is_run_by_python():
    recording = record(lambda x: torch.add(x > 0, True), torch.ones(2))  # a boolean Scalar: the sum is a boolean
    assert recording.uncompiled.__module__ != "canter.execution.interpreter"
    assert torch.equal(recording.replay([torch.zeros(2)]), torch.tensor([True, True]))


def test_without_the_interpreter_python_runs_the_graph(monkeypatch):
    def refuse(graph):
        raise AttributeError("no such name")

    monkeypatch.setattr("canter.execution.interpreter.to_interpreter", refuse)
    recording = record(with_numbers, torch.tensor([1.5, -2.0, 0.25]))
    x = torch.tensor([0.5, 3.0, -1.0])
    assert recording.uncompiled.__module__ != "canter.execution.interpreter"
    assert all(map(torch.equal, recording.replay([x]), with_numbers(x)))
