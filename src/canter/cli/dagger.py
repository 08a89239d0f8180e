"""`canter dagger`: a student learns from what its teacher would have done where the student goes.

Two processes, a collector and a trainer, that share nothing but the student's run directory and the data directory;
either may be stopped, killed and started again.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import tyro
import yaml
from gymnasium import spaces

from canter.cli.collect import collect
from canter.cli.errors import UserError, user_errors
from canter.cli.options import parse
from canter.cli.runs import SavedRun, find_checkpoint, limit_threads, load_policy, open_env, open_runner, read_run
from canter.runners import Runner
from canter.runners.dagger_saver import CONFIG_NAMES, DaggerSaver
from canter.storage.rollout_files.catalog import find_trajectory, trajectory_folders
from canter.utils.checkpoint import find_checkpoints, newest_valid_checkpoint

ROLES = ("both", "collect", "train")


@dataclasses.dataclass
class DaggerOptions:
    """Train a student to do as its teacher: collect with one process, learn with another, or start both at once."""

    teacher: tyro.conf.Positional[Path]
    """The teacher's run directory."""
    role: Literal["both", "collect", "train"] = "both"
    """Which of the two processes this is; "both" trains here and starts a collector of its own."""
    run: Path | None = None
    """The student's run directory; <teacher>/dagger by default. Continues one that is there."""
    data: Path | None = None
    """Where trajectories go; <run>/data by default."""
    task: str | None = None
    """What the student plays, if not the teacher's task: the same with other observations, for example."""
    iterations: int = 500
    """Length of the training, in iterations of `num_steps_per_env` recorded steps of each stream."""
    num_envs: int = 16
    """Environments of the collector, and streams of recorded trajectories in the trainer."""
    num_steps_per_env: int = 32
    """Recorded steps of each stream between two updates."""
    teacher_act_prob: str = "exp"
    """Chance that the teacher drives: exp, linear, tanh, or a number."""
    update_times_scale: float = 50
    """Iterations over which that chance falls."""
    noise_std: float = 0.1
    """Noise of the student's actions while collecting; its own, which imitation does not learn, if 0."""
    critic_obs: bool = False
    """The teacher sees the critic's observation."""
    policy: dict[str, Any] | None = None
    """Settings of the student's policy, as YAML, over those of the teacher's."""
    algorithm: dict[str, Any] | None = None
    """Settings of TPPO, as YAML: {learning_rate: 3e-4, distill_target: mse_sum}."""
    keep_latest: int = 0
    """Learn from so many of the newest trajectories, and begin when there are as many; 0 learns from all there are."""
    max_steps: float = 1e12
    """The collector stops after so many steps."""
    eval_episodes: int = 10
    """Episodes without noise at the end of the training; 0 for none."""
    seed: int = 1
    """Of weights, environments and draws."""
    device: str | None = None
    """Where to compute; the CPU by default."""


