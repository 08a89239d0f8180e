"""Runs to interrupt and continue; `python resume_cases.py DIR` continues every one of them in a process of its own."""

import random
import sys
from pathlib import Path

import numpy as np
import torch

from canter.envs.torch_envs import PointRobot
from canter.runners import OnPolicyRunner

HALF = 2
RND = {"weight": 0.5, "num_outputs": 4, "predictor_hidden_dims": [8], "target_hidden_dims": [8]}
RND |= {"state_normalization": True, "reward_normalization": True}
RND |= {"weight_schedule": {"mode": "linear", "final_step": 40, "final_value": 0.1}}
EVERYTHING = {"empirical_normalization": True, "normalize_rewards": True, "rnd_cfg": RND}
CASES = {
    "mlp": ({}, {**EVERYTHING, "schedule": "linear", "clip_schedule": "linear"}),
    "mlp_adaptive": ({}, {"schedule": "adaptive", "desired_kl": 0.001, "learning_rate": 0.003}),
    "mlp_sgd": ({}, {"optimizer_class_name": "SGD", "schedule": "linear"}),
    "mlp_rmsprop": ({}, {"optimizer_class_name": "RMSprop", "schedule": "adaptive", "desired_kl": 0.001}),
    "lstm": ({"rnn_type": "lstm"}, {**EVERYTHING, "schedule": "adaptive", "desired_kl": 0.001}),
    "gru": ({"rnn_type": "gru"}, {**EVERYTHING, "schedule": "linear"}),
}


class NoisyRobot(PointRobot):
    """A point robot whose rewards also need the three global generators, as those of many simulators do."""

    def step(self, actions):
        record = super().step(actions)
        noise = 0.1 * (random.random() + np.random.random() + torch.rand(self.num_envs))
        parts = {"task": record.reward, "noise": noise}
        return record._replace(reward=record.reward + noise, extras={**record.extras, "reward_components": parts})


def make_runner(case, log_dir=None):
    policy, algorithm = CASES[case]
    cfg = {
        "seed": 5,
        "num_steps_per_env": 4,
        "max_iterations": 2 * HALF,
        "save_interval": 0,
        "extra_log_keys": ["log", "reward_components"],
        "algorithm": {"class_name": "PPO", "num_mini_batches": 2, "execution": "eager", **algorithm},
        "policy": {
            "class_name": "ActorCriticRecurrent" if policy else "ActorCritic",
            "actor_hidden_dims": [8],
            "critic_hidden_dims": [8],
            **({"rnn_hidden_size": 6} if policy else {}),
            **policy,
        },
    }
    return OnPolicyRunner(NoisyRobot(3, max_episode_length=7), cfg, log_dir=log_dir, show_progress=False)


def train(runner, iterations):
    """What the last half logged, but for how long it took."""
    history = runner.learn(iterations).history[-HALF:]
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in history]


def main(directory):
    torch.set_num_threads(1)
    for case in CASES:
        runner = make_runner(case)
        runner.load(directory / case / f"model_{HALF}.pt")
        runner.save(directory / case / "resumed.pt", infos=train(runner, HALF))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
