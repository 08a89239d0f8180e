"""How much code one eager iteration runs through: files, functions and depth of calls.

Trains PPO on CartPole-v1 and traces the second iteration between the callbacks `pre_rollout` and `post_update` with
`sys.setprofile`. Of SAC, TD3 (one Pendulum-v1) and DQN (one CartPole-v1) it traces a step of the environment and the
gradient step after it, from the exploration to the end of `train`. Only canter's own functions count; comprehensions
belong to the function they stand in.

    python benchmarks/iteration_profile.py --calls
    python benchmarks/iteration_profile.py --algorithm sac
    PYTHONPATH=path/to/an/older/src python benchmarks/iteration_profile.py --version 941f2e4
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from report import report

import canter
from canter.algorithms import DQNConfig, SACConfig, TD3Config
from canter.envs import wrap_env
from canter.presets import load_preset
from canter.runners import OffPolicyRunner, OnPolicyRunner

SOURCE = str(Path(canter.__file__).parent)
INNER = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
OFF_POLICY = {"sac": ("Pendulum-v1", SACConfig), "td3": ("Pendulum-v1", TD3Config), "dqn": ("CartPole-v1", DQNConfig)}
TRACED_UPDATE = 20  # a gradient step of the actor too, in TD3


class CallTrace:
    """Counts calls of canter's functions and how deep they nest."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.deepest = 0
        self.deepest_stack: list[str] = []
        self.stack: list[str] = []
        self.iteration = 0

    def start(self, runner) -> None:
        self.iteration += 1
        if self.iteration == 2:  # in the first one, buffers are allocated
            sys.setprofile(self._trace)

    def stop(self, runner, metrics) -> None:
        sys.setprofile(None)

    def _trace(self, frame, event, arg) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(SOURCE) or code.co_name in INNER:
            return
        if event == "call":
            self.calls[code.co_filename[len(SOURCE) + 1 :], getattr(code, "co_qualname", code.co_name)] += 1
            self.stack.append(getattr(code, "co_qualname", code.co_name))
            if len(self.stack) > self.deepest:
                self.deepest, self.deepest_stack = len(self.stack), list(self.stack)
        elif self.stack:
            self.stack.pop()


def trace_ppo() -> CallTrace:
    """The calls of the second iteration of PPO."""
    settings = load_preset("CartPole-v1")
    settings["algorithm"]["execution"] = "eager"
    env = wrap_env("CartPole-v1", num_envs=settings["num_envs"])
    runner = OnPolicyRunner(env, settings, show_progress=False)
    trace = CallTrace()
    runner.add_callback("pre_rollout", trace.start)
    runner.add_callback("post_update", trace.stop)
    runner.learn(2)
    return trace


def trace_off_policy(name: str) -> CallTrace:
    """The calls of a step of the environment and of the gradient step after it."""
    task, config = OFF_POLICY[name]
    cfg = config(seed=1, execution="eager", batch_size=64, learning_starts=64)
    runner = OffPolicyRunner(wrap_env(task, num_envs=1), cfg, show_progress=False)
    trace = CallTrace()
    explore, train = runner.rollout_step, runner.alg.train

    def traced_step(*args):
        if runner.alg.num_updates == TRACED_UPDATE - 1:
            sys.setprofile(trace._trace)
        return explore(*args)

    def traced_train(*args):
        try:
            return train(*args)
        finally:
            sys.setprofile(None)

    runner.rollout_step, runner.alg.train = traced_step, traced_train
    runner.learn(total_timesteps=64 + TRACED_UPDATE)
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", choices=("ppo", *OFF_POLICY), default="ppo")
    parser.add_argument("--calls", action="store_true", help="list every function and how often it ran")
    parser.add_argument("--version", default="this version", help="name of what is measured")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    trace = trace_ppo() if options.algorithm == "ppo" else trace_off_policy(options.algorithm)
    files = sorted({file for file, _ in trace.calls})
    if options.calls:
        for (file, name), count in sorted(trace.calls.items()):
            print(f"{count:7d}  {file}:{name}")
    print("files:", ", ".join(files))
    print("deepest:", " > ".join(trace.deepest_stack))
    counts = {"files": len(files), "functions": len(trace.calls), "depth": trace.deepest}
    counts["calls"] = sum(trace.calls.values())
    report({"version": options.version, "algorithm": options.algorithm, **counts}, options.out)


if __name__ == "__main__":
    main()