def main(args: Sequence[str]) -> int:
    """Play the role, or both."""
    options: DaggerOptions = parse(DaggerOptions, args, "canter dagger")
    for name in ("num_envs", "num_steps_per_env", "iterations"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    teacher = read_run(options.teacher)
    options.run = options.run or teacher.path / "dagger"
    options.data = options.data or options.run / "data"
    if options.role == "collect":
        collect_for(options, teacher)
    elif options.role == "train":
        train_from(options, teacher)
    else:
        with collector(list(args), options.run) as process:
            train_from(options, teacher, process)
    return 0


@contextmanager
def collector(args: list[str], run: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A collector in a process of its own, while the trainer needs it; what it says goes to <run>/collector.log."""
    run.mkdir(parents=True, exist_ok=True)
    with (run / "collector.log").open("a") as log:
        command = [sys.executable, "-m", "canter.cli", "dagger", *args, "--role", "collect"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()  # it saves what it has and ends
            process.wait()


# ---------------------------------------------------------------------- collecting
def collect_for(options: DaggerOptions, teacher: SavedRun) -> None:
    """Play with the newest student, label with the teacher, until told to stop."""
    assert options.run is not None
    assert options.data is not None
    wait_for_config(options.run)
    checkpoint = find_checkpoint(teacher.path, None)
    if options.task is not None:
        teacher.config["run"]["task"] = options.task
    runner = load_policy(teacher, checkpoint, options.num_envs, options.seed, options.device)
    with user_errors():
        saver = DaggerSaver(
            runner.env,
            runner.policy,
            options.data,
            options.num_steps_per_env,
            min_timesteps=options.max_steps,
            min_episodes=1,
            use_critic_obs=options.critic_obs,
            training_policy_logdir=options.run,
            teacher_act_prob=number_or_name(options.teacher_act_prob),
            update_times_scale=options.update_times_scale,
            action_sample_std=options.noise_std,
        )
    collect(saver, teacher, checkpoint, runner)


def wait_for_config(run: Path, seconds: float = 600.0) -> None:
    """The trainer writes what the student is before it learns anything."""
    end = time.monotonic() + seconds
    while not any((run / name).is_file() for name in CONFIG_NAMES):
        if time.monotonic() > end:
            raise UserError(f"no training began in {run} within {seconds:.0f} s; start `canter dagger --role train`")
        time.sleep(0.1)


def number_or_name(text: str) -> str | float:
    """A probability, or the name of a schedule."""
    try:
        return float(text)
    except ValueError:
        return text


# ---------------------------------------------------------------------- training
def train_from(options: DaggerOptions, teacher: SavedRun, source: subprocess.Popen[bytes] | None = None) -> None:
    """Learn from the trajectories, saving as it goes; continue the run if there is one."""
    assert options.run is not None
    config_path = options.run / "config.yaml"
    is_new = not config_path.is_file()
    config = student_config(options, teacher) if is_new else yaml.safe_load(config_path.read_text(encoding="utf-8"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TPPO has no teacher")  # it asks for labels in another process
        runner = open_runner(config, options.run, eval_episodes=options.eval_episodes)
    with user_errors():
        if find_checkpoints(options.run):
            runner.load(newest_valid_checkpoint(options.run))
        runner.init_writer()
    limit_threads(runner, None)
    wait_for_data(options, source)
    runner.learn(max(0, options.iterations - runner.iteration))
    report(runner, options)
    runner.close()


def wait_for_data(options: DaggerOptions, source: subprocess.Popen[bytes] | None) -> None:
    """One trajectory for every stream, however short, before the first step."""
    assert options.data is not None
    while count_trajectories(options.data) < options.num_envs:
        if source is not None and source.poll() is not None:
            raise UserError(f"the collector has ended; {options.run}/collector.log says why")
        time.sleep(0.1)


def count_trajectories(data: Path) -> int:
    """How many there are to read."""
    folders = trajectory_folders(data) if data.is_dir() else []
    return sum(find_trajectory(folder)[0] is not None for _, folder in folders)


def student_config(options: DaggerOptions, teacher: SavedRun) -> dict[str, Any]:
    """A run of pure imitation from a dataset that grows while it is read."""
    taught = teacher.config.get("algorithm") or {}
    env = open_env(options.task or teacher.task, 1, "cpu")
    is_box = isinstance(env.action_space, spaces.Box)
    env.close()
    algorithm = {
        "class_name": "TPPO",
        "using_ppo": False,
        "distill_target": "mse_sum" if is_box else "max_log_prob",
        "learning_rate": 1e-3,
        "num_learning_epochs": 2,
        "num_mini_batches": 4,
        "empirical_normalization": bool(taught.get("empirical_normalization", False)),
        **(options.algorithm or {}),
    }
    run = {"task": options.task or teacher.task, "num_envs": options.num_envs, "runner": "TwoStageRunner"}
    return {
        "algorithm": algorithm,
        "policy": {**(teacher.config.get("policy") or {}), **(options.policy or {})},
        "num_steps_per_env": options.num_steps_per_env,
        "seed": options.seed,
        "device": options.device or "cpu",
        "log_interval": 1,
        "save_interval": 1,
        "pretrain_iterations": -1,
        "pretrain_dataset": {
            "data_dir": str(options.data),
            "dataset_loops": -1,
            "random_shuffle_traj_order": True,
            "keep_latest_n_trajs": options.keep_latest,
            "wait_interval_s": 0.2,
            "seed": options.seed,
        },
        "run": {**run, "total_timesteps": options.iterations * options.num_envs * options.num_steps_per_env},
    }


def report(runner: Runner, options: DaggerOptions) -> None:
    """What came of it."""
    if options.eval_episodes:
        result = runner.eval(options.eval_episodes)
        print(f"  return      {result['eval/mean_reward']:.1f} ± {result['eval/std_reward']:.1f} without noise")
    print(f"  run         {options.run}")
    print(f"  data        {options.data}")
