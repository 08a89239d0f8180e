"""Policies that learn from pixels alone, with and without memory.

    python benchmarks/visual.py image-reach --policy recurrent --seed 1 --out results.jsonl
    python benchmarks/visual.py cartpole --workers --device cuda

`image-reach` is the torch-native task: move a red dot to a green one, both only seen. `cartpole` is Gymnasium's
CartPole-v1, rendered and shrunk to grey pictures; without memory the last four are stacked, with memory only the newest
is seen. One line of JSON per run goes to `--out`, its curve as [steps, seconds, return].
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from report import report

from canter.envs.wrap import wrap_env
from canter.runners import OnPolicyRunner

POINTS, STACK = 20, 4
SMALL = {"channels": [16, 32], "kernel_sizes": [4, 3], "strides": [2, 2], "hidden_sizes": []}
STRIP = {"channels": [16, 32], "kernel_sizes": [5, 3], "strides": [4, 2], "hidden_sizes": []}
HEIGHT, WIDTH = 44, 120
# Not with an adaptive rate: while an image says little the policy hardly moves, the rate rises to its bound, and the
# first large errors of the critic, which shares the encoder, leave nothing of its rectifiers alive.
CARTPOLE = {
    "gamma": 0.98,
    "lam": 0.9,
    "num_learning_epochs": 6,
    "num_mini_batches": 16,
    "learning_rate": 5e-4,
    "entropy_coef": 0.005,
    "schedule": "linear",
    "normalize_rewards": True,
}
# task -> environment steps, environments, steps per environment, settings of PPO, settings of the encoder
TASKS = {
    "image-reach": (100_000, 32, 25, {"gamma": 0.95, "lam": 0.9, "num_learning_epochs": 6, "desired_kl": 0.02}, SMALL),
    "cartpole": (200_000, 16, 128, CARTPOLE, STRIP),
}


class PixelCartPole(gymnasium.Wrapper):
    """CartPole whose observation is the last few rendered frames, grey, (num_frames, 44, 120)."""

    def __init__(self, num_frames):
        super().__init__(gymnasium.make("CartPole-v1", render_mode="rgb_array"))
        self.observation_space = spaces.Box(0, 255, (num_frames, HEIGHT, WIDTH), np.uint8)
        self.frames = np.zeros((num_frames, HEIGHT, WIDTH), np.uint8)

    def look(self):
        rows = self.env.render()[140:360:5, :, 2]  # every fifth row of pole and cart, dark on white
        # Means of five pixels: what moves by less than one between two frames shows in its greys.
        return (255 - rows.reshape(HEIGHT, WIDTH, 5).sum(-1, dtype=np.uint16) // 5).astype(np.uint8)

    def reset(self, **kwargs):
        _, info = self.env.reset(**kwargs)
        self.frames[:] = self.look()
        return self.frames.copy(), info

    def step(self, action):
        _, reward, terminated, truncated, info = self.env.step(action)
        self.frames = np.concatenate([self.frames[1:], self.look()[None]])
        return self.frames.copy(), reward, terminated, truncated, info


def make_env(task, policy, num_envs, device, seed=None, workers=False):
    if task == "image-reach":
        return wrap_env("canter/ImageReach", device, num_envs=num_envs, seed=seed)
    makers = [lambda: PixelCartPole(1 if policy == "recurrent" else STACK)] * num_envs
    same_step = gymnasium.vector.AutoresetMode.SAME_STEP
    env = gymnasium.vector.AsyncVectorEnv(makers, autoreset_mode=same_step) if workers else makers
    return wrap_env(env, device, seed=seed)


def configuration(task, policy, seed, iterations):
    _, _, num_steps, algorithm, encoder = TASKS[task]
    settings = {
        "visual_component_name": "obs",
        "visual_latent_size": 64,
        "visual_critic": True,
        "visual_kwargs": encoder,
    }
    settings |= {"actor_hidden_dims": [64], "critic_hidden_dims": [64], "init_noise_std": 0.6}
    settings["orthogonal_init"] = task == "cartpole"
    defaults = {"num_mini_batches": 4, "learning_rate": 1e-3, "schedule": "adaptive", "max_grad_norm": 0.5}
    if policy == "recurrent":
        settings |= {"class_name": "VisualActorCriticRecurrent", "rnn_type": "gru", "rnn_hidden_size": 64}
        defaults |= {"num_mini_batches": 8, "learning_rate": 1e-3, "schedule": "linear"}
    else:
        settings |= {"class_name": "VisualActorCritic"}
    run = {"num_steps_per_env": num_steps, "seed": seed, "max_iterations": iterations}
    return run | {"policy": settings, "algorithm": defaults | algorithm, "save_interval": 0, "log_interval": 0}


def train(task, policy, seed, steps, workers, device):
    _, num_envs, num_steps, *_ = TASKS[task]
    total = -(-steps // (num_envs * num_steps))
    env = make_env(task, policy, num_envs, device, workers=workers)
    judge = make_env(task, policy, 4, device, seed + 1000)
    cfg = configuration(task, policy, seed, total)
    runner = OnPolicyRunner(env, cfg, None, device, eval_env=judge, show_progress=False)
    begin, curve = time.perf_counter(), []
    for point in range(1, POINTS + 1):
        runner.learn(total * point // POINTS - runner.iteration)
        recent = sum(runner.rewbuffer) / max(1, len(runner.rewbuffer))
        curve.append([runner.tot_timesteps, round(time.perf_counter() - begin), round(recent, 2)])
        print(f"{task} {policy} seed {seed}: {runner.tot_timesteps:,} steps, return {recent:.2f}", flush=True)
    score = runner.eval(20)
    env.close()
    result = {"task": task, "policy": policy, "seed": seed, "steps": runner.tot_timesteps, "secs": curve[-1][1]}
    result |= {"eval": round(score["eval/mean_reward"], 2), "std": round(score["eval/std_reward"], 2)}
    return result | {"curve": curve}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--policy", choices=["feed-forward", "recurrent"], default="feed-forward")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", action="store_true", help="render every environment in a process of its own")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = train(args.task, args.policy, args.seed, args.steps or TASKS[args.task][0], args.workers, args.device)
    report(result, args.out)


if __name__ == "__main__":
    main()
