"""`canter bench`: how fast canter is on this machine."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

from canter.bench.iteration import NullEnv, Timing, Workload, null_runner, time_iterations
from canter.bench.scaling import Point, measure_sizes, slope, with_envs, with_width
from canter.cli.errors import UserError, user_errors
from canter.cli.options import PRESET_KEYS, given, parse, preset_for
from canter.cli.runs import open_runner
from canter.runners import Runner, StopTraining
from canter.utils.runtime import resolve_device, usable_cores

Execution = Literal["auto", "eager", "graph", "compile"]
GPU_ENVS, CPU_ENVS = 4096, 256
NUMBER = {"justify": "right", "no_wrap": True}


@dataclasses.dataclass
class IterationOptions:
    """Time of one PPO iteration with an environment that costs nothing."""

    work: Annotated[Workload, tyro.conf.arg(name="")]
    executions: tuple[Execution, ...]
    """How hot functions run; one row each."""
    precision: Literal["tf32", "fp32", "bf16"] = "tf32"
    """Of matrix products on a GPU."""
    device: str | None = None
    """Where; None takes a GPU if there is one."""
    warm_up: int = 8
    """Iterations before the clock starts."""
    iterations: int = 10
    """Iterations whose median is shown."""


@dataclasses.dataclass
class ScalingOptions(IterationOptions):
    """Time and memory of one PPO iteration against the number of environments and the width of the networks."""

    num_envs_list: tuple[int, ...] = (64, 256, 1024, 4096, 16384, 65536, 131072)
    """Numbers of environments to measure."""
    widths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)
    """Widths of the first hidden layer to measure; the next two are a half and a quarter as wide."""
    max_seconds: float = 60.0
    """A size whose measurement would take longer is left out."""


@dataclasses.dataclass
class CpuOptions:
    """Steps per second of training on CPU environments, with the task's preset."""

    task: str = "CartPole-v1"
    """A Gymnasium id, canter/<name> or envpool/<id>."""
    num_envs: int | None = None
    """Environments stepped together; the preset's by default."""
    threads: tuple[int, ...] = tuple(sorted({1, min(2, usable_cores())}))
    """Threads of torch to try; one row each."""
    seconds: float = 5.0
    """Length of each measurement."""


def main(args: Sequence[str]) -> int:
    """Measure, and print a table."""
    what, rest = (args[0], args[1:]) if args and args[0] in MEASURES else ("iteration", args)
    if {"-h", "--help"} & set(args[:1]):
        print("canter bench iteration|cpu|scaling [flags]; the default is iteration\n")
        print("\n".join(f"  {name:<12}{made.__doc__}" for name, (made, _) in MEASURES.items()))
        return 0
    if args and not args[0].startswith("-") and args[0] not in MEASURES:
        raise UserError(f"canter bench has no {args[0]!r}; there are {', '.join(MEASURES)}")
    made, show = MEASURES[what]
    default = CpuOptions() if made is CpuOptions else made(*machine_defaults(given(rest, "--device")))
    options = parse(made, rest, f"canter bench {what}", default)
    check_positive(options)
    with user_errors():
        show(options)
    return 0


def check_positive(options: Any) -> None:
    """Refuse sizes and counts below 1."""
    given = vars(options) | vars(getattr(options, "work", options))
    for name, value in given.items():
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and number < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {number}")


def machine_defaults(device: str | None) -> tuple[Workload, tuple[str, ...]]:
    """Work that a device does in seconds, and the ways to run it there."""
    with user_errors():
        is_gpu = resolve_device(device).type == "cuda"
    return Workload(num_envs=GPU_ENVS if is_gpu else CPU_ENVS), ("eager", "graph", "auto") if is_gpu else ("eager",)


def show_iteration(options: IterationOptions) -> None:
    """One row for each way to run it."""
    device = resolve_device(options.device)
    table = new_table(f"One PPO iteration, {describe(options.work)}, {machine(device)}", "execution")
    for execution in options.executions:
        env = NullEnv(options.work, device)
        runner = null_runner(env, options.work, execution, options.precision)
        add_row(table, execution, time_iterations(runner, options.warm_up, options.iterations))
    Console().print(table)


