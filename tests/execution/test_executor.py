"""The executor without a GPU: signatures, replays, fallbacks. CUDA graphs are tested in tests/gpu."""

import copy
import re
import warnings

import pytest
import torch

from canter.algorithms import PPO
from canter.envs.vec_env import StepRecord
from canter.execution import executor as executor_module
from canter.execution.cuda_graph import describe, rebuild
from canter.execution.executor import FEW_CALLS, MANY_RECORDINGS, MAX_SHORT_LIVED, WARM_UP_CALLS, Executor
from canter.modules import ActorCritic
from canter.storage.trajectories import Trajectories

CPU = torch.device("cpu")
EAGER_CALLS = WARM_UP_CALLS + 1  # the last notes what the function writes; then there is a graph


class FakeGraph(executor_module.Graph):
    """Stand-in for a CUDA graph: fixed input and output tensors; a replay runs the function as it was captured."""

    def capture(self, fn, args, leaves, generators, owned):
        self.fn, self.args, self.generators = fn, args, generators
        self.inputs = [leaf if leaf.data_ptr() in owned else leaf.clone() for leaf in leaves]
        before = [tensor.clone() for tensor in self.written]  # a capture executes nothing
        self.outputs = fn(*rebuild(args, iter(self.inputs)))
        for tensor, value in zip(self.written, before, strict=True):
            tensor.copy_(value)
        self.output_leaves = []
        self.description = describe(self.outputs, self.output_leaves)
        self.is_captured = True

    def replay(self, leaves):
        for target, leaf in zip(self.inputs, leaves, strict=True):
            if target.data_ptr() != leaf.data_ptr():
                target.copy_(leaf)
        fresh = []
        describe(self.fn(*rebuild(self.args, iter(self.inputs))), fresh)
        for target, leaf in zip(self.output_leaves, fresh, strict=True):
            target.copy_(leaf)
        return self.outputs


@pytest.fixture
def executor(monkeypatch):
    monkeypatch.setattr(executor_module, "Graph", FakeGraph)
    made = Executor(CPU, "auto")
    made.uses_graphs, made.records, made.has_user_code = True, False, False
    return made


def test_rebuilding_inverts_describing():
    row, column = torch.arange(6).view(3, 2), torch.zeros(3, 2)
    tree = ({"a": row, "b": {"c": column, "d": None}}, Trajectories(row, column, 7), [column], 3)
    leaves = []
    describe(tree, leaves)
    assert len(leaves) == 5
    again = rebuild(tree, iter([leaf + 1 for leaf in leaves]))
    assert torch.equal(again[0]["a"], row + 1)
    assert again[0]["b"]["d"] is None
    assert isinstance(again[1], Trajectories)
    assert again[1].total == 7
    assert again[3] == 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": torch.zeros(2)}, {"a": torch.zeros(3)}),
        ({"a": torch.zeros(2)}, {"b": torch.zeros(2)}),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2).double()}),
        ({"a": torch.zeros(2, 2)}, {"a": torch.zeros(2, 2).t()}),
        ({"a": None}, {"a": torch.zeros(2)}),
        ([torch.zeros(2)], (torch.zeros(2),)),
        (Trajectories(torch.zeros(1), torch.zeros(1), 4), Trajectories(torch.zeros(1), torch.zeros(1), 5)),
    ],
)
def test_inputs_that_need_another_graph_have_another_description(one, other):
    assert describe(one, []) != describe(other, [])
    assert describe(one, []) == describe(one, [])


def test_unknown_execution_and_precision_are_refused():
    with pytest.raises(ValueError, match="execution must be one of auto, eager, graph, compile, got 'fast'"):
        Executor(CPU, "fast")
    with pytest.raises(ValueError, match="precision must be one of tf32, fp32, bf16, got 'fp8'"):
        PPO(ActorCritic(2, 1), precision="fp8")


def test_on_a_cpu_auto_records_without_compiling_and_counts_stay_exact():
    executor = Executor(CPU)
    assert executor.records
    assert not executor.uses_graphs
    assert not executor.compiles
    assert not Executor(CPU, "eager").records
    assert executor.bucket(77, 64) == 77
    assert executor.run("double", lambda x: 2 * x, torch.ones(2)).tolist() == [2, 2]


