"""Functions are replayed only while they do the same in every run; messages say what differed, and where."""

import datetime
import os
import random
import re
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from canter.envs.torch_envs import PointRobot
from canter.envs.wrappers import ClipActions
from canter.execution.executor import Executor
from canter.execution.python_state import Walk, find_line, first_change
from canter.execution.trace import Tracer, run_traced

CPU = torch.device("cpu")
X = torch.arange(3.0)
HERE = re.escape(__file__)
GENERATOR = torch.Generator()
STATE = GENERATOR.get_state()


def traced(fn, *tensors, roots=None):
    tracer = Tracer(tensors)
    run_traced(tracer, fn, tensors, roots or {})
    return tracer


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (lambda x: x * 2, lambda x: x * 3, rf"the arguments of aten.mul.Tensor at {HERE}:\d+ changed from 2 to 3"),
        (lambda x: x * 2, lambda x: x * 2.0, "changed from 2 to 2.0"),
        (lambda x: x * 0.0, lambda x: x * -0.0, "changed from 0.0 to -0.0"),
        (lambda x: x * 2, lambda x: x + 2, "aten.add.Tensor at .* ran where aten.mul.Tensor at .* ran before"),
        (lambda x: x * 2, lambda x: x * 2 + 1, rf"aten.add.Tensor at {HERE}:\d+ ran in one of two calls only"),
        (lambda x: x + torch.zeros(3), lambda x: x + X, "ran where|ran in one of two calls"),
        (lambda x: (x, 1), lambda x: (x, 2), "it returned something else"),
        (lambda x: x[0], lambda x: x[1], "changed from 0 to 1"),
    ],
)
def test_the_first_difference_is_named_with_its_line(one, other, message):
    assert re.search(message, traced(one, X).trace.difference(traced(other, X).trace))


def test_equal_runs_have_no_difference_even_if_values_differ():
    def fn(x):
        return (x * X).relu().sum(), torch.randn(2)

    assert traced(fn, X).trace.difference(traced(fn, X * 5).trace) == ""


def test_a_tensor_made_anew_outside_is_a_difference():
    owner = SimpleNamespace(average=torch.zeros(3))
    first = traced(lambda x: x + owner.average, X)
    owner.average = torch.zeros(3)
    second = traced(lambda x: x + owner.average, X)
    assert "uses another tensor than before" in first.trace.difference(second.trace)


def run_iterations(executor, fn, count, calls=4):
    """Results of the last call of each iteration."""
    results = []
    for _ in range(count):
        executor.begin_iteration()
        results += [executor.run("f", fn, X)[0].item() for _ in range(calls)][-1:]
    return results


@pytest.mark.filterwarnings("ignore:'f' cannot be recorded")
def test_every_function_is_looked_at_again_in_iterations_2_4_and_8(monkeypatch):
    """A number in a container that is not watched changes in iterations 3, 6 and 12."""
    for change, noticed in ((3, 4), (6, 8)):
        executor, numbers = Executor(CPU), {"scale": [1.0]}
        monkeypatch.setitem(globals(), "HIDDEN", SimpleNamespace(numbers=numbers))  # reached through a global only
        for iteration in range(1, 10):
            if iteration == change:
                numbers["scale"][0] = 2.0
            (result,) = run_iterations(executor, lambda x: x + HIDDEN.numbers["scale"][0], 1)  # noqa: F821
            assert result == (2.0 if iteration >= noticed else 1.0)
        assert re.search(rf"the arguments of .* at {HERE}:\d+ changed from 1.0 to 2.0", executor.eager_only["f"])


def test_a_function_that_was_looked_at_is_replayed_again(monkeypatch):
    executor, run_traced, calls = Executor(CPU), Executor._run_traced, [0]

    def count(*args):
        calls[-1] += 1
        return run_traced(*args)

    monkeypatch.setattr(Executor, "_run_traced", count)
    for _ in range(8):
        run_iterations(executor, lambda x: x + 1, 1)
        calls.append(0)
    assert calls[:8] == [3, 1, 0, 1, 0, 0, 0, 1]  # at first one eager and two traced calls


