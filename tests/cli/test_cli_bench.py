"""`canter bench`: its tables, defaults and errors."""

import pytest
import torch

from canter.bench import Timing
from canter.cli import bench
from canter.cli.__main__ import main
from canter.cli.errors import USAGE

SMALL = ["--num-envs", "4", "--num-steps-per-env", "3", "--hidden-dims", "8", "--warm-up", "1", "--iterations", "1"]


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def numbers(out, first):
    """The cells of the row that begins with a word."""
    row = next(line for line in out.splitlines() if line.replace("│", " ").split()[:1] == [first])
    return [cell.replace(",", "") for cell in row.replace("│", " ").split()[1:]]


@pytest.mark.parametrize("command", [[], ["iteration"]])
def test_an_iteration_is_timed_and_shown(command, capsys):
    assert main(["bench", *command, *SMALL]) == 0
    out = capsys.readouterr().out
    assert "4 x 3 steps, MLP 8" in out
    collect, learn, total, rate, _ = map(float, numbers(out, "eager"))
    assert total == pytest.approx(collect + learn, abs=0.02)
    assert rate == pytest.approx(12 / total * 1e3, rel=0.05)


def test_each_execution_is_a_row(capsys, monkeypatch):
    monkeypatch.setattr("canter.bench.time_iterations", lambda runner, *counts: Timing(1.0, len(counts), 0.5, 12))
    assert main(["bench", "iteration", *SMALL, "--executions", "eager", "graph"]) == 0
    out = capsys.readouterr().out
    assert numbers(out, "eager") == numbers(out, "graph") == ["1.00", "2.00", "3.00", "4000", "0.5"]


def test_the_default_workload_depends_on_the_device(monkeypatch):
    work, executions = bench.machine_defaults("cpu")
    assert (work.num_envs, executions) == (256, ("eager",))
    monkeypatch.setattr(bench, "resolve_device", lambda device: torch.device("cuda"))
    work, executions = bench.machine_defaults(None)
    assert (work.num_envs, executions) == (4096, ("eager", "graph", "auto"))


def test_training_on_a_cpu_environment_is_timed_with_each_number_of_threads(capsys):
    before = torch.get_num_threads()
    assert main(["bench", "cpu", "--seconds", "0.05", "--threads", "1", "--num-envs", "2"]) == 0
    assert torch.get_num_threads() == before
    out = capsys.readouterr().out
    assert "CartPole-v1" in out
    envs, rate, iterations = map(float, numbers(out, "1"))
    assert envs == 2
    assert rate > 0
    assert iterations >= 1


def test_the_rate_is_of_whole_iterations_after_the_first(monkeypatch):
    class Training:
        def add_callback(self, event, fn):
            self.stamp = fn

        def learn(self, iterations):
            for _ in range(iterations):
                try:
                    self.stamp(self, {})
                except bench.StopTraining:
                    return

        def steps_per_iteration(self):
            return 100

    clock = iter([7.0, 8.0, 9.0, 11.0])  # the first stamp ends the warm-up
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    assert bench.training_rate(Training(), seconds=3.5) == (75.0, 3)


def test_scaling_shows_every_size_and_the_growth(capsys, monkeypatch):
    def measured(fn, work, **options):
        milliseconds = work.num_envs * work.hidden_dims[0] ** 2 / 64.0
        return Timing(0.0, milliseconds, 0.0, work.num_envs, memory=float(work.num_envs))

    def on_ranks(size, fn, work, **options):  # twice the steps in 1.25 times the time, a tenth of it in collectives
        return Timing(0.0, 4.0 + size, 0.0, 100 * size, collectives=0.1 * (4.0 + size))

    monkeypatch.setattr("canter.bench.in_new_process", measured)
    monkeypatch.setattr("canter.bench.in_ranks", on_ranks)
    sizes = ["--num-envs-list", "4", "8", "100000", "--widths", "16", "32", "--ranks", "1", "2"]
    assert main(["bench", "scaling", *SMALL, *sizes, "--max-seconds", "10"]) == 0
    out = capsys.readouterr().out
    assert numbers(out, "8")[1] == "8.00"
    assert "time ~ environments^1.00, memory ~ environments^1.00" in out
    assert "environments 100000 left out: would take about 200 s" in out
    assert "time ~ width^2.00, memory ~ width^0.00" in out
    assert numbers(out, "1")[-4:] == ["100", "%", "10", "%"]
    assert numbers(out, "2")[2:4] == ["6.00", "33333"]
    assert numbers(out, "2")[-4:] == ["83", "%", "10", "%"]


def test_help_names_the_three_benchmarks(capsys):
    assert main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in ("iteration", "cpu", "scaling"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["iterations"], "'iteration'"),
        (["iteration", "--device", "tpu"], "tpu"),
        (["cpu", "--task", "CartPole-v9"], "CartPole"),
        ([*SMALL, "--num-mini-batches", "99"], "num_mini_batches"),
        (["cpu", "--num-envs", "0"], "--num-envs"),
        (["cpu", "--threads", "0"], "--threads"),
        ([*SMALL, "--iterations", "0"], "--iterations"),
        ([*SMALL, "--num-obs", "-1"], "--num-obs"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(args, message, capsys):
    assert main(["bench", *args]) == USAGE
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error
