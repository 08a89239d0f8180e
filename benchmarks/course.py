"""Train three skills apart, put them into one ActorCriticFieldMutex, and drive the course with it.

    python benchmarks/course.py --seed 1 --out benchmarks/results/course.jsonl --plot docs/assets/course.png

One line of JSON goes to `--out` for the mutex and for each skill alone: the share of 200 robots that arrive, and their
mean time in seconds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path

import torch
from report import report

from canter.envs.torch_envs.tasks import KINDS, Course
from canter.modules import ActorCriticFieldMutex
from canter.runners import OnPolicyRunner
from canter.runners.evaluation import InferencePolicy

# kind -> action scale it is trained with, commanded speeds, settings of the policy
SKILLS = {
    "flat": (0.5, (0.5, 1.2), {}),
    "mud": (1.5, (0.3, 0.8), {}),
    "beam": (0.25, (0.2, 0.5), {"class_name": "ActorCriticRecurrent", "rnn_type": "gru", "rnn_hidden_size": 16}),
}
VELOCITIES = {1: 0.5, 2: [0.3, 0.4]}
SMOOTHING = 5
POINTS = 6


def train(kind, seed, steps, folder):
    """Train one skill on endless ground of its kind; its run directory says what the mutex has to know."""
    scale, command_range, policy = SKILLS[kind]
    env = Course(128, segments=(kind,), action_scale=scale, command_range=command_range, max_episode_length=150)
    cfg = {
        "seed": seed,
        "num_steps_per_env": 32,
        "save_interval": 0,
        "algorithm": {
            "num_learning_epochs": 4,
            "num_mini_batches": 4,
            "gamma": 0.97,
            "learning_rate": 2e-3,
            "schedule": "adaptive",
            "value_normalization": "popart",
        },
        "policy": {"actor_hidden_dims": [32, 32], "critic_hidden_dims": [32, 32], "init_noise_std": 0.5, **policy},
    }
    info = {"control": {"action_scale": scale}, "normalization": {"obs_scales": {"lin_vel": Course.lin_vel_scale}}}
    runner = OnPolicyRunner(env, cfg, folder / kind, "cpu", run_info=info, show_progress=False)
    total, begin, curve = -(-steps // runner.steps_per_iteration()), time.perf_counter(), []
    for point in range(1, POINTS + 1):
        runner.learn(total * point // POINTS - runner.iteration)
        recent = sum(runner.rewbuffer) / max(1, len(runner.rewbuffer))
        curve.append([runner.tot_timesteps, round(time.perf_counter() - begin, 1), round(recent, 1)])
    runner.close()
    print(f"{kind}: {curve[-1][0]:,} steps, {curve[-1][1]} s, return {curve[-1][2]} of 300", flush=True)
    return curve


def build(folder, kinds=KINDS, **settings):
    """The mutex of some skills, as its users build it."""
    env = Course(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="obstacles .* have no sub-policy")  # the course has two of five
        return ActorCriticFieldMutex(
            env.num_obs,
            env.num_obs,
            env.num_actions,
            None,
            [folder / kind for kind in kinds],
            obs_segments=env.obs_segments,
            env_action_scale=env.action_scale,
            **settings,
        )


def arrivals(policy, num_envs=200, seed=7):
    """Share of robots that reach the end, and their mean time in seconds."""
    env, acting = Course(num_envs, seed=seed), InferencePolicy(policy)
    obs, _ = env.reset()
    running, arrived, steps = torch.ones(num_envs, dtype=torch.bool), 0, 0
    for step in range(1, env.max_episode_length + 1):
        record = env.step(acting(obs))
        ends = running & record.terminated & (record.reward > -10)  # a fall costs 10
        arrived, steps = arrived + int(ends.sum()), steps + step * int(ends.sum())
        running &= ~record.done
        acting.reset(record.done)
        obs = record.obs
    return arrived / num_envs, env.dt * steps / max(1, arrived)


def drive(policy, seed=3):
    """One robot over the course: what is chosen, mixed, commanded and remembered at every step."""
    env, log, hidden = Course(1, seed=seed), [], None
    obs, _ = env.reset()
    ended = False
    while not ended:
        state = {name: value[0].clone() for name, value in env._state.items()}
        action, hidden = policy.infer(obs, hidden)
        selection = policy.get_policy_selection(obs)
        seen = policy.override_cmd_vel(
            policy.recover_last_action(obs, selection), selection, hidden["velocities"][:, 0, 0]
        )
        log.append(
            {
                "x": float(state["position"][0]),
                "offset": float(state["position"][1]),
                "speed": float(state["velocity"][0]),
                "kind": int(env.kind_at(env._state["position"][:, 0])),
                "chosen": int(selection.int().argmax()),
                "share": hidden["selections"].mean((1, 2))[0].tolist(),
                "command": float(seen[0, 9]) / env.lin_vel_scale,
                "last_action": [float(obs[0, 13]), float(seen[0, 13])],
                "memory": float(hidden["memory_a_2"].norm()),
            }
        )
        record = env.step(action)
        obs, ended = record.obs, bool(record.done)
    return log


def check(log):
    """The documented behaviour in the numbers of a drive; each is a plain truth about the log."""
    switches = [i for i in range(1, len(log)) if log[i]["chosen"] != log[i - 1]["chosen"]]
    ramps = [[round(log[i + k]["share"][log[i]["chosen"]], 2) for k in range(SMOOTHING)] for i in switches]
    found = {
        "order of skills": [KINDS[log[0]["chosen"]], *(KINDS[log[i]["chosen"]] for i in switches)],
        "shares after a switch": ramps,
        "command in mud": sorted({round(row["command"], 3) for row in log if row["chosen"] == 1}),
        "command on the beam": sorted({round(row["command"], 3) for row in log if row["chosen"] == 2}),
        "last action in mud, of the environment's": sorted(
            {round(row["last_action"][1] / row["last_action"][0], 3) for row in log if row["chosen"] == 1}
        ),
        "largest memory of the beam's skill while it is not mixed in": max(
            row["memory"] for row in log if row["share"][2] == 0
        ),
        "least memory of it while it is": min(row["memory"] for row in log if row["share"][2] > 0),
    }
    assert found["order of skills"] == ["flat", "mud", "flat", "beam", "flat"]
    assert all(ramp == [0.2, 0.4, 0.6, 0.8, 1.0] for ramp in ramps)
    assert found["command in mud"] == [0.5]
    assert len(found["command on the beam"]) == 1
    assert 0.3 <= found["command on the beam"][0] <= 0.4
    assert found["last action in mud, of the environment's"] == [0.333]
    assert found["largest memory of the beam's skill while it is not mixed in"] == 0
    assert found["least memory of it while it is"] > 0
    return found


def plot(log, path):
    """What the numbers say, over the way that was driven."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colours = ("#4477aa", "#997700", "#aa3377")
    x = [row["x"] for row in log]
    figure, axes = plt.subplots(4, 1, figsize=(9, 8), sharex=True, height_ratios=(2, 1.3, 1.3, 1))
    axes[0].plot(x, [row["speed"] for row in log], color="black", label="speed, m/s")
    axes[0].plot(x, [row["command"] for row in log], color="tab:red", linestyle="--", label="command that is seen, m/s")
    for i, kind in enumerate(KINDS):
        axes[1].plot(x, [row["share"][i] for row in log], color=colours[i], label=f"share of '{kind}'")
    axes[2].plot(x, [row["offset"] for row in log], color="black", label="off the middle, m")
    axes[3].plot(x, [row["memory"] for row in log], color=colours[2], label="memory of 'beam', norm")
    for axis in axes:
        for i, kind in enumerate(("flat", "mud", "flat", "beam", "flat")):
            if kind != "flat":
                start = i * Course.segment_length
                axis.axvspan(start, start + Course.segment_length, color=colours[KINDS.index(kind)], alpha=0.12)
        axis.legend(loc="lower left", bbox_to_anchor=(0, 0.97), fontsize=8, ncols=3, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    for half in (-Course.beam_half_width, Course.beam_half_width):
        axes[2].plot([9, 12], [half, half], color=colours[2], linewidth=1)
    axes[3].set_xlabel("x, m (mud from 3 to 6, beam from 9 to 12)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=250_000, help="environment steps of each skill")
    parser.add_argument("--runs", type=Path, help="where the skills' run directories go; a temporary one by default")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.runs or Path(temporary)
        curves = {kind: train(kind, args.seed, args.steps, folder) for kind in KINDS}
        torch.manual_seed(args.seed)
        mutex = build(folder, cmd_vel_mapping=VELOCITIES, action_smoothing_buffer_len=SMOOTHING)
        scores = {"mutex": arrivals(mutex)} | {f"{kind} alone": arrivals(build(folder, [kind])) for kind in KINDS}
        scores["mutex without commands"] = arrivals(build(folder, action_smoothing_buffer_len=SMOOTHING))
        log = drive(mutex)
    found = check(log)
    for name, value in found.items():
        print(f"{name}: {value}")
    if args.plot:
        plot(log, args.plot)
    result = {"seed": args.seed, "curves": curves, "found": found}
    result["arrivals"] = {name: [round(share, 3), round(s, 1)] for name, (share, s) in scores.items()}
    for name, (share, seconds) in result["arrivals"].items():
        report({"policy": name, "seed": args.seed, "arrived": share, "seconds": seconds}, args.out)
    return result


if __name__ == "__main__":
    main()