def test_auto_compiles_in_iteration_1000_and_keeps_count_over_a_resume(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda fn, dynamic: compiled.append(fn) or fn)
    executor = Executor(torch.device("cuda"), "auto")
    executor.compiles = True
    double = executor.compile(lambda x: 2 * x)
    executor.past_iterations = 990
    for _ in range(9):
        executor.begin_iteration()
        assert double(2) == 4
    assert not compiled
    executor.calls["double"] = 5
    executor.begin_iteration()
    assert not executor.calls  # captured anew
    assert double(2) == 4
    assert len(compiled) == 1
    assert Executor(torch.device("cuda"), "compile").compile_from == 0


def test_first_calls_run_the_function_itself(executor):
    calls = []
    total = torch.zeros(())

    def add(x):
        calls.append(1)
        total.add_(x.sum())
        return {"total": total + 0}

    for k in range(EAGER_CALLS):
        executor.run("add", add, torch.full((2,), float(k)))
    assert not any(graph.is_captured for graph in executor.graphs.values())
    assert total == 6.0  # 2 * (0 + 1 + 2): every call counted once
    for k in range(3, 8):
        executor.run("add", add, torch.full((2,), float(k)))
    assert total == 56.0  # 2 * (0 + ... + 7), comparisons included


def test_results_of_one_graph_go_into_another_without_a_copy(executor):
    def first(x):
        return {"y": x + 1}

    def second(step):
        return step["y"] * 10

    for k in range(6):
        step = executor.run("first", first, torch.full((3,), float(k)))
        assert executor.run("second", second, step).tolist() == [10.0 * (k + 1)] * 3
    (graph,) = [g for signature, g in executor.graphs.items() if signature[0] == "second"]
    assert graph.inputs[0] is step["y"]


def test_a_function_whose_shapes_keep_changing_warns_once_and_runs_eagerly(executor):
    sizes = [n for n in range(1, 40) for _ in range(EAGER_CALLS + 1)]
    with pytest.warns(UserWarning, match=r"'grow' cannot be captured .* more than 32 times") as caught:
        totals = [executor.run("grow", lambda x: x.sum(), torch.ones(n)).item() for n in sizes]
    assert totals == sizes
    assert len(caught) == 1
    assert "grow" in executor.eager_only


def test_a_function_that_cannot_be_captured_warns_once_and_runs_eagerly(executor, monkeypatch):
    def refuse():
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(FakeGraph, "capture", lambda *args: refuse())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    line = f"{__file__}:{refuse.__code__.co_firstlineno + 1}"
    with pytest.warns(UserWarning, match=rf"not permitted when stream is capturing at {re.escape(line)}\)") as caught:
        results = [executor.run("f", lambda x: x + 1, torch.zeros(2)).tolist() for _ in range(6)]
    assert results == [[1, 1]] * 6
    assert len(caught) == 1


def test_a_function_that_writes_to_an_argument_is_not_captured(executor):
    """A graph would write to its copy of the argument."""
    given = [torch.ones(2) for _ in range(EAGER_CALLS + 3)]
    with pytest.warns(UserWarning, match="it writes to an argument"):
        results = [executor.run("f", lambda x: x.mul_(2).sum(), x).item() for x in given]
    assert results == [4] * len(given)
    assert [x.tolist() for x in given] == [[2, 2]] * len(given)


def test_a_function_with_nan_in_an_argument_is_captured(executor):
    for _ in range(EAGER_CALLS + 1):
        executor.run("f", lambda x: x + 1, torch.full((2,), torch.nan))
    assert len(executor.graphs) == 1


def test_a_function_that_cannot_be_compiled_warns_once_and_runs_uncompiled(monkeypatch):
    def refuse(*args):
        raise RuntimeError("unsupported: something exotic")

    monkeypatch.setattr(torch, "compile", lambda fn, dynamic: refuse)
    double = Executor(torch.device("cuda"), "compile").compile(lambda x: 2 * x)
    with pytest.warns(UserWarning, match=r"cannot be compiled \(unsupported: something exotic\)") as caught:
        results = [double(torch.ones(1)).item() for _ in range(4)]
    assert results == [2.0] * 4
    assert len(caught) == 1


