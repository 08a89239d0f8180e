"""Policies in every exported format: parity, latency per step with one observation, and size; returns from bundles.

python benchmarks/export.py --out benchmarks/results/export.json
python benchmarks/export.py --runs RUN... --out ...      # also: returns of runs and of their bundles without torch
"""

import argparse
import inspect
import json
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from gymnasium import spaces
from report import report

import canter
from canter.export.bundle import export_bundle
from canter.export.parity import TorchScriptPolicy, compiler
from canter.export.runtime import Bundle, Policy
from canter.modules import ActorCritic, ActorCriticRecurrent, EncoderStateAcRecurrent, VisualActorCritic
from canter.modules.actors import MLPSquashedGaussianActor
from canter.modules.q_networks import ActorQPolicy, MLPQNetwork, QPolicy, StackedMLPCritics
from canter.runners.evaluation import InferencePolicy

BIG = {"actor_hidden_dims": (512, 256, 128), "critic_hidden_dims": (64,)}
SMALL = {"actor_hidden_dims": (64, 64), "critic_hidden_dims": (64,)}
SEGMENTS = {"base": (9,), "joints": (24,), "history": (5, 3)}
EPISODES = 20
TIMER = """
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include "policy.h"
static policy_state state;
static double times[20000];
static int less(const void *a, const void *b)
{{
    return (*(double *)a > *(double *)b) - (*(double *)a < *(double *)b);
}}
int main(void)
{{
    static {arrays};
    policy_reset(&state);
    for (int i = 0; i < 20000; i++) {{
        struct timespec a, b;
        clock_gettime(CLOCK_MONOTONIC, &a);
        policy_step(&state, {call});
        clock_gettime(CLOCK_MONOTONIC, &b);
        times[i] = (b.tv_sec - a.tv_sec) + 1e-9 * (b.tv_nsec - a.tv_nsec);
    }}
    qsort(times, 20000, sizeof(double), less);
    printf("%g %g", times[10000], times[19800]);
    return 0;
}}
"""
# Runs a bundle's episodes where torch cannot be imported.
WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None
from canter.export.runtime import Policy
from canter.export.simulation import make_task
policy = Policy(sys.argv[1])
print(json.dumps(totals(policy, make_task(policy, None, int(sys.argv[3])), int(sys.argv[2]))))
assert not any(name.startswith("torch.") for name in sys.modules)
"""


def policies():
    """Name -> policy of a robot's size."""
    box, actions = spaces.Box(-np.inf, np.inf, (48,)), spaces.Box(-1.0, 1.0, (12,))
    critics = StackedMLPCritics(box, actions, {}, 2)
    image = {"camera": (1, 48, 64), "state": (30,)}
    encoders = {"encoder_component_names": ("history",), "encoder_class_name": "HistoryEncoder"}
    estimator = {"estimator_target_components": ("base",), "estimator_obs_components": ("joints", "history")}
    yield "MLP 64-64", ActorCritic(17, 17, 6, **SMALL)
    yield "MLP 512-256-128", ActorCritic(48, 48, 12, **BIG)
    yield "GRU 256 + MLP 512-256-128", ActorCriticRecurrent(48, 48, 12, rnn_type="gru", **BIG)
    yield "LSTM 256 + MLP 512-256-128", ActorCriticRecurrent(48, 48, 12, rnn_type="lstm", **BIG)
    yield (
        "Estimator, history encoder, LSTM 256",
        EncoderStateAcRecurrent(
            48, 48, 12, obs_segments=SEGMENTS, replace_state_prob=1.0, **encoders, **estimator, **BIG
        ),
    )
    yield (
        "Camera 48x64 + MLP 512-256-128",
        VisualActorCritic(
            48 * 64 + 30,
            48 * 64 + 30,
            12,
            obs_segments=image,
            visual_component_name="camera",
            visual_kwargs={"channels": (16, 32), "kernel_sizes": (5, 3), "strides": (4, 2)},
            **BIG,
        ),
    )
    yield "SAC 256-256", ActorQPolicy(MLPSquashedGaussianActor(box, actions, {}), critics)
    yield "DQN 256-256", QPolicy(MLPQNetwork(box, spaces.Discrete(4), {}), spaces.Discrete(4))


def measure(policy, folder):
    """Parity, latency and size of one policy."""
    made = export_bundle(InferencePolicy(policy.eval()), folder / "bundle")
    bundle = Bundle(made.path)
    times = {"policy.onnx": Policy(bundle).latency(), "policy.ts": torchscript_latency(bundle)}
    if "policy.c" in bundle.files:
        times["policy.c"] = c_latency(bundle, folder)
    assert made.left_out == {}
    worst = max(made.parity.values())
    kinds = {"policy.onnx": "onnx", "policy.ts": "torchscript", "policy.c": "c"}
    return [
        {
            "format": kinds[name],
            "difference": difference,
            "largest_difference": worst,
            "median_us": 1e6 * times[name]["median"],
            "p99_us": 1e6 * times[name]["p99"],
            "bytes": bundle.spec["files"][name]["bytes"],
        }
        for name, difference in made.parity.items()
    ]


