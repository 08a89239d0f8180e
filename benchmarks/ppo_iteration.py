"""Time of one PPO iteration with an environment that costs nothing: canter against rsl_rl (and skrl), in one process.

    python benchmarks/ppo_iteration.py                       # 4096 envs x 24 steps, MLP 512-256-128
    python benchmarks/ppo_iteration.py --recurrent           # LSTM 256
    python benchmarks/ppo_iteration.py --envs 32768 --peers rsl_rl

Peers come from PyPI (`pip install rsl-rl-lib skrl`) in an environment of their own; one that is missing is left out.
Every library gets the same tensors, networks, epochs, minibatches and schedule, and bootstraps time-outs from the value
of the state before the step, which is all a peer can do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch

from canter.bench.iteration import NullEnv, Workload, null_runner, time_iterations

warnings.filterwarnings("ignore")


class RslRlView:
    """The same environment as rsl_rl wants it."""

    def __init__(self, env):
        from tensordict import TensorDict

        self.env, self.cfg, self.num_actions = env, {}, env.num_actions
        self.num_envs, self.device, self.max_episode_length = env.num_envs, str(env.device), 1000
        self.episode_length_buf = env.episode_length_buf
        self.group = lambda obs, critic: TensorDict({"actor": obs, "critic": critic}, batch_size=[env.num_envs])

    def get_observations(self):
        return self.group(*self.env.get_observations())

    def step(self, actions):
        record = self.env.step(actions)
        obs = self.group(record.obs, record.critic_obs)
        return obs, record.reward, record.truncated.long(), {"time_outs": record.truncated}


def workload(args):
    """What canter is given: the same sizes, in its own names."""
    return Workload(
        num_envs=args.envs, num_steps_per_env=args.steps, num_obs=args.obs, num_critic_obs=args.critic_obs,
        num_actions=args.actions, hidden_dims=tuple(args.hidden), num_learning_epochs=args.epochs,
        num_mini_batches=args.minibatches, rnn_type=args.rnn_type if args.recurrent else None,
        rnn_hidden_size=args.rnn_size,
    )  # fmt: skip


def time_canter(args, env, execution, precision):
    runner = null_runner(env, workload(args), execution, precision)
    timing = time_iterations(runner, args.warm_up, args.iterations)
    waits = count_waits(runner) if env.device.type == "cuda" else None
    return summary(args, timing.collect, timing.learn, timing.ready, waits)


def count_waits(runner):
    """How often the host waits for the device in one iteration."""
    torch.cuda.set_sync_debug_mode("warn")
    for fns in runner.callbacks.by_event.values():
        fns.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runner.learn(1)
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(w.message) for w in caught)


def time_rsl_rl(args, env):
    from rsl_rl.runners import OnPolicyRunner as Peer

    model = {"class_name": "MLPModel", "hidden_dims": args.hidden, "activation": "elu", "obs_normalization": True}
    if args.recurrent:
        rnn = {"rnn_type": args.rnn_type, "rnn_hidden_dim": args.rnn_size, "rnn_num_layers": 1}
        model |= {"class_name": "RNNModel", **rnn}
    gaussian = {"distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 1.0}}
    algorithm = {
        "class_name": "PPO", "num_learning_epochs": args.epochs, "num_mini_batches": args.minibatches, "gamma": 0.99,
        "lam": 0.95, "entropy_coef": 0.01, "schedule": "adaptive", "desired_kl": 0.01, "learning_rate": 1e-3,
    }  # fmt: skip
    cfg = {
        "num_steps_per_env": args.steps, "save_interval": 10**9, "algorithm": algorithm,
        "obs_groups": {"actor": ["actor"], "critic": ["critic"]},
        "actor": model | gaussian, "critic": dict(model), "multi_gpu": None,
    }  # fmt: skip
    torch.set_float32_matmul_precision("high" if args.precision != "fp32" else "highest")
    peer = Peer(RslRlView(env), cfg, None, str(env.device))
    rows, stamps = [], []
    returns, update = peer.alg.compute_returns, peer.alg.update

    def stamp():
        torch.cuda.synchronize() if env.device.type == "cuda" else None
        stamps.append(time.perf_counter())

    def timed_returns(obs):
        result = returns(obs)
        stamp()
        return result

    def timed_update():
        result = update()
        stamp()
        return result

    peer.alg.compute_returns, peer.alg.update = timed_returns, timed_update
    begin = time.perf_counter()
    peer.learn(min(args.warm_up, 3))
    ready = time.perf_counter() - begin
    for _ in range(args.iterations):
        stamps.clear()
        stamp()
        peer.learn(1)
        rows.append(((stamps[1] - stamps[0]) * 1e3, (stamps[2] - stamps[1]) * 1e3))
    torch.set_float32_matmul_precision("highest")
    collect, learn = (statistics.median(column) for column in zip(*rows, strict=True))
    return summary(args, collect, learn, ready, None)


def gemm_floor(args, device, precision):
    """Milliseconds that the matrix products of one update take by themselves."""
    batch, total = args.envs * args.steps // args.minibatches, 0.0
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    for first, last in ((args.obs, args.actions), (args.critic_obs, 1)):
        sizes = [-(-first // 8) * 8, *args.hidden, last]
        for i, (n_in, n_out) in enumerate(pairwise(sizes)):
            shapes = ((batch, n_in), (n_in, n_out), (batch, n_out))
            x, w, g = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
            products = [lambda x=x, w=w: x @ w, lambda x=x, g=g: x.T @ g] + ([lambda g=g, w=w: g @ w.T] if i else [])
            for product in products:
                for _ in range(3):
                    product()
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(20):
                    product()
                torch.cuda.synchronize()
                total += (time.perf_counter() - begin) / 20
    torch.set_float32_matmul_precision("highest")
    return total * 1e3 * args.epochs * args.minibatches


def summary(args, collect, learn, ready, waits):
    memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    rate = args.envs * args.steps / (collect + learn) * 1e3
    return {"collect": collect, "learn": learn, "iteration": collect + learn, "rate": rate, "ready": ready,
            "waits": waits, "memory": memory}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("envs", 4096), ("steps", 24), ("obs", 48), ("critic-obs", 235), ("actions", 12),
                          ("epochs", 5), ("minibatches", 4), ("iterations", 20), ("warm-up", 8),
                          ("rnn-size", 256)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--hidden", type=int, nargs="*", default=[512, 256, 128])
    parser.add_argument("--recurrent", action="store_true")
    parser.add_argument("--rnn-type", default="lstm")
    parser.add_argument("--precision", default="tf32", help="what rsl_rl and the first canter rows use")
    parser.add_argument("--ours", nargs="*", default=["eager:tf32", "graph:tf32", "auto:tf32", "auto:bf16"])
    parser.add_argument("--peers", nargs="*", default=["rsl_rl"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    results = {}
    for name in args.peers:
        fresh(device)
        with left_out_if_missing(name):
            results[name] = {"rsl_rl": time_rsl_rl}[name](args, NullEnv(workload(args), device))
    for variant in args.ours:
        execution, _, precision = variant.partition(":")
        fresh(device)
        results[f"canter {execution} {precision}"] = time_canter(
            args, NullEnv(workload(args), device), execution, precision
        )
    show(results)
    if device.type == "cuda" and not args.recurrent:
        floors = {p: gemm_floor(args, device, p) for p in ("tf32", "bf16")}
        print("matrix products alone: " + ", ".join(f"{p} {ms:.1f} ms" for p, ms in floors.items()))
        results["gemm_floor"] = floors
    if args.out:
        given = {name: str(value) for name, value in vars(args).items() if name != "out"}
        args.out.write_text(json.dumps({"args": given, "results": results}, indent=1))


@contextmanager
def left_out_if_missing(name):
    try:
        yield
    except ImportError as error:
        print(f"{name} is left out: {error}")


def fresh(device):
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def show(results):
    peer = next((r["iteration"] for name, r in results.items() if not name.startswith("canter")), None)
    print(f"{'':24}{'collect':>9}{'learn':>9}{'iteration':>11}{'steps/s':>12}{'ratio':>8}"
          f"{'ready s':>9}{'waits':>7}{'GiB':>7}")  # fmt: skip
    for name, r in results.items():
        ratio = f"{peer / r['iteration']:.2f}x" if peer else "-"
        print(f"{name:24}{r['collect']:9.2f}{r['learn']:9.2f}{r['iteration']:11.2f}{r['rate']:12,.0f}{ratio:>8}"
              f"{r['ready']:9.1f}{r['waits'] if r['waits'] is not None else '-':>7}{r['memory']:7.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