def test_errors_of_a_compiled_function_are_raised_unchanged(monkeypatch):
    def wrong(x):
        raise KeyError("no such segment")

    monkeypatch.setattr(torch, "compile", lambda fn, dynamic: fn)
    with pytest.raises(KeyError, match="no such segment"):
        Executor(torch.device("cuda"), "compile").compile(wrong)(torch.ones(1))


def test_a_changed_choice_needs_another_graph_and_a_new_storage_drops_all(make_ppo, collect, executor):
    alg, env = make_ppo("mlp", num_steps=2, num_mini_batches=1)
    executor.eager_only = dict.fromkeys(("act", "store", "finish", "returns"), "")
    alg.executor = executor  # which has no user's code

    def learn_graphs():
        for _ in range(EAGER_CALLS + 1):
            collect(alg, env)
            alg.update(0)
        return sum(signature[0] == "learn" for signature in executor.graphs)

    assert learn_graphs() == 1
    assert learn_graphs() == 1
    alg.loss_weights["value_loss"] = 0.25  # a graph reads the current value of a weight and of a float setting
    alg.max_grad_norm = 7.0
    assert learn_graphs() == 1
    alg.use_clipped_value_loss = False
    assert learn_graphs() == 2
    alg.loss_weights["value_loss"] = torch.tensor(0.5)  # a graph reads the current value of a tensor
    before = learn_graphs()
    alg.loss_weights["value_loss"].fill_(0.1)
    assert learn_graphs() == before
    alg.init_storage(env.num_envs, 2, [3], [None], [2])
    assert not executor.graphs


def test_on_a_gpu_counts_are_rounded_up_to_an_eighth_of_their_unit():
    executor = Executor(torch.device("cuda"))
    assert [executor.bucket(count, 64) for count in (16, 17, 24, 25)] == [16, 24, 24, 32]
    assert executor.bucket(5, 4) == 5


# Comparisons.
class Work:
    """A function with a number of Python's, and the calls that ran it."""

    def __init__(self, gain=2.0):
        self.gain, self.ran = gain, 0

    def __call__(self, x):
        self.ran += 1
        return x * self.gain


def numbers_of_runs(executor, work, num_calls):
    """Calls of the executor, counted from 1, in which the function itself ran."""
    found = []
    for call in range(1, num_calls + 1):
        before = work.ran
        assert executor.run("f", work, torch.tensor([float(call)])).item() == work.gain * call
        found += [call] if work.ran > before else []
    return found


def test_own_functions_are_compared_in_calls_1_2_4_8_of_their_recording():
    executor = Executor(CPU)
    executor.expect_user_code(False)
    assert numbers_of_runs(executor, Work(), 40) == [
        1,
        2,
        3,
        4,
        6,
        10,
        18,
        34,
    ]


def test_functions_with_a_users_code_are_compared_once_a_period():
    executor, work = Executor(CPU), Work()
    executor.begin_iteration()
    assert numbers_of_runs(executor, work, 3) == [1, 2, 3]
    for _ in range(4):
        executor.begin_iteration()
        assert 1 in numbers_of_runs(executor, work, 20)
    executor.period_length = 3
    runs = []
    for _ in range(6):
        executor.begin_iteration()
        runs.append(1 in numbers_of_runs(executor, work, 1))
    assert sum(runs) == 2


def test_with_execution_graph_only_the_first_replay_is_compared():
    executor = Executor(CPU, "graph")
    executor.begin_iteration()
    assert numbers_of_runs(executor, Work(), 40) == [1, 2, 3]


def test_a_function_with_a_users_code_that_runs_once_a_period_is_not_recorded():
    executor, work = Executor(CPU), Work()
    for _ in range(5):
        executor.begin_iteration()
        assert numbers_of_runs(executor, work, 1) == [1]
    assert not executor.graphs


def test_a_number_that_changes_between_iterations_is_recorded_anew_in_silence(recwarn):
    executor, work = Executor(CPU), Work()
    for iteration in range(6):
        work.gain = 2.0 if iteration < 3 else 5.0
        executor.begin_iteration()
        numbers_of_runs(executor, work, 50)
    assert executor.recordings["f"] == 2
    assert not executor.eager_only
    assert not recwarn


