"""Add a loss to PPO as an extension: actions that follow each other should differ little."""

import argparse

import torch
from torch import Tensor

from canter.algorithms import PPO, Extension
from canter.envs import PointRobot
from canter.modules import ActorCritic
from canter.runners import OnPolicyRunner
from canter.storage import Field
from canter.utils.config import setting, settings


@settings
class SmoothSettings:
    """Settings of `Smooth`; a setting is declared once, and `alg.smooth_loss_coef` may change at any time."""

    smooth_loss_coef: float = setting(0.1, low=0.0)
    """Weight of the squared change of the mean action; a loss named x has the weight x_coef."""


class Smooth(Extension):
    """Penalises changes of the action from one step to the next."""

    name = "smooth"
    settings_class = SmoothSettings

    def fields(self) -> dict[str, Field]:
        """One more quantity per step in the rollout."""
        return {"previous_action": Field((2,))}

    def begin(self, storage) -> None:
        """Memory of the last action of every environment."""
        self.previous = torch.zeros(storage.num_envs, 2, device=storage.device)

    def after_act(self, step: dict[str, Tensor], obs: Tensor, critic_obs: Tensor) -> None:
        """Store the action before this one."""
        step["previous_action"] = self.previous.clone()
        self.previous.copy_(step["actions"])

    def reset(self, ends: Tensor) -> None:
        """An episode begins with no action."""
        self.previous.masked_fill_(ends.unsqueeze(1), 0.0)

    def losses(self, terms, batch, out) -> None:
        """Add the term; `batch.mean` leaves out steps that do not count."""
        terms.losses["smooth_loss"] = batch.mean((out.mean - batch.previous_action).square().sum(-1))


def roughness(runner: OnPolicyRunner) -> float:
    """Mean squared change of the policy's actions without noise."""
    env, policy = PointRobot(64, seed=2), runner.get_inference_policy()
    obs, _ = env.reset()
    actions = []
    for _ in range(50):
        actions.append(policy(obs))
        obs = env.step(actions[-1]).obs
    return torch.stack(actions).diff(dim=0).square().sum(-1).mean().item()


def main() -> None:
    """Train with and without the loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--out", default="runs/own_loss")
    args = parser.parse_args()

    for weight in (0.0, 0.02):
        torch.manual_seed(1)
        policy = ActorCritic(6, 9, 2, actor_hidden_dims=[64], critic_hidden_dims=[64])
        extensions = [Smooth(smooth_loss_coef=weight)]
        alg = PPO(policy, extensions=extensions, num_learning_epochs=5, num_mini_batches=4, schedule="adaptive", seed=1)
        runner = OnPolicyRunner(PointRobot(64, seed=1), alg, log_dir=f"{args.out}/weight_{weight}")
        runner.learn(total_timesteps=args.steps)
        mean = runner.eval(num_episodes=64)["eval/mean_reward"]
        print(f"weight {weight}: mean return {mean:.1f}, squared change of the action {roughness(runner):.4f}")
        runner.close()


if __name__ == "__main__":
    main()
