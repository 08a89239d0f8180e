"""`canter distill`: a student that sees less learns what a trained teacher does."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from canter.algorithms.tppo import TPPOConfig
from canter.cli.errors import UserError
from canter.cli.options import parse
from canter.cli.runs import SavedRun, find_checkpoint, new_run_directory, new_runner, open_env, read_run
from canter.cli.train import EVALS_PER_RUN, run_to_end, say

FADE = 0.2  # share of the run over which the teacher stops acting
STUDENT = {"schedule": "fixed", "learning_rate": 1e-3, "num_learning_epochs": 5, "num_mini_batches": 4}
QUIET = {"init_noise_std": 0.05}  # which imitation alone does not learn: much of it leads to where nobody goes without
RECURRENT = {"class_name": "ActorCriticRecurrent", "rnn_type": "gru", "rnn_hidden_size": 64}


@dataclasses.dataclass
class DistillOptions:
    """Train a student to do what a trained teacher does, seeing only a part of what the teacher sees."""

    teacher: tyro.conf.Positional[Path]
    """The teacher's run directory."""
    segments: dict[str, Any] | None = None
    """Names and widths of the observation's parts, as YAML: {position: 8, velocity: 9}; else the environment's."""
    hide: tuple[str, ...] = ()
    """Parts that the student does not see."""
    using_ppo: bool = False
    """Learn from rewards too; without it this is DAgger."""
    recurrent: bool = True
    """Give the student a memory."""
    total_timesteps: int = 500_000
    """Length of the run in environment steps."""
    num_envs: int | None = None
    """Environments stepped together; as many as the teacher had by default."""
    num_steps_per_env: int = 128
    """Steps of each environment between two updates."""
    algorithm: dict[str, Any] | None = None
    """Other settings of TPPO, as YAML: {distill_target: mse_sum, learning_rate: 3e-4}."""
    policy: dict[str, Any] | None = None
    """Other settings of the student, as YAML: {rnn_hidden_size: 128}."""
    checkpoint: str | None = None
    """The teacher's checkpoint: a file, or "best"; by default the newest valid one."""
    seed: int = 1
    """Seed of the run."""
    name: str | None = None
    """Name of the run; student and the time by default."""
    runs_dir: Path = Path("runs")
    """Where run directories are made."""
    final_episodes: int = 20
    """Episodes of the evaluation at the end."""
    video: bool = True
    """Film an episode at the end."""
    threads: int | None = None
    """Threads of torch on a CPU."""
    device: str | None = None
    """Where to learn; None takes a GPU if there is one."""


def main(args: Sequence[str]) -> int:
    """Distil."""
    options: DistillOptions = parse(DistillOptions, args, "canter distill")
    for name in ("total_timesteps", "num_steps_per_env"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    saved = read_run(options.teacher)
    checkpoint = find_checkpoint(saved.path, options.checkpoint)
    name = options.name or f"student-{time.strftime('%Y%m%d-%H%M%S')}"
    path = new_run_directory(options.runs_dir, saved.task, name, options.seed)
    config = student_config(options, saved, checkpoint)
    code = run_to_end(new_runner(config, path), path)
    if not code:
        say_share(saved.path, path)
    return code


def student_config(options: DistillOptions, saved: SavedRun, checkpoint: Path) -> dict[str, Any]:
    """The student's whole configuration, in the layout of a config.yaml."""
    num_envs = options.num_envs or int(saved.config["run"]["num_envs"])
    iterations = -(-options.total_timesteps // (options.num_steps_per_env * num_envs))
    taught = saved.config.get("algorithm") or {}
    known = {f.name for f in dataclasses.fields(TPPOConfig)}
    kept = {name: value for name, value in taught.items() if name in known}
    algorithm = {
        **kept,
        **STUDENT,
        "class_name": "TPPO",
        "teacher_ac_path": str(checkpoint),
        "using_ppo": options.using_ppo,
        "teacher_act_prob": "linear",
        "update_times_scale": max(1.0, FADE * iterations),
        "label_action_with_critic_obs": bool(options.hide),
        **(options.algorithm or {}),
    }
    hidden = {k: v for k, v in (saved.config.get("policy") or {}).items() if k not in ("class_name", *RECURRENT)}
    policy = hidden | (RECURRENT if options.recurrent else {"class_name": "ActorCritic"})
    policy |= ({} if options.using_ppo else QUIET) | (options.policy or {})
    if options.recurrent:
        algorithm["num_mini_batches"] = min(int(algorithm["num_mini_batches"]), num_envs)
    run: dict[str, Any] = {
        "task": saved.task, "num_envs": num_envs, "total_timesteps": options.total_timesteps,
        "final_episodes": options.final_episodes, "video": options.video, "threads": options.threads,
        "teacher": str(saved.path),
    }  # fmt: skip
    if options.hide or options.segments:
        run["components"] = shown(options, saved)
    return {
        "algorithm": algorithm,
        "policy": policy,
        "num_steps_per_env": options.num_steps_per_env,
        "seed": options.seed,
        "device": options.device,
        "eval_interval": max(1, iterations // EVALS_PER_RUN),
        "eval_episodes": 10,
        "run": run,
    }


def shown(options: DistillOptions, saved: SavedRun) -> dict[str, Any]:
    """What `ObsComponents` is told, checked against the environment."""
    env = open_env(saved.task, 1, "cpu")
    segments = options.segments or env.obs_segments
    has_own = env.critic_obs_space is not env.obs_space
    env.close()
    if segments is None:
        raise UserError(f"{saved.task} does not name the parts of its observation; give --segments '{{a: 3, b: 2}}'")
    unknown = [name for name in options.hide if name not in segments]
    if unknown:
        raise UserError(f"the observation has no part {unknown[0]!r}; it has {', '.join(segments)}")
    if has_own and options.hide:
        raise UserError(
            f"{saved.task} shows its critic something else already; the teacher's observation would be lost"
        )
    return {"segments": dict(segments), "actor": [name for name in segments if name not in options.hide]}


def say_share(teacher: Path, student: Path) -> None:
    """The student's return beside the teacher's, where both were evaluated."""
    results = [directory / "evaluation.json" for directory in (teacher, student)]
    if all(result.is_file() for result in results):
        before, after = (json.loads(result.read_text())["eval/mean_reward"] for result in results)
        share = f", {after / before:.0%} of it" if before > 0 else ""
        say("teacher", f"{before:.1f}, the student {after:.1f}{share}")
