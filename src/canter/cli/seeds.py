"""`canter seeds`: train the same settings with several seeds, in parallel processes, and summarise them."""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from canter.cli import runs
from canter.cli.errors import UserError, user_errors
from canter.cli.flags import TaskName, at_least, parse
from canter.cli.live_table import LiveTable, make_table
from canter.cli.options import parse_train
from canter.cli.run_process import POLL_S, RunPool, TrainingRun
from canter.cli.train import print_row, write_json
from canter.utils.plots import plot_runs
from canter.utils.run_data import load_run
from canter.utils.runtime import StopSignal, usable_cores
from canter.utils.statistics import few_runs, iqm_estimate

HEAD = ["seed", "return", "±", "steps", "time"]


@dataclasses.dataclass(kw_only=True)
class SeedsOptions:
    """Train several seeds in parallel and summarise them.

    All flags of `canter train` are flags here too; --seed is the first seed.
    """

    task: TaskName
    """A Gymnasium id, canter/<name>, envpool/<id> or a registered name; `canter tasks` lists them."""
    seeds: int = 5  # Number of runs; their seeds are consecutive.
    jobs: int | None = None  # Runs at a time; by default the number of cores.


def seeds(args: Sequence[str]) -> int:
    """Run `canter seeds`."""
    if not args:
        raise UserError("name the task to train: canter seeds TASK --seeds 5")
    with user_errors():
        options, rest = parse(SeedsOptions, args, "canter seeds", return_unknown_args=True)
        at_least(1, seeds=options.seeds, jobs=options.jobs)
        train, _ = parse_train([options.task, *rest])
    if not train.final_episodes:
        raise UserError("the summary needs the evaluation at the end of each run; use --final-episodes 20")
    name, first = train.name or time.strftime("%Y%m%d-%H%M%S"), train.settings.seed
    trained: dict[int, TrainingRun] = {}
    for seed in range(first, first + options.seeds):
        path = runs.new_run_directory(train.runs_dir, options.task, name, seed)
        own = ["--name", name, "--seed", str(seed), "--runs-dir", str(train.runs_dir)]
        trained[seed] = TrainingRun(path, ["train", options.task, *rest, *own])
    jobs = min(options.jobs or usable_cores(), options.seeds)
    with StopSignal() as stop, RunPool(jobs, train.settings.device) as pool, LiveTable() as table:
        pool.add(*trained.values())
        running = dict(trained)
        while (pool.active or pool.waiting) and stop.requested is None:
            time.sleep(POLL_S)
            pool.poll()
            table.show(f"{options.task}: {options.seeds} seeds", HEAD, progress(trained, train.total_timesteps))
            for seed in [seed for seed, run in running.items() if run.exit_code is not None]:
                run = running.pop(seed)
                end = "done" if run.exit_code == 0 else run.error()
                table.message(f"seed {seed}: {end} after {run.seconds:.0f} s")
    if stop.requested is not None:
        print("stopped; the runs are saved: canter resume RUN continues one")
        return 128 + stop.requested
    return summarise(options.task, trained)


def progress(trained: dict[int, TrainingRun], total: int) -> list[list[str]]:
    """A row for each seed: the newest return, and how far its run is."""
    rows: list[list[str]] = []
    for seed, run in trained.items():
        found = run.values("eval/mean_reward") or run.values("episode/mean_reward")
        newest = f"{found[-1][1]:.1f}" if found else ""
        rows.append([str(seed), newest, "", f"{min(1.0, run.step / total):.0%}", f"{run.seconds:.0f} s"])
    return rows


def summarise(task: str, trained: dict[int, TrainingRun]) -> int:
    """Print the returns with their interquartile mean; returns the exit code of a run that failed, or 0."""
    from rich import print as rich_print

    done = {seed: load_run(run.path) for seed, run in trained.items() if run.exit_code == 0}
    failed = [run for run in trained.values() if run.exit_code]
    if done:
        rows = [
            [
                str(seed),
                f"{run.evaluation['eval/mean_reward']:.1f}",
                f"{run.evaluation['eval/std_reward']:.1f}",
                f"{run.steps[-1]:,}",
                f"{trained[seed].seconds:.0f} s",
            ]
            for seed, run in done.items()
        ]
        rich_print(make_table(f"{task}: return without noise", HEAD, rows))
        scores = np.array([run.evaluation["eval/mean_reward"] for run in done.values()])
        estimate = iqm_estimate([scores])
        print_row("mean", f"{scores.mean():.1f} ± {scores.std():.1f} over {len(scores)} seeds")
        print_row(
            "IQM",
            f"{estimate.value:.1f}, 95% interval {estimate.low:.1f} to {estimate.high:.1f}{few_runs(len(scores))}",
        )
        first = next(iter(trained.values())).path
        stem = first.with_name(first.name.rpartition("-seed")[0] + "-summary")
        by_seed = {str(seed): float(score) for seed, score in zip(done, scores, strict=True)}
        write_json(stem.with_name(f"{stem.name}.json"), {"task": task, "returns": by_seed, "iqm": list(estimate)})
        paths = [trained[seed].path for seed in done]
        print_row("curves", plot_runs(paths, stem.with_name(f"{stem.name}.png"), labels=[task] * len(paths)))
        print_row("next", f"canter report {' '.join(map(str, paths))}")
    for run in failed:
        print_row("failed", f"{run.path}: {run.error()}; see {run.log}")
    return (failed[0].exit_code or 0) if failed else 0
