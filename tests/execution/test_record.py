"""Recordings: replays equal the function bit for bit, with outside tensors, writes, random draws and gradients."""

import math
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from canter.execution import record as record_module
from canter.execution.compile import Compilation, fills, merge_copies, split
from canter.execution.cuda_graph import describe
from canter.execution.executor import MAX_GRAPHS, Executor
from canter.execution.record import Recorder
from canter.execution.recorded_graph import simplify

CPU = torch.device("cpu")


def record(fn, *args, compiles=False):
    leaves = []
    describe(args, leaves)
    result, recording = record_module.record(fn, args, leaves, compiles)
    return recording, result


def compiled(fn, *args):
    """A recording that runs compiled, and the result of the function."""
    recording, result = record(fn, *args, compiles=True)
    compilation = Compilation(recording.to_compile, (*recording.outside, *args))
    compilation.thread.join()
    recording.run, recording.strides = compilation.run, [x.stride() for x in args]
    return recording, result


def operations(fn, *inputs):
    """Names of the operations of a function after simplification."""
    recorder = Recorder(inputs)
    with recorder:
        result = fn(*recorder.inputs)
    outputs = []
    describe(result, outputs)
    recorder.recorded.graph.output(tuple(recorder.node_of(leaf) for leaf in outputs))
    simplify(recorder.recorded)
    return [
        "getitem" if node.target is operator.getitem else str(node.target).split(".")[1]
        for node in recorder.recorded.graph.nodes
        if node.op == "call_function"
    ]


def test_a_replay_computes_the_function_of_its_inputs():
    recording, result = record(lambda x, y: {"sum": x + y, "pair": (x * 2, None)}, torch.ones(2), torch.ones(2))
    assert result["sum"].tolist() == [2, 2]
    again = recording.replay([torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])])
    assert again["sum"].tolist() == [11, 22]
    assert again["pair"][0].tolist() == [2, 4]
    assert again["pair"][1] is None


def test_two_inputs_that_were_one_tensor_may_differ_in_a_replay():
    x = torch.ones(2)
    recording, _ = record(torch.sub, x, x)
    assert recording.replay([torch.tensor([5.0, 5.0]), torch.tensor([1.0, 2.0])]).tolist() == [4, 3]


def test_a_replay_reads_the_current_values_of_outside_tensors():
    scale = torch.tensor(2.0)
    recording, _ = record(lambda x: x * scale.view(1), torch.ones(3))
    scale.fill_(5.0)
    assert recording.replay([torch.ones(3)]).tolist() == [5, 5, 5]


def test_writes_happen_once_per_replay_and_in_order():
    total, count = torch.zeros(3), torch.zeros(())

    def add(x):
        before = total * 1.0
        total.add_(x)
        count.add_(1)
        return before, total * 1.0

    recording, (before, after) = record(add, torch.ones(3))
    assert (before[0], after[0]) == (0, 1)
    before, after = recording.replay([torch.full((3,), 5.0)])
    assert (before[0], after[0]) == (1, 6)
    assert count == 2


def test_repeated_operations_are_not_merged_if_a_result_is_written_to():
    def f(x):
        a, b = x + 1, x + 1
        a.mul_(2)
        return a, b

    recording, _ = record(f, torch.ones(2))
    assert [part.tolist() for part in recording.replay([torch.ones(2)])] == [[4, 4], [2, 2]]


def test_a_tensor_written_to_between_two_reads_is_read_twice():
    def f(x):
        y = x.clone()
        first = y.sum()
        y.add_(1)
        return first, y.sum()

    recording, _ = record(f, torch.zeros(3))
    assert [float(part) for part in recording.replay([torch.ones(3)])] == [3, 6]


def test_a_row_written_through_a_view_shows_in_the_whole():
    table, cursor = torch.zeros(4, 2), torch.zeros(1, dtype=torch.long)

    def write(x):
        table.index_copy_(0, cursor, x.unsqueeze(0))
        table.view(-1)[0].add_(100)
        cursor.add_(1)

    recording, _ = record(write, torch.full((2,), 1.0))
    recording.replay([torch.full((2,), 2.0)])
    assert table.tolist() == [[201, 1], [2, 2], [0, 0], [0, 0]]


