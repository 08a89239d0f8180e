"""Speed of off-policy learning beside Stable-Baselines3 on a CPU and skrl on a GPU; learning.py says what is learned.

    python benchmarks/off_policy.py cpu --sb3-python peer/bin/python      # SAC on HalfCheetah, steps per second
    python benchmarks/off_policy.py cpu --sb3-python peer/bin/python --algo dqn --task CartPole-v1
    python benchmarks/off_policy.py gpu --batch 256 8192                  # updates per second, canter and skrl
    python benchmarks/off_policy.py massive --envs 4096                   # SAC and PPO on thousands of environments

`cpu` runs every measurement as a process of its own and lets the libraries take turns, with one environment and, but
for `--train-freq`, the defaults of Stable-Baselines3. `gpu` gives both the same replay of random steps. Lines of JSON
go to `--out`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from itertools import pairwise
from pathlib import Path

import torch
from report import report

# ---------------------------------------------------------------------- a CPU
# Stable-Baselines3's defaults where canter's are others; SAC's are the same but for clipping.
DEFAULTS = {
    "sac": {"max_grad_norm": None},
    "dqn": {
        "learning_rate": 1e-4,
        "batch_size": 32,
        "buffer_size": 1_000_000,
        "double_dqn": False,
        "target_update_interval": 2_500,
        "network_hidden_dims": (64, 64),
        "epsilon_decay_steps": 0,
    },
}
CHUNKS = {"sac": 100, "dqn": 1000}  # steps between two looks at the clock


def cpu_canter(args):
    from canter import algorithms
    from canter.envs.wrap import wrap_env
    from canter.runners import OffPolicyRunner

    env = wrap_env(args.task, "cpu", num_envs=1, seed=args.seed)
    own = {"learning_starts": args.starts, "seed": args.seed, "log_interval": 10**9, "save_interval": 0}
    own["train_freq"] = args.train_freq
    own |= {"execution": "compile", "precision": "bf16"} if args.worker == "canter-bf16" else {}
    cfg = getattr(algorithms, f"{args.algo.upper()}Config")(**DEFAULTS[args.algo], **own)
    runner = OffPolicyRunner(env, cfg, device="cpu", show_progress=False)
    runner.learn(args.starts + args.warm_up)
    begin = [time.perf_counter(), time.process_time()]
    while time.perf_counter() - begin[0] < args.seconds:
        runner.learn(CHUNKS[args.algo])
    return steps_per_second(runner.tot_timesteps - args.starts - args.warm_up, begin)


def cpu_sb3(args):
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback

    begin = []

    class Look(BaseCallback):
        def _on_step(self):
            if self.num_timesteps == args.starts + args.warm_up:
                begin.extend([time.perf_counter(), time.process_time()])
            return not (begin and time.perf_counter() - begin[0] > args.seconds)

    options = {"learning_starts": args.starts, "seed": args.seed, "device": "cpu", "train_freq": args.train_freq}
    if args.algo == "dqn":  # exploring as little as at the end of a run
        options["exploration_initial_eps"] = 0.05
    model = getattr(stable_baselines3, args.algo.upper())("MlpPolicy", args.task, **options)
    model.learn(10**9, Look(), log_interval=None)
    return steps_per_second(model.num_timesteps - args.starts - args.warm_up, begin)


def cpu_products(args):
    """The matrix products of one SAC update alone: what no implementation in float32 can save."""
    num_obs, num_actions, batch, width = 17, 6, 256, 256  # HalfCheetah-v5

    def sizes(first, last):
        return [(first, width), (width, width), (width, last)]

    actor, critics = sizes(num_obs, 2 * num_actions), 2 * sizes(num_obs + num_actions, 1)
    # Forward: the actor in the next and in the sampled states; targets, critics, and critics of the actor's actions.
    shapes = [(batch, inner, outer) for inner, outer in 2 * actor + 3 * critics]
    # Gradients of the weights of actor and critics, and of the layers' inputs where a trained part lies below.
    shapes += [(inner, batch, outer) for inner, outer in actor + critics]
    shapes += [(batch, outer, inner) for inner, outer in actor[1:] + 2 * critics if inner == width]
    shapes += [(batch, width, num_actions)] * 2
    pairs = [(torch.randn(a, b), torch.randn(b, c), torch.empty(a, c)) for a, b, c in shapes]
    begin, count = [time.perf_counter(), time.process_time()], 0
    while time.perf_counter() - begin[0] < args.seconds:
        for left, right, out in pairs:
            torch.mm(left, right, out=out)
        count += 1
    return steps_per_second(count, begin)


def steps_per_second(steps, begin):
    """Of wall time, and of processor time, which depends less on what else the machine does."""
    return steps / (time.perf_counter() - begin[0]), steps / (time.process_time() - begin[1])


def cpu(args):
    if args.worker:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(args.threads)
        work = {"canter": cpu_canter, "canter-bf16": cpu_canter, "sb3": cpu_sb3, "products": cpu_products}
        print(json.dumps(work[args.worker](args)))
        return
    more = ["canter-bf16", "products"] if args.algo == "sac" else []
    libraries = (["sb3"] if args.sb3_python else []) + ["canter", *more]
    rates = {f"{library} {threads}": [] for library in libraries for threads in args.try_threads}
    for repeat in range(args.repeats):
        for name in list(rates)[:: -1 if repeat % 2 else 1]:  # a load that grows or falls is shared out
            library, threads = name.split()
            python = args.sb3_python if library == "sb3" else sys.executable
            command = [
                python,
                __file__,
                "cpu",
                "--worker",
                library,
                "--threads",
                threads,
                "--task",
                args.task,
                "--algo",
                args.algo,
                "--train-freq",
                str(args.train_freq),
                "--seconds",
                str(args.seconds),
                "--seed",
                str(args.seed + repeat),
            ]
            env = {**os.environ, "OMP_NUM_THREADS": threads}
            done = subprocess.run(command, capture_output=True, text=True, env=env)
            if done.returncode:
                raise SystemExit(f"{name} failed:\n{done.stderr}")
            rates[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(
                f"{name:12} threads: {rates[name][-1][0]:8.1f} steps/s, {rates[name][-1][1]:8.1f} per cpu s", flush=True
            )
    best = {}
    for name, turns in rates.items():
        library, row = name.split()[0], [statistics.median(column) for column in zip(*turns, strict=True)]
        if library not in best or row[0] > best[library][0]:
            best[library] = row
    for library, (rate, cpu_rate) in best.items():  # medians with the threads that suit each best
        result = {
            "task": args.task,
            "algo": args.algo,
            "train_freq": args.train_freq,
            "library": library,
            "rate": rate,
            "cpu_rate": cpu_rate,
            "repeats": args.repeats,
        }
        ratios = {"ratio": rate / best["sb3"][0], "cpu_ratio": cpu_rate / best["sb3"][1]} if "sb3" in best else {}
        report({**result, **ratios}, args.out)


# ---------------------------------------------------------------------- a GPU
def gpu_canter(args, batch, execution, precision):
    from canter.algorithms import SAC, SACConfig
    from canter.bench import NullEnv, Workload

    work = Workload(num_envs=256, num_obs=args.obs, num_critic_obs=args.obs, num_actions=args.actions)
    env = NullEnv(work, args.device)
    env.critic_obs_space = env.obs_space
    hidden = tuple(args.hidden)
    cfg = SACConfig(
        batch_size=batch,
        learning_starts=0,
        buffer_size=200_000,
        actor_hidden_dims=hidden,
        seed=1,
        critic_hidden_dims=hidden,
        max_grad_norm=None,
        execution=execution,
        precision=precision,
        device=args.device,
    )
    alg = SAC(env, cfg)
    alg.executor.compile_from = 0  # a long run is measured
    obs = env.get_observations()[0]
    for _ in range(400):
        record = env.step(alg.explore(obs))
        alg.process_step(record._replace(critic_obs=record.obs))
        obs = record.obs
    return rate(args, lambda: alg.train(8), 8)


def gpu_skrl(args, batch):
    import gymnasium
    from skrl.agents.torch.sac import SAC, SAC_CFG
    from skrl.memories.torch import RandomMemory
    from skrl.models.torch import DeterministicMixin, GaussianMixin, Model

    def net(size_in, size_out):
        sizes = [size_in, *args.hidden]
        layers = [m for a, b in pairwise(sizes) for m in (torch.nn.Linear(a, b), torch.nn.ReLU())]
        return torch.nn.Sequential(*layers, torch.nn.Linear(sizes[-1], size_out))

    spaces = {
        "observation_space": gymnasium.spaces.Box(-9, 9, (args.obs,)),
        "action_space": gymnasium.spaces.Box(-1, 1, (args.actions,)),
        "device": args.device,
    }

    class Actor(GaussianMixin, Model):
        def __init__(self):
            Model.__init__(self, **spaces)
            GaussianMixin.__init__(self)
            self.net = net(args.obs, 2 * args.actions)

        def compute(self, inputs, role):
            mean, log_std = self.net(inputs["observations"]).chunk(2, -1)
            return torch.tanh(mean), {"log_std": log_std}

    class Critic(DeterministicMixin, Model):
        def __init__(self):
            Model.__init__(self, **spaces)
            DeterministicMixin.__init__(self)
            self.net = net(args.obs + args.actions, 1)

        def compute(self, inputs, role):
            return self.net(torch.cat([inputs["observations"], inputs["taken_actions"]], -1)), {}

    names = ("critic_1", "critic_2", "target_critic_1", "target_critic_2")
    models = {"policy": Actor().to(args.device), **{name: Critic().to(args.device) for name in names}}
    memory = RandomMemory(memory_size=400, num_envs=256, device=args.device, replacement=True)
    cfg = SAC_CFG(batch_size=batch, gradient_steps=8)
    cfg.experiment.write_interval = cfg.experiment.checkpoint_interval = 0
    agent = SAC(models=models, memory=memory, cfg=cfg, **spaces)
    agent.init()
    for name, tensor in memory.tensors.items():
        tensor.copy_((torch.rand_like(tensor.float()) < 0.01) if name == "terminated" else torch.randn_like(tensor))
    memory.filled = True
    agent.enable_models_training_mode(True)
    return rate(args, lambda: agent.update(timestep=1, timesteps=2), 8)


def rate(args, work, steps):
    """Gradient steps per second."""
    wait = torch.cuda.synchronize if str(args.device).startswith("cuda") else lambda: None
    begin = time.perf_counter()
    while time.perf_counter() - begin < args.seconds / 2:
        work()
    wait()
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < args.seconds:
        for _ in range(5):
            work()
        wait()
        count += 5 * steps
    return count / (time.perf_counter() - begin)


def gpu(args):
    for batch in args.batch:
        torch.set_float32_matmul_precision("high")
        found = {}
        try:
            found["skrl", "eager", "tf32"] = gpu_skrl(args, batch)
        except ImportError as error:
            print(f"skrl is left out: {error}")
        torch.set_float32_matmul_precision("highest")
        for variant in args.ours:
            execution, _, precision = variant.partition(":")
            found["canter", execution, precision] = gpu_canter(args, batch, execution, precision)
        peer = found.get(("skrl", "eager", "tf32"))
        for (library, execution, precision), value in found.items():
            how = {"batch": batch, "library": library, "execution": execution, "precision": precision}
            report({**how, "updates_per_s": value, "ratio": peer and value / peer}, args.out)


# ---------------------------------------------------------------------- thousands of environments
def massive(args):
    from canter.envs.torch_envs import TORCH_ENVS
    from canter.presets import load_preset
    from canter.runners import OffPolicyRunner, OnPolicyRunner

    for algo in args.algos:
        if args.device.startswith("cuda"):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        env, judge = (TORCH_ENVS[args.env](n, args.device, seed=args.seed) for n in (args.envs, 256))
        if algo == "ppo":
            cfg = {**load_preset("default"), "num_steps_per_env": 24, "seed": args.seed, "log_interval": 0}
            cfg["algorithm"] |= {
                "num_learning_epochs": 5,
                "num_mini_batches": 4,
                "learning_rate": 1e-3,
                "schedule": "adaptive",
                "precision": "bf16",
                "normalize_rewards": True,
            }
            cfg["policy"] |= {
                "actor_hidden_dims": [512, 256, 128],
                "critic_hidden_dims": [512, 256, 128],
                "activation": "elu",
            }
            runner = OnPolicyRunner(env, cfg, None, args.device, eval_env=judge, show_progress=False)
        else:
            algorithm = {"class_name": algo.upper(), "profile": "massive"}
            cfg = {"algorithm": algorithm, "seed": args.seed, "log_interval": 0, "save_interval": 0}
            runner = OffPolicyRunner(env, cfg, device=args.device, eval_env=judge, show_progress=False)
        spent, curve, look = 0.0, [], 0.0
        while spent < args.seconds:
            begin = time.perf_counter()
            runner.learn(num_learning_iterations=args.chunk if algo != "ppo" else max(1, args.chunk // 24))
            if args.device.startswith("cuda"):
                torch.cuda.synchronize()
            spent += time.perf_counter() - begin
            if spent < look:
                continue
            look = spent + args.every
            score = runner.eval(256)["eval/mean_reward"]
            alg = runner.alg
            updates = (
                runner.current_learning_iteration * alg.num_learning_epochs * alg.num_mini_batches
                if algo == "ppo"
                else alg.num_updates
            )
            curve.append([runner.tot_timesteps, round(spent, 2), round(score, 2), updates])
            print(f"{algo}: {spent:6.1f} s, {runner.tot_timesteps:,} steps, return {score:.1f}", flush=True)
        memory = torch.cuda.max_memory_allocated() / 2**30 if args.device.startswith("cuda") else None
        first, last = curve[len(curve) // 2], curve[-1]  # the first half holds warm-up, compilation and capture
        steps, updates = ((last[k] - first[k]) / max(1e-9, last[1] - first[1]) for k in (0, 3))
        late = statistics.fmean(point[2] for point in curve if point[1] > args.seconds - 20)
        result = {"task": args.env, "algo": algo, "envs": args.envs, "seed": args.seed, "steps_per_s": steps}
        result |= {"updates_per_s": updates, "GiB": memory, "return": late, "ready": curve[0][1]}
        result["curve"] = [point[:3] for point in curve]
        report(result, args.out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("cpu")
    one.add_argument("--sb3-python", help="the Python of an environment with Stable-Baselines3; left out if absent")
    one.add_argument("--algo", default="sac", choices=list(DEFAULTS))
    one.add_argument("--task", default="HalfCheetah-v5")
    one.add_argument("--train-freq", type=int, default=1, help="steps between two gradient steps")
    one.add_argument("--seconds", type=float, default=20.0)
    one.add_argument("--repeats", type=int, default=3)
    one.add_argument("--try-threads", type=int, nargs="+", default=[1, 2])
    one.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    one.add_argument("--worker", help=argparse.SUPPRESS)
    two = commands.add_parser("gpu")
    two.add_argument("--batch", type=int, nargs="+", default=[256, 8192])
    two.add_argument("--obs", type=int, default=48)
    two.add_argument("--actions", type=int, default=12)
    two.add_argument("--hidden", type=int, nargs="+", default=[256, 256])
    two.add_argument("--ours", nargs="+", default=["eager:tf32", "graph:tf32", "auto:tf32", "auto:bf16"])
    two.add_argument("--seconds", type=float, default=6.0)
    three = commands.add_parser("massive")
    three.add_argument("--env", default="PointRobot")
    three.add_argument("--envs", type=int, default=4096)
    three.add_argument("--algos", nargs="+", default=["sac", "ppo"])
    three.add_argument("--seconds", type=float, default=60.0, help="of training, for each")
    three.add_argument("--chunk", type=int, default=48, help="vector steps between two looks at the clock")
    three.add_argument("--every", type=float, default=1.0, help="seconds of training between two evaluations")
    for command in (two, three):
        command.add_argument("--device", default=device)
    for command in (one, two, three):
        command.add_argument("--seed", type=int, default=1)
        command.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.starts, args.warm_up = 300, 50
    {"cpu": cpu, "gpu": gpu, "massive": massive}[args.command](args)


if __name__ == "__main__":
    main()
