"""CartPole with everything on the GPU, each rollout one graph: steps per second, and seconds to solve it.

python benchmarks/cartpole_gpu.py --envs 4096 --steps 32
"""

from __future__ import annotations

import time

START = time.perf_counter()

import argparse  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from report import report  # noqa: E402

from canter.envs.wrap import wrap_env  # noqa: E402
from canter.runners import OnPolicyRunner, StopTraining  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("envs", 4096),
        ("steps", 32),
        ("epochs", 4),
        ("minibatches", 4),
        ("iterations", 300),
        ("seed", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--execution", default="graph")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    env = wrap_env("canter/CartPole", args.device, num_envs=args.envs, seed=args.seed)
    judge = wrap_env("canter/CartPole", args.device, num_envs=64, seed=args.seed + 1)
    hidden = {"actor_hidden_dims": [64, 64], "critic_hidden_dims": [64, 64]}
    policy = {**hidden, "activation": "tanh", "orthogonal_init": True}
    algorithm = {
        "num_learning_epochs": args.epochs,
        "num_mini_batches": args.minibatches,
        "gamma": 0.99,
        "lam": 0.95,
        "learning_rate": args.learning_rate,
        "max_grad_norm": 0.5,
        "value_loss_coef": 0.5,
        "execution": args.execution,
        "normalize_rewards": True,
    }
    cfg = {"num_steps_per_env": args.steps, "algorithm": algorithm, "policy": policy, "seed": args.seed}
    cfg["log_interval"] = 0
    runner = OnPolicyRunner(env, cfg, None, args.device, eval_env=judge, show_progress=False)
    first = time.perf_counter()
    solved = {"seconds": None, "seconds_from_start": None, "steps_to_solve": None}

    def check(runner, stats):
        if stats.get("episode/mean_length", 0) > 400 and runner.iteration % 5 == 0:
            score = runner.eval(64)["eval/mean_reward"]
            if score >= 475:
                now = time.perf_counter()
                solved.update(seconds=now - first, seconds_from_start=now - START, steps_to_solve=runner.tot_timesteps)
                raise StopTraining

    runner.add_callback("post_iteration", check)
    runner.learn(args.iterations)
    runner.callbacks.by_event["post_iteration"].clear()
    runner.learn(20)
    torch.cuda.synchronize() if args.device == "cuda" else None
    begin = time.perf_counter()
    runner.learn(50)
    torch.cuda.synchronize() if args.device == "cuda" else None
    rate = 50 * runner.steps_per_iteration() / (time.perf_counter() - begin)
    sizes = {"envs": args.envs, "steps": args.steps, "epochs": args.epochs, "minibatches": args.minibatches}
    report({**sizes, "steps_per_second": round(rate), **solved}, args.out)


if __name__ == "__main__":
    main()
