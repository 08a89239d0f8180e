"""Collectors and trainers to be killed: every line `ROLE DATA RUN` on stdin forks a process that plays the role.

Prints its process id. The two know nothing of each other but the data directory and the run directory.
"""

import os
import signal
import sys
import warnings
from pathlib import Path

import torch
import torch._dynamo  # torch.optim imports it in its first step, which takes seconds

from canter.envs.torch_envs import PointRobot
from canter.runners.dagger_saver import DaggerSaver
from canter.runners.two_stage_runner import TwoStageRunner
from canter.utils.checkpoint import newest_valid_checkpoint

NUM_ENVS = 3


class Teacher:
    """Drives against the error of the velocity."""

    def act_inference(self, obs):
        return (obs[:, 2:4] - obs[:, 0:2]).clamp(-1, 1)

    act = act_inference

    def reset(self, dones=None):
        pass


def train(data, run):
    """Learn from whatever is there, saving after every iteration; continue the last life."""
    cfg = {
        "seed": 1,
        "num_steps_per_env": 8,
        "save_interval": 1,
        "keep_checkpoints": 3,
        "logger_backend": [],
        "pretrain_iterations": -1,
        "pretrain_dataset": {
            "data_dir": data,
            "dataset_loops": -1,
            "keep_latest_n_trajs": 4,
            "wait_interval_s": 0.02,
            "seed": 1,
        },
        "algorithm": {"class_name": "TPPO", "using_ppo": False, "distill_target": "mse_sum"},
        "policy": {"class_name": "ActorCritic", "actor_hidden_dims": [16], "critic_hidden_dims": [4]},
    }
    runner = TwoStageRunner(PointRobot(NUM_ENVS), cfg, log_dir=run, device="cpu", show_progress=False)
    if list(Path(run).glob("model_*.pt")):
        runner.load(newest_valid_checkpoint(run))
    (Path(run) / "resumed_at").write_text(str(runner.iteration))
    runner.learn(10**9)


def collect(data, run):
    """Collect for ever with the newest student."""
    env = PointRobot(NUM_ENVS, max_episode_length=11)
    saver = DaggerSaver(
        env,
        Teacher(),
        data,
        4,
        training_policy_logdir=run,
        min_timesteps=10**12,
        teacher_act_prob="exp",
        update_times_scale=20,
        show_progress=False,
    )
    saver.collect_and_save()


def main():
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are not kept as zombies
    for line in sys.stdin:
        role, data, run = line.rstrip("\n").split("\t")
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            warnings.simplefilter("ignore")
            try:
                with open(Path(run) / f"{role}.stderr", "a") as log:
                    os.dup2(log.fileno(), 2)
                (train if role == "train" else collect)(data, run)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(1)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
