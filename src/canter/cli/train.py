"""`canter train` and `canter resume`: from a task to a trained policy, its learning curve and its video."""

import json
import math
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from canter.cli import named_plugins, runs
from canter.cli.errors import UserError, printable, user_errors
from canter.cli.films import FILM_SECONDS, Films, film_command, film_environment, modules_of
from canter.cli.flags import RunPath, at_least
from canter.cli.launch import is_launched, launch
from canter.cli.options import TrainOptions, parse_train
from canter.envs.wrap import env_options
from canter.runners import Runner, check_policy, log_histograms
from canter.runners.checkpoints import all_or_none
from canter.utils.checkpoint import FINAL_NAME, load_checkpoint
from canter.utils.console import format_duration
from canter.utils.distributed import RANKS
from canter.utils.files import RunLock, atomic_write
from canter.utils.plots import plot_runs
from canter.utils.reading import FileContentError, read_json
from canter.utils.runtime import StopSignal, resolve_device

EVALS_PER_RUN = 10


def train(args: Sequence[str]) -> int:
    """Run `canter train`: one run for every seed."""
    if not args:
        raise UserError("name the task to train: canter train TASK; `canter tasks` lists the known ones")
    with user_errors():
        options, config = parse_train(args)
        if options.ranks > 1 and not is_launched():
            return launch(options.ranks, ["train", *args])
        RANKS.start(resolve_device(options.settings.device), options.settings.rank_timeout)
    paths: list[Path] = []
    for seed in options.seeds or (options.settings.seed,):
        runner, path = open_run(options, {**config, "seed": seed})
        code = run_to_end(runner, path)
        if code:
            return code
        paths.append(path)
    if len(paths) > 1 and RANKS.is_first:
        together = paths[0].with_name(paths[0].name.rpartition("-seed")[0] + "-seeds.png")
        print_row("all seeds", plot_runs(paths, together, labels=[options.task] * len(paths)))
    return 0


def open_run(options: TrainOptions[Any, Any], config: dict[str, Any]) -> tuple[Runner, Path]:
    """A new run and its directory; or the one that this launch began, if torchrun has restarted its ranks."""
    folder, task, seed = options.runs_dir, options.task, config["seed"]
    path = RANKS.on_first(
        lambda: runs.restarted_run(folder, task, seed) or runs.new_run_directory(folder, task, options.name, seed)
    )
    is_given = config["eval_interval"] is not None
    if not (path / "config.yaml").exists():
        return runs.new_runner(run_config(options, config), path, fits_evaluations=not is_given), path
    runner = runs.open_runner(run_config(options, config), path, eval_episodes=config["eval_episodes"])
    runner.resumed_at = 0  # what was logged after the checkpoint is logged again
    if newest := RANKS.on_first(lambda: runs.find_checkpoint(path, None) if any(path.glob("model_*.pt")) else None):
        runner.load(newest)
    return runner, path


def check(args: Sequence[str]) -> int:
    """Run `canter check-policy`: a few iterations of a run that writes nothing, with the flags of `canter train`."""
    if not args:
        raise UserError("name the task: canter check-policy TASK, with the flags of `canter train`")
    about = (
        "Report which functions of a run are replayed, and why others are not. The flags are those of `canter train`."
    )
    with user_errors():
        options, config = parse_train(args, "canter check-policy", about)
    config = run_config(options, {**config, "eval_interval": None, "offline_data": None} | {"seed": 1})
    runner = runs.open_runner(config, show_progress=False)
    with user_errors():
        report = check_policy(runner)
    print(report)
    return 0


def run_section(options: Any, task: str, num_envs: int) -> dict[str, Any]:
    """The section of a new run's config.yaml about the run itself."""
    names = ("total_timesteps", "final_episodes", "video", "film_interval", "histogram_interval", "threads")
    names += ("workers", "worker_timeout", "restart_workers") if options.workers else ()
    section = {"task": task, "num_envs": num_envs} | {name: getattr(options, name) for name in names}
    if plugins := named_plugins():
        section["plugins"] = plugins
    if RANKS.size > 1:  # `num_envs` is of each rank
        section |= {"ranks": RANKS.size, "launch": os.environ.get("TORCHELASTIC_RUN_ID")}
    return section


