"""Train an mjlab task by canter or rsl_rl for some seconds or iterations, and score the policies saved on the way.

    python benchmarks/mjlab_race.py train canter --profile fast --seconds 60 --seed 1 --out runs/canter-1
    python benchmarks/mjlab_race.py train rsl_rl --seconds 250 --seed 1 --out runs/rsl_rl-1
    python benchmarks/mjlab_race.py train canter --iterations 300 --marks-iterations 100 200 --out runs/canter-2
    python benchmarks/mjlab_race.py score runs/canter-1 runs/rsl_rl-1 --out scores.jsonl
    python benchmarks/mjlab_race.py collect runs/canter-1 runs/rsl_rl-1 --scores scores.jsonl
    python benchmarks/mjlab_race.py plot docs/assets/mjlab_race.png
    python benchmarks/mjlab_race.py simulate --num-envs 4096 --out benchmarks/results

`mjlab_race.sh` does all of it for docs/benchmarks.md.

`train` saves the policy as TorchScript at the end of the first iteration after each mark and at the end of training,
and one line per iteration in progress.jsonl: seconds, iteration, environment steps, mean reward of a step. With
`--seconds` the marks are 30, 60, 120 and 250 s from the start of the process; `--iterations` does not depend on what
else runs on the GPU. An iteration of SAC and TD3 is 24 steps of every environment. `simulate` reports the steps per
second of the environments alone, with random actions.

`score` drives all policies at once, each in environments of its own, without exploration noise and with the command
ranges of the curriculum's first stage: mean return of 2,000 full episodes each. rsl_rl has mjlab's own settings; canter
too, except what the preset's `--profile` and `--set` (KEY=VALUE, as in learning.py) change.
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

import numpy as np  # noqa: E402
import torch  # noqa: E402

MARKS = (30, 60, 120, 250)
TASK = "Mjlab-Velocity-Flat-Unitree-Go1"
RESULTS = Path(__file__).parent / "results"
RACE, CURVES, SPEED = "mjlab_race.jsonl", "mjlab_curves.jsonl", "mjlab_speed.jsonl"


class EndOfTrainingError(Exception):
    """Raised at the end of the last iteration."""


class Progress:
    """Writes a line per iteration, and the policy after each mark."""

    def __init__(self, args, num_envs, trace):
        self.args, self.trace, self.iteration = args, trace, 0
        if args.iterations is not None:
            self.marks = sorted({*args.marks_iterations, args.iterations})
        else:
            self.marks = [*(mark for mark in MARKS if mark < args.seconds), args.seconds]
        args.out.mkdir(parents=True, exist_ok=True)
        self.file = (args.out / "progress.jsonl").open("w")
        self.reward, self.steps, self.num_envs, self.shown = torch.zeros(2, device=args.device), 0, num_envs, 0.0
        told = {"task": args.task, "library": args.library, "profile": args.profile, "set": args.set, "seed": args.seed}
        self.write(event="environment built", envs=num_envs, **told)

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
        self.iteration += 1
        self.write(iteration=self.iteration, steps=self.steps, reward=round(total / max(count, 1), 5))
        if now - self.shown > 10:
            self.shown = now
            reward = f"{total / max(count, 1):.4f} a step"
            print(f"{self.args.out.name} {now:.0f} s {self.iteration} it {self.steps} steps {reward}", flush=True)
        self.reward.zero_()
        unit, reached = ("iteration", self.iteration) if self.args.iterations is not None else ("seconds", now)
        if reached >= self.marks[0]:
            self.trace().save(str(self.args.out / f"policy_{unit}_{self.marks.pop(0):g}.ts"))
        if not self.marks:
            raise EndOfTrainingError


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
    except EndOfTrainingError:
        progress.write(event="end")


def train_canter(args):
    import gymnasium
    from learning import override

    from canter.presets import load_preset
    from canter.runners import OffPolicyRunner, OnPolicyRunner, StopTraining

    changes = {"algorithm": {"class_name": "PPO"}}
    override(changes, args.set)
    algorithm = changes["algorithm"]["class_name"]
    preset = load_preset(f"mjlab/{args.task}", profile=args.profile)
    raw, rl_cfg = make_env(args, args.num_envs or preset["num_envs"])
    for name in ("task", "total_timesteps", "num_envs"):
        preset.pop(name)
    groups = {name: list(group) for name, group in rl_cfg.obs_groups.items()}
    own = {"save_interval": 0, "logger": [], "seed": args.seed}
    if algorithm == "PPO":
        cfg = preset | own | {"max_iterations": 10**6, "log_interval": 1}
    else:
        cfg = own | {"algorithm": {"class_name": algorithm, "profile": "massive"}, "obs_groups": groups}
        cfg["log_interval"] = raw.num_envs * 24
    override(cfg, args.set)
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
            except EndOfTrainingError:
                raise StopTraining from None

    if algorithm == "PPO":
        runner.learn(num_learning_iterations=10**6, init_at_random_ep_len=True)
    else:
        runner.learn(total_timesteps=10**10)
    progress.write(event="end")


def simulate(args):
    """Step the environments with random actions, resets included."""
    env, _ = make_env(args, args.num_envs)
    env.reset()
    shape = (env.num_envs, env.action_manager.total_action_dim)
    for count in (20, args.steps):  # the first are a warm-up
        begin = time.time()
        for _ in range(count):
            reward = env.step(torch.randn(shape, device=args.device))[1]
        reward.cpu()  # waits for the GPU
    rate = env.num_envs * args.steps / (time.time() - begin)
    from report import report

    found = {"task": args.task, "what": "simulator alone", "envs": env.num_envs, "steps_per_s": round(rate)}
    report(found, args.out and args.out / SPEED)


def score(args):
    """Drive all policies in one simulation; the first episode of every environment counts."""
    in_order = {"key": lambda file: float(file.stem.rpartition("_")[2])}
    files = [file for run in args.runs for file in sorted(run.glob("policy_*_*.ts"), **in_order)]
    if not files:
        raise SystemExit(f"there is no saved policy (policy_*_*.ts) in {', '.join(map(str, args.runs))}")
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
    rows = []
    for file, returns, steps, falls in zip(
        files, *(t.float().split(args.episodes) for t in (total, length, fell)), strict=True
    ):
        _, unit, mark = file.stem.split("_")
        row = {"run": file.parent.name, unit: float(mark), "return": round(returns.mean().item(), 3)}
        row |= {"error": round(returns.std().item() / len(returns) ** 0.5, 3), "length": round(steps.mean().item(), 1)}
        rows.append(json.dumps(row | {"falls": round(falls.mean().item(), 4)}) + "\n")
    print("".join(rows), end="", flush=True)
    if args.out is not None:
        args.out.write_text("".join(rows))


def read_run(run):
    """The first line of a run's progress, and arrays of the seconds, steps and rewards of its iterations."""
    head, *rows = map(json.loads, (run / "progress.jsonl").read_text().splitlines())
    rows = [row for row in rows if "iteration" in row]
    return head, *(np.array([row[name] for row in rows]) for name in ("seconds", "steps", "reward"))