def test_a_watched_attribute_that_changes_now_and_then_is_recorded_anew_and_else_eager():
    executor, owner = Executor(CPU), SimpleNamespace(scale=1.0)
    for change in range(3):
        owner.scale = change + 1.0
        executor.watch({"owner": owner})
        assert run_iterations(executor, lambda x: x + owner.scale, 2) == [owner.scale] * 2
        assert executor.graphs
    owner.scale = 9.0
    executor.watch({"owner": owner})
    run_iterations(executor, lambda x: x + owner.scale, 1)
    owner.scale = 10.0
    executor.watch({"owner": owner})
    with pytest.warns(UserWarning, match="changed from 9.0 to 10.0"):
        assert run_iterations(executor, lambda x: x + owner.scale, 1) == [10.0]
    assert not executor.graphs


def test_a_changed_object_that_the_function_does_not_read_costs_only_a_look():
    executor, owner = Executor(CPU), SimpleNamespace(count=0)
    for owner.count in range(20):
        executor.watch({"owner": owner})
        run_iterations(executor, lambda x: x + 1, 1)
    assert len(executor.graphs) == 1
    assert not executor.eager_only


class Counting:
    """A user's object."""

    def __init__(self):
        self.calls = 0
        self.seen = []

    def count(self, x):
        self.calls += 1
        return x + 1

    def keep(self, x):
        self.seen.append(x)
        return x + 1


@pytest.mark.parametrize(("method", "path"), [("count", r"mine\.calls \(0 to 1\)"), ("keep", r"len\(mine\.seen\)")])
def test_a_function_that_changes_an_object_is_refused_with_the_line_of_the_change(method, path):
    mine = Counting()
    tracer = traced(getattr(mine, method), X, roots={"mine": mine})
    assert re.search(rf"it changes {path}.* at {HERE}:\d+; a replay would not", tracer.not_replayable)
    assert tracer.is_user_code


@pytest.mark.parametrize(
    ("fn", "problem"),
    [
        (lambda x: (time.time(), x + 1)[1], r"time\(\) is called"),
        (lambda x: (time.perf_counter(), x + 1)[1], r"perf_counter\(\) is called"),
        (lambda x: (print(end=""), x + 1)[1], r"print\(\) is called"),
        (lambda x: (open(__file__).close(), x + 1)[1], r"open\(\) is called"),
        (lambda x: (os.path.exists(__file__), x + 1)[1], r"stat\(\) is called"),
        (lambda x: (np.random.default_rng(), x + 1)[1], r"urandom\(\) is called"),
        (lambda x: (datetime.datetime.now(), x + 1)[1], r"now\(\) is called"),
        (lambda x: (random.random(), x + 1)[1], r"random\(\) is called"),
        (lambda x: (np.random.rand(), x + 1)[1], "it draws from np.random"),
        (lambda x: (GENERATOR.manual_seed(1), x + 1)[1], r"manual_seed\(\) is called"),
        (lambda x: (GENERATOR.get_state(), x + 1)[1], r"get_state\(\) is called"),
        (lambda x: (GENERATOR.set_state(STATE), x + 1)[1], r"set_state\(\) is called"),
    ],
)
def test_calls_that_a_replay_would_leave_out_are_refused_with_their_line(fn, problem):
    assert re.match(rf"{problem} at {HERE}:\d+", traced(fn, X).not_replayable)


def test_host_reads_are_refused_under_a_profiler_too():
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, arg: None)
    try:
        tracer = traced(lambda x: x + sum(x.tolist()), X)
    finally:
        sys.setprofile(before)
    assert re.match(rf"Tensor.tolist reads values on the host at {HERE}", tracer.not_replayable)


def test_an_argument_whose_data_is_assigned_has_it_after_a_traced_run():
    def fn(x):
        x.data = torch.ones(3)

    given = torch.zeros(3)
    assert re.match(rf"it assigns the data of an argument at {HERE}:\d+", traced(fn, given).not_replayable)
    assert given.tolist() == [1, 1, 1]


def test_a_user_who_reads_a_counter_is_refused():
    mine = Counting()
    tracer = Tracer([X])
    run_traced(tracer, lambda x: x * mine.calls, (X,), {}, [(mine, ("calls",))])
    assert re.search(rf"calls reads values on the host at {HERE}", tracer.not_replayable)
    assert type(mine) is Counting


def test_a_number_of_the_simulator_that_is_read_through_an_adapter_is_refused():
    inner = PointRobot(2)
    inner.level = 2.0
    env = ClipActions(inner, 1.0)
    assert env.level == 2.0
    tracer = traced(lambda x: x * env.level, X)
    assert re.match(rf"level reads values on the host at {HERE}:\d+", tracer.not_replayable)


