"""PPO on CPU environments: canter against Stable-Baselines3 and SBX, with the same environments, networks and settings.

    python -m venv peer && peer/bin/pip install stable-baselines3 sbx-rl "gymnasium[mujoco]"
    python benchmarks/cpu_training.py --sb3-python peer/bin/python
    python benchmarks/cpu_training.py --sb3-python peer/bin/python --train-seconds 60     # and what was learned by when

SBX is Stable-Baselines3 on JAX. "canter" runs as it is (`execution="auto"`), with a callback in Python, so that its
replays are compared once an iteration; "eager" without replays; "compiled" with `execution="compile"`, which compiles
beside the run if the rest of it pays. Steps per second are of whole iterations: acting, stepping and learning. Every
measurement is a process of its own, libraries take turns so that all see the same load, each is tried on one core and
on two, with as many threads, and shown with what suits it best; figures are medians of the turns. Steps per second of
processor time and of the fastest single iteration are shown beside: they depend less on what else the machine does.

Both libraries decay the learning rate (CartPole: the clip range too) over the same number of steps, and bootstrap
time-outs from the final observation. VecNormalize takes every step into its statistics, canter every rollout.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
import warnings
from itertools import pairwise
from pathlib import Path

from report import report

# The settings of the RL zoo where it has some for these sizes; `batch` is one minibatch.
COMMON = {"envs": 8, "clip": 0.2, "value_coef": 0.5, "max_grad_norm": 0.5, "hidden": [64, 64], "std": 1.0}
TASKS = {
    "CartPole-v1": {
        **COMMON,
        "steps": 32,
        "epochs": 20,
        "batch": 256,
        "gamma": 0.98,
        "lam": 0.8,
        "rate": 1e-3,
        "total": 100_000,
        "clip_decays": True,
        "normalize": False,
    },
    "Pendulum-v1": {
        **COMMON,
        "steps": 256,
        "epochs": 10,
        "batch": 64,
        "gamma": 0.9,
        "lam": 0.95,
        "rate": 1e-3,
        "total": 200_000,
        "clip_decays": False,
        "normalize": False,
    },
    "HalfCheetah-v5": {
        **COMMON,
        "steps": 256,
        "epochs": 10,
        "batch": 64,
        "gamma": 0.98,
        "lam": 0.92,
        "rate": 3e-4,
        "total": 1_000_000,
        "clip_decays": False,
        "normalize": True,
        "std": 0.5,
    },
}
WARM_UP = 4  # functions are recorded, and compiled, in the first iterations


class Clock:
    """Stamps the ends of iterations, and says when time is up."""

    def __init__(self, seconds):
        self.seconds, self.begin, self.rows = seconds, 0.0, []

    def start(self):
        self.begin = time.perf_counter()

    def stamp(self, steps, mean_return):
        now = time.perf_counter()
        self.rows.append((steps, now - self.begin, time.process_time(), mean_return))
        return len(self.rows) > WARM_UP and now - self.begin - self.rows[WARM_UP - 1][1] >= self.seconds

    def result(self):
        first, last = self.rows[WARM_UP - 1], self.rows[-1]
        steps, wall, cpu = (last[i] - first[i] for i in range(3))
        curve = [(row[0], row[1], row[3]) for row in self.rows]
        best = max((b[0] - a[0]) / (b[1] - a[1]) for a, b in pairwise(self.rows[WARM_UP - 1 :]))
        return {"rate": steps / wall, "cpu_rate": steps / cpu, "best": best, "curve": curve}


def work_canter(task, prefix, execution, clock, seed, record):
    from canter.envs.wrap import wrap_env
    from canter.runners import OnPolicyRunner, StopTraining

    t = TASKS[task]
    algorithm = {
        "num_learning_epochs": t["epochs"],
        "num_mini_batches": t["envs"] * t["steps"] // t["batch"],
        "gamma": t["gamma"],
        "lam": t["lam"],
        "clip_param": t["clip"],
        "value_loss_coef": t["value_coef"],
        "max_grad_norm": t["max_grad_norm"],
        "learning_rate": t["rate"],
        "schedule": "linear",
        "clip_schedule": "linear" if t["clip_decays"] else "fixed",
        "use_clipped_value_loss": False,
        "normalize_advantage_per_mini_batch": True,
        "empirical_normalization": t["normalize"],
        "normalize_rewards": t["normalize"],
        "execution": execution,
    }
    policy = {
        "actor_hidden_dims": t["hidden"],
        "critic_hidden_dims": t["hidden"],
        "activation": "tanh",
        "orthogonal_init": True,
        "init_noise_std": t["std"],
    }
    cfg = {"num_steps_per_env": t["steps"], "algorithm": algorithm, "policy": policy, "seed": seed, "log_interval": 0}
    env = wrap_env(prefix + task, "cpu", num_envs=t["envs"], seed=seed)
    runner = OnPolicyRunner(env, cfg, None, "cpu", show_progress=False)

    def look(runner, stats):
        if clock.stamp(runner.tot_timesteps, stats.get("episode/mean_reward", math.nan) if record else math.nan):
            raise StopTraining

    runner.add_callback("post_iteration", look)
    clock.start()
    runner.learn(total_timesteps=t["total"])


def work_sb3(task, library, clock, seed, record):
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize
    from torch import nn

    make = importlib.import_module(library).PPO
    t = TASKS[task]

    class Look(BaseCallback):
        is_up = False

        def _on_rollout_start(self):
            if self.num_timesteps:
                episodes = self.model.ep_info_buffer if record else ()
                mean = statistics.fmean(e["r"] for e in episodes) if episodes else math.nan
                self.is_up = clock.stamp(self.num_timesteps, mean)

        def _on_step(self):
            return not self.is_up

        def _on_training_end(self):
            if not self.is_up:
                self._on_rollout_start()

    env = make_vec_env(task, t["envs"], seed=seed)
    if t["normalize"]:
        env = VecNormalize(env, gamma=t["gamma"])
    policy = {
        "net_arch": t["hidden"],
        "activation_fn": nn.Tanh,
        "optimizer_kwargs": {"eps": 1e-8},
        "log_std_init": math.log(t["std"]),
    }
    if library == "sbx":  # its networks are Flax's, with tanh, and its optimizer is Optax's
        policy = {"net_arch": t["hidden"], "log_std_init": math.log(t["std"])}
    model = make(
        "MlpPolicy",
        env,
        n_steps=t["steps"],
        batch_size=t["batch"],
        n_epochs=t["epochs"],
        gamma=t["gamma"],
        gae_lambda=t["lam"],
        learning_rate=lambda left: t["rate"] * left,
        vf_coef=t["value_coef"],
        clip_range=(lambda left: t["clip"] * left) if t["clip_decays"] else t["clip"],
        ent_coef=0.0,
        max_grad_norm=t["max_grad_norm"],
        policy_kwargs=policy,
        seed=seed,
        device="cpu",
    )
    clock.start()
    model.learn(t["total"], Look(), log_interval=None)


WORKERS = {
    "sb3": lambda task, *rest: work_sb3(task, "stable_baselines3", *rest),
    "sbx": lambda task, *rest: work_sb3(task, "sbx", *rest),
    "canter eager": lambda task, *rest: work_canter(task, "", "eager", *rest),
    "canter": lambda task, *rest: work_canter(task, "", "auto", *rest),
    "canter compiled": lambda task, *rest: work_canter(task, "", "compile", *rest),
    "canter EnvPool": lambda task, *rest: work_canter(task, "envpool/", "auto", *rest),
    "canter EnvPool compiled": lambda task, *rest: work_canter(task, "envpool/", "compile", *rest),
}


PEERS = ("sb3", "sbx")


def work(args):
    """One measurement, printed as JSON."""
    import torch

    warnings.filterwarnings("ignore")
    torch.set_num_threads(args.cores[0])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores[0]])
    clock = Clock(args.seconds)
    WORKERS[args.worker](args.tasks[0], clock, args.seed, args.train_seconds > 0)
    print(json.dumps(clock.result()))


def measure(args, library, task, cores, seconds, seed, record=False):
    python = args.sb3_python if library in PEERS else sys.executable
    command = [python, __file__, "--worker", library, "--tasks", task, "--cores", str(cores)]
    command += ["--seconds", str(seconds), "--seed", str(seed), "--train-seconds", str(int(record))]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": str(cores)})
    if done.returncode:
        raise SystemExit(f"{library} on {task} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def libraries(args, task):
    """Those to measure."""
    wanted = [name for name in args.libraries if name not in PEERS or args.sb3_python]
    return [name for name in wanted if "EnvPool" not in name or task in args.envpool]


def measure_task(args, task):
    """Steps per second by library: the medians over turns with the number of cores that suits it best."""
    turns = {(library, cores): [] for library in libraries(args, task) for cores in args.cores}
    for repeat in range(args.repeats):
        # Every other turn goes backwards, so that a load that grows or falls is shared out.
        for library, cores in list(turns)[:: -1 if repeat % 2 else 1]:
            turns[library, cores].append(measure(args, library, task, cores, args.seconds, args.seed + repeat))
    rows = {}
    for (library, cores), results in turns.items():
        rates = [r["rate"] for r in results]
        row = {
            "cores": cores,
            "rate": statistics.median(rates),
            "low": min(rates),
            "high": max(rates),
            "cpu_rate": statistics.median(r["cpu_rate"] for r in results),
            "best": max(r["best"] for r in results),
        }
        if library not in rows or row["rate"] > rows[library]["rate"]:
            rows[library] = row
    return rows


def show_rates(task, rows):
    peer = rows.get("sb3")
    for library, r in rows.items():
        row = f"{task:16}{library:26}{r['cores']:>8}" + f"{r['low']:,.0f}-{r['high']:,.0f}".rjust(16)
        for name in ("rate", "cpu_rate", "best"):
            row += f"{r[name]:>12,.0f}" + (f"{r[name] / peer[name]:.2f}x" if peer else "-").rjust(8)
        print(row, flush=True)


def show_curves(args, task, rows):
    """Mean return of the last 100 episodes at even times, by library."""
    results = {
        name: measure(args, name, task, r["cores"], args.train_seconds, args.seed, True) for name, r in rows.items()
    }
    end = max(result["curve"][-1][1] for result in results.values())
    times = [end * (i + 1) / args.points for i in range(args.points)]
    print(f"\n{task}: mean return of the last 100 episodes (and steps taken) by time")
    print(f"{'seconds':26}" + "".join(f"{t:>16.1f}" for t in times))
    for library, result in results.items():
        shown = [f"{r:.0f} ({s // 1000}k)" for s, r in (at(result["curve"], t) for t in times)]
        print(f"{library:26}" + "".join(f"{text:>16}" for text in shown), flush=True)
    for t in times:
        reached = {library: at(result["curve"], t) for library, result in results.items()}
        row = {
            f"{library}_{what}": value
            for library, point in reached.items()
            for what, value in zip(("steps", "return"), point, strict=True)
        }
        report({"task": task, "seed": args.seed, "seconds": t, **row}, args.returns)


def at(curve, seconds):
    """Steps and return of the last point that was reached by a time."""
    reached = [row for row in curve if row[1] <= seconds]
    return (reached[-1][0], reached[-1][2]) if reached else (0, math.nan)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sb3-python", help="the Python of an environment with both; else they are left out")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--libraries", nargs="*", default=list(WORKERS), choices=list(WORKERS))
    parser.add_argument("--envpool", nargs="*", default=["HalfCheetah-v5"], help="tasks to run with EnvPool as well")
    parser.add_argument("--cores", type=int, nargs="*", default=[1, 2], help="numbers of cores to try")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--train-seconds", type=float, default=0.0, help="also learn for so long, and show the returns")
    parser.add_argument("--points", type=int, default=8, help="times at which returns are shown")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="append one line of JSON per task and library")
    parser.add_argument("--returns", type=Path, help="append one line of JSON per time")
    parser.add_argument("--worker", choices=list(WORKERS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    print(
        f"{'':42}{'cores':>8}{'spread':>16}"
        + "".join(f"{n:>12}{'ratio':>8}" for n in ("steps/s", "per cpu s", "fastest"))
    )
    found = {}
    for task in args.tasks:
        found[task] = measure_task(args, task)
        show_rates(task, found[task])
        for library, row in found[task].items():
            peer = found[task].get("sb3")
            ratios = {"ratio": "rate", "cpu_ratio": "cpu_rate"} if peer else {}
            ratios = {name: row[value] / peer[value] for name, value in ratios.items()}
            report({"task": task, "library": library, **row, **ratios}, args.out)
    if args.train_seconds:
        for task in args.tasks:
            show_curves(args, task, found[task])


if __name__ == "__main__":
    main()
