"""Trainings to be killed: for every line `DIRECTORY ITERATIONS MODE` on stdin a process is forked that trains there.

Prints its process id when it starts and its wait status when it has ended. Forking from one process that has imported
everything makes a training start in milliseconds.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # torch.optim imports it in its first step, which takes seconds

from canter.envs.torch_envs import PointRobot
from canter.runners import OnPolicyRunner
from canter.utils.checkpoint import newest_valid_checkpoint
from canter.utils.runtime import StopSignal

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background ignore it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and this one under nohup

CFG = {
    "seed": 3,
    "num_steps_per_env": 4,
    "save_interval": 1,
    "logger_backend": [],
    "keep_checkpoints": 3,
    "algorithm": {"class_name": "PPO", "num_mini_batches": 2, "empirical_normalization": True, "schedule": "adaptive"},
    "policy": {"class_name": "ActorCritic", "actor_hidden_dims": [64, 64], "critic_hidden_dims": [64, 64]},
}


def make_runner(directory, **cfg):
    env = PointRobot(4, max_episode_length=11)
    return OnPolicyRunner(env, {**CFG, **cfg}, log_dir=directory, device="cpu", show_progress=False)


def wait_for_signal(directory):
    end = time.monotonic() + 120
    while not (Path(directory) / "signalled").exists() and time.monotonic() < end:
        time.sleep(0.01)


def train(directory, iterations, mode):
    """Continue whatever is there until `iterations` are done; a note says where it continued."""
    runner = make_runner(directory)
    if list(Path(directory).glob("model_*.pt")):
        runner.load(newest_valid_checkpoint(directory))
    (Path(directory) / "resumed_at").write_text(str(runner.iteration))
    if mode == "handler":
        signal.signal(signal.SIGTERM, lambda *_: (Path(directory) / "user_handler").touch())
    if mode == "slow_save":
        real = runner.checkpoints.save_periodic

        def save():
            (Path(directory) / "saving").touch()
            wait_for_signal(directory)
            real()

        runner.checkpoints.save_periodic = save
    if mode == "slow":
        started = Path(directory) / "rollout"
        runner.add_callback("pre_update", lambda r: (started.touch(), time.sleep(0.4)))
    if mode.startswith("waits"):  # after so many iterations, until a second signal; a first one does not end a sleep
        started, number = Path(directory) / "rollout", int(mode.removeprefix("waits"))
        runner.add_callback("pre_update", lambda r: r.iteration == number and (started.touch(), time.sleep(300.0)))
    handle = StopSignal._handle

    def handle_and_note(self, *args):
        handle(self, *args)
        (Path(directory) / "signalled").touch()

    StopSignal._handle = handle_and_note
    runner.learn(max(0, iterations - runner.iteration))
    (Path(directory) / "returned").write_text(str(runner.iteration))


def main():
    torch.set_num_threads(1)
    for line in sys.stdin:
        directory, iterations, mode = line.rstrip("\n").split("\t")
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                with open(Path(directory) / "stderr", "a") as log:
                    os.dup2(log.fileno(), 2)
                train(directory, int(iterations), mode)
                status = 0
            except SystemExit as end:
                status = end.code
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(status)
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)


if __name__ == "__main__":
    main()
