"""Learning with several processes (ranks) against one process with as many environments.

    python benchmarks/ranks.py                                   # every case, one process and two
    python benchmarks/ranks.py --cases sac --ranks 1 2 --seeds 1 2 3 --out benchmarks/results/ranks.jsonl

Every case has a fixed number of environments, which the ranks share. The score is the mean return of deterministic
episodes, and of APPO the distance between the velocity of the robot and that of the clip, which is its only reward.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent))

from report import report

from canter.bench import in_ranks
from canter.envs import make_env
from canter.envs.components import MotionFeatures, ObsComponents, windows
from canter.envs.torch_envs.tasks import Pendulum, PointRobot
from canter.presets import load_preset
from canter.runners import AmpPolicyRunner, OnPolicyRunner, build_runner
from canter.utils.distributed import RANKS

EPISODES = 20
NET = {"actor_hidden_dims": [64, 64], "critic_hidden_dims": [64, 64], "activation": "tanh", "orthogonal_init": True}
PENDULUM = {"gamma": 0.9, "learning_rate": 1e-3, "empirical_normalization": True, "normalize_rewards": True}
QUIET = {"log_interval": 0, "save_interval": 0}
MEMORY = {
    "task": "canter/MaskedCartPole",
    "num_envs": 32,
    "total_timesteps": 150_000,
    "num_steps_per_env": 64,
    "algorithm": {
        "class_name": "PPO",
        "num_learning_epochs": 8,
        "num_mini_batches": 4,
        "gamma": 0.99,
        "lam": 0.95,
        "value_loss_coef": 0.5,
        "use_clipped_value_loss": False,
        "learning_rate": 1e-3,
        "schedule": "linear",
        "max_grad_norm": 0.5,
        "empirical_normalization": True,
        "normalize_rewards": True,
    },
    "policy": {
        **NET,
        "class_name": "ActorCriticRecurrent",
        "rnn_type": "lstm",
        "rnn_hidden_size": 64,
        "actor_hidden_dims": [64],
        "critic_hidden_dims": [64],
    },
}


def own_envs(total: int) -> int:
    """The environments of this rank, of as many in all."""
    RANKS.start(torch.device("cpu"))
    return total // RANKS.size


def preset_score(preset: dict, seed: int, steps: int | None = None) -> float:
    """Mean return after the training of a preset."""
    cfg = copy.deepcopy(preset)
    task, num_envs, length = cfg.pop("task"), own_envs(cfg.pop("num_envs")), cfg.pop("total_timesteps")
    env = make_env(task, "cpu", num_envs, seed + RANKS.rank * num_envs)
    judge = make_env(task, "cpu", EPISODES, seed + 1000)
    is_off_policy = cfg["algorithm"]["class_name"] in ("SAC", "TD3", "DQN")
    name = "OffPolicyRunner" if is_off_policy else "OnPolicyRunner"
    runner = build_runner(name, env, cfg | QUIET | {"seed": seed}, device="cpu", eval_env=judge, show_progress=False)
    runner.learn(total_timesteps=steps or length)
    return runner.eval(EPISODES)["eval/mean_reward"]


def ppo(seed: int, teacher: str) -> float:
    """PPO on CartPole."""
    return preset_score({"task": "CartPole-v1", **load_preset("CartPole-v1")}, seed, 100_000)


def ppo_lstm(seed: int, teacher: str) -> float:
    """PPO with an LSTM on CartPole without velocities."""
    return preset_score(MEMORY, seed)


def sac(seed: int, teacher: str) -> float:
    """SAC on Pendulum."""
    preset = {"task": "Pendulum-v1", **load_preset("Pendulum-v1", "sac")}
    return preset_score({**preset, "num_envs": 4}, seed, 16_000)


def tppo(seed: int, teacher: str) -> float:
    """TPPO on Pendulum: a student with a memory and without velocities, of a teacher that sees them."""
    parts, num_envs = {"angle": 2, "velocity": 1}, own_envs(32)
    env = ObsComponents(Pendulum(num_envs, seed=seed + RANKS.rank * num_envs), parts, ["angle"])
    judge = ObsComponents(Pendulum(EPISODES, seed=98), parts, ["angle"])
    policy = {**NET, "class_name": "ActorCriticRecurrent", "rnn_type": "gru", "rnn_hidden_size": 32}
    settings = {
        "class_name": "TPPO",
        "teacher_ac_path": teacher,
        "num_learning_epochs": 5,
        "num_mini_batches": 4,
        "distill_target": "mse_sum",
        "schedule": "linear",
        "using_ppo": False,
        "teacher_act_prob": "linear",
        "update_times_scale": 10,
    }
    cfg = {**QUIET, "num_steps_per_env": 64, "seed": seed, "max_iterations": 40, "policy": policy}
    cfg["algorithm"] = {**PENDULUM, **settings}
    runner = OnPolicyRunner(env, cfg, None, "cpu", eval_env=judge, show_progress=False)
    runner.learn(40)
    return runner.eval(EPISODES)["eval/mean_reward"]


def appo(seed: int, teacher: str) -> float:
    """APPO on a point robot whose only reward is the style of a clip."""
    velocity, num_envs = torch.tensor([0.8, 0.0]), own_envs(64)
    noise = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    env = MotionFeatures(PointRobot(num_envs, seed=seed + RANKS.rank), ["true_velocity"], privileged=True)
    discriminator = {"input_dim": 4, "style_reward_coef": 1.0, "hidden_dims": [64, 64]}
    policy = {
        "class_name": "AmpActorCritic",
        "actor_hidden_dims": [64, 64],
        "critic_hidden_dims": [64, 64],
        "init_noise_std": 0.5,
        "amp_discriminator": discriminator,
    }
    settings = {
        "class_name": "APPO",
        "num_learning_epochs": 4,
        "num_mini_batches": 4,
        "schedule": "adaptive",
        "gamma": 0.99,
        "empirical_normalization": True,
        "amp_motion_loader": windows(velocity + 0.05 * noise),
        "discriminator_learning_rate": 5e-4,
    }
    cfg = {**QUIET, "num_steps_per_env": 24, "seed": seed, "policy": policy, "algorithm": settings}
    runner = AmpPolicyRunner(env, cfg, None, "cpu", show_progress=False)
    runner.learn(60)
    act, (obs, _), seen = runner.get_inference_policy(), env.reset(), []
    for _ in range(150):
        record = env.step(act(obs))
        obs = record.obs
        seen.append(record.critic_obs[:, 6:8].mean(0))
    return float((torch.stack(seen[50:]).mean(0) - velocity).norm())


def train_teacher(folder: str) -> str:
    """The run directory of a teacher that sees everything."""
    algorithm = {**PENDULUM, "num_learning_epochs": 10, "num_mini_batches": 16, "lam": 0.95}
    cfg = {**QUIET, "num_steps_per_env": 64, "seed": 1, "algorithm": algorithm, "policy": NET}
    OnPolicyRunner(Pendulum(32, seed=1), cfg, folder, "cpu", show_progress=False).learn(total_timesteps=150_000)
    return folder


CASES = {"ppo": ppo, "ppo lstm": ppo_lstm, "tppo": tppo, "appo": appo, "sac": sac}


def measure(case: str, size: int, seed: int, teacher: str) -> dict:
    """The score of a case with this many ranks, and the seconds it took."""
    begin = time.perf_counter()
    score = in_ranks(size, CASES[case], seed, teacher)
    return {"case": case, "ranks": size, "seed": seed, "score": score, "seconds": time.perf_counter() - begin}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--out", type=Path, help="append one line of JSON per run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        teacher = train_teacher(folder) if "tppo" in args.cases else ""
        for case in args.cases:
            for seed in args.seeds:
                for size in args.ranks:
                    report(measure(case, size, seed, teacher), args.out)


if __name__ == "__main__":
    main()