def run_config(options: TrainOptions[Any, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The content of a new run's config.yaml."""
    config["run"] = run_section(options, options.task, options.num_envs) | env_options(vars(options.environment))
    if config["eval_interval"] is None:
        length = config.get("max_timesteps") or options.total_timesteps  # intervals are steps, else iterations
        if "num_steps_per_env" in config:
            steps = config["num_steps_per_env"] * options.num_envs * RANKS.size
            length = config["max_iterations"] or -(-length // steps)
        config["eval_interval"] = max(1, length // EVALS_PER_RUN)
    config["eval_interval"] = config["eval_interval"] or None
    return config


def resume(
    run: RunPath,
    total_timesteps: int | None = None,
    checkpoint: str | None = None,
    device: str | None = None,
    ranks: int | None = None,
    modules: tuple[str, ...] = (),
    logger_kwargs: dict[str, Any] | None = None,
) -> int:
    """Continue a run from its newest valid checkpoint, with the settings it was started with.

    A run that ended before its first checkpoint begins again.

    Args:
        run: The run directory, or a checkpoint in it.
        total_timesteps: Environment steps to add; the rest of the run's own length by default.
        checkpoint: Another checkpoint to continue from: a file, or "best".
        device: Device to use instead of the one the run was started on.
        ranks: Processes on this machine; as many as the run had by default, which is needed to continue it exactly.
        modules: Modules that the run's settings name, such as that of its task, and that may be imported.
        logger_kwargs: Settings of the logging backends, as YAML. Hosts, keys, accounts and paths are taken from here or
            from the environment, not from the run's config.yaml.
    """
    at_least(1, total_timesteps=total_timesteps, ranks=ranks)
    saved = runs.read_run(run, modules)
    config: dict[str, Any] = {**saved.config, "run": dict(saved.config["run"])}
    if missing := [name for name in ("num_envs", "total_timesteps") if name not in config["run"]]:
        raise UserError(f"{saved.path / 'config.yaml'} lacks run.{missing[0]}; `canter train` writes it")
    if device is not None:
        config["device"] = device
    wanted = int(config["run"].get("ranks", 1) if ranks is None else ranks)
    if wanted > 1 and not is_launched():
        given = {"total-timesteps": total_timesteps, "checkpoint": checkpoint, "device": device}
        given["logger-kwargs"] = None if logger_kwargs is None else json.dumps(logger_kwargs)
        flags = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
        return launch(wanted, ["resume", str(run), *flags, *(["--modules", *modules] if modules else [])])
    with user_errors(f"{saved.path / 'config.yaml'} (--device names another)" if device is None else None):
        place = resolve_device(config.get("device"))
    with user_errors():
        RANKS.start(place, config.get("rank_timeout", 60.0))
    is_unsaved = RANKS.on_first(lambda: checkpoint is None and runs.is_unsaved(saved.path))
    path = None if is_unsaved else RANKS.on_first(lambda: saved.checkpoint(checkpoint))
    with user_errors(saved.path / "config.yaml"):
        if total_timesteps is not None:
            done = 0 if path is None else int(load_checkpoint(path, "cpu").get("total_timesteps", 0))
            config["run"]["total_timesteps"] = done + total_timesteps
            config |= {name: None for name in ("max_iterations", "max_timesteps") if name in config}
        runner = runs.open_runner(config, saved.path, eval_episodes=config.get("eval_episodes") or 0)
        runs.take_logger_settings(runner, logger_kwargs)
    if path is None:
        runner.resumed_at = 0  # the log of what was lost is dropped
    else:
        with user_errors(path):
            runner.load(path)
    if RANKS.is_first:
        with user_errors(saved.path / "config.yaml"), RunLock(saved.path):
            runner.init_writer()  # finds a bad logging backend before the training
        print(f"{saved.path} {progress(runner, path, config)}")
        if changed := runs.changed_settings(saved.config, runner.checkpoints.loaded_config):
            print(f"  settings in config.yaml that are not the checkpoint's: {'; '.join(changed)}", file=sys.stderr)
    return run_to_end(runner, saved.path)


def progress(runner: Runner, checkpoint: Path | None, config: Mapping[str, Any]) -> str:
    """Where a run is that has been resumed, for a sentence about it."""
    if config["run"]["total_timesteps"] <= runner.tot_timesteps and not config.get("max_iterations"):
        return f"is complete at step {runner.tot_timesteps}; --total-timesteps STEPS trains on"
    if checkpoint is None:
        return "ended before its first checkpoint: it begins again"
    return f"continues from {checkpoint.name} at step {runner.tot_timesteps}"


def run_to_end(runner: Runner, path: Path) -> int:
    """Train the rest of a run, then evaluate it, plot its curve and record a video; returns the exit code."""
    runs.limit_threads(runner, runner.run_info.get("threads"))
    keep_best(runner, path)
    films = picture_callbacks(runner, path) if RANKS.is_first else None
    if RANKS.size > 1 and RANKS.is_first:
        each = f"{runner.env.num_envs} environments each, {runner.num_envs} in all"
        print(f"{RANKS.size} ranks ({RANKS.backend}) with {each}", file=sys.stderr)
    began, steps_before = time.monotonic(), runner.tot_timesteps
    planned, steps = runner.planned_iterations(), runner.run_info["total_timesteps"] - runner.tot_timesteps
    length: dict[str, Any] = {"total_timesteps": max(0, steps)}
    if planned is not None:
        length = {"num_learning_iterations": max(0, planned - runner.iteration)}
    with StopSignal() as stop:
        try:
            runner.learn(**length)
        except SystemExit:
            if runner.stopped_by is None:
                raise
    seconds = time.monotonic() - began
    received = runner.stopped_by or stop.requested
    if films is not None:
        films.finish(runner) if received is None else films.cancel()
    if received is not None:
        if RANKS.is_first:
            again = command_for("resume", runner, path)
            text = f"stopped after {runner.tot_timesteps} steps, saved; continue with: {again}"
            print(text, file=sys.stderr)
        return 128 + received
    if RANKS.is_first:
        print()
        done = runner.tot_timesteps - steps_before
        print_row("trained", f"{done:,} steps in {format_duration(seconds)}, {done / max(seconds, 1e-9):,.0f} steps/s")
        show_results(runner, path)
    runner.close()
    return 0


def picture_callbacks(runner: Runner, path: Path) -> Films:
    """Add the callbacks that a run's `film_interval` and `histogram_interval` ask for; returns that of the films."""
    films = Films(path, runner.run_info.get("film_interval") or 0)
    if films.interval:
        runner.add_callback("post_iteration", films)
    if interval := runner.run_info.get("histogram_interval"):
        runner.add_callback("post_iteration", lambda runner, _: runner.is_due(interval) and log_histograms(runner))
    return films


def keep_best(runner: Runner, path: Path) -> None:
    """Keep the checkpoint of the best periodic evaluation."""
    record = path / "best.json"
    best = RANKS.on_first(lambda: recorded_return(record) if record.is_file() else -math.inf)

    def keep(runner: Runner, stats: dict[str, float]) -> None:
        nonlocal best
        if stats.get("eval/mean_reward", -math.inf) > best:
            try:
                runner.save(path / runs.BEST_NAME)
                with all_or_none():
                    if RANKS.is_first:
                        found = {"eval/mean_reward": stats["eval/mean_reward"], "step": runner.tot_timesteps}
                        write_json(record, found)
                best = stats["eval/mean_reward"]
            except OSError as error:  # the next good evaluation is kept
                warnings.warn(f"the best checkpoint was not kept: {error}", stacklevel=2)

    runner.add_callback("post_iteration", keep)


def recorded_return(path: Path) -> float:
    """The mean return in a JSON file of a run."""
    value = read_json(path, root=path.parent).get("eval/mean_reward")
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise FileContentError(f"{path} has no mean return but {value!r}; delete it to go on without it")
    return value


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a small JSON file atomically."""
    atomic_write(path, f"{json.dumps(content, indent=2)}\n".encode())


def show_results(runner: Runner, path: Path) -> None:
    """Evaluate, plot, record a video, and print where everything is."""
    info, episodes = runner.run_info, runner.run_info.get("final_episodes")
    result: dict[str, float] = {}
    if episodes:
        result = runner.eval(episodes)
        write_json(path / "evaluation.json", {**result, "episodes": episodes, "step": runner.tot_timesteps})
        print_return(result, f"over {episodes} episode{'s' * (episodes > 1)} without noise")
    chosen: list[str] = []
    if (path / "best.json").is_file():
        best = read_json(path / "best.json", root=path)
        if episodes and best["eval/mean_reward"] > result["eval/mean_reward"]:
            chosen = ["--checkpoint", "best"]
        print_row("best", f"{best['eval/mean_reward']:.1f} in the evaluation at step {best['step']:,}")
    print_row("run", path)
    print_row("checkpoint", path / FINAL_NAME)
    try:
        print_row("curve", plot_runs([path], path / "curve.png", labels=[info["task"]]))
    except ValueError as error:
        print_row("curve", f"none: {error}")
    if info.get("video", True):
        print_row("video", "filming an episode ...")
        print_row("", record_video(path, modules_of(runner)))
    print_row("next", command_for("play", runner, path, *chosen))
    print_row("", command_for("export", runner, path, *chosen))
    print_row("", command_for("resume", runner, path, "--total-timesteps", str(info["total_timesteps"])))
    print_row("", f"{program('canter')} plot {path}")
    print_row("", f"{program('tensorboard')} --logdir {path}")


def command_for(command: str, runner: Runner, path: Path, *flags: str) -> str:
    """A command of canter on a run, with the modules that it must name to import them."""
    modules = modules_of(runner)
    return " ".join([program("canter"), command, str(path), *flags, *(["--modules", *modules] if modules else [])])


def program(name: str) -> str:
    """A program of this Python environment as the shell finds it: with its folder if the environment is not active."""
    here, found = Path(sys.executable).with_name(name), shutil.which(name)
    if not here.is_file() or (found is not None and here.samefile(found)):
        return name
    return str(here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here)


def print_row(name: str, text: object) -> None:
    """Print one row of the results."""
    print(f"  {name:<12}{printable(str(text))}", flush=True)


def print_return(result: dict[str, float], episodes: str) -> None:
    """Print the mean return of some episodes and its spread."""
    print_row("return", f"{result['eval/mean_reward']:.1f} ± {result['eval/std_reward']:.1f} {episodes}")


def record_video(path: Path, modules: Sequence[str] = ()) -> str:
    """Record a video in a process of its own, which a graphics library may end; returns its path, or the error."""
    video = path / "video.mp4"
    try:
        command = film_command(path, video, modules)
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 10 * FILM_SECONDS}
        done = subprocess.run(command, env=film_environment(), **options)
    except subprocess.TimeoutExpired:
        return "none: rendering took too long"
    if done.returncode == 0 and video.is_file():
        rows = [line.strip() for line in done.stdout.splitlines() if str(video) in line]
        return rows[-1].removeprefix("video").strip() if rows else str(video)
    reason = (done.stderr.strip() or f"rendering ended with exit code {done.returncode}").splitlines()[-1]
    return f"none: {reason.removeprefix('canter: ')[:200]}"
