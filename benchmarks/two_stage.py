"""Pretraining on saved demonstrations, then PPO, against PPO from scratch at the same number of environment steps.

    python benchmarks/two_stage.py canter/Pendulum --seeds 1
    python benchmarks/two_stage.py HalfCheetah-v5 --seeds 1 2 3 --teacher-steps 1000000 --steps 300000

A teacher is trained with the task's preset (or read from `--teacher RUN`), plays `--demo-steps` steps into trajectory
files, and then both students train with that preset for `--steps` environment steps; the one that is pretrained first
learns from the files for `--pretrain` iterations, in which no environment is stepped. Curves are deterministic
evaluations, [environment steps, seconds, return].
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
import warnings
from pathlib import Path

import torch
from report import report

from canter.cli.runs import find_checkpoint, load_policy, read_run
from canter.envs.wrap import wrap_env
from canter.presets import load_preset
from canter.runners import DemonstrationSaver, OnPolicyRunner, TwoStageRunner

POINTS = 10
LAUNCHER = ("task", "num_envs", "total_timesteps")


def make(task, seed, cfg, iterations, runner_class=OnPolicyRunner):
    settings = {name: value for name, value in cfg.items() if name not in LAUNCHER}
    settings |= {"seed": seed, "max_iterations": iterations}
    env, judge = wrap_env(task, num_envs=cfg["num_envs"]), wrap_env(task, num_envs=4, seed=seed + 1000)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TPPO has no teacher")
        return runner_class(env, settings, None, "cpu", eval_env=judge, show_progress=False)


def iterations_of(cfg, steps):
    return -(-steps // (cfg["num_steps_per_env"] * cfg["num_envs"]))


def train(runner, total, before=0, episodes=10):
    """Evaluate ten times on the way to `total` iterations after the first `before`; judging takes no seconds."""
    begin, curve, judged = time.perf_counter(), [], 0.0
    per_iteration = runner.steps_per_iteration()
    for point in range(POINTS + 1):
        runner.learn(before + total * point // POINTS - runner.iteration)
        seconds = time.perf_counter() - begin - judged
        score = runner.eval(episodes)["eval/mean_reward"]
        judged = time.perf_counter() - begin - seconds
        curve.append([(runner.iteration - before) * per_iteration, round(seconds, 1), round(score, 1)])
    return curve


def teach(task, seed, cfg, args, folder):
    """Demonstrations of a trained policy, and how good it is."""
    if args.teacher is not None:
        saved = read_run(args.teacher)
        runner = load_policy(saved, find_checkpoint(saved.path, None), cfg["num_envs"], seed, "cpu")
    else:
        runner = make(task, seed + 100, cfg, iterations_of(cfg, args.teacher_steps))
        runner.learn(iterations_of(cfg, args.teacher_steps))
    score = runner.eval(20)["eval/mean_reward"]
    env = wrap_env(task, num_envs=cfg["num_envs"], seed=seed + 2000)
    DemonstrationSaver(
        env, runner.policy, folder, 256, min_timesteps=args.demo_steps, min_episodes=1, show_progress=False
    ).collect_and_save()
    return score


def compare(task, seed, args):
    cfg = load_preset(task)
    total = iterations_of(cfg, args.steps)
    folder = Path(tempfile.mkdtemp())
    try:
        teacher = teach(task, seed, cfg, args, folder)
        print(f"{task} seed {seed}: teacher {teacher:.1f}", flush=True)
        scratch = train(make(task, seed, cfg, total), total)
        taught = {
            **cfg["algorithm"],
            "class_name": "TPPO",
            "distill_target": "mse_sum",
            "critic_warmup_iterations": args.pretrain + args.warmup,
        }
        policy = {**cfg["policy"], "init_noise_std": args.noise_std}
        source = {"data_dir": str(folder), "dataset_loops": -1, "random_shuffle_traj_order": True, "seed": seed}
        two = {**cfg, "algorithm": taught, "policy": policy, "pretrain_iterations": args.pretrain}
        runner = make(task, seed, {**two, "pretrain_dataset": source}, args.pretrain + total, TwoStageRunner)
        begin = time.perf_counter()
        runner.learn(args.pretrain)
        seconds = time.perf_counter() - begin
        pretrained = train(runner, total, args.pretrain)
    finally:
        shutil.rmtree(folder)
    print(f"{seconds:.1f} s of pretraining\n{'steps':>10}{'scratch':>12}{'two stages':>12}")
    for (steps, _, a), (_, _, b) in zip(scratch, pretrained, strict=True):
        print(f"{steps:>10}{a:>12.1f}{b:>12.1f}", flush=True)
    run = {"task": task, "seed": seed, "steps": scratch[-1][0], "demo_steps": args.demo_steps}
    report({**run, "arm": "teacher", "eval": round(teacher, 1)}, args.out)
    for arm, curve in (("scratch", scratch), ("two stages", pretrained)):
        report({**run, "arm": arm, "eval": curve[-1][2], "curve": curve}, args.out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=60_000)
    parser.add_argument("--teacher", type=Path, help="a run directory; one is trained if it is not given")
    parser.add_argument("--teacher-steps", type=int, default=200_000)
    parser.add_argument("--demo-steps", type=int, default=20_000)
    parser.add_argument("--pretrain", type=int, default=30, help="iterations of stage one")
    parser.add_argument("--warmup", type=int, default=3, help="iterations of stage two in which only the critic learns")
    parser.add_argument("--noise-std", type=float, default=0.4, help="exploration noise that stage two begins with")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for seed in args.seeds:
        compare(args.task, seed, args)


if __name__ == "__main__":
    main()
