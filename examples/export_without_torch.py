"""Export a policy as a bundle, and run it in a process that cannot import torch, as on a robot's computer."""

import argparse
import subprocess
import sys
from pathlib import Path

import canter
from canter.envs import PointRobot
from canter.export.bundle import export_bundle
from canter.runners import OnPolicyRunner

# On a robot this is a file beside the bundle; it needs numpy and onnxruntime.
ROBOT = """
import sys
sys.modules["torch"] = None  # a robot's computer has none
import numpy as np
from runtime import Policy

policy = Policy(".")
policy.reset()
for step in range(3):
    print("action", policy.predict(np.full(6, 0.1 * step)))
print("microseconds per step", round(1e6 * policy.latency(200)["median"]))
"""


def main() -> None:
    """Train a recurrent policy, export it with its checks, and run the bundle."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--out", default="runs/export_without_torch")
    args = parser.parse_args()

    policy = {"class_name": "ActorCriticRecurrent", "rnn_type": "gru", "rnn_hidden_size": 32}
    policy |= {"actor_hidden_dims": [32], "critic_hidden_dims": [64]}
    algorithm = {"num_learning_epochs": 5, "num_mini_batches": 4, "schedule": "adaptive"}
    cfg = {"num_steps_per_env": 24, "seed": 1, "policy": policy, "algorithm": algorithm}
    runner = OnPolicyRunner(PointRobot(64, seed=1), cfg, log_dir=args.out, device="cpu")
    runner.learn(total_timesteps=args.steps)
    runner.close()

    bundle = Path(args.out) / "bundle"
    made = export_bundle(canter.load(args.out), bundle, env=PointRobot(3))
    print("largest differences from the policy in torch", made.parity)
    done = subprocess.run([sys.executable, "-c", ROBOT], cwd=bundle, capture_output=True, text=True, check=True)
    print(done.stdout)


if __name__ == "__main__":
    main()