def test_every_replay_draws_new_noise_from_the_same_stream():
    one, other = (torch.Generator().manual_seed(3) for _ in range(2))

    def draw(x):
        return x + torch.randn(4, generator=one)

    recording, first = record(draw, torch.zeros(4))
    drawn = [first, recording.replay([torch.zeros(4)]), recording.replay([torch.zeros(4)])]
    assert torch.equal(torch.stack(drawn), torch.stack([torch.randn(4, generator=other) for _ in range(3)]))


def test_unused_noise_is_still_drawn():
    generator = torch.Generator().manual_seed(3)

    def draw(x):
        torch.randn(4, generator=generator)
        return x + torch.randn(4, generator=generator)

    recording, _ = record(draw, torch.zeros(4))
    other = torch.Generator().manual_seed(3)
    expected = [torch.randn(4, generator=other) for _ in range(4)]
    assert torch.equal(recording.replay([torch.zeros(4)]), expected[3])


def test_unused_and_repeated_operations_are_removed():
    def f(x):
        x.cos()
        return x.exp().sum(), x.exp().mean()

    assert operations(f, torch.zeros(2)) == ["exp", "sum", "mean"]


def test_a_view_of_the_same_shape_is_its_argument():
    def fn(x):
        row = x.view(2, 3)
        row.add_(1.0)
        return row.reshape(2, 3) * x.view(3, 2).sum()

    recording, _ = record(fn, torch.zeros(2, 3))
    x = torch.arange(6.0).view(2, 3)
    assert recording.replay([x]).tolist() == [[21.0, 42.0, 63.0], [84.0, 105.0, 126.0]]
    assert x.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert operations(fn, x) == ["add_", "view", "sum", "mul"]


def test_constants_and_views_of_outside_tensors_are_evaluated_once():
    weight = nn.Parameter(torch.ones(3, 3))
    left = operations(lambda x: x @ weight.t() + torch.ones(3) * 2 + torch.ones_like(x)[0], torch.zeros(2, 3))
    assert left == ["mm", "add", "add"]


def test_a_weight_is_transposed_once_and_read_anew_in_every_replay():
    layer, bias_free = nn.Linear(3, 2), nn.Linear(3, 2, bias=False)

    def f(x):
        return layer(x), bias_free(x), layer(x[None])

    with torch.inference_mode():
        assert operations(f, torch.ones(4, 3)) == ["addmm", "linear", "unsqueeze", "linear"]
        recording, _ = record(f, torch.ones(4, 3))
        for part in (layer, bias_free):
            part.weight.data.mul_(2.0)
        x = torch.rand(4, 3)
        assert all(map(torch.equal, recording.replay([x]), f(x)))


@pytest.mark.parametrize("make", [torch.zeros_like, lambda x: x.new_zeros(2), lambda x: torch.zeros(2)])
def test_a_tensor_made_inside_and_written_to_is_new_in_every_replay(make):
    recording, _ = record(lambda x: make(x).add_(x), torch.ones(2))
    assert [recording.replay([torch.ones(2)]).tolist() for _ in range(3)] == [[1, 1]] * 3


def test_gradients_are_recorded():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def grads(x, y):
        return list(torch.autograd.grad((net(x) - y).square().mean(), list(net.parameters())))

    recording, _ = record(grads, torch.randn(5, 3), torch.randn(5, 1))
    x, y = torch.randn(5, 3), torch.randn(5, 1)
    assert all(torch.equal(a, b) for a, b in zip(recording.replay([x, y]), grads(x, y), strict=True))