def collect(args):
    """Report every scored policy by seconds, and the curve of every run.

    With `--pace` the runs shared the GPU, and their seconds are those in which the run of the same library in `--pace`,
    which had the GPU for itself, would have done as many iterations.
    """
    from report import report

    scored = [json.loads(line) for line in args.scores.read_text().splitlines()]
    paces = {read_run(run)[0]["library"]: read_run(run)[1] for run in args.pace}
    for run in args.runs:
        head, seconds, steps, rewards = read_run(run)
        told = {name: head[name] for name in ("task", "library", "profile", "seed", "envs")}
        pace = paces.get(head["library"])
        told["gpu"] = "alone" if pace is None and not args.shared else "shared"
        if pace is not None:
            seconds = pace[0] + np.median(np.diff(pace)) * np.arange(len(seconds))
        for row in (row for row in scored if row["run"] == run.name):
            done = int(row["iteration"]) if "iteration" in row else int((seconds <= row["seconds"]).sum()) + 1
            at = min(done, len(steps)) - 1
            mark = min(MARKS, key=lambda mark: abs(mark - seconds[at]))
            found = {"seconds": row.get("seconds", mark), "iterations": at + 1, "steps": int(steps[at])}
            report(told | found | {name: row[name] for name in ("return", "error", "falls")}, args.out / RACE)
        window = max(1, len(steps) // 60)
        parts = [slice(i, i + window) for i in range(0, len(steps), window)]
        curve = [
            [round(float(seconds[p][-1]), 1), int(steps[p][-1]), round(float(rewards[p].mean()), 4)] for p in parts
        ]
        report(told | {"curve": curve}, args.out / CURVES)
        settled = len(steps) // 4  # without the start
        if told["gpu"] == "alone" and settled:
            rate = (steps[-1] - steps[settled]) / (seconds[-1] - seconds[settled])
            name = f"{told['library']}, profile {told['profile']}" if told["profile"] else told["library"]
            found = {"task": told["task"], "what": name, "envs": told["envs"], "seed": told["seed"]}
            report(found | {"steps_per_s": round(float(rate))}, args.out / SPEED)


def plot(args):
    """Draw the curves of both libraries against seconds and against steps, a line per seed."""
    import matplotlib.pyplot as plt

    rows = [json.loads(line) for line in (args.results / CURVES).read_text().splitlines()]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure, axes = plt.subplots(len(tasks), 2, figsize=(9, 3 * len(tasks)), squeeze=False, layout="constrained")
    colors = {"canter": "tab:blue", "rsl_rl": "tab:orange"}
    for task, (by_seconds, by_steps) in zip(tasks, axes, strict=True):
        for row in (row for row in rows if row["task"] == task):
            seconds, steps, rewards = np.array(row["curve"]).T
            style = {"color": colors[row["library"]], "label": row["library"], "linewidth": 1.2}
            by_seconds.plot(seconds, rewards, **style)
            by_steps.plot(steps / 1e6, rewards, **style)
        by_seconds.set(xlabel="seconds since the start of the process", ylabel="mean reward of a step")
        by_seconds.set_title(task.removeprefix("Mjlab-Velocity-").replace("-Unitree-", " "), loc="left")
        by_steps.set(xlabel="million environment steps")
        handles = dict(zip(*reversed(by_seconds.get_legend_handles_labels()), strict=True))
        by_seconds.legend(handles.values(), handles.keys(), frameon=False)
        for axis in (by_seconds, by_steps):
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(args.out, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = parser.add_subparsers(required=True)
    one = sub.add_parser("train")
    one.add_argument("library", choices=("canter", "rsl_rl"))
    length = one.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, default=250, help="end after this time")
    length.add_argument("--iterations", type=int, help="end after this many iterations instead")
    one.add_argument("--marks-iterations", type=int, nargs="+", default=[], help="iterations after which to save too")
    one.add_argument("--num-envs", type=int, default=None)
    one.add_argument("--profile", help="a profile of canter's preset")
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--bound", type=float, default=3.0, help="SAC and TD3: actions lie in [-bound, bound]")
    one.add_argument("--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help="settings of canter")
    one.set_defaults(run=lambda args: {"canter": train_canter, "rsl_rl": train_rsl_rl}[args.library](args))
    two = sub.add_parser("score")
    two.add_argument("runs", type=Path, nargs="+")
    two.add_argument("--episodes", type=int, default=2000)
    two.add_argument("--out", type=Path, help="file for the scores; mjlab prints much else")
    two.set_defaults(run=score)
    three = sub.add_parser("simulate")
    three.add_argument("--num-envs", type=int, default=4096)
    three.add_argument("--steps", type=int, default=200)
    three.add_argument("--out", type=Path, help="folder for the result")
    three.set_defaults(run=simulate)
    four = sub.add_parser("collect")
    four.add_argument("runs", type=Path, nargs="+")
    four.add_argument("--scores", type=Path, required=True, help="the file of `score`")
    four.add_argument("--pace", type=Path, nargs="*", default=[], help="runs that had the GPU for themselves")
    four.add_argument("--shared", action="store_true", help="the runs shared the GPU; seconds are the clock's")
    four.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    four.set_defaults(run=collect)
    five = sub.add_parser("plot")
    five.add_argument("out", type=Path)
    five.add_argument("--results", type=Path, default=RESULTS)
    five.set_defaults(run=plot)
    for each in (one, two, three):
        each.add_argument("--task", default=TASK)
        each.add_argument("--device", default="cuda:0")
        each.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    marks = getattr(args, "marks_iterations", ())
    if marks and not 0 < min(marks) <= max(marks) <= (args.iterations or 0):
        parser.error(f"--marks-iterations {marks} must lie between 1 and --iterations {args.iterations}")
    args.run(args)


if __name__ == "__main__":
    main()
