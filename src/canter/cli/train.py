"""`canter train` and `canter resume`: from a task to a trained policy, its learning curve and its video."""

import json
import math
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from canter.cli import runs
from canter.cli.errors import UserError, user_errors
from canter.cli.options import TrainOptions, parse_train
from canter.runners import Runner, check_policy
from canter.utils.checkpoint import load_checkpoint
from canter.utils.files import atomic_write
from canter.utils.plots import plot_runs
from canter.utils.runtime import StopSignal

EVALS_PER_RUN = 10
VIDEO_SECONDS = 25.0  # a machine that renders in software does not reach the end of a long episode


def train(args: Sequence[str]) -> int:
    """Run `canter train`: one run for every seed."""
    if not args:
        raise UserError("name the task to train: canter train TASK; `canter tasks` lists the known ones")
    with user_errors():
        options, config = parse_train(args)
    paths: list[Path] = []
    for seed in options.seeds or (options.settings.seed,):
        path = runs.new_run_directory(options.runs_dir, options.task, options.name, seed)
        code = run_to_end(runs.new_runner(run_config(options, {**config, "seed": seed}), path), path)
        if code:
            return code
        paths.append(path)
    if len(paths) > 1:
        together = paths[0].with_name(paths[0].name.rpartition("-seed")[0] + "-seeds.png")
        print_row("all seeds", plot_runs(paths, together, labels=[options.task] * len(paths)))
    return 0


def check(args: Sequence[str]) -> int:
    """Run `canter check-policy`: a few iterations of a run that writes nothing, with the flags of `canter train`."""
    if not args:
        raise UserError("name the task: canter check-policy TASK, with the flags of `canter train`")
    with user_errors():
        options, config = parse_train(args)
    config = run_config(options, {**config, "eval_interval": None, "offline_data": None} | {"seed": 1})
    runner = runs.open_runner(config, show_progress=False)
    with user_errors():
        report = check_policy(runner)
    print(report)
    return 0


def run_section(options: Any, task: str, num_envs: int) -> dict[str, Any]:
    """The section of a new run's config.yaml about the run itself."""
    names = ("total_timesteps", "final_episodes", "video", "threads")
    names += ("workers", "worker_timeout", "restart_workers") if options.workers else ()
    return {"task": task, "num_envs": num_envs} | {name: getattr(options, name) for name in names}


