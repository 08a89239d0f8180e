"""Teach Unitree's Go1 to walk on two CPU cores: the joystick task of MuJoCo Playground, simulated by EnvPool.

    taskset -c 0,1 python benchmarks/go1_two_cores.py --minutes 20 --seed 1 --run runs/go1 --out results.jsonl
    canter play runs/go1 --video go1.mp4                                   # where MuJoCo can render

Policies are saved on the way and scored at the end, without noise, over one episode of every environment, with the
task's own rewards: commands are drawn by the task and drawn again in mid-episode. A robot that stands still is scored
first, for comparison. It walks when the mean error of its velocity is below half of that of standing still and no more
than one episode in twenty ends in a fall. A line of JSON for every point of the curve goes to `--out`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from learning import override
from report import report

from canter.cli.runs import open_runner
from canter.cli.train import record_video
from canter.envs.wrap import wrap_env
from canter.presets import load_preset
from canter.utils.runtime import usable_cores

TASK = "envpool/Go1JoystickFlatTerrain-v1"
# Columns of the critic's observation that are free of noise: velocity in the robot's frame, and turning rate.
VELOCITY, TURNING = slice(57, 60), 50
COMMAND = slice(45, 48)
NUM_JUDGED = 32


def settings(args):
    cfg = load_preset(TASK, args.algo)
    override(cfg, args.set)
    run = {"task": TASK, "num_envs": cfg["num_envs"], "total_timesteps": cfg["total_timesteps"], **cfg.pop("run", {})}
    return {**cfg, "seed": args.seed, "device": "cpu", "eval_interval": None, "save_interval": 0, "run": run}


def train(runner, seconds, steps, points):
    """Train for some seconds or steps, whichever comes first; saves policies at evenly spaced times."""
    begin, cpu, saved = time.perf_counter(), time.process_time(), []
    chunk = runner.env.num_envs * 256
    while True:
        runner.learn(total_timesteps=min(chunk, steps - runner.tot_timesteps))
        now, done = time.perf_counter() - begin, runner.tot_timesteps
        is_over = now >= seconds or done >= steps
        if is_over or max(now / seconds, done / steps) >= (len(saved) + 1) / points:
            path = Path(runner.log_dir) / f"policy_{done}.pt"
            runner.save(path)
            times = {"secs": round(now, 1), "cpu_secs": round(time.process_time() - cpu, 1), "steps": done}
            saved.append((path, times))
            recent = sum(runner.rewbuffer) / max(1, len(runner.rewbuffer))
            print(f"{now:6.0f} s {done:10,} steps {done / now:6.0f} steps/s, return {recent:.2f}", flush=True)
        if is_over:
            return saved
        # Every call of `learn` ends with a checkpoint, so there are few: to the next point at the rate so far.
        left = max(1.0, min((len(saved) + 1) / points, 1.0) * seconds - now)
        chunk = max(runner.env.num_envs, int(done / now * left))


@torch.inference_mode()
def score(env, act):
    """Tracking, falls and return of one episode of every environment."""
    obs, critic_obs = env.reset()
    alive = torch.ones(env.num_envs)
    errors, turning, total, count, falls = 0.0, 0.0, 0.0, 0.0, 0.0
    for _ in range(env.max_episode_length):
        record = env.step(act(obs))
        command, velocity = critic_obs[:, COMMAND], record.critic_obs[:, VELOCITY]
        errors += ((command[:, :2] - velocity[:, :2]).norm(dim=1) * alive).sum()
        turning += ((command[:, 2] - record.critic_obs[:, TURNING]).abs() * alive).sum()
        total += (record.reward * alive).sum()
        count += alive.sum()
        falls += (record.terminated * alive).sum()
        alive = alive * ~record.done
        obs, critic_obs = record.obs, record.critic_obs
        if not alive.any():
            break
    n = env.num_envs
    figures = {
        "eval": total / n,
        "velocity_error": errors / count,
        "turning_error": turning / count,
        "falls": falls / n,
    }
    return {name: round(float(value), 4) for name, value in figures.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", default="ppo")
    parser.add_argument("--minutes", type=float, default=20.0, help="length of the training")
    parser.add_argument("--steps", type=float, default=1e9, help="most environment steps")
    parser.add_argument("--points", type=int, default=10, help="policies that are saved and scored")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings other than the preset's")
    parser.add_argument("--run", type=Path, required=True, help="folder of the policies")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    env = wrap_env(TASK, "cpu", NUM_JUDGED, args.seed + 1000)
    about = {"task": TASK, "algo": args.algo, "seed": args.seed, "set": " ".join(args.set), "cores": usable_cores()}
    still = score(env, lambda obs: torch.zeros(env.num_envs, env.num_actions))
    report(about | {"arm": "standing still"} | still, args.out)
    runner = open_runner(settings(args), args.run, show_progress=False)
    for path, times in train(runner, 60 * args.minutes, int(args.steps), args.points):
        runner.load(path)
        result = score(env, runner.get_inference_policy())
        walks = result["velocity_error"] < still["velocity_error"] / 2 and result["falls"] <= 0.05
        report(about | {"arm": "trained"} | times | result | {"walks": walks}, args.out)
    print(record_video(args.run))


if __name__ == "__main__":
    main()
