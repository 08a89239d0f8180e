"""Learn a task in the style of a motion clip: a discriminator rewards motion that looks like the clip."""

import argparse
import math

import torch
from torch import Tensor

from canter.envs import MotionFeatures, PointRobot
from canter.envs.components import windows
from canter.runners import AmpPolicyRunner


def make_clip(num_frames: int = 400) -> Tensor:
    """Velocities of an expert that moves to the right and weaves, at the control rate of the robot."""
    time = torch.arange(num_frames) * 0.1
    weave = 0.2 * torch.sin(2 * math.pi * 0.5 * time)
    return torch.stack([torch.full_like(time, 0.8), weave], 1) + 0.02 * torch.randn(num_frames, 2)


def main() -> None:
    """Train with the style of the clip alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--out", default="runs/motion_prior")
    args = parser.parse_args()

    torch.manual_seed(1)
    clip = make_clip()
    # Windows of two frames of the same quantity, from the policy and from the clip, at the same rate.
    env = MotionFeatures(PointRobot(64, seed=1), ["true_velocity"], frames=2, privileged=True)
    algorithm = {"class_name": "APPO", "amp_motion_loader": windows(clip, 2), "discriminator_learning_rate": 5e-4}
    algorithm |= {"num_learning_epochs": 5, "num_mini_batches": 4, "schedule": "adaptive"}
    # total reward = (1 - task_reward_lerp) * style + task_reward_lerp * task
    discriminator = {"input_dim": 4, "hidden_dims": [64, 64], "style_reward_coef": 1.0, "task_reward_lerp": 0.0}
    policy = {"class_name": "AmpActorCritic", "amp_discriminator": discriminator}
    policy |= {"actor_hidden_dims": [64, 64], "critic_hidden_dims": [64, 64]}
    cfg = {"num_steps_per_env": 24, "seed": 1, "algorithm": algorithm, "policy": policy}
    runner = AmpPolicyRunner(env, cfg, args.out, "cpu")
    runner.learn(total_timesteps=args.steps)

    act = runner.get_inference_policy()
    robots = PointRobot(64, seed=2)
    obs, _ = robots.reset()
    velocities = []
    for _ in range(100):
        record = robots.step(act(obs))
        obs = record.obs
        velocities.append(obs[:, :2])
    mean = torch.stack(velocities[20:]).mean((0, 1)).tolist()
    print(f"mean velocity of the clip {clip.mean(0).tolist()}, of the policy {mean}")
    runner.close()


if __name__ == "__main__":
    main()
