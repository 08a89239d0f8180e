"""What smooth and constrained policies cost: return, action rate and size of the action of each kind.

    python benchmarks/smooth.py caps --seed 1 --out results.jsonl

The preset of HalfCheetah for `--steps` steps, simulated by EnvPool. Then the mean action acts in 16 environments for a
whole episode: `rate` is the mean absolute change of an action's component from one step to the next, `peak` the mean
largest change of a component in a step, `size` the mean square of a component, to which a motor's losses are
proportional. Actions are in [-1, 1].
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from report import report

from canter.envs.wrap import wrap_env
from canter.presets import load_preset
from canter.runners import OnPolicyRunner

TASK = "HalfCheetah-v4"
EPISODE = 1000
ARMS = {
    "ppo": {},
    "caps": {"smoothness_cfg": {"temporal_coef": 0.2, "spatial_coef": 0.2, "spatial_std": 0.05}},
    "l2c2": {"smoothness_cfg": {"policy_coef": 0.2, "value_coef": 0.1}},
    "rate-bound": {"smoothness_cfg": {"rate_coef": 0.2, "rate_limit": 0.2}},
    "lipschitz": {"gradient_penalty_coef": 0.02},
    "constraints": {"constraints_cfg": {"limits": {"action_rate": 1.0}, "probability": 0.1}},
}


@torch.no_grad()
def measure(runner, seed):
    """Mean return, action rates and size of the mean action in one episode of 16 environments."""
    env = wrap_env(f"envpool/{TASK}", num_envs=16, seed=seed)
    policy = runner.policy.eval()
    obs, _ = env.reset()
    total, actions = torch.zeros(16), []
    for _ in range(EPISODE):
        action = policy.infer(obs)[0].clamp(-1.0, 1.0)
        record = env.step(action)
        actions.append(action)
        obs, total = record.obs, total + record.reward
    actions = torch.stack(actions)
    change = (actions[1:] - actions[:-1]).abs()
    return {
        "return": round(total.mean().item(), 1),
        "rate": round(change.mean().item(), 4),
        "peak": round(change.amax(-1).mean().item(), 4),
        "size": round(actions.square().mean().item(), 4),
    }


def train(arm, seed, steps):
    cfg = load_preset("HalfCheetah-v5")
    cfg["algorithm"] |= ARMS[arm]
    total = -(-steps // (cfg["num_envs"] * cfg["num_steps_per_env"]))
    cfg |= {"seed": seed, "max_iterations": total, "save_interval": 0, "log_interval": 0}
    env = wrap_env(f"envpool/{TASK}", num_envs=cfg["num_envs"], seed=seed)
    runner = OnPolicyRunner(env, cfg, None, "cpu", show_progress=False)
    begin = time.process_time()
    runner.learn(total)
    secs = round(time.process_time() - begin)
    return {"task": TASK, "arm": arm, "seed": seed, "steps": runner.tot_timesteps, "cpu_secs": secs} | measure(
        runner, seed + 1000
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arm", choices=ARMS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report(train(args.arm, args.seed, args.steps), args.out)


if __name__ == "__main__":
    main()
