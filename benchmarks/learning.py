"""Train presets on several seeds and evaluate each policy without noise.

    python benchmarks/learning.py CartPole-v1 Acrobot-v1 --seeds 1 2 3
    python benchmarks/learning.py HalfCheetah-v5 Ant-v5 --seeds 1 2 3 4 5 --execution compile
    python benchmarks/learning.py HalfCheetah-v5 --algo sac --steps 300000 --device cuda
    python benchmarks/learning.py Swimmer-v5 --preset default                # as a task without a preset is trained
    python benchmarks/learning.py HalfCheetah-v5 --set algorithm.lam=0.95 policy.init_noise_std=0.5

One line of JSON per run goes to `--out`; the table at the end has the mean over seeds. `jobs.py` runs lists of such
trainings, several at the same time. CartPole without velocities:

    python benchmarks/learning.py canter/MaskedCartPole --set policy.class_name=ActorCriticRecurrent policy.rnn_type=gru

`--note` names the settings in the results, so that runs with and without an option of PPO stand side by side. After
`--minutes` a run stops, and its line goes to a file beside `--out`, named *.cut.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import product
from pathlib import Path

import torch
from report import report

from canter.cli.flags import parse_value
from canter.envs.wrap import env_options, make_env
from canter.execution.executor import EXECUTIONS
from canter.presets import load_preset
from canter.runners import OffPolicyRunner, OnPolicyRunner, StopTraining


def override(cfg, words):
    """Set KEY=VALUE in a training dict; a key is a path with dots, a value is YAML as on the command line of canter."""
    for word in words:
        name, sign, value = word.partition("=")
        if not sign:
            raise SystemExit(f"--set {word}: give KEY=VALUE, for instance algorithm.lam=0.95")
        *path, last = name.split(".")
        node = cfg
        for key in path:
            node = node.setdefault(key, {})
        node[last] = parse_value(value)


def settings(args, task):
    """The preset of a task, with the changes of the command line."""
    cfg = {**load_preset(args.preset or task, args.algo, args.profile), "task": task}
    override(cfg, args.set)
    if args.execution is not None:
        cfg["execution"] = args.execution
    return {**cfg, "total_timesteps": args.steps or cfg["total_timesteps"]}


def stop_at(end):
    """A callback that ends the training at a time of the system's clock."""

    def stop(runner, stats):
        if time.time() > end:
            raise StopTraining

    return stop


def train(args, task, seed):
    """Train once; returns the line of results, with `planned` steps if the time was over before them."""
    cfg = settings(args, task)
    total, on_policy = cfg["total_timesteps"], "num_steps_per_env" in cfg
    options = env_options(cfg.pop("run", {}))
    env = make_env(task, args.device, cfg["num_envs"], seed, **options)
    judge = make_env(task, args.device, 4, seed + 1000, **options)
    length = {"max_timesteps": total}
    if on_policy:
        length = {"max_iterations": -(-total // (cfg["num_steps_per_env"] * env.num_envs))}
    runner = (OnPolicyRunner if on_policy else OffPolicyRunner)(
        env, {**cfg, **length, "seed": seed}, device=args.device, eval_env=judge, show_progress=False
    )
    if args.end is not None:
        runner.add_callback("post_iteration", stop_at(args.end))
    begin, secs, score, curve, is_over = time.perf_counter(), 0.0, {}, [], False
    for point in range(1, args.points + 1):
        runner.learn(total_timesteps=max(0, total * point // args.points - runner.tot_timesteps))
        recent, secs = sum(runner.rewbuffer) / max(1, len(runner.rewbuffer)), time.perf_counter() - begin
        is_over = point == args.points or runner.tot_timesteps < total * point // args.points
        score = runner.eval(args.episodes if is_over else 10)
        curve.append([runner.tot_timesteps, round(secs, 1), round(score["eval/mean_reward"], 1)])
        print(
            f"{task} seed {seed}: {runner.tot_timesteps:,} steps, {secs:.0f} s, return {recent:.1f}, "
            f"without noise {curve[-1][2]:.1f}",
            flush=True,
        )
        if is_over:
            break
    network = (cfg.get("policy") or {}).get("rnn_type", "mlp")
    result = {"task": task, "algo": args.algo, "policy": network, "seed": seed}
    result |= {name: value for name in ("preset", "profile", "note") if (value := getattr(args, name))}
    result |= {"steps": runner.tot_timesteps, "secs": round(secs)}
    result |= {"planned": total} if runner.tot_timesteps < total else {}
    result |= {"eval": round(score["eval/mean_reward"], 1), "std": round(score["eval/std_reward"], 1)}
    return {**result, "curve": curve}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+")
    parser.add_argument("--algo", default="ppo")
    parser.add_argument("--preset", metavar="TASK", help="settings of another task, or default")
    parser.add_argument("--profile", help="a profile of the preset or of the algorithm")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help="environment steps instead of the preset's")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings other than the preset's")
    parser.add_argument("--note", help="a name for these settings, kept in the results")
    parser.add_argument("--episodes", type=int, default=20, help="episodes of the evaluation at the end")
    parser.add_argument("--points", type=int, default=10, help="points of the curve")
    parser.add_argument("--execution", choices=EXECUTIONS, help="how the algorithm's functions run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, help="training stops after this time")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.end = None if args.minutes is None else time.time() + 60 * args.minutes
    torch.set_num_threads(args.threads)
    results = []
    for task, seed in product(args.tasks, args.seeds):
        result = train(args, task, seed)
        is_cut = "planned" in result and args.out is not None
        report(result, args.out.with_suffix(".cut.jsonl") if is_cut else args.out)
        results.append(result)
    for task in args.tasks:
        values = [result["eval"] for result in results if result["task"] == task]
        print(f"{task:28}{statistics.mean(values):10.1f}   seeds: {', '.join(f'{v:.1f}' for v in values)}")


if __name__ == "__main__":
    main()
