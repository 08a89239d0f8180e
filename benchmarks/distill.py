"""Teacher to student on real physics: the teacher sees velocities, the student remembers positions instead.

    python benchmarks/distill.py teacher --task HalfCheetah-v5 --seed 1 --teacher runs/cheetah1
    python benchmarks/distill.py dagger --task HalfCheetah-v5 --seed 1 --teacher runs/cheetah1 --out distill.jsonl

Arms: `teacher` trains the preset and leaves its run in `--teacher`; `dagger` imitates alone; `tppo` imitates and learns
from rewards, the imitation fading; `scratch` is PPO on the same student. One line of JSON per run goes to `--out`: the
curve as [steps, seconds, return] of 10 episodes without noise, the teacher's return, the share of it that the student
reached, and the steps it took to 80 % and 90 %.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path

import torch
from report import report
from robots import SEGMENTS

from canter.envs.components import ObsComponents
from canter.envs.wrap import wrap_env
from canter.presets import load_preset
from canter.runners import OnPolicyRunner

POINTS, EPISODES = 25, 10
STUDENT = {"class_name": "ActorCriticRecurrent", "rnn_type": "lstm", "rnn_hidden_size": 64}
IMITATION = {
    "class_name": "TPPO",
    "using_ppo": False,
    "distill_target": "mse_sum",
    "teacher_act_prob": "linear",
    "learning_rate": 5e-4,
    "schedule": "linear",
    "num_learning_epochs": 5,
    "buffer_dilation_ratio": 4.0,
}
GUIDED = {"class_name": "TPPO", "teacher_act_prob": 0.0, "distill_target": "mse_sum"}
ARMS = {"dagger": IMITATION, "tppo": GUIDED, "scratch": {}}
# Imitation alone does not learn the noise, and the student is judged without it.
NOISE = {"dagger": 0.05, "tppo": 0.2}
FADE = 0.1  # share of the run over which the teacher stops acting
# What reward and teacher are worth to each other depends on the task: a hopper that only falls earns nothing to learn
# from, a cheetah soon outruns its teacher. Learning rate, weight of the teacher, share of the run over which it fades.
GUIDANCE = {"HalfCheetah-v5": (1e-3, 1.0, 0.15), "Hopper-v5": (5e-4, 5.0, 1.0)}
ALONE = {"HalfCheetah-v5": (1e-3, 0.2), "Hopper-v5": (3e-4, 1.0)}  # learning rate and noise that served PPO better


def student_env(task, num_envs, seed=None):
    """The teacher's observation is the critic's; the student sees positions and what it did last."""
    parts = SEGMENTS[task]
    return ObsComponents(
        wrap_env(task, num_envs=num_envs, seed=seed), parts, ["position", "last_action"], list(parts), last_action=True
    )


def configuration(arm, args):
    cfg = load_preset(args.task)
    if arm != "teacher":
        # Minibatches are made of whole environments: as many steps as without memory, but of more environments.
        cfg |= {"num_envs": 32, "num_steps_per_env": 64}
        cfg["policy"] |= STUDENT | {"init_noise_std": NOISE.get(arm, ALONE[args.task][1])}
        cfg["algorithm"] |= {"num_mini_batches": 4, **ARMS[arm]}
    total = -(-args.steps // (cfg["num_steps_per_env"] * cfg["num_envs"]))
    rate, weight, fade = GUIDANCE[args.task]
    if arm in ("tppo", "dagger"):
        cfg["algorithm"] |= {"teacher_ac_path": str(args.teacher), "update_times_scale": max(1.0, FADE * total)}
    if arm == "scratch":
        cfg["algorithm"]["learning_rate"] = ALONE[args.task][0]
    if arm == "tppo":
        cfg["algorithm"]["learning_rate"] = rate
        cfg["algorithm"]["distillation_loss_coef"] = lambda it: weight * max(0.0, 1.0 - it / (fade * total))
    return cfg | {"seed": args.seed, "max_iterations": total, "save_interval": 0, "log_interval": 0}


def train(arm, args):
    cfg = configuration(arm, args)
    make = wrap_env if arm == "teacher" else student_env
    env, judge = make(args.task, num_envs=cfg["num_envs"]), make(args.task, num_envs=EPISODES, seed=args.seed + 1000)
    directory = args.teacher if arm == "teacher" else None
    runner = OnPolicyRunner(env, cfg, directory, "cpu", eval_env=judge, show_progress=False)
    curve, spent = [], 0.0
    for end in sorted({cfg["max_iterations"] * point // POINTS for point in range(1, POINTS + 1)} - {0}):
        begin = time.perf_counter()
        runner.learn(end - runner.iteration)
        spent += time.perf_counter() - begin
        score = runner.eval(EPISODES)["eval/mean_reward"]
        curve.append([runner.tot_timesteps, round(spent), round(score, 1)])
        print(
            f"{args.task} {arm} seed {args.seed}: {curve[-1][0]:,} steps, {curve[-1][1]} s, return {score:.1f}",
            flush=True,
        )
    final = runner.eval(2 * EPISODES)
    runner.close()
    result = {"task": args.task, "arm": arm, "seed": args.seed, "steps": runner.tot_timesteps, "secs": round(spent)}
    return result | {
        "eval": round(final["eval/mean_reward"], 1),
        "std": round(final["eval/std_reward"], 1),
        "curve": curve,
    }


def compare(result, teacher):
    """The student beside its teacher."""
    reached = {
        f"steps_to_{share}": next((s for s, _, r in result["curve"] if r >= share / 100 * teacher), None)
        for share in (80, 90)
    }
    return {**result, "teacher": teacher, "share": round(result["eval"] / teacher, 3), **reached}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arm", choices=["teacher", *ARMS])
    parser.add_argument("--task", choices=GUIDANCE, default="HalfCheetah-v5")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--teacher", type=Path, required=True, help="the teacher's run directory")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="buffer_dilation_ratio")
    result = train(args.arm, args)
    score = args.teacher / "score.json"
    if args.arm == "teacher":
        score.write_text(json.dumps({"eval": result["eval"]}))
    else:
        result = compare(result, json.loads(score.read_text())["eval"])
    report(result, args.out)


if __name__ == "__main__":
    main()