def show_scaling(options: ScalingOptions) -> None:
    """A table for the number of environments and one for the width, for each way to run it."""
    device = resolve_device(options.device)
    axes: tuple[tuple[str, Iterable[int], Callable[[Workload, int], Workload]], ...] = (
        ("environments", options.num_envs_list, with_envs),
        ("width", options.widths, with_width),
    )
    for execution in options.executions:
        how = {"device": str(device), "execution": execution, "precision": options.precision}
        how |= {"warm_up": options.warm_up, "iterations": options.iterations}
        for name, sizes, change in axes:
            if sizes:
                points = list(measure_sizes(options.work, sizes, change, options.max_seconds, **how))
                show_points(f"{execution}, {describe(options.work)}, {machine(device)}", name, points)


def show_points(title: str, name: str, points: Sequence[Point]) -> None:
    """One row for each size, and the fitted growth."""
    table = new_table(title, name, "GiB")
    known = [(point.size, point.timing) for point in points if point.timing is not None]
    for size, timing in known:
        add_row(table, str(size), timing, f"{timing.memory:.2f}")
    console = Console()
    console.print(table)
    growth = {
        "time": slope([(size, timing.iteration) for size, timing in known]),
        "memory": slope([(size, timing.memory) for size, timing in known]),
    }
    fits = [f"{what} ~ {name}^{power:.2f}" for what, power in growth.items() if not math.isnan(power)]
    if fits:
        console.print(f"  the larger half of these: {', '.join(fits)}")
    for size, _, left_out in points:
        if left_out:
            console.print(f"  {name} {size} left out: {left_out}")


def show_cpu(options: CpuOptions) -> None:
    """One row for each number of threads."""
    before = torch.get_num_threads()
    table = Table(title=f"Training on {options.task}, {usable_cores()} CPU cores")
    for name in ("threads", "environments", "steps/s", "iterations"):
        table.add_column(name, **NUMBER)  # pyright: ignore[reportArgumentType]
    try:
        for threads in options.threads:
            torch.set_num_threads(threads)
            runner = preset_runner(options.task, options.num_envs)
            rate, iterations = training_rate(runner, options.seconds)
            runner.close()
            table.add_row(str(threads), str(runner.env.num_envs), f"{rate:,.0f}", str(iterations))
    finally:
        torch.set_num_threads(before)
    Console().print(table)


def preset_runner(task: str, num_envs: int | None) -> Any:
    """A task with its preset on the CPU, that writes nothing."""
    preset = preset_for(task)
    config = {name: value for name, value in preset.items() if name not in PRESET_KEYS}
    run = {"task": task, "num_envs": num_envs or preset["num_envs"]}
    return open_runner({**config, "seed": 1, "device": "cpu", "log_interval": 0, "run": run}, show_progress=False)


def training_rate(runner: Runner, seconds: float) -> tuple[float, int]:
    """Steps per second over whole iterations, and how many those were; the first is for warming up."""
    ends: list[float] = []

    def stamp(runner: Runner, stats: dict[str, float]) -> None:
        ends.append(time.perf_counter())
        if len(ends) > 1 and ends[-1] - ends[0] >= seconds:
            raise StopTraining

    runner.add_callback("post_iteration", stamp)
    runner.learn(10**9)
    return (len(ends) - 1) * runner.steps_per_iteration() / (ends[-1] - ends[0]), len(ends) - 1


def new_table(title: str, first: str, *more: str) -> Table:
    """A table of timings."""
    table = Table(title=title)
    table.add_column(first, no_wrap=True)
    for name in ("collect ms", "learn ms", "total ms", "steps/s", "ready s", *more):
        table.add_column(name, **NUMBER)  # pyright: ignore[reportArgumentType]
    return table


def add_row(table: Table, name: str, timing: Timing, *more: str) -> None:
    """One timing."""
    times = (f"{value:.2f}" for value in (timing.collect, timing.learn, timing.iteration))
    table.add_row(name, *times, f"{timing.rate:,.0f}", f"{timing.ready:.1f}", *more)


def describe(work: Workload) -> str:
    """The work in a few words."""
    memory = "" if work.rnn_type is None else f"{work.rnn_type.upper()} {work.rnn_hidden_size}, "
    layers = "-".join(map(str, work.hidden_dims))
    return f"{work.num_envs} x {work.num_steps_per_env} steps, {memory}MLP {layers}"


def machine(device: torch.device) -> str:
    """The device in a few words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{usable_cores()} CPU cores, torch threads: {torch.get_num_threads()}"


MEASURES: dict[str, tuple[type, Callable[[Any], None]]] = {
    "iteration": (IterationOptions, show_iteration),
    "cpu": (CpuOptions, show_cpu),
    "scaling": (ScalingOptions, show_scaling),
}
