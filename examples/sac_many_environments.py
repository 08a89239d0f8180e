"""SAC on thousands of environments: the profile `massive`, large batches and several updates per step."""

import argparse

import torch

from canter.envs import PointRobot
from canter.runners import OffPolicyRunner


def main() -> None:
    """Train on a GPU if there is one; on a CPU use fewer environments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2_000_000)
    parser.add_argument("--out", default="runs/sac_many_environments")
    parser.add_argument("--num-envs", type=int, default=4096)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    # The profile is a group of settings; any of them can be given beside it.
    algorithm = {"class_name": "SAC", "profile": "massive", "learning_starts": 10 * args.num_envs}
    if device == "cpu":
        algorithm |= {"batch_size": 512, "gradient_steps": 2, "precision": "fp32"}
    cfg = {"seed": 1, "algorithm": algorithm, "log_interval": 20 * args.num_envs, "save_interval": 0}
    runner = OffPolicyRunner(PointRobot(args.num_envs, device), cfg, log_dir=args.out, device=device)
    runner.learn(total_timesteps=args.steps)
    print("mean return", runner.eval(num_episodes=64)["eval/mean_reward"])
    runner.close()


if __name__ == "__main__":
    main()
