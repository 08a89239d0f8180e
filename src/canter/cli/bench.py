"""`canter bench`: the speed of canter on this machine."""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Column, Table

from canter import bench as benchmark
from canter.bench import Point, Timing, Workload, with_envs, with_width
from canter.cli.errors import UserError, user_errors
from canter.cli.flags import at_least, given, parse
from canter.cli.runs import open_runner
from canter.presets import find_preset
from canter.runners import Runner, StopTraining
from canter.utils.config import unknown_name
from canter.utils.runtime import resolve_device, usable_cores

GPU_ENVS, CPU_ENVS = 4096, 256
TIMINGS = ("collect ms", "learn ms", "total ms", "steps/s", "ready s")


@dataclasses.dataclass
class IterationOptions:
    """Time of one PPO iteration with an environment that costs nothing."""

    work: Annotated[Workload, tyro.conf.arg(name="")]
    executions: tuple[Literal["auto", "eager", "graph", "compile"], ...]  # Execution modes to measure, one row each.
    precision: Literal["tf32", "fp32", "bf16"] = "tf32"  # Precision of matrix products; tf32 is float32 on a CPU.
    device: str | None = None  # Device to measure; None takes a GPU if there is one.
    warm_up: int = 8  # Iterations before the measurement.
    iterations: int = 10  # Measured iterations; their median is shown.


@dataclasses.dataclass
class ScalingOptions:
    """Time and memory of one PPO iteration against the number of environments, the width of the networks and ranks."""

    iteration: Annotated[IterationOptions, tyro.conf.arg(name="")]
    num_envs_list: tuple[int, ...] = (64, 256, 1024, 4096, 16384, 65536, 131072)  # Numbers of environments to measure.
    widths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)
    """Widths of the first hidden layer to measure; the next two are a half and a quarter as wide."""
    ranks: tuple[int, ...] = ()  # Numbers of ranks to measure, each with the same workload; by default as many as fit.
    max_seconds: float = 60.0  # A size whose measurement would take longer is left out.


@dataclasses.dataclass
class CpuOptions:
    """Steps per second of training on CPU environments, with the task's preset."""

    task: str = "CartPole-v1"  # A Gymnasium id, canter/<name>, envpool/<id> or a registered name.
    num_envs: int | None = None  # Environments stepped together; the preset's by default.
    threads: tuple[int, ...] = tuple(sorted({1, min(2, usable_cores())}))
    """Numbers of torch threads to measure, one row each."""
    seconds: float = 5.0  # Length of each measurement.


def bench(args: Sequence[str]) -> int:
    """Run `canter bench`."""
    if {"-h", "--help"} & set(args[:1]):
        print("canter bench iteration|cpu|scaling [flags]; the default is iteration\n")
        print("\n".join(f"  {name:<12}{options_type.__doc__}" for name, (options_type, _) in BENCHMARKS.items()))
        print("\nEach lists its flags: canter bench iteration --help")
        return 0
    name, *rest = args if args and not args[0].startswith("-") else ("iteration", *args)
    if name not in BENCHMARKS:
        raise UserError(unknown_name("benchmark", name, BENCHMARKS, "canter bench"))
    with user_errors():
        options_type, show = BENCHMARKS[name]
        iteration = IterationOptions(*machine_defaults(given(rest, "--device")))
        ranks = rank_numbers(given(rest, "--device"))
        defaults = {"iteration": iteration, "scaling": ScalingOptions(iteration, ranks=ranks)}
        options = parse(options_type, rest, f"canter bench {name}", defaults.get(name))
        iteration = getattr(options, "iteration", options)
        at_least(1, **vars(options) | vars(iteration) | vars(getattr(iteration, "work", iteration)))
        show(options)
    return 0


def machine_defaults(device: str | None) -> tuple[Workload, tuple[Any, ...]]:
    """A workload that takes a device seconds, and the execution modes that it has."""
    is_gpu = resolve_device(device).type == "cuda"
    return Workload(num_envs=GPU_ENVS if is_gpu else CPU_ENVS), ("eager", "graph", "auto") if is_gpu else ("eager",)


def rank_numbers(device: str | None) -> tuple[int, ...]:
    """1, 2 and 4 ranks, where there are as many GPUs or CPU cores; none if there is only one."""
    is_gpu = resolve_device(device).type == "cuda"
    devices = torch.cuda.device_count() if is_gpu else usable_cores()
    fitting = tuple(number for number in (1, 2, 4) if number <= devices)
    return fitting if len(fitting) > 1 else ()


def show_iteration(options: IterationOptions) -> None:
    """Print a table with one row for each execution mode."""
    device, work = resolve_device(options.device), options.work
    table = new_table(f"One PPO iteration, {describe(work, device)}", "execution", *TIMINGS)
    for execution in options.executions:
        runner = benchmark.null_runner(benchmark.NullEnv(work, device), work, execution, options.precision)
        add_timing(table, execution, benchmark.time_iterations(runner, options.warm_up, options.iterations))
    Console().print(table)