GAIN = 1.0


def test_walks_compare_values_and_identities():
    level = 1

    class Mine(torch.nn.Module):
        shared = 1.0

        def __init__(self):
            super().__init__()
            self.layer, self.scale, self.table = torch.nn.Linear(2, 2), 1.0, {"a": [1, 2]}
            self.history = [0.0] * 2000
            self.names, self.optimizer = {"a"}, torch.optim.SGD(self.layer.parameters(), lr=0.1)
            self.moments = self.optimizer.state[self.layer.weight] = {"mean": torch.zeros(2, 2)}
            self.stream, self.array, self.numbers = np.random.default_rng(1), np.zeros(3), (n for n in range(9))
            self.scripted = torch.jit.script(torch.nn.Linear(2, 2))

        def forward(self, x):
            return x * level * GAIN

    def raise_level():
        nonlocal level
        level += 1

    mine = Mine()
    roots = {"mine": mine}
    for change in (
        lambda: setattr(mine, "scale", 2.0),
        lambda: mine.table["a"].append(3),
        lambda: mine.history.append(0.0),
        lambda: mine.table.update(b=1),
        lambda: mine.table.update(c=mine.table.pop("b")),
        lambda: mine.names.add("b"),
        lambda: (mine.names.remove("a"), mine.names.add("c")),
        lambda: mine.optimizer.param_groups[0].update(lr=0.2),
        lambda: mine.moments.update(mean=torch.zeros(2, 2)),
        lambda: mine.optimizer.load_state_dict(mine.optimizer.state_dict()),
        lambda: mine.optimizer.state.clear(),
        lambda: mine.layer.weight.register_hook(lambda gradient: gradient),
        lambda: mine.layer.weight._backward_hooks.clear(),
        lambda: vars(Mine.forward).update(calls=1),
        lambda: setattr(mine.layer.weight, "data", torch.zeros(2, 2)),
        lambda: setattr(mine.scripted.weight, "data", torch.zeros(2, 2)),
        lambda: mine.layer.requires_grad_(False),
        lambda: setattr(mine, "layer", torch.nn.Linear(2, 2)),
        lambda: mine.eval(),
        lambda: mine.layer.register_forward_hook(lambda *args: None),
        lambda: setattr(Mine, "shared", 2.0),
        lambda: mine.stream.random(),
        lambda: mine.array.fill(1.0),
        lambda: next(mine.numbers),
        lambda: globals().update(GAIN=GAIN + 1),
        raise_level,
    ):
        before = Walk(roots)
        assert before.is_current(roots)
        assert before.values == Walk(roots).values
        change()
        assert not before.is_current(roots)
        assert first_change(before.values, Walk(roots).values, roots)
    before = Walk(roots)
    globals().update(UNREAD=1)
    assert before.is_current(roots)
    with torch.no_grad():
        mine.layer.weight.add_(1.0)  # values in place are read by a replay
    assert before.is_current(roots)
    assert before.values == Walk(roots).values
    assert not before.is_current({"mine": Mine()})
    assert find_line(roots, ["nothing"]).startswith(f" at {__file__}:")


def test_the_newer_precision_setting_is_respected_and_restored():
    matmul, executor = torch.backends.cuda.matmul, Executor(CPU, "eager", "fp32")
    before = torch.get_float32_matmul_precision()
    matmul.fp32_precision = "tf32"
    try:
        with pytest.raises(RuntimeError):  # the older setting cannot be read any more
            torch.get_float32_matmul_precision()
        assert executor._run_in_precision(torch.get_float32_matmul_precision) == "highest"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = "none"
        torch.set_float32_matmul_precision(before)


def test_backends_still_follow_the_common_precision_afterwards():
    whole, before = torch.backends, torch.get_float32_matmul_precision()
    whole.cuda.matmul.fp32_precision = whole.mkldnn.matmul.fp32_precision = "none"
    try:
        whole.fp32_precision = "tf32"
        assert Executor(CPU, "eager", "fp32")._run_in_precision(torch.get_float32_matmul_precision) == "highest"
        for common in ("tf32", "ieee"):
            whole.fp32_precision = common
            assert (whole.cuda.matmul.fp32_precision, whole.mkldnn.matmul.fp32_precision) == (common, common)
    finally:
        whole.fp32_precision = "none"
        torch.set_float32_matmul_precision(before)
