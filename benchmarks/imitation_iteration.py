"""Time of one iteration of APPO (with its gradient penalty) and of TPPO, eager against captured.

    python benchmarks/imitation_iteration.py                    # 4096 envs x 24 steps, MLP 512-256-128
    python benchmarks/imitation_iteration.py --recurrent --algorithms tppo

The environment costs nothing, as in ppo_iteration.py, so what is timed is the learner. Milliseconds are medians.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch
from report import report

from canter.bench import NullEnv, Workload, time_iterations
from canter.runners import AmpPolicyRunner, OnPolicyRunner

FRAMES, FEATURES = 2, 45
DISCRIMINATOR = {
    "input_dim": FRAMES * FEATURES,
    "style_reward_coef": 2.0,
    "hidden_dims": [1024, 512],
    "discriminator_grad_pen": 10.0,
    "task_reward_lerp": 0.3,
}
VARIANTS = ("eager:tf32", "graph:tf32", "auto:tf32", "auto:bf16")


class NullMotionEnv(NullEnv):
    """The null environment with motion features."""

    def __init__(self, work, device):
        super().__init__(work, device)
        self.features = [torch.randn(work.num_envs, FRAMES, FEATURES, device=self.device) for _ in range(8)]

    def step(self, actions):
        record = super().step(actions)
        window = self.features[self.t % 8]
        return record._replace(extras={"observations": {"ref_obs": window}})


def make_runner(algorithm, work, device, execution, precision):
    policy = {"actor_hidden_dims": list(work.hidden_dims), "critic_hidden_dims": list(work.hidden_dims)}
    if work.rnn_type is not None:
        policy |= {"rnn_type": work.rnn_type, "rnn_hidden_size": work.rnn_hidden_size}
    ending = "" if work.rnn_type is None else "Recurrent"
    settings = {
        "num_learning_epochs": work.num_learning_epochs,
        "num_mini_batches": work.num_mini_batches,
        "gamma": 0.99,
        "schedule": "adaptive",
        "empirical_normalization": True,
        "execution": execution,
        "precision": precision,
        "timeout_bootstrap": "current_value",
    }
    cfg = {"num_steps_per_env": work.num_steps_per_env, "log_interval": 0, "seed": 1}
    if algorithm == "appo":
        policy |= {"class_name": f"AmpActorCritic{ending}", "amp_discriminator": DISCRIMINATOR}
        bank = torch.randn(100_000, FRAMES * FEATURES, device=device)
        settings |= {"class_name": "APPO", "amp_motion_loader": bank, "amp_replay_buffer_size": 200_000}
        env, runner_class = NullMotionEnv(work, device), AmpPolicyRunner
    else:
        policy |= {"class_name": f"ActorCritic{ending}"}
        teacher = {
            "class_name": "ActorCritic",
            "num_actor_obs": work.num_critic_obs,
            "num_actions": work.num_actions,
            "num_critic_obs": work.num_critic_obs,
            "actor_hidden_dims": list(work.hidden_dims),
        }
        settings |= {"class_name": "TPPO", "teacher_policy": teacher, "teacher_act_prob": 0.2}
        env, runner_class = NullEnv(work, device), OnPolicyRunner
    return runner_class(env, {**cfg, "policy": policy, "algorithm": settings}, None, device, show_progress=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="*", default=["appo", "tppo"], choices=["appo", "tppo"])
    parser.add_argument("--variants", nargs="*", default=VARIANTS, help="execution:precision")
    parser.add_argument("--envs", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--hidden", type=int, nargs="*", default=[512, 256, 128])
    parser.add_argument("--recurrent", action="store_true")
    parser.add_argument("--warm-up", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    work = Workload(
        num_envs=args.envs,
        num_steps_per_env=args.steps,
        hidden_dims=tuple(args.hidden),
        rnn_type="lstm" if args.recurrent else None,
    )
    device = torch.device(args.device)
    print(f"{'':24}{'collect':>9}{'learn':>9}{'iteration':>11}{'steps/s':>12}{'ratio':>8}")
    for algorithm in args.algorithms:
        first = None
        for variant in args.variants:
            execution, _, precision = variant.partition(":")
            runner = make_runner(algorithm, work, device, execution, precision or "tf32")
            timing = time_iterations(runner, args.warm_up, args.iterations)
            first = first or timing.iteration
            name, ratio = f"{algorithm} {execution} {precision}", first / timing.iteration
            print(
                f"{name:24}{timing.collect:9.2f}{timing.learn:9.2f}{timing.iteration:11.2f}{timing.rate:12,.0f}"
                f"{ratio:7.2f}x  {', '.join(sorted(runner.alg.executor.eager_only))}",
                flush=True,
            )
            how = {"algorithm": algorithm.upper(), "envs": args.envs, "execution": execution, "precision": precision}
            times = {"collect": timing.collect, "learn": timing.learn, "iteration": timing.iteration}
            report({**how, **times, "rate": timing.rate, "ratio": ratio}, args.out)


if __name__ == "__main__":
    main()
