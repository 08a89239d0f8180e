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
import statistics
import time
import warnings
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch
from report import report

from canter.bench import NullEnv, Workload, null_runner, time_iterations

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
        num_envs=args.envs,
        num_steps_per_env=args.steps,
        num_obs=args.obs,
        num_critic_obs=args.critic_obs,
        num_actions=args.actions,
        hidden_dims=tuple(args.hidden),
        num_learning_epochs=args.epochs,
        num_mini_batches=args.minibatches,
        rnn_type=args.rnn_type if args.recurrent else None,
        rnn_hidden_size=args.rnn_size,
    )


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
        "class_name": "PPO",
        "num_learning_epochs": args.epochs,
        "num_mini_batches": args.minibatches,
        "gamma": 0.99,
        "lam": 0.95,
        "entropy_coef": 0.01,
        "schedule": "adaptive",
        "desired_kl": 0.01,
        "learning_rate": 1e-3,
    }
    cfg = {
        "num_steps_per_env": args.steps,
        "save_interval": 10**9,
        "algorithm": algorithm,
        "obs_groups": {"actor": ["actor"], "critic": ["critic"]},
        "actor": model | gaussian,
        "critic": dict(model),
        "multi_gpu": None,
    }
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


def time_skrl(args, env):
    """The agent stepped as skrl's sequential trainer steps it; value clipping and KL schedule as skrl has them."""
    from skrl.agents.torch import ppo
    from skrl.memories.torch import RandomMemory
    from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
    from skrl.resources.preprocessors.torch import RunningStandardScaler
    from skrl.resources.schedulers.torch import KLAdaptiveLR
    from torch import nn

    if args.recurrent:
        raise ImportError("its recurrent models are not set up here")
    spaces = {"observation_space": env.obs_space, "state_space": env.critic_obs_space, "action_space": env.action_space}

    def layers(n_in, n_out):
        sizes = [n_in, *args.hidden]
        hidden = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ELU())]
        return nn.Sequential(*hidden, nn.Linear(sizes[-1], n_out))

    class Actor(GaussianMixin, Model):
        def __init__(self):
            Model.__init__(self, **spaces, device=env.device)
            GaussianMixin.__init__(self)
            self.net, self.log_std = layers(args.obs, args.actions), nn.Parameter(torch.zeros(args.actions))

        def compute(self, inputs, role):
            return self.net(inputs["observations"]), {"log_std": self.log_std}

    class Critic(DeterministicMixin, Model):
        def __init__(self):
            Model.__init__(self, **spaces, device=env.device)
            DeterministicMixin.__init__(self)
            self.net = layers(args.critic_obs, 1)

        def compute(self, inputs, role):
            return self.net(inputs["states"]), {}

    scaler = {f"{name}_preprocessor": RunningStandardScaler for name in ("observation", "state")}
    sizes = {"observation": env.obs_space, "state": env.critic_obs_space}
    scaler |= {f"{k}_preprocessor_kwargs": {"size": size, "device": env.device} for k, size in sizes.items()}
    cfg = {
        "rollouts": args.steps,
        "learning_epochs": args.epochs,
        "mini_batches": args.minibatches,
        "discount_factor": 0.99,
        "gae_lambda": 0.95,
        "learning_rate": 1e-3,
        "learning_rate_scheduler": KLAdaptiveLR,
        "learning_rate_scheduler_kwargs": {"kl_threshold": 0.01},
        "grad_norm_clip": 1.0,
        "entropy_loss_scale": 0.01,
        "value_loss_scale": 1.0,
        "time_limit_bootstrap": True,
        **scaler,
        "experiment": {"write_interval": 0, "checkpoint_interval": 0},
    }
    torch.set_float32_matmul_precision("high" if args.precision != "fp32" else "highest")
    memory = RandomMemory(memory_size=args.steps, num_envs=env.num_envs, device=env.device)
    peer = ppo.PPO(
        models={"policy": Actor().to(env.device), "value": Critic().to(env.device)},
        memory=memory,
        cfg=cfg,
        device=env.device,
        **spaces,
    )
    peer.init()
    peer.enable_training_mode(True)

    def synced():
        torch.cuda.synchronize() if env.device.type == "cuda" else None
        return time.perf_counter()

    def iteration():
        obs, critic_obs = env.get_observations()
        start = middle = synced()
        for step in range(args.steps):
            with torch.no_grad():
                actions, _ = peer.act(obs, critic_obs, timestep=step, timesteps=args.steps)
                record = env.step(actions)
                peer.record_transition(
                    observations=obs,
                    states=critic_obs,
                    actions=actions,
                    rewards=record.reward.view(-1, 1).clone(),
                    next_observations=record.obs,
                    next_states=record.critic_obs,
                    terminated=record.terminated.view(-1, 1),
                    truncated=record.truncated.view(-1, 1),
                    infos={},
                    timestep=step,
                    timesteps=args.steps,
                )
                obs, critic_obs = record.obs, record.critic_obs
            if step == args.steps - 1:
                middle = synced()
            peer.post_interaction(timestep=step, timesteps=args.steps)
        return (middle - start) * 1e3, (synced() - middle) * 1e3

    begin = time.perf_counter()
    for _ in range(min(args.warm_up, 3)):
        iteration()
    ready = time.perf_counter() - begin
    rows = [iteration() for _ in range(args.iterations)]
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
    return {
        "collect": collect,
        "learn": learn,
        "iteration": collect + learn,
        "rate": rate,
        "ready": ready,
        "waits": waits,
        "memory": memory,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("envs", 4096),
        ("steps", 24),
        ("obs", 48),
        ("critic-obs", 235),
        ("actions", 12),
        ("epochs", 5),
        ("minibatches", 4),
        ("iterations", 20),
        ("warm-up", 8),
        ("rnn-size", 256),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--hidden", type=int, nargs="*", default=[512, 256, 128])
    parser.add_argument("--recurrent", action="store_true")
    parser.add_argument("--rnn-type", default="lstm")
    parser.add_argument("--precision", default="tf32", help="what rsl_rl and the first canter rows use")
    parser.add_argument("--ours", nargs="*", default=["eager:tf32", "graph:tf32", "auto:tf32", "auto:bf16"])
    parser.add_argument("--peers", nargs="*", default=["rsl_rl", "skrl"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    results = {}
    for name in args.peers:
        fresh(device)
        with left_out_if_missing(name):
            results[name] = {"rsl_rl": time_rsl_rl, "skrl": time_skrl}[name](args, NullEnv(workload(args), device))
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
        results |= {f"products alone {precision}": {"learn": ms} for precision, ms in floors.items()}
    sizes = {"envs": args.envs, "network": args.rnn_type.upper() if args.recurrent else "MLP"}
    for name, result in results.items():
        library, execution, precision = name.split() if " " in name else (name, "eager", args.precision)
        if "iteration" in result and "rsl_rl" in results:
            result["ratio"] = results["rsl_rl"]["iteration"] / result["iteration"]
        report({**sizes, "library": library, "execution": execution, "precision": precision, **result}, args.out)


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
    print(
        f"{'':24}{'collect':>9}{'learn':>9}{'iteration':>11}{'steps/s':>12}{'ratio':>8}"
        f"{'ready s':>9}{'waits':>7}{'GiB':>7}"
    )
    for name, r in results.items():
        ratio = f"{peer / r['iteration']:.2f}x" if peer else "-"
        print(
            f"{name:24}{r['collect']:9.2f}{r['learn']:9.2f}{r['iteration']:11.2f}{r['rate']:12,.0f}{ratio:>8}"
            f"{r['ready']:9.1f}{r['waits'] if r['waits'] is not None else '-':>7}{r['memory']:7.2f}"
        )


if __name__ == "__main__":
    main()
