"""The executor without a GPU: signatures, replays, fallbacks. CUDA graphs are tested in tests/gpu."""

import copy
import re

import pytest
import torch

from canter.algorithms import PPO
from canter.envs.vec_env import StepRecord
from canter.execution import executor as executor_module
from canter.execution.cuda_graph import describe, rebuild
from canter.execution.executor import WARM_UP_CALLS, Executor
from canter.modules import ActorCritic
from canter.storage.trajectories import Trajectories

CPU = torch.device("cpu")
EAGER_CALLS = WARM_UP_CALLS + 2  # two are traced; then there is a graph


class FakeGraph:
    """Stand-in for a CUDA graph: fixed input and output tensors; a replay runs the function again."""

    def __init__(self, fn, args, leaves, generators, owned):
        self.fn, self.args = fn, args
        self.inputs = [leaf if leaf.data_ptr() in owned else leaf.clone() for leaf in leaves]
        self.outputs = fn(*rebuild(args, iter(self.inputs)))
        self.output_leaves = []
        self.description = describe(self.outputs, self.output_leaves)

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
    made = Executor(CPU, "graph")
    made.uses_graphs, made.records = True, False
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
    assert not executor.graphs
    assert total == 12.0  # 2 * (0 + 1 + 2 + 3): every call counted once


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
    with pytest.warns(
        UserWarning, match=r"'grow' cannot be captured .*shapes or settings changed more than 32 times"
    ) as caught:
        totals = [executor.run("grow", lambda x: x.sum(), torch.ones(n)).item() for n in sizes]
    assert totals == sizes
    assert len(caught) == 1
    assert "grow" in executor.eager_only


def test_a_function_that_cannot_be_captured_warns_once_and_runs_eagerly(executor, monkeypatch):
    def refuse():
        raise RuntimeError("operation not permitted when stream is capturing")

    def broken(*args):
        refuse()

    monkeypatch.setattr(executor_module, "Graph", broken)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    line = f"{__file__}:{refuse.__code__.co_firstlineno + 1}"
    with pytest.warns(UserWarning, match=rf"not permitted when stream is capturing at {re.escape(line)}\)") as caught:
        results = [executor.run("f", lambda x: x + 1, torch.zeros(2)).tolist() for _ in range(6)]
    assert results == [[1, 1]] * 6
    assert len(caught) == 1


def test_a_function_that_writes_to_an_argument_is_not_captured(executor):
    """A graph would write to its copy of the argument."""
    given = [torch.ones(2) for _ in range(EAGER_CALLS + 3)]
    with pytest.warns(UserWarning, match=rf"it writes to an argument: aten.mul_.Tensor at {re.escape(__file__)}:\d+"):
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


def test_a_changed_weight_or_choice_needs_another_graph_and_a_new_storage_drops_all(make_ppo, collect, executor):
    alg, env = make_ppo("mlp", num_steps=2, num_mini_batches=1)
    executor.eager_only = dict.fromkeys(("act", "process", "returns"), "")
    alg.executor = executor

    def learn_graphs():
        for _ in range(EAGER_CALLS + 1):
            collect(alg, env)
            alg.update(0)
        return sum(signature[0] == "learn" for signature in executor.graphs)

    assert learn_graphs() == 1
    assert learn_graphs() == 1
    alg.loss_weights["value_loss"] = 0.25
    assert learn_graphs() == 2
    alg.max_grad_norm = 7.0  # a graph reads the current value of a float setting
    assert learn_graphs() == 2
    alg.use_clipped_value_loss = False
    assert learn_graphs() == 3
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
    monkeypatch.setattr("canter.execution.recording.COMPILE_AFTER", 0)
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
        assert compiled == (set() if execution == "eager" else {"act", "process", "learn", "returns"})
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
        assert recorded == (set() if execution == "eager" else {"act", "process", "learn", "returns"})
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