def show_scaling(options: ScalingOptions) -> None:
    """Print a table for the number of environments and one for the width, for each execution mode."""
    how = vars(options.iteration).copy()
    work, device = how.pop("work"), resolve_device(how.pop("device"))
    executions = how.pop("executions")
    axes = (("environments", options.num_envs_list, with_envs), ("width", options.widths, with_width))
    for execution, (name, sizes, change) in itertools.product(executions, axes):
        if sizes:
            how |= {"execution": execution, "device": str(device)}
            points = benchmark.measure_sizes(work, sizes, change, options.max_seconds, **how)
            show_points(f"{execution}, {describe(work, device)}", name, points)
    for execution in executions if options.ranks else ():
        timings = benchmark.measure_ranks(work, options.ranks, **how | {"execution": execution, "device": str(device)})
        show_ranks(f"{execution}, each rank {describe(work, device)}", timings)


def show_points(title: str, name: str, points: Iterable[Point]) -> None:
    """Print a table with one row for each size, the fitted growth and the sizes left out."""
    table, notes = new_table(title, name, *TIMINGS, "GiB"), []
    growth: dict[str, list[tuple[float, float]]] = {"time": [], "memory": []}
    for size, timing, left_out in points:
        if timing is None:
            notes.append(f"  {name} {size} left out: {left_out}")
            continue
        add_timing(table, str(size), timing, f"{timing.memory:.2f}")
        growth["time"].append((size, timing.iteration))
        growth["memory"].append((size, timing.memory))
    powers = {quantity: benchmark.slope(values) for quantity, values in growth.items()}
    fits = [f"{quantity} ~ {name}^{power:.2f}" for quantity, power in powers.items() if not math.isnan(power)]
    notes = [f"  fitted to the larger half: {', '.join(fits)}", *notes] if fits else notes
    Console().print(table, *notes, sep="\n")


def show_ranks(title: str, timings: Iterable[tuple[int, Timing]]) -> None:
    """Print a table with one row for each number of ranks; the efficiency is relative to the smallest number."""
    table, first = new_table(title, "ranks", *TIMINGS, "efficiency", "in collectives"), 0.0
    for size, timing in timings:
        first = first or timing.rate / size
        shares = (timing.rate / size / first, timing.collectives / timing.iteration)
        add_timing(table, str(size), timing, *(f"{100 * share:.0f} %" for share in shares))
    Console().print(table)


def show_cpu(options: CpuOptions) -> None:
    """Print a table with one row for each number of threads."""
    before, title = torch.get_num_threads(), f"Training on {options.task}, {usable_cores()} CPU cores"
    table = new_table(title, "threads", "environments", "steps/s", "iterations")
    preset = find_preset(options.task)
    run = {"task": options.task, "num_envs": options.num_envs or preset["num_envs"]}
    config = {**preset, "seed": 1, "device": "cpu", "log_interval": 0, "run": run}
    try:
        for threads in options.threads:
            torch.set_num_threads(threads)
            runner = open_runner(config, show_progress=False)
            rate, iterations = training_rate(runner, options.seconds)
            runner.close()
            table.add_row(str(threads), str(runner.env.num_envs), f"{rate:,.0f}", str(iterations))
    finally:
        torch.set_num_threads(before)
    Console().print(table)


def training_rate(runner: Runner, seconds: float) -> tuple[float, int]:
    """Steps per second over whole iterations after the first, and the number of iterations."""
    ends: list[float] = []

    def stamp(runner: Runner, stats: dict[str, float]) -> None:
        ends.append(time.perf_counter())
        if len(ends) > 1 and ends[-1] - ends[0] >= seconds:
            raise StopTraining

    runner.add_callback("post_iteration", stamp)
    runner.learn(10**9)
    return (len(ends) - 1) * runner.steps_per_iteration() / (ends[-1] - ends[0]), len(ends) - 1


def new_table(title: str, name: str, *numbers: str) -> Table:
    """An empty table whose first column names the rows."""
    columns = [Column(name, no_wrap=True), *(Column(number, justify="right", no_wrap=True) for number in numbers)]
    return Table(*columns, title=title)


def add_timing(table: Table, name: str, timing: Timing, *more: str) -> None:
    """Add one timing to a table."""
    times = (f"{value:.2f}" for value in (timing.collect, timing.learn, timing.iteration))
    table.add_row(name, *times, f"{timing.rate:,.0f}", f"{timing.ready:.1f}", *more)


def describe(work: Workload, device: torch.device) -> str:
    """The workload and the device in a few words."""
    memory = "" if work.rnn_type is None else f"{work.rnn_type.upper()} {work.rnn_hidden_size}, "
    layers = "-".join(map(str, work.hidden_dims))
    cores = f"{usable_cores()} CPU cores, torch threads: {torch.get_num_threads()}"
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else cores
    return f"{work.num_envs} x {work.num_steps_per_env} steps, {memory}MLP {layers}, {machine}"


BENCHMARKS: dict[str, tuple[type, Callable[[Any], None]]] = {
    "iteration": (IterationOptions, show_iteration),
    "cpu": (CpuOptions, show_cpu),
    "scaling": (ScalingOptions, show_scaling),
}
