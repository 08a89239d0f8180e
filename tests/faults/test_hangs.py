"""A run that waits for a hung environment ends soon after one signal, with its state saved."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from canter.utils.checkpoint import newest_valid_checkpoint

PLUGIN = '''
import pathlib, time
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Hangs(CartPoleEnv):
    """Hangs for good after 100 steps."""
    num_steps = 0

    def step(self, action):
        self.num_steps += 1
        while self.num_steps > 100:
            pathlib.Path("hangs").touch()
            time.sleep(0.1)
        return super().step(action)

gymnasium.register("Hangs-v0", Hangs, max_episode_steps=20)
'''
FLAGS = "--workers 2 --num-envs 2 --num-steps-per-env 16 --num-mini-batches 1 --num-learning-epochs 1 --name r "
FLAGS += "--eval-interval 0 --save-interval 1"
SEVERAL = (
    "import gymnasium, hangs\nfrom canter.runners import OnPolicyRunner\n"
    + """
if __name__ == "__main__":
    env = gymnasium.vector.AsyncVectorEnv([lambda: gymnasium.make("Hangs-v0")] * 2)
    cfg = {"num_steps_per_env": 16, "save_interval": 1, "device": "cpu", "logger_backend": []}
    OnPolicyRunner(env, cfg, log_dir="runs/Hangs-v0/r-seed1", show_progress=False).learn(100)
"""
)


@pytest.mark.parametrize(
    ("name", "is_gymnasium"),
    [
        pytest.param("SIGTERM", False, id="term"),
        pytest.param("SIGINT", False, id="int", marks=pytest.mark.slow),
        pytest.param("SIGTERM", True, id="async", marks=pytest.mark.slow),
    ],
)
def test_one_signal_ends_a_run_that_waits_for_a_hung_worker(tmp_path, name, is_gymnasium):
    (tmp_path / "hangs.py").write_text(PLUGIN)
    (tmp_path / "script.py").write_text(SEVERAL)
    environment = {**os.environ, "CANTER_PLUGINS": "hangs", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = ["-m", "canter.cli", "train", "Hangs-v0", *FLAGS.split()]
    command = ["script.py"] if is_gymnasium else command
    with (tmp_path / "output").open("w") as output:
        options = {"stdout": output, "stderr": output, "env": environment, "cwd": tmp_path}
        start = time.monotonic()
        process = subprocess.Popen([sys.executable, *command], **options, start_new_session=True)
    while not (tmp_path / "hangs").exists():
        assert process.poll() is None, (tmp_path / "output").read_text()
        assert time.monotonic() < start + 300
        time.sleep(0.05)
    busy = max(1.0, (time.monotonic() - start) / 15)  # on a machine with nothing else to do it starts in less than 15 s
    time.sleep(busy)
    begin = time.monotonic()
    os.kill(process.pid, signal.SIGINT if name == "SIGINT" else signal.SIGTERM)
    try:
        code = process.wait(timeout=200)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert time.monotonic() - begin < 15 * busy
    assert code == (130 if name == "SIGINT" else 143)
    text = (tmp_path / "output").read_text()
    # Gymnasium's workers reset in a step of their own, so the one with fewer ends of episodes hangs first, and later.
    assert re.search("environment worker [01] hangs: no answer for", text), text
    assert newest_valid_checkpoint(tmp_path / "runs" / "Hangs-v0" / "r-seed1").name in {"model_6.pt", "model_7.pt"}
