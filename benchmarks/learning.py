"""Train presets on several seeds and evaluate each without noise over 20 episodes.

    python benchmarks/learning.py CartPole-v1 Acrobot-v1 --seeds 1 2 3
    python benchmarks/learning.py HalfCheetah-v5 --seeds 1 --set total_timesteps=500000 algorithm.lam=0.95

One line of JSON per run goes to `--out`; the table at the end has the mean over seeds. CartPole without velocities:

    python benchmarks/learning.py canter/MaskedCartPole --set policy.class_name=ActorCriticRecurrent policy.rnn_type=gru

`--note` names the settings in the results, so that runs with and without an option of PPO stand side by side.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
import yaml
from report import report

from canter.envs.wrap import wrap_env
from canter.presets import load_preset
from canter.runners import OnPolicyRunner

POINTS = 10


def train(task, seed, overrides, note):
    cfg = load_preset(task)
    for override in overrides:
        name, _, value = override.partition("=")
        *path, last = name.split(".")
        node = cfg
        for key in path:
            node = node[key]
        node[last] = yaml.safe_load(value)
    env = wrap_env(task, num_envs=cfg["num_envs"])
    judge = wrap_env(task, num_envs=4, seed=seed + 1000)
    total = -(-cfg["total_timesteps"] // (cfg["num_steps_per_env"] * env.num_envs))
    runner = OnPolicyRunner(
        env, {**cfg, "seed": seed, "max_iterations": total}, None, "cpu", eval_env=judge, show_progress=False
    )
    begin, curve = time.perf_counter(), []
    for point in range(1, POINTS + 1):
        runner.learn(total * point // POINTS - runner.iteration)
        recent = sum(runner.rewbuffer) / max(1, len(runner.rewbuffer))
        curve.append((runner.tot_timesteps, round(recent, 1)))
        print(f"{task} seed {seed}: {runner.tot_timesteps:,} steps, return {recent:.1f}", flush=True)
    seconds = time.perf_counter() - begin
    score = runner.eval(20)
    result = {"task": task, "policy": cfg["policy"].get("rnn_type", "mlp"), "seed": seed}
    if note:
        result["note"] = note
    result |= {"steps": runner.tot_timesteps, "secs": round(seconds)}
    return result | {
        "eval": round(score["eval/mean_reward"], 1),
        "std": round(score["eval/std_reward"], 1),
        "curve": curve,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings other than the preset's")
    parser.add_argument("--note", help="a name for these settings, kept in the results")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    scores = {}
    for task in args.tasks:
        for seed in args.seeds:
            result = train(task, seed, args.set, args.note)
            scores.setdefault(task, []).append(result["eval"])
            report(result, args.out)
    for task, values in scores.items():
        print(f"{task:28}{statistics.mean(values):10.1f}   seeds: {', '.join(f'{v:.1f}' for v in values)}")


if __name__ == "__main__":
    main()