def test_a_function_that_is_recorded_anew_again_and_again_says_so_once():
    executor, work = Executor(CPU), Work()

    def iterate(gain):
        work.gain = gain
        executor.begin_iteration()
        numbers_of_runs(executor, work, FEW_CALLS + 3)

    for gain in (3.0, 4.0, 5.0):
        iterate(gain)
    with pytest.warns(UserWarning, match=f"'f' was recorded anew, {MANY_RECORDINGS} times .* from 5.0 to 6.0"):
        iterate(6.0)
    with warnings.catch_warnings(action="error"):
        iterate(7.0)
    assert not executor.eager_only


def test_a_function_whose_recordings_are_short_lived_runs_eagerly():
    executor, work = Executor(CPU), Work()

    def call(gain):
        work.gain = gain
        return executor.run("f", work, torch.ones(1)).item()

    executor.begin_iteration()
    assert [call(float(k)) for k in range(6)] == list(range(6))
    with pytest.warns(UserWarning, match=r"'f' cannot be recorded \(.*aten.mul.Tensor change.*test_executor.py"):
        assert call(6.0) == 6.0
    assert [call(float(k)) for k in range(6)] == list(range(6))
    assert executor.recordings["f"] == MAX_SHORT_LIVED


def test_a_stale_value_within_a_longer_period_is_counted_in_the_message():
    executor, work = Executor(CPU), Work()
    executor.period_length = 10

    def call():
        executor.begin_iteration()
        executor.run("f", work, torch.ones(1))

    for _ in range(35):
        call()
    work.gain = 3.0
    for _ in range(5):  # the fifth begins a period and is compared
        call()
    with pytest.warns(UserWarning, match="up to 9 calls since the last comparison"):
        call()


def test_changed_attributes_ask_for_a_comparison_at_once():
    executor, work = Executor(CPU), Work()
    executor.expect_user_code(False)
    executor.attributes = lambda: {("Work.gain", 0): work.gain}
    numbers_of_runs(executor, work, 20)
    work.gain = 7.0
    executor.notice_changes()
    assert numbers_of_runs(executor, work, 1) == [1]


def test_a_function_that_changes_an_attribute_runs_eagerly():
    executor, work = Executor(CPU), Work()
    executor.attributes = lambda: {("Work.ran", 0): work.ran}
    with pytest.warns(UserWarning, match=r"'f' cannot be recorded \(it changes Work.ran"):
        assert numbers_of_runs(executor, work, 9) == list(range(1, 10))


def test_what_a_comparison_replays_is_undone():
    total, noise = torch.zeros(2), torch.Generator().manual_seed(1)
    other = torch.Generator().manual_seed(1)
    executor, expected = Executor(CPU), torch.zeros(2)
    for _ in range(12):
        executor.begin_iteration()
        for _ in range(3):
            executor.run("add", lambda: total.add_(torch.rand(2, generator=noise)).clone())
            expected += torch.rand(2, generator=other)
    assert torch.equal(total, expected)
    assert torch.equal(noise.get_state(), other.get_state())


def test_what_a_function_wrote_is_put_back_if_recording_it_fails():
    total, calls = torch.zeros(2), []

    def fn(x):
        total.add_(x)
        drawn = torch.rand(1)
        calls.append(drawn)
        if len(calls) == 2:
            raise RuntimeError("no operator for this mode")
        return total + drawn

    executor = Executor(CPU)
    executor.expect_user_code(False)
    torch.manual_seed(3)
    executor.run("f", fn, torch.ones(2))
    with pytest.warns(UserWarning, match="no operator for this mode"):
        executor.run("f", fn, torch.ones(2))
    executor.run("f", fn, torch.ones(2))
    assert total.tolist() == [3, 3]
    torch.manual_seed(3)
    drawn = [torch.rand(1).item() for _ in range(3)]
    calls = [call.item() for call in calls]
    assert [calls[0], calls[2], calls[3]] == drawn
    assert calls[1] == calls[2]  # the failed recording and the call in its place


def test_rows_of_a_large_buffer_are_compared_without_a_copy_of_it(monkeypatch):
    monkeypatch.setattr("canter.execution.record.LARGE", 8)
    buffer, row = torch.zeros(5, 2), torch.zeros(1, dtype=torch.long)
    executor = Executor(CPU)
    work = Work()

    def insert(x):
        buffer.index_copy_(0, row, work(x))
        row.copy_((row + 1) % 5)

    for call in range(1, 30):
        executor.begin_iteration()
        work.gain = 2.0 if call < 10 else 3.0
        for _ in range(3):
            executor.run("insert", insert, torch.full((1, 2), float(call)))
        assert (buffer == work.gain * call).any(1).sum() == 3
    (recording,) = executor.graphs.values()
    assert recording.rows
    assert not any(tensor is buffer for tensor in recording.compared)
    assert executor.recordings["insert"] == 2