@pytest.mark.parametrize("kind", ["penalty", "LSTM", "GRU", "conv"])
def test_second_derivatives_recurrent_and_convolutional_networks_are_replayed_bit_for_bit(kind):
    torch.manual_seed(0)
    net = {
        "penalty": nn.Sequential(nn.Linear(4, 8), nn.ELU(), nn.Linear(8, 1)),
        "LSTM": nn.LSTM(4, 8),
        "GRU": nn.GRU(4, 8),
        "conv": nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(3, 1)),
    }[kind]

    def grads(x):
        if kind == "penalty":
            x = x.requires_grad_()
            (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
            loss = (slope.norm(dim=-1) - 1).square().mean()
        else:
            out = net(x.view(-1, 1, 2, 2) if kind == "conv" else x.view(5, 1, 4))
            loss = (out[0] if isinstance(out, tuple) else out).square().sum()
        return [g for g in torch.autograd.grad(loss, list(net.parameters()), allow_unused=True) if g is not None]

    recording, _ = record(grads, torch.randn(5, 4))
    x = torch.randn(5, 4)
    expected = grads(x.clone())
    for has_grad in (True, False):  # a replay is in the mode of the recording, whatever that of the caller is
        with torch.set_grad_enabled(has_grad):
            again = recording.replay([x.clone()])
        assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


def test_a_recording_made_in_inference_mode_is_replayed_in_it():
    with torch.inference_mode():
        recording, _ = record(lambda x: F.linear(x, torch.ones(2, 2)), torch.ones(1, 2))
        assert recording.replay([torch.full((1, 2), 3.0)]).tolist() == [[6, 6]]


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: x * float(x.sum()), "_local_scalar_dense"),
        (lambda x: x[x > 0], "index.Tensor|nonzero"),
        (lambda x: x.unique(), "unique"),
    ],
)
def test_a_function_that_reads_values_runs_and_gives_the_reason_it_cannot_be_replayed(fn, reason):
    x = torch.tensor([1.0, 2.0, -1.0])
    recording, result = record(fn, x)
    assert torch.equal(result, fn(x))
    assert any(name in recording for name in reason.split("|"))
    assert "reads values on the host at" in recording


@pytest.mark.parametrize("execution", ["auto", "graph"])
def test_the_executor_runs_a_function_eagerly_that_cannot_be_replayed(execution, recwarn):
    executor = Executor(CPU, execution)
    inputs = [torch.full((2,), k) for k in (1.0, 2.0, 3.0, 4.0)]
    results = [executor.run("f", lambda x: x * float(x.sum()), x).tolist() for x in inputs]
    assert results == [[2, 2], [8, 8], [18, 18], [32, 32]]
    assert set(executor.eager_only) == {"f"}
    (message,) = [str(w.message) for w in recwarn if "cannot be recorded" in str(w.message)]
    assert f"{__file__}:" in message


def test_a_very_long_function_is_not_replayed():
    def long(x):
        for _ in range(3001):
            x = x + 1
        return x

    recording, result = record(long, torch.zeros(1))
    assert result.tolist() == [3001]
    assert recording == "it is too long"


def test_a_function_whose_shapes_keep_changing_runs_eagerly():
    executor = Executor(CPU)
    sizes = [n for n in range(1, MAX_GRAPHS + 4) for _ in range(3)]
    assert [executor.run("grow", lambda x: x.sum(), torch.ones(n)).item() for n in sizes] == sizes
    assert not executor.graphs
    assert "grow" in executor.eager_only


def test_eager_calls_and_the_recorded_call_take_effect_once_each():
    executor, total = Executor(CPU), torch.zeros(())
    for k in range(6):
        assert executor.run("add", lambda x: total.add_(x.sum()) * 1.0, torch.ones(2)) == 2.0 * (k + 1)


def test_functions_that_torch_wraps_in_python_are_called_as_operations():
    with torch.inference_mode():  # under which composite operations are not decomposed
        recording, _ = record(
            lambda x, y: torch.broadcast_tensors(x, y)[0] + torch.einsum("ij,jk->ik", y, y), *torch.ones(2, 3, 3)
        )
        assert recording.replay([torch.full((3, 3), 2.0), torch.ones(3, 3)])[0].tolist() == [5, 5, 5]


def test_methods_that_torch_wraps_in_python_are_called_as_operations():
    with torch.inference_mode():
        recording, _ = record(lambda x: x.split([1, 2])[1] + x.norm() + x.unflatten(0, (3,)).sum(), torch.ones(3))
        assert recording.replay([torch.zeros(3)]).tolist() == [0, 0]


