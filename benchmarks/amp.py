"""Style from motion alone: HalfCheetah learns to run from clips of an expert, without any task reward.

    python benchmarks/amp.py expert --seed 1 --run runs/expert
    python benchmarks/amp.py style --seed 1 --run runs/expert --out amp.jsonl
    python benchmarks/amp.py style --seed 1 --run runs/expert --separate-normalizers --out amp.jsonl

`expert` trains the preset into `--run` and records clips of it there; `style` sees those clips, and its reward is the
discriminator's alone. With `--separate-normalizers` policy and expert features are whitened apart, as in the original,
which hides how they differ. One line of JSON per run goes to `--out`: the curve as [steps, seconds, forward speed] and
the speed as a share of the expert's.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from report import report

from canter.envs.components import MotionFeatures, windows
from canter.envs.wrap import wrap_env
from canter.presets import load_preset
from canter.runners import AmpPolicyRunner, OnPolicyRunner

TASK, FORWARD, WIDTH = "HalfCheetah-v5", 8, 17  # column and number of what is observed: the root's forward speed
POINTS, CLIPS, CLIP_LENGTH, JUDGES = 20, 8, 500, 8
DISCRIMINATOR = {"style_reward_coef": 1.0, "hidden_dims": [256, 128], "discriminator_grad_pen": 1.0}
STYLE = {
    "class_name": "APPO",
    "num_learning_epochs": 5,
    "num_mini_batches": 16,
    "discriminator_learning_rate": 1e-4,
    "amp_replay_buffer_size": 100_000,
}


@torch.no_grad()
def play(runner, num_envs, num_steps, seed):
    """(num_envs, T, D) observations of the policy without noise."""
    env = wrap_env(TASK, num_envs=num_envs, seed=seed)
    policy, (obs, _), frames = runner.get_inference_policy(), env.reset(), []
    for _ in range(num_steps):
        frames.append(obs)
        obs = env.step(policy(obs)).obs
    env.close()
    return torch.stack(frames, 1)


def forward_speed(runner, seed):
    """Mean forward speed in m/s over episodes without noise, the start left out."""
    return play(runner, JUDGES, 400, seed)[:, 100:, FORWARD].mean().item()


def train_expert(args):
    cfg = load_preset(TASK) | {"seed": args.seed, "save_interval": 0, "log_interval": 0}
    runner = OnPolicyRunner(wrap_env(TASK, num_envs=cfg["num_envs"]), cfg, args.run, "cpu", show_progress=False)
    curve = learn(runner, args)
    clips = play(runner, CLIPS, CLIP_LENGTH, args.seed + 500)
    np.savez(args.run / "clips.npz", frames=clips.numpy(), speed=curve[-1][2])
    return {"arm": "expert", "speed": curve[-1][2], "curve": curve}


def train_style(args):
    with np.load(args.run / "clips.npz") as file:
        clips, expert = torch.as_tensor(file["frames"]), float(file["speed"])
    cfg = load_preset(TASK)
    cfg["policy"] |= {"class_name": "AmpActorCritic", "amp_discriminator": {**DISCRIMINATOR, "input_dim": 2 * WIDTH}}
    cfg["algorithm"] |= STYLE | {"separate_amp_normalizers": args.separate_normalizers}
    cfg["algorithm"]["amp_motion_loader"] = torch.cat([windows(clip) for clip in clips])
    cfg |= {"seed": args.seed, "save_interval": 0, "log_interval": 1}
    env = MotionFeatures(wrap_env(TASK, num_envs=cfg["num_envs"]))
    runner = AmpPolicyRunner(env, cfg, None, "cpu", show_progress=False)
    curve = learn(runner, args)
    share = round(curve[-1][2] / expert, 3)
    arm = "style-separate" if args.separate_normalizers else "style"
    return {
        "arm": arm,
        "speed": curve[-1][2],
        "expert": expert,
        "share": share,
        "curve": curve,
        "grad_pen": DISCRIMINATOR["discriminator_grad_pen"],
    }


def learn(runner, args):
    """Train, and measure how fast it runs as it goes."""
    total = -(-args.steps // runner.steps_per_iteration())
    runner.cfg.max_iterations = total
    curve, spent = [], 0.0
    for end in sorted({total * point // POINTS for point in range(1, POINTS + 1)} - {0}):
        begin = time.perf_counter()
        history = runner.learn(end - runner.iteration).history
        spent += time.perf_counter() - begin
        speed = forward_speed(runner, args.seed + 1000)
        curve.append([runner.tot_timesteps, round(spent), round(speed, 3)])
        health = {k.partition("/")[2]: round(v, 2) for k, v in (history or [{}])[-1].items() if k.startswith("amp/")}
        print(f"{args.arm} seed {args.seed}: {curve[-1]} {health or ''}", flush=True)
    return curve


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arm", choices=["expert", "style"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1_200_000)
    parser.add_argument("--run", type=Path, required=True, help="where the expert and its clips are")
    parser.add_argument("--separate-normalizers", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="task_reward_lerp is 0")
    result = {"task": TASK, "seed": args.seed, "steps": args.steps}
    result |= train_expert(args) if args.arm == "expert" else train_style(args)
    report(result, args.out)


if __name__ == "__main__":
    main()
