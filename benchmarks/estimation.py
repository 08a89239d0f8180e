"""A robot whose actor does not see velocities: what a state estimator is worth.

    python benchmarks/estimation.py state-ac-window --seed 1 --out results.jsonl
    python benchmarks/estimation.py blind --task Hopper-v5

Arms: `full` sees everything; `blind` sees positions, and in `blind-both` its critic sees no more; `blind-window` and
`blind-recurrent` see a window of them, or remember; `state-ac-window` and `state-ac-recurrent` do that too, and
estimate the velocities, which only the critic sees. One line of JSON per run goes to `--out`: the curve as [steps,
seconds, return], the return of 20 episodes without noise, and the R^2 of the estimates on episodes that nothing was
learned from.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from report import report
from robots import SEGMENTS

from canter.envs.components import ObsComponents
from canter.envs.wrap import wrap_env
from canter.presets import load_preset
from canter.runners import OnPolicyRunner

WINDOW, POINTS = 6, 20
PAST = ["position_history", "last_action_history"]
ESTIMATOR = {"estimator_target_components": ["velocity"], "append_estimate": True}
HEAD = {"estimator_kwargs": {"hidden_sizes": [128, 128], "nonlinearity": "ELU"}}
RECURRENT = {"rnn_type": "lstm", "rnn_hidden_size": 64}
# arm -> components of the actor, class of the policy, its settings
ARMS = {
    "full": (["position", "velocity"], "ActorCritic", {}),
    "blind": (["position"], "ActorCritic", {}),
    "blind-both": (["position"], "ActorCritic", {}),
    "blind-window": (PAST, "ActorCritic", {}),
    "blind-recurrent": (["position", "last_action"], "ActorCriticRecurrent", RECURRENT),
    "state-ac-window": (PAST, "StateAc", {**ESTIMATOR, **HEAD}),
    "state-ac-recurrent": (["position", "last_action"], "StateAcRecurrent", {**RECURRENT, **ESTIMATOR, **HEAD}),
}


def make_env(task, arm, num_envs, seed=None):
    history = {"position": WINDOW, "last_action": WINDOW} if arm.endswith("window") else None
    env = wrap_env(task, num_envs=num_envs, seed=seed)
    critic = ["position"] if arm == "blind-both" else ["position", "velocity"]
    return ObsComponents(env, SEGMENTS[task], ARMS[arm][0], critic, history, last_action=arm.endswith("recurrent"))


def configuration(task, arm, seed, steps, layout):
    cfg = load_preset(task)
    _, class_name, settings = ARMS[arm]
    cfg["policy"] |= {"class_name": class_name, **settings}
    if layout == "wide":  # as many steps as the preset's, of more environments: memories need whole ones in a minibatch
        cfg |= {"num_envs": 32, "num_steps_per_env": 64}
        cfg["algorithm"]["num_mini_batches"] = 4 if class_name.endswith("Recurrent") else 8
    if class_name.startswith("State"):
        cfg["algorithm"]["class_name"] = "EstimatorPPO"
    total = -(-steps // (cfg["num_steps_per_env"] * cfg["num_envs"]))
    return cfg | {"seed": seed, "max_iterations": total, "save_interval": 0, "log_interval": 0}


@torch.no_grad()
def held_out_r2(runner, task, arm, seed, num_steps=500, num_envs=8):
    """R^2 of every estimated velocity on new episodes: 1 - squared error / variance."""
    policy = runner.policy
    env = make_env(task, arm, num_envs, seed)
    obs, critic_obs = env.reset()
    policy.eval()
    policy.reset()
    guesses, truths = [], []
    for _ in range(num_steps):
        actions = policy.act(obs)
        guesses.append(policy.get_estimated_state(denormalize=True))
        truths.append(critic_obs[:, SEGMENTS[task]["position"] :])
        record = env.step(policy.distribution.to_env(actions))
        policy.reset(record.done)
        obs, critic_obs = record.obs, record.critic_obs
    guess, truth = torch.stack(guesses).flatten(0, 1), torch.stack(truths).flatten(0, 1)
    return (1 - (guess - truth).square().mean(0) / truth.var(0)).tolist()


def train(task, arm, seed, steps, layout):
    cfg = configuration(task, arm, seed, steps, layout)
    env, judge = make_env(task, arm, cfg["num_envs"]), make_env(task, arm, 4, seed + 1000)
    runner = OnPolicyRunner(env, cfg, None, "cpu", eval_env=judge, show_progress=False)
    begin, curve = time.perf_counter(), []
    for point in range(1, POINTS + 1):
        runner.learn(cfg["max_iterations"] * point // POINTS - runner.iteration)
        recent = sum(runner.rewbuffer) / max(1, len(runner.rewbuffer))
        curve.append([runner.tot_timesteps, round(time.perf_counter() - begin), round(recent, 1)])
        print(
            f"{task} {arm} seed {seed}: {runner.tot_timesteps:,} steps, {curve[-1][1]} s, return {recent:.1f}",
            flush=True,
        )
    score = runner.eval(20)
    result = {"task": task, "arm": arm, "seed": seed, "layout": layout, "steps": runner.tot_timesteps}
    result["secs"] = curve[-1][1]
    result |= {"eval": round(score["eval/mean_reward"], 1), "std": round(score["eval/std_reward"], 1)}
    if arm.startswith("state"):
        each = held_out_r2(runner, task, arm, seed + 2000)
        result |= {"r2": round(sum(each) / len(each), 4), "r2_each": [round(value, 4) for value in each]}
    return result | {"curve": curve}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arm", choices=ARMS)
    parser.add_argument("--task", choices=SEGMENTS, default="HalfCheetah-v5")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--layout", choices=["wide", "preset"], default="wide", help="32 x 64 steps, or the preset's")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = train(args.task, args.arm, args.seed, args.steps, args.layout)
    report(result, args.out)


if __name__ == "__main__":
    main()
