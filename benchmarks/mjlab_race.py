"""Train an mjlab task by canter or rsl_rl for some seconds, and score the policies that were saved on the way.

    python benchmarks/mjlab_race.py train canter --seconds 60 --seed 1 --out runs/canter-1 --set num_steps_per_env=8
    python benchmarks/mjlab_race.py train rsl_rl --seconds 250 --seed 1 --out runs/rsl_rl-1
    python benchmarks/mjlab_race.py score runs/canter-1 runs/rsl_rl-1

Seconds count from the start of the process. `train` saves the policy at the end of the first iteration after each mark
(30, 60, 120, 250 s) as TorchScript, and one line per iteration in progress.jsonl: seconds, environment steps, mean
reward of a step. `score` drives all policies at once, each in environments of its own, without exploration noise and
with the command ranges of the curriculum's first stage: mean return of 2,000 full episodes each. rsl_rl has mjlab's
own settings; canter too, except what `--set` changes.
"""

import time

BEGIN = time.time()

import argparse  # noqa: E402
import copy  # noqa: E402
import dataclasses  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402

os.environ.setdefault("MUJOCO_GL", "disabled")
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")

import torch  # noqa: E402
import yaml  # noqa: E402

MARKS = (30, 60, 120, 250)
TASK = "Mjlab-Velocity-Flat-Unitree-Go1"


class OutOfTimeError(Exception):
    """Raised at the end of the last iteration."""


class Progress:
    """Writes a line per iteration, and the policy after each mark."""

    def __init__(self, args, num_envs, trace):
        self.args, self.trace, self.marks = args, trace, [mark for mark in MARKS if mark <= args.seconds]
        if args.seconds not in MARKS:
            self.marks.append(args.seconds)
        args.out.mkdir(parents=True, exist_ok=True)
        self.file = (args.out / "progress.jsonl").open("w")
        self.reward, self.steps, self.num_envs, self.shown = torch.zeros(2, device=args.device), 0, num_envs, 0.0
        self.write(event="environment built")

    def write(self, **row):
        self.file.write(json.dumps({"seconds": round(time.time() - BEGIN, 3), **row}) + "\n")
        self.file.flush()

    def add(self, reward):
        """Count one step of all environments."""
        self.reward += torch.stack([reward.mean(), torch.ones_like(reward[0])])
        self.steps += self.num_envs

    def end_iteration(self):
        total, count = self.reward.tolist()
        now = time.time() - BEGIN
        self.write(steps=self.steps, reward=round(total / max(count, 1), 5))
        if now - self.shown > 10:
            self.shown = now
            print(f"{self.args.out.name} {now:.0f} s {self.steps} steps {total / max(count, 1):.4f} a step", flush=True)
        self.reward.zero_()
        if self.marks and now >= self.marks[0]:
            mark = self.marks.pop(0)
            self.trace().save(str(self.args.out / f"policy_{mark:g}.ts"))
        if not self.marks:
            raise OutOfTimeError


def make_env(args, num_envs):
    import mjlab.tasks  # noqa: F401
    from mjlab.envs import ManagerBasedRlEnv
    from mjlab.tasks.registry import load_env_cfg, load_rl_cfg
    from mjlab.utils.torch import configure_torch_backends

    configure_torch_backends()
    cfg, rl_cfg = load_env_cfg(args.task), load_rl_cfg(args.task)
    cfg.scene.num_envs, cfg.seed, rl_cfg.seed = num_envs, args.seed, args.seed
    return ManagerBasedRlEnv(cfg, device=args.device), rl_cfg


def counted(env, progress):
    """Count the steps of an environment and their rewards."""
    step = env.step

    def counted_step(*args, **kwargs):
        result = step(*args, **kwargs)
        progress.add(result[1])
        return result

    env.step = counted_step


def frozen(module, call, width, device):
    """TorchScript of a policy's deterministic actions."""
    module = copy.deepcopy(module).eval().requires_grad_(False)
    return torch.jit.trace(lambda obs: call(module, obs), torch.zeros(2, width, device=device), check_trace=False)


def train_rsl_rl(args):
    from mjlab.rl import MjlabOnPolicyRunner, RslRlVecEnvWrapper
    from mjlab.tasks.registry import load_runner_cls

    raw, rl_cfg = make_env(args, args.num_envs or 4096)
    rl_cfg.max_iterations, rl_cfg.upload_model, rl_cfg.save_interval = 10**6, False, 10**6
    env = RslRlVecEnvWrapper(raw, clip_actions=rl_cfg.clip_actions)
    cfg = dataclasses.asdict(rl_cfg) | {"logger": "tensorboard"}
    runner = (load_runner_cls(args.task) or MjlabOnPolicyRunner)(env, cfg, str(args.out / "log"), args.device)
    actor = runner.alg.actor

    def trace():
        parts = torch.nn.ModuleList([actor.obs_normalizer, actor.mlp])
        return frozen(parts, lambda m, obs: m[1](m[0](obs)), actor.mlp[0].in_features, args.device)

    progress = Progress(args, env.num_envs, trace)
    counted(raw, progress)
    update = runner.alg.update

    def counted_update(*given, **named):
        result = update(*given, **named)
        progress.end_iteration()
        return result

    runner.alg.update = counted_update
    try:
        runner.learn(num_learning_iterations=10**6, init_at_random_ep_len=True)
    except OutOfTimeError:
        progress.write(event="end")


