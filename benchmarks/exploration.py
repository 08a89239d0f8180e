"""Random network distillation where rewards are rare: a treasure that only one sequence of actions reaches.

    python benchmarks/exploration.py --size 16 --seeds 1 2 3 --out benchmarks/results/exploration.jsonl

A diver sinks one row in each step and moves left or right. The treasure lies in the last column of the last row, and
each move to the right costs a little, so that all rewards but one teach to stay left. A random diver finds it in one of
2^(size - 1) episodes. PPO learns with and without random network distillation; `found` is the number of environment
steps until the first iteration in which most episodes end at the treasure, null if none did.
"""

import argparse
from pathlib import Path

import torch
from gymnasium import spaces
from report import report
from torch import nn

from canter.envs import TorchEnv
from canter.runners import OnPolicyRunner, StopTraining

RND = {"weight": 0.1, "reward_normalization": True}


class Sea(TorchEnv):
    """The diver: its row and its column, each one-hot."""

    action_space = spaces.Discrete(2)

    def __init__(self, size, num_envs, seed):
        self.size = self.max_episode_length = size
        self.obs_space = self.critic_obs_space = spaces.Box(0.0, 1.0, (2 * size,))
        super().__init__(num_envs, "cpu", seed=seed)

    def initial_state(self, n):
        return {"place": torch.zeros(n, 2, dtype=torch.long)}

    def dynamics(self, state, action):
        row, column = state["place"].unbind(1)
        column = (column + 2 * action.long() - 1).clamp(0, self.size - 1)
        has_ended = row + 1 == self.size - 1
        reward = (has_ended & (column == self.size - 1)).float() - 0.01 / self.size * action
        return {"place": torch.stack([row + 1, column], 1)}, reward, has_ended

    def observe(self, state):
        return nn.functional.one_hot(state["place"], self.size).flatten(1).float()


def train(size, seed, rnd_cfg, steps):
    """Environment steps until most episodes end at the treasure, and the return at the end."""
    algorithm = {
        "num_learning_epochs": 4,
        "num_mini_batches": 4,
        "learning_rate": 1e-3,
        "schedule": "fixed",
        "gamma": 0.99,
        "entropy_coef": 0.0,
        "rnd_cfg": rnd_cfg,
    }
    policy = {"actor_hidden_dims": [64, 64], "critic_hidden_dims": [64, 64], "activation": "tanh"}
    cfg = {"num_steps_per_env": 2 * (size - 1), "seed": seed, "algorithm": algorithm, "policy": policy}
    runner = OnPolicyRunner(Sea(size, 32, seed), cfg, device="cpu", show_progress=False)

    def stop(runner, stats):
        if sum(runner.rewbuffer) > 0.5 * max(1, len(runner.rewbuffer)):
            raise StopTraining

    runner.add_callback("post_iteration", stop)
    runner.learn(total_timesteps=steps)
    recent = sum(runner.rewbuffer) / len(runner.rewbuffer)
    return {"found": runner.tot_timesteps if recent > 0.5 else None, "return": round(recent, 3)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=500_000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for note, rnd_cfg in (("PPO", None), ("PPO with RND", RND)):
        for seed in args.seeds:
            result = {"task": "sea", "size": args.size, "note": note, "seed": seed, "steps": args.steps}
            report({**result, **train(args.size, seed, rnd_cfg, args.steps)}, args.out)


if __name__ == "__main__":
    main()