def torchscript_latency(bundle, steps=2000):
    """Seconds per step of policy.ts."""
    policy = TorchScriptPolicy(bundle)
    obs = {port["name"]: bundle.samples[f"input.{port['name']}"][0, :1] for port in bundle.spec["inputs"]}
    times = []
    for _ in range(steps + 50):
        begin = time.perf_counter()
        policy.predict(obs)
        times.append(time.perf_counter() - begin)
    return {"median": float(np.median(times[50:])), "p99": float(np.quantile(times[50:], 0.99))}


def c_latency(bundle, folder, flags=("-O3", "-march=native")):
    """Seconds per step of policy.c in a program of its own."""
    ports = [*bundle.spec["inputs"], *bundle.spec["outputs"]]
    kinds = {"float32": "float", "uint8": "unsigned char", "int64": "int"}
    if len({kinds[port["dtype"]] for port in ports}) > 1:
        declared = "; static ".join(f"{kinds[p['dtype']]} {p['name']}[{np.prod(p['shape'], dtype=int)}]" for p in ports)
    else:
        declared = "float " + ", ".join(f"{port['name']}[{np.prod(port['shape'], dtype=int)}]" for port in ports)
    (folder / "timer.c").write_text(TIMER.format(arrays=declared, call=", ".join(port["name"] for port in ports)))
    program, sources = folder / "timer", [str(folder / "timer.c"), str(bundle.path / "policy.c")]
    include = f"-I{bundle.path}"
    subprocess.run([compiler(), *flags, "-std=gnu99", include, *sources, "-o", program, "-lm"], check=True)
    median, p99 = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()
    return {"median": float(median), "p99": float(p99)}


def totals(policy, task, episodes):
    """Returns of episodes."""
    found = []
    for episode in range(episodes):
        obs, total, is_over = task.reset(episode), 0.0, False
        policy.reset()
        while not is_over:
            obs, reward, terminated, truncated = task.step(policy.predict(obs))
            total, is_over = total + reward, terminated or truncated
        found.append(total)
    return found


class InTorch:
    """The policy of a run, beside its bundle on the same observations, with noise on continuous actions if asked."""

    def __init__(self, acting, policy, noise=0.0):
        self.acting, self.policy, self.noise, self.difference = acting, policy, noise, 0.0
        self.generator = np.random.default_rng(0)

    def reset(self):
        self.acting.reset()
        self.policy.reset()

    def predict(self, obs):
        ours = self.acting.predict(obs["obs"] if set(obs) == {"obs"} else obs)
        self.difference = max(self.difference, float(np.abs(ours - self.policy.predict(obs)).max()))
        return ours if ours.dtype.kind != "f" else ours + self.generator.normal(0.0, self.noise, ours.shape)


def returns(run, folder, episodes=EPISODES, seed=1000):
    """Returns of a run's policy in torch, with and without noise of 1e-7 on its actions, and of its bundle.

    The bundle runs in ONNX Runtime in a process where torch cannot be imported. Where the noise alone changes returns,
    as in chaotic simulations, they are compared by their spread, and actions on the same observations.
    """
    from canter.export.simulation import make_task

    acting = canter.load(run)
    policy = Policy(export_bundle(acting, folder / "bundle", formats=("onnx",)).path)
    ours, noisy = InTorch(acting, policy), InTorch(acting, policy, noise=1e-7)
    found = {
        "run": totals(ours, make_task(policy, None, seed), episodes),
        "run_with_noise": totals(noisy, make_task(policy, None, seed), episodes),
    }
    code = WITHOUT_TORCH.replace("policy = ", inspect.getsource(totals) + "\npolicy = ", 1)
    command = [sys.executable, "-c", code, str(policy.bundle.path), str(episodes), str(seed)]
    found["bundle"] = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    )
    spread = {"mean": np.mean, "median": np.median, "std": np.std}
    rows = {f"{name}_{key}": float(reduce(values)) for name, values in found.items() for key, reduce in spread.items()}
    task = {"task": policy.spec["training"]["task"], "episodes": episodes}
    return {**task, "largest_difference": ours.difference, **rows}


def main(argv=None):
    """Write the matrix."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/export.jsonl"))
    parser.add_argument("--runs", type=Path, nargs="*", default=[])
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name, policy in () if options.runs else policies():
        with tempfile.TemporaryDirectory() as folder:
            for row in measure(policy, Path(folder)):
                report({"policy": name, **row}, options.out)
    for run in options.runs:
        with tempfile.TemporaryDirectory() as folder:
            report(returns(run, Path(folder)), options.out)


if __name__ == "__main__":
    main()