def train_canter(args):
    import gymnasium

    from canter.envs.mjlab import mjlab_training_dict
    from canter.runners import OffPolicyRunner, OnPolicyRunner, StopTraining

    raw, rl_cfg = make_env(args, args.num_envs or 4096)
    changes = {key: yaml.safe_load(text) for key, _, text in (change.partition("=") for change in args.set)}
    algorithm = changes.pop("algorithm.class_name", "PPO")
    groups = {name: list(group) for name, group in rl_cfg.obs_groups.items()}
    own = {"save_interval": 0, "logger": [], "seed": args.seed}
    if algorithm == "PPO":
        cfg = mjlab_training_dict(args.task) | own | {"max_iterations": 10**6, "log_interval": 1}
    else:
        cfg = own | {"algorithm": {"class_name": algorithm, "profile": "massive"}, "obs_groups": groups}
        cfg["log_interval"] = raw.num_envs * 24
    for key, value in changes.items():
        *sections, name = key.split(".")
        part = cfg
        for section in sections:
            part = part[section]
        part[name] = value
    if algorithm == "PPO":
        runner = OnPolicyRunner(raw, cfg, None, args.device, show_progress=False)
    else:
        box = gymnasium.spaces.Box(-args.bound, args.bound, (raw.action_manager.total_action_dim,))
        runner = OffPolicyRunner(raw, cfg, device=args.device, action_space=box, show_progress=False)
    policy = runner.alg.get_policy()

    def trace():
        width = runner.env.obs_space.shape[0]
        return frozen(policy, lambda m, obs: m.act_inference(obs), width, args.device)

    progress = Progress(args, raw.num_envs, trace)
    counted(raw, progress)
    runner.add_callback("post_iteration", lambda runner, metrics: check(progress, metrics))

    def check(progress, metrics):
        if metrics:
            try:
                progress.end_iteration()
            except OutOfTimeError:
                raise StopTraining from None

    if algorithm == "PPO":
        runner.learn(num_learning_iterations=10**6, init_at_random_ep_len=True)
    else:
        runner.learn(total_timesteps=10**10)
    progress.write(event="end")


def score(args):
    """Drive all policies in one simulation; the first episode of every environment counts."""
    files = [file for run in args.runs for file in sorted(run.glob("policy_*.ts"), key=lambda f: float(f.stem[7:]))]
    policies = [torch.jit.load(str(file), map_location=args.device) for file in files]
    env, rl_cfg = make_env(args, args.episodes * len(files))
    group = rl_cfg.obs_groups["actor"][0]
    obs = env.reset()[0]
    total = torch.zeros(env.num_envs, device=args.device)
    length, alive = torch.zeros_like(total), torch.ones_like(total, dtype=torch.bool)
    fell = torch.zeros_like(alive)
    with torch.inference_mode():
        for number in range(env.max_episode_length):
            parts = obs[group].split(args.episodes)
            actions = torch.cat([policy(part) for policy, part in zip(policies, parts, strict=True)])
            obs, reward, terminated, truncated, _ = env.step(actions)
            total += reward * alive
            length += alive
            fell |= alive & terminated
            alive &= ~(terminated | truncated)
            if number % 100 == 0 and not alive.any():
                break
    for file, returns, steps, falls in zip(
        files, *(t.float().split(args.episodes) for t in (total, length, fell)), strict=True
    ):
        row = {"run": file.parent.name, "seconds": float(file.stem[7:]), "return": round(returns.mean().item(), 3)}
        row |= {"error": round(returns.std().item() / len(returns) ** 0.5, 3), "length": round(steps.mean().item(), 1)}
        print(json.dumps(row | {"falls": round(falls.mean().item(), 4)}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = parser.add_subparsers(required=True)
    one = sub.add_parser("train")
    one.add_argument("library", choices=("canter", "rsl_rl"))
    one.add_argument("--seconds", type=float, default=250)
    one.add_argument("--num-envs", type=int, default=None)
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--bound", type=float, default=3.0, help="SAC and TD3: actions lie in [-bound, bound]")
    one.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting of canter; VALUE is YAML")
    one.set_defaults(run=lambda args: {"canter": train_canter, "rsl_rl": train_rsl_rl}[args.library](args))
    two = sub.add_parser("score")
    two.add_argument("runs", type=Path, nargs="+")
    two.add_argument("--episodes", type=int, default=2000)
    two.set_defaults(run=score)
    for each in (one, two):
        each.add_argument("--task", default=TASK)
        each.add_argument("--device", default="cuda:0")
        each.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