def parts_by_name(fn, *inputs):
    """Part by name of the operation."""
    recorder = Recorder(inputs)
    with recorder:
        result = fn(*recorder.inputs)
    recorder.recorded.graph.output((recorder.node_of(result),))
    simplify(recorder.recorded)
    merge_copies(recorder.recorded)
    parts, _ = split(recorder.recorded)
    return {
        str(node.target).split(".")[1]: part for node, part in parts.items() if "add.Tensor" not in str(node.target)
    }


def test_draws_are_split_off_first_and_uncompilable_operations_last():
    total, generator = torch.zeros(3), torch.Generator().manual_seed(0)

    def step(x, write):
        y = x + torch.randn(3, generator=generator)
        write(y)
        return total * 2 + y.exp()

    simple = parts_by_name(lambda x: step(x, total.add_), torch.ones(3))
    assert simple == {"randn": 0, "add_": 1, "mul": 1, "exp": 1}
    through_a_view = parts_by_name(lambda x: step(x, total[:].view(3).add_) + total.view(1, 3), torch.ones(3))
    assert through_a_view == {"randn": 0, "add_": 2, "mul": 2, "exp": 1}
    unknown = parts_by_name(lambda x: step(x, lambda y: torch._foreach_add_([total], [y])), torch.ones(3))
    assert unknown == {"randn": 0, "_foreach_add_": 2, "mul": 2, "exp": 1}


def test_draws_follow_the_writes_they_depend_on_and_keep_their_order():
    chance, generator = torch.full((3,), 0.5), torch.Generator().manual_seed(0)

    def step(x):
        chance.mul_(x)
        first = torch.bernoulli(chance, generator=generator)  # depends on the write
        return first.exp() + torch.randn(3, generator=generator)  # from the same generator, so it must come later

    assert parts_by_name(step, torch.ones(3)) == {"mul_": 1, "bernoulli": 2, "exp": 2, "randn": 2}


def test_copies_that_fill_a_vector_become_one_copy():
    whole, far = torch.zeros(6), torch.zeros(6)
    pieces = [whole[:2], whole[2:].view(2, 2)]

    def step(x, into):
        torch._foreach_copy_(into, [x[0] * 1.5, x * 2.0] if into[0].dim() == 1 else [x * 2.0, x[0] * 1.5])
        return whole + far

    assert parts_by_name(lambda x: step(x, pieces), torch.ones(2, 2))["copy_"] == 1
    gaps = [far.view(3, 2)[1:], far[:2]]
    assert parts_by_name(lambda x: step(x, gaps), torch.ones(2, 2))["_foreach_copy_"] == 2
    for wrong in ([whole[:2]], pieces[::-1], [far[:2], whole[2:]], [whole[:2], whole[3:]]):
        assert not fills(wrong, whole)
    assert fills(pieces, whole)


def test_views_that_only_uncompiled_operations_read_are_not_compiled():
    table = torch.zeros(1, 6)
    recorder = Recorder([torch.ones(2, 3), torch.ones(2, 3)])
    with recorder:
        x, y = recorder.inputs
        torch._foreach_copy_([table], [x.view(1, 6)])
        z = y.view(3, 2) * 2
    recorder.recorded.graph.output((recorder.node_of(z),))
    simplify(recorder.recorded)
    parts, _ = split(recorder.recorded)
    assert [part for node, part in parts.items() if "view" in str(node.target)] == [2, 1]


@pytest.mark.slow
def test_a_compiled_recording_computes_the_same_up_to_rounding():
    torch.manual_seed(0)
    net, total = nn.Linear(3, 4), torch.zeros(4)
    streams = [torch.Generator().manual_seed(1) for _ in range(2)]

    def step(x, generator):
        y = torch.tanh(net(x)) + torch.randn(5, 4, generator=generator)
        grads = torch.autograd.grad(y.square().mean(), list(net.parameters()))
        total.add_(y.detach().sum(0))
        return [y.detach(), *grads]

    def other(x):
        return step(x, streams[1])

    x = torch.randn(5, 3)
    recording, result = compiled(lambda x: step(x, streams[0]), x)
    for ours, theirs in zip(result, other(x), strict=True):
        assert torch.equal(ours, theirs)
    assert recording.run is not recording.uncompiled
    before = total.clone()
    ours = recording.replay([x])
    added = total - before
    theirs = other(x)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(added, theirs[0].sum(0))


