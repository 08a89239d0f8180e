"""`canter train`: from a task's name to a trained policy, its curve and its film."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from canter.cli.errors import INTERRUPTED, UserError, user_errors
from canter.cli.options import TrainOptions, parse_train
from canter.cli.runs import BEST_NAME, limit_threads, new_run_directory, new_runner
from canter.runners import Runner
from canter.utils.files import atomic_write
from canter.utils.plots import plot_runs

EVALS_PER_RUN = 10
FILM_SECONDS = 25.0  # a machine that draws in software does not get to the end of a long episode


def main(args: Sequence[str]) -> int:
    """Train with every seed asked for."""
    if not args:
        raise UserError("say what to train on: canter train TASK; `canter tasks` lists what there is")
    with user_errors():
        options, config = parse_train(args)
    runs: list[Path] = []
    for seed in options.seeds or (options.settings.seed,):
        run, code = train_one(options, {**config, "seed": seed})
        if code:
            return code
        runs.append(run)
    if len(runs) > 1:
        together = runs[0].with_name(runs[0].name.rpartition("-seed")[0] + "-seeds.png")
        plot_runs(runs, together, labels=[options.task] * len(runs))
        print(f"  all seeds   {together}")
    return 0


def train_one(options: TrainOptions[Any, Any], config: dict[str, Any]) -> tuple[Path, int]:
    """One run; its directory and exit code."""
    path = new_run_directory(options.runs_dir, options.task, options.name, config["seed"])
    config["run"] = {
        "task": options.task,
        "num_envs": options.num_envs,
        "total_timesteps": options.total_timesteps,
        "final_episodes": options.final_episodes,
        "video": options.video,
        "threads": options.threads,
    }
    if options.components is not None:
        config["run"]["components"] = options.components
    if config["eval_interval"] == 0:
        config["eval_interval"] = None
    elif config["eval_interval"] is None:
        config["eval_interval"] = max(1, run_length(options, config) // EVALS_PER_RUN)
    return path, run_to_end(new_runner(config, path), path)


def run_length(options: TrainOptions[Any, Any], config: dict[str, Any]) -> int:
    """Length of the run in units of its intervals: iterations of rollouts, or environment steps."""
    if "num_steps_per_env" not in config:
        return config["max_timesteps"] or options.total_timesteps
    return config["max_iterations"] or -(-options.total_timesteps // (config["num_steps_per_env"] * options.num_envs))


def run_to_end(runner: Runner, path: Path) -> int:
    """Train what is left of a run, then evaluate it, draw its curve and film it."""
    info = runner.run_info
    limit_threads(runner, info.get("threads"))
    keep_best(runner, path)
    planned = runner.planned_iterations()
    if planned is not None:
        left = {"num_learning_iterations": max(0, planned - runner.iteration)}
    else:
        left = {"total_timesteps": max(0, info["total_timesteps"] - runner.tot_timesteps)}
    try:
        with Interrupts() as interrupts:
            runner.learn(**left)  # type: ignore[arg-type]
    except SystemExit:
        say_stopped(runner, path)
        raise
    if interrupts.count:
        say_stopped(runner, path)
        return INTERRUPTED
    show_results(runner, path)
    runner.close()
    return 0


class Interrupts:
    """Counts Ctrl-C while the runner finishes what it is doing; the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Interrupts:
        self.before = signal.signal(signal.SIGINT, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self.before)


def say_stopped(runner: Runner, path: Path) -> None:
    """How to go on after a signal."""
    print(f"stopped after {runner.tot_timesteps} steps, saved; continue with: canter resume {path}", file=sys.stderr)


def keep_best(runner: Runner, path: Path) -> None:
    """Keep the checkpoint of the best periodic evaluation."""
    record = path / "best.json"
    best = json.loads(record.read_text())["eval/mean_reward"] if record.is_file() else float("-inf")

    def keep(runner: Runner, stats: dict[str, float]) -> None:
        nonlocal best
        if stats.get("eval/mean_reward", float("-inf")) > best:
            best = stats["eval/mean_reward"]
            runner.save(path / BEST_NAME)
            write_json(record, {"eval/mean_reward": best, "step": runner.tot_timesteps})

    runner.add_callback("post_iteration", keep)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """A small file for people and scripts."""

    def write(file: BinaryIO) -> None:
        file.write((json.dumps(content, indent=2) + "\n").encode())

    atomic_write(path, write)


def show_results(runner: Runner, path: Path) -> None:
    """Evaluate, draw, film, and say where everything is."""
    info = runner.run_info
    print()
    if info.get("final_episodes"):
        result = runner.eval(info["final_episodes"])
        facts = {**result, "episodes": info["final_episodes"], "step": runner.tot_timesteps}
        write_json(path / "evaluation.json", facts)
        spread = f"{result['eval/mean_reward']:.1f} ± {result['eval/std_reward']:.1f}"
        say("return", f"{spread} over {info['final_episodes']} episodes without noise")
    say("run", path)
    say("checkpoint", path / "checkpoint_final.pt")
    try:
        say("curve", plot_runs([path], path / "curve.png", labels=[info["task"]]))
    except ValueError as error:
        say("curve", f"none: {error}")
    if info.get("video", True):
        say("video", film_run(path))
    say("look", f"canter play {path}")
    say("", f"canter eval {path}")
    say("", f"tensorboard --logdir {path}")


def say(name: str, text: object) -> None:
    """One row of the results."""
    print(f"  {name:<12}{text}", flush=True)


def film_run(path: Path) -> str:
    """The film's path, or why there is none.

    A process of its own draws it: graphics libraries that find no device have been seen to end theirs.
    """
    video = path / "video.mp4"
    command = [sys.executable, "-m", "canter.cli", "play", str(path), "--video", str(video)]
    limit = f"{FILM_SECONDS:g}"
    try:
        done = subprocess.run([*command, "--seconds", limit], capture_output=True, text=True, timeout=10 * FILM_SECONDS)
    except subprocess.TimeoutExpired:
        return "none: drawing it took too long"
    if done.returncode == 0 and video.is_file():
        return str(video)
    reason = (done.stderr.strip() or f"drawing ended with exit code {done.returncode}").splitlines()[-1]
    return f"none: {reason.removeprefix('canter: ')[:200]}"
