"""Where a step of HalfCheetah-v5 spends its time: the physics, Gymnasium, EnvPool, and canter's adapters of both.

    python benchmarks/env_step.py --out benchmarks/results/env_step.jsonl

Microseconds of processor time per step of one environment, on one thread: the lowest of `--repeats` means, since other
processes on the machine only add to it. All variants take turns.
"""

import argparse
import time
from pathlib import Path

import envpool
import gymnasium
import mujoco
import numpy as np
import torch
from report import report

from canter.envs import wrap_env

TASK, NUM_ENVS = "HalfCheetah-v5", 8


def variants():
    """Functions that take one step, and the number of environments that it steps."""
    single: gymnasium.Env = gymnasium.make(TASK).unwrapped
    single.reset(seed=0)
    pool = envpool.make(TASK, env_type="gymnasium", num_envs=NUM_ENVS, num_threads=1, seed=0)
    pool.reset()
    adapted = {"canter with Gymnasium": wrap_env(TASK, "cpu", num_envs=NUM_ENVS, seed=0)}
    adapted["canter with EnvPool"] = wrap_env(f"envpool/{TASK}", "cpu", num_envs=NUM_ENVS, seed=0)
    action, actions, tensor = np.zeros(6), np.zeros((NUM_ENVS, 6)), torch.zeros(NUM_ENVS, 6)
    made = {
        "physics": (lambda: mujoco.mj_step(single.model, single.data, nstep=single.frame_skip), 1),
        "Gymnasium": (lambda: single.step(action), 1),
        "EnvPool": (lambda: pool.step(actions), NUM_ENVS),
    }
    return made | {name: (lambda env=env: env.step(tensor), NUM_ENVS) for name, env in adapted.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--steps", type=int, default=100, help="in each repeat")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    steps = variants()
    found = {name: [] for name in steps}
    for _ in range(args.repeats):
        for name, (step, count) in steps.items():
            begin = time.process_time()
            for _ in range(args.steps):
                step()
            found[name].append((time.process_time() - begin) / args.steps / count * 1e6)
    for name, times in found.items():
        report({"task": TASK, "what": name, "us": min(times)}, args.out)


if __name__ == "__main__":
    main()