def test_a_recording_that_cannot_be_compiled_warns_once_and_is_replayed_uncompiled(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("canter.execution.compile.compile_graph", refuse)
    with pytest.warns(UserWarning, match="no compiler here") as seen:
        recording, _ = compiled(lambda x: x + 1, torch.ones(2))
    assert recording.replay([torch.zeros(2)]).tolist() == [1, 1]
    assert len(seen) == 1


def test_a_recording_is_compiled_if_the_rest_of_the_run_pays_for_it(monkeypatch):
    recording, _ = record(lambda x: x * 2, torch.ones(2), compiles=True)
    recording.seconds = record_module.PAYING_SECONDS  # so far, at half of the run
    recording.replay_timed([torch.zeros(2)], 0.6)
    assert recording.compilation is None
    recording.replay_timed([torch.zeros(2)], 0.4)
    recording.compilation.thread.join()
    recording.replay_timed([torch.zeros(2)], 0.5)
    assert recording.run is not recording.uncompiled
    assert recording.next_comparison == 0  # it is compared at once
    assert recording.replay([torch.ones(2)]).tolist() == [2, 2]


@pytest.mark.slow
def test_kernels_are_called_directly_unless_the_compiler_wraps_them():
    """Their writes stay in place, also those to a row of a table at a cursor."""
    table, cursor, total = torch.zeros(30, 2), torch.zeros(1, dtype=torch.long), torch.zeros(2)

    def step(x):
        table.index_copy_(0, cursor, (x * 2.0).unsqueeze(0))
        cursor.add_(1)
        total.copy_(total * 0.5 + x)
        return x.exp() + total

    recording, _ = compiled(step, torch.zeros(2))
    for k in range(1, 30):
        result = recording.replay([torch.full((2,), float(k))])
    assert table[:, 0].tolist() == [2.0 * k for k in range(30)]
    assert cursor.item() == 30
    expected = sum(k * 0.5 ** (29 - k) for k in range(30))
    torch.testing.assert_close(total, torch.full((2,), expected))
    torch.testing.assert_close(result, torch.full((2,), math.exp(29.0)) + expected)
    kernels = recording.run.__closure__[recording.run.__code__.co_freevars.index("kernels")].cell_contents
    assert kernels.__name__ != "<lambda>"


@pytest.mark.slow
def test_kernels_run_only_on_inputs_with_the_strides_they_were_compiled_for():
    with torch.inference_mode():
        wide, dense = torch.rand(2).expand(3, 2), torch.rand(3, 2)
        recording, _ = compiled(lambda x: x * 2.0, wide)
        assert torch.equal(recording.replay([wide]), wide * 2.0)
        assert recording.run is not recording.uncompiled
        assert torch.equal(recording.replay([dense]), dense * 2.0)
        assert torch.equal(recording.replay([dense.t().contiguous().t()]), dense * 2.0)


@pytest.mark.slow
def test_a_view_of_memory_that_kernels_write_to_stays_a_view():
    table, twin = torch.zeros(2, 3), torch.zeros(2, 3)

    def step(x, table):
        view = table.view(-1)
        scaled = view * 2.0
        table.add_(x)
        torch._foreach_add_([view], [scaled + 1.0])
        return view.sum()

    recording, _ = compiled(lambda x: step(x, table), torch.ones(2, 3))
    step(torch.ones(2, 3), twin)
    for k in range(4):
        x = torch.full((2, 3), 0.1 * k)
        torch.testing.assert_close(recording.replay([x]), step(x, twin))
    torch.testing.assert_close(table, twin)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("copying", [lambda x: x.T.contiguous(), lambda x: x.T.reshape(-1)])
def test_operations_that_are_views_of_some_tensors_only_are_evaluated_in_every_replay(copying, inference):
    """Under inference_mode contiguous() and reshape() are not decomposed, and their schema says they may be views."""
    state = torch.zeros(2, 3)

    def step(x):
        before = copying(state) * 1.0
        state.add_(x)
        return before

    executor = Executor(torch.device("cpu"), "graph")
    with torch.inference_mode(inference):
        seen = [executor.run("step", step, torch.ones(2, 3)).flatten()[0].item() for _ in range(6)]
    assert seen == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def branch(x, state):
    return x * 2 if state > 0 else x * 3


def through_numpy(x, state):
    return x + torch.from_numpy(state.detach().view(1).numpy() * 2)


def through_a_list(x, state):
    return x * sum(state.reshape(-1).tolist())


def accumulated(x, state):
    total = torch.tensor(0.0)
    total += x.sum() * state
    return total


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("fn", [branch, through_numpy, through_a_list, accumulated])
def test_functions_that_read_values_give_what_eager_gives(fn, inference):
    """The state changes its sign in mid-run, when a replay would repeat the decision of the recorded run."""
    executor, state = Executor(CPU), torch.tensor(1.0)
    for k in range(6):
        state.fill_(1.0 if k < 4 else -1.0)
        x = torch.full((2,), float(k))
        with torch.inference_mode(inference):
            assert torch.equal(executor.run("f", lambda x: fn(x, state), x), fn(x, state))
    assert set(executor.eager_only) == (set() if fn is accumulated else {"f"})


def test_a_function_without_tensor_arguments_is_recorded_with_everything_it_reads():
    a, b, total = torch.arange(3.0), torch.ones(3), torch.zeros(3)

    def add(count):
        for _ in range(count):
            total.add_(a * b + 1.0)

    executor = Executor(torch.device("cpu"), "auto")
    for _ in range(6):
        executor.run("add", add, 2)
    assert executor.graphs
    assert torch.equal(total, 12 * (torch.arange(3.0) + 1.0))
    b.fill_(2.0)  # outside tensors are read anew
    executor.run("add", add, 2)
    assert torch.equal(total, 12 * (torch.arange(3.0) + 1.0) + 2 * (2 * torch.arange(3.0) + 1.0))


def test_stacks_and_casts_that_are_only_copied_are_copied_part_by_part():
    place, other = torch.zeros(2, 3), torch.zeros(3)

    def fn(x, y):
        stacked = torch.stack([(x * 2).float(), y.float()])
        torch._foreach_copy_([place, other], [stacked, (x + 1).float()])

    x, y = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16), torch.tensor([4.0, 5.0, 6.0], dtype=torch.bfloat16)
    assert operations(fn, x, y) == ["mul", "add", "_foreach_copy_"]
    recording, _ = record(fn, x, y)
    before = place._version
    recording.replay([y, x])
    assert place.tolist() == [[8, 10, 12], [1, 2, 3]]
    assert other.tolist() == [5, 6, 7]
    assert place._version > before


@pytest.mark.parametrize("case", ["read-elsewhere", "written-to", "another-dimension", "rounded-twice", "not-outside"])
def test_stacks_and_casts_stay_where_a_copy_of_the_parts_would_be_something_else(case):
    place = torch.zeros(2, 2, dtype=torch.float64 if case == "rounded-twice" else torch.float32)

    def fn(x, y):
        rows = x * 2, y * 2
        if case == "rounded-twice":
            rows = rows[0].bfloat16(), rows[1].bfloat16()
        stacked = torch.stack(rows, 1 if case == "another-dimension" else 0)
        if case == "written-to":
            rows[0].zero_()
        target = place * 1.0 if case == "not-outside" else place
        torch._foreach_copy_([target], [stacked])
        return stacked.sum() if case == "read-elsewhere" else target.clone()

    x, y = torch.tensor([1.001, 2.0]), torch.tensor([3.0, 4.0])
    recording, _ = record(fn, x, y)
    for inputs in ([y, x], [x * 3, y]):
        got = recording.replay(inputs).clone(), place.clone()
        want = fn(*inputs), place
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
