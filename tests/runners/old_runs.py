"""Small runs whose checkpoints of an earlier version lie in `checkpoints/`; every version must load them.

`python old_runs.py DIR` writes them, with the version that is on PYTHONPATH.
"""

import sys
import warnings
from pathlib import Path

import torch

from canter.envs.torch_envs import PointRobot
from canter.runners import OffPolicyRunner, OnPolicyRunner

NETWORKS = {"actor_hidden_dims": [4], "critic_hidden_dims": [4]}
RND = {"weight": 0.5, "num_outputs": 2, "predictor_hidden_dims": [4], "target_hidden_dims": [4]}
TEACHER = {"class_name": "ActorCritic", "num_actor_obs": 9, "num_critic_obs": 9, "num_actions": 2, **NETWORKS}
CASES = {
    "ppo": ({"class_name": "PPO", "normalize_rewards": True, "rnd_cfg": RND, "value_normalization": "popart"}, {}),
    "ppo_lstm": ({"class_name": "PPO"}, {"class_name": "ActorCriticRecurrent", "rnn_hidden_size": 4}),
    "tppo": (
        {
            "class_name": "TPPO",
            "teacher_policy": TEACHER,
            "lr_scheduler_class_name": "ExponentialLR",
            "lr_scheduler": {"gamma": 0.9},
            "schedule": "fixed",
        },
        {},
    ),
    "sac": ({"class_name": "SAC", "batch_size": 8, "learning_starts": 8, "buffer_size": 64, **NETWORKS}, {}),
    "td3": ({"class_name": "TD3", "batch_size": 8, "learning_starts": 8, "buffer_size": 64, **NETWORKS}, {}),
}


def make_runner(case):
    algorithm, policy = CASES[case]
    cfg = {"seed": 5, "save_interval": 0, "device": "cpu", "algorithm": {"empirical_normalization": True, **algorithm}}
    if case in ("sac", "td3"):
        return OffPolicyRunner(PointRobot(2, max_episode_length=7), cfg, show_progress=False)
    cfg |= {"num_steps_per_env": 4, "policy": {**NETWORKS, **policy}}
    cfg["algorithm"] |= {"num_mini_batches": 2, "num_learning_epochs": 1}
    cfg["algorithm"].setdefault("schedule", "adaptive")
    return OnPolicyRunner(PointRobot(2, max_episode_length=7), cfg, show_progress=False)


def outputs(runner):
    """Deterministic actions for a fixed observation."""
    obs = torch.linspace(-1, 1, 12).view(2, 6)
    return runner.get_inference_policy()(obs)


def learn(runner):
    """A few more iterations."""
    return runner.learn(24) if isinstance(runner, OffPolicyRunner) else runner.learn(2)


def main(directory):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for case in CASES:
        runner = make_runner(case)
        learn(runner)
        actions = outputs(runner)
        runner.alg.train_mode()
        runner.save(directory / f"{case}.pt", infos={"actions": actions.tolist()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
