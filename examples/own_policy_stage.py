"""Add a stage to the policy: the difference between command and velocity, computed before the networks."""

import argparse

import torch
from torch import Tensor

from canter.envs import PointRobot
from canter.modules import ActorCritic, register_policy
from canter.runners import OnPolicyRunner


class ErrorMixin(ActorCritic):
    """Appends `command - velocity` to the observation of the actor.

    A stage extends hooks through `super()`: the widths, and what flows from one stage to the next. The same code serves
    single steps (N, ...) and sequences (T, N, ...), and is recorded or captured like the rest of the policy.
    """

    def feature_widths(self, num_actor_obs: int, num_critic_obs: int) -> tuple[int, int]:
        """The widths after this stage, whose output has one more component."""
        self.error_layout = self.feature_layout
        self.feature_layout = self.feature_layout.resized({"error": 2})
        return super().feature_widths(num_actor_obs + 2, num_critic_obs)

    def actor_features(self, obs: Tensor, ctx) -> Tensor:
        """The observation and the error."""
        error = self.error_layout.take(obs, ["command"]) - self.error_layout.take(obs, ["velocity"])
        return super().actor_features(torch.cat([obs, error], -1), ctx)


@register_policy
class ErrorActorCritic(ErrorMixin, ActorCritic):
    """An MLP policy with the error stage; stages of canter may stand beside it in the class statement."""


def main() -> None:
    """Train with and without the stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--out", default="runs/own_policy_stage")
    args = parser.parse_args()

    for name in ("ActorCritic", "ErrorActorCritic"):
        cfg = {"num_steps_per_env": 24, "seed": 1}
        cfg["algorithm"] = {"num_learning_epochs": 5, "num_mini_batches": 4, "schedule": "adaptive"}
        cfg["policy"] = {"class_name": name, "actor_hidden_dims": [32], "critic_hidden_dims": [64, 64]}
        runner = OnPolicyRunner(PointRobot(64, seed=1), cfg, log_dir=f"{args.out}/{name}", device="cpu")
        runner.learn(total_timesteps=args.steps)
        print(name, "mean return", runner.eval(num_episodes=64)["eval/mean_reward"])
        runner.close()


if __name__ == "__main__":
    main()