def test_a_graph_is_compared_as_recordings_are(executor):
    work, total = Work(), torch.zeros(1)

    def fn(x):
        total.add_(work(x))
        return total + 0

    assert [executor.run("f", fn, torch.ones(1)).item() for _ in range(6)] == [2, 4, 6, 8, 10, 12]


def test_a_function_is_recorded_anew_in_inference_mode():
    executor = Executor(torch.device("cpu"))

    def fn(x):
        return x + (1 if torch.is_inference_mode_enabled() else 2)

    for is_inference, expected in ((False, 2), (True, 1)) * 2:
        for _ in range(EAGER_CALLS + 2):
            with torch.inference_mode(is_inference):
                assert executor.run("fn", fn, torch.zeros(1)).item() == expected
    assert len(executor.graphs) == 2


def test_a_step_record_is_described_and_rebuilt():
    flags = torch.zeros(3).bool()
    record = StepRecord(None, None, torch.ones(3), flags, flags, None, None, ~flags, None)
    leaves = []
    describe(record, leaves)
    again = rebuild(record, iter(leaves))
    assert isinstance(again, StepRecord)
    assert torch.equal(again.done, record.done)


def numbers(values):
    """What `assert_close` compares: all but the names of classes."""
    return {name: value for name, value in values.items() if not isinstance(value, str)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlp", "lstm", "discrete", "dict"])
def test_compiled_recordings_learn_the_same_up_to_rounding(make_ppo, collect, snapshot, kind, monkeypatch):
    monkeypatch.setattr("canter.execution.record.PAYING_SECONDS", 0.0)
    results = []
    for execution in ("eager", "compile"):
        alg, env = make_ppo(
            kind,
            num_learning_epochs=2,
            num_mini_batches=2,
            execution=execution,
            seed=5,
            empirical_normalization=True,
            normalize_rewards=True,
            learning_rate=1e-4,
            schedule="fixed",
        )
        for iteration in range(6):
            collect(alg, env)
            rollout = {name: value.clone() for name, value in alg.rollout.data.items()}
            alg.update(iteration)
        compiled = {name for (name, *_), recording in alg.executor.graphs.items() if recording.run.__name__ == "run"}
        assert compiled >= (set() if execution == "eager" else {"act", "learn"})
        results.append((numbers(snapshot(alg)), rollout))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["mlp", "lstm", "gru", "discrete", "dict"])
@pytest.mark.parametrize("num_mini_batches", [1, 3])
def test_recorded_training_equals_eager_bit_for_bit(make_ppo, collect, snapshot, kind, num_mini_batches):
    results = []
    for execution in ("eager", "auto"):
        alg, env = make_ppo(
            kind,
            num_learning_epochs=2,
            num_mini_batches=num_mini_batches,
            execution=execution,
            seed=5,
            empirical_normalization=True,
            normalize_rewards=True,
            schedule="adaptive",
        )
        reports = []
        for iteration in range(6):
            collect(alg, env)
            reports.append(alg.update(iteration))
        results.append((numbers(snapshot(alg)), alg.generators["action"].get_state(), reports))
        recorded = {signature[0] for signature in alg.executor.graphs}
        assert recorded >= (set() if execution == "eager" else {"act", "learn"})
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["mlp", "gru"])
def test_recorded_steps_continue_from_a_state_loaded_in_mid_run(make_ppo, collect, snapshot, kind):
    results = []
    for execution in ("eager", "auto"):
        alg, env = make_ppo(kind, num_learning_epochs=2, num_mini_batches=2, execution=execution, seed=5)
        saved = None
        for iteration in range(8):
            collect(alg, env)
            alg.update(iteration)
            if iteration == 1:
                saved = copy.deepcopy(alg.state_dict())
            if iteration == 4:
                assert bool(alg.executor.graphs) == (execution == "auto")
                alg.load_state_dict(saved)
        results.append(numbers(snapshot(alg)))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
