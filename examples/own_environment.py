"""Write an environment as tensor code, check it, and train PPO on thousands of copies of it."""

import argparse

import torch
from gymnasium import spaces
from torch import Tensor

from canter.envs import TorchEnv, check_env
from canter.runners import OnPolicyRunner


class Hover(TorchEnv):
    """Hold a drone at a height: thrust against gravity, with an unknown weight that only the critic observes.

    A TorchEnv is three functions on a dict of (N, ...) tensors; resets, time limits and final observations are
    inherited.
    """

    obs_space = spaces.Box(-10.0, 10.0, (3,))
    critic_obs_space = spaces.Box(-10.0, 10.0, (4,))
    action_space = spaces.Box(-1.0, 1.0, (1,))
    max_episode_length = 100

    def initial_state(self, n: int) -> dict[str, Tensor]:
        """Height, speed, target and weight at the start of `n` episodes."""
        names = {"height": (0.5, 1.5), "speed": (-0.1, 0.1), "target": (0.5, 1.5), "weight": (0.8, 1.2)}
        return {name: self.uniform(n, 1, low, high) for name, (low, high) in names.items()}

    def dynamics(self, state: dict[str, Tensor], action: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """The state after 0.05 s, the reward, and where the drone has crashed."""
        thrust = 10.0 * (1.0 + action.clamp(-1.0, 1.0))
        speed = state["speed"] + 0.05 * (thrust / state["weight"] - 9.81)
        height = state["height"] + 0.05 * speed
        error = (height - state["target"]).abs().squeeze(1)
        has_crashed = (height < 0.0).squeeze(1) | (height > 3.0).squeeze(1)
        return {**state, "height": height, "speed": speed}, 1.0 - error - 5.0 * has_crashed, has_crashed

    def observe(self, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """What the policy observes, and what its critic does."""
        obs = torch.cat([state["height"], state["speed"], state["target"]], 1)
        return obs, torch.cat([obs, state["weight"]], 1)


def main() -> None:
    """Check the environment and train on it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2_000_000)
    parser.add_argument("--out", default="runs/own_environment")
    parser.add_argument("--num-envs", type=int, default=1024)
    args = parser.parse_args()

    print(report := check_env(Hover(16), num_steps=150))
    assert report.ok

    cfg = {"num_steps_per_env": 24, "seed": 1}
    cfg["algorithm"] = {"num_learning_epochs": 5, "num_mini_batches": 4, "schedule": "adaptive", "gamma": 0.99}
    cfg["algorithm"] |= {"entropy_coef": 0.002, "empirical_normalization": True}
    cfg["policy"] = {"actor_hidden_dims": [64, 64], "critic_hidden_dims": [64, 64]}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runner = OnPolicyRunner(Hover(args.num_envs, device), cfg, log_dir=args.out, device=device)
    runner.learn(total_timesteps=args.steps)
    print("mean return", runner.eval(num_episodes=64)["eval/mean_reward"])  # 100 is perfect
    runner.close()


if __name__ == "__main__":
    main()