def run_config(options: TrainOptions[Any, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The content of a new run's config.yaml."""
    config["run"] = run_section(options, options.task, options.num_envs)
    if options.components is not None:
        config["run"]["components"] = options.components
    if config["eval_interval"] is None:
        length = config.get("max_timesteps") or options.total_timesteps  # intervals are steps, else iterations
        if "num_steps_per_env" in config:
            length = config["max_iterations"] or -(-length // (config["num_steps_per_env"] * options.num_envs))
        config["eval_interval"] = max(1, length // EVALS_PER_RUN)
    config["eval_interval"] = config["eval_interval"] or None
    return config


def resume(
    run: tyro.conf.Positional[Path],
    total_timesteps: int | None = None,
    checkpoint: str | None = None,
    device: str | None = None,
) -> int:
    """Continue a run from its newest valid checkpoint, with the settings it was started with.

    A run that ended before its first checkpoint begins again.

    Args:
        run: The run directory.
        total_timesteps: Environment steps to add; the rest of the run's own length by default.
        checkpoint: Another checkpoint to continue from: a file, or "best".
        device: Device to use instead of the one the run was started on.
    """
    saved = runs.read_run(run)
    is_unsaved = checkpoint is None and runs.is_unsaved(saved.path)
    path = None if is_unsaved else runs.find_checkpoint(saved.path, checkpoint)
    config: dict[str, Any] = {**saved.config, "run": dict(saved.config["run"])}
    if device is not None:
        config["device"] = device
    if total_timesteps is not None:
        done = 0 if path is None else int(load_checkpoint(path, "cpu").get("total_timesteps", 0))
        config["run"]["total_timesteps"] = done + total_timesteps
        config |= {name: None for name in ("max_iterations", "max_timesteps") if name in config}
    runner = runs.open_runner(config, saved.path, eval_episodes=config["eval_episodes"])
    if path is None:
        runner.resumed_at = 0  # the log of what was lost is dropped
        print(f"{saved.path} ended before its first checkpoint: it begins again")
    else:
        with user_errors():
            runner.load(path)
        print(f"continuing {saved.path} from {path.name} at step {runner.tot_timesteps}")
    return run_to_end(runner, saved.path)


def run_to_end(runner: Runner, path: Path) -> int:
    """Train the rest of a run, then evaluate it, plot its curve and record a video; returns the exit code."""
    runs.limit_threads(runner, runner.run_info.get("threads"))
    keep_best(runner, path)
    planned, steps = runner.planned_iterations(), runner.run_info["total_timesteps"] - runner.tot_timesteps
    iterations = None if planned is None else max(0, planned - runner.iteration)
    with StopSignal() as stop:
        try:
            runner.learn(num_learning_iterations=iterations, total_timesteps=max(0, steps))
        except SystemExit:
            if stop.requested is None:
                raise
    if stop.requested is not None:
        text = f"stopped after {runner.tot_timesteps} steps, saved; continue with: canter resume {path}"
        print(text, file=sys.stderr)
        return 128 + stop.requested
    show_results(runner, path)
    runner.close()
    return 0


def keep_best(runner: Runner, path: Path) -> None:
    """Keep the checkpoint of the best periodic evaluation."""
    record = path / "best.json"
    best = json.loads(record.read_text())["eval/mean_reward"] if record.is_file() else -math.inf

    def keep(runner: Runner, stats: dict[str, float]) -> None:
        nonlocal best
        if stats.get("eval/mean_reward", -math.inf) > best:
            try:
                runner.save(path / runs.BEST_NAME)
                write_json(record, {"eval/mean_reward": stats["eval/mean_reward"], "step": runner.tot_timesteps})
                best = stats["eval/mean_reward"]
            except OSError as error:  # the next good evaluation is kept
                warnings.warn(f"the best checkpoint was not kept: {error}", stacklevel=2)

    runner.add_callback("post_iteration", keep)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a small JSON file atomically."""
    atomic_write(path, f"{json.dumps(content, indent=2)}\n".encode())


def show_results(runner: Runner, path: Path) -> None:
    """Evaluate, plot, record a video, and print where everything is."""
    info, episodes = runner.run_info, runner.run_info.get("final_episodes")
    print()
    if episodes:
        result = runner.eval(episodes)
        write_json(path / "evaluation.json", {**result, "episodes": episodes, "step": runner.tot_timesteps})
        print_return(result, f"over {episodes} episodes without noise")
    print_row("run", path)
    print_row("checkpoint", path / "checkpoint_final.pt")
    try:
        print_row("curve", plot_runs([path], path / "curve.png", labels=[info["task"]]))
    except ValueError as error:
        print_row("curve", f"none: {error}")
    if info.get("video", True):
        print_row("video", record_video(path))
    for name, command in (("next", "canter play"), ("", "canter eval"), ("", "tensorboard --logdir")):
        print_row(name, f"{command} {path}")


def print_row(name: str, text: object) -> None:
    """Print one row of the results."""
    print(f"  {name:<12}{text}", flush=True)


def print_return(result: dict[str, float], episodes: str) -> None:
    """Print the mean return of some episodes and its spread."""
    print_row("return", f"{result['eval/mean_reward']:.1f} ± {result['eval/std_reward']:.1f} {episodes}")


def record_video(path: Path) -> str:
    """Record a video in a process of its own, which a graphics library may end; returns its path, or the error."""
    video, limit = path / "video.mp4", f"{VIDEO_SECONDS:g}"
    command = [sys.executable, "-m", "canter.cli", "play", str(path), "--video", str(video), "--seconds", limit]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10 * VIDEO_SECONDS)
    except subprocess.TimeoutExpired:
        return "none: rendering took too long"
    if done.returncode == 0 and video.is_file():
        return str(video)
    reason = (done.stderr.strip() or f"rendering ended with exit code {done.returncode}").splitlines()[-1]
    return f"none: {reason.removeprefix('canter: ')[:200]}"
