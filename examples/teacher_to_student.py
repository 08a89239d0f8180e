"""Train a teacher that observes everything, then a student with a memory that observes what a robot measures."""

import argparse

from canter.envs import ObsComponents, Pendulum
from canter.presets import load_preset
from canter.runners import OnPolicyRunner


def main() -> None:
    """Train the teacher, then the student by DAgger, and compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--out", default="runs/teacher_to_student")
    args = parser.parse_args()

    teacher_cfg = load_preset("Pendulum-v1") | {"seed": 1}
    teacher = OnPolicyRunner(Pendulum(8, seed=1), teacher_cfg, f"{args.out}/teacher", "cpu")
    teacher.learn(total_timesteps=args.steps)
    print("teacher", teacher.eval(num_episodes=16)["eval/mean_reward"])
    teacher.close()

    # The student observes the angle alone; its critic, and the teacher that labels its steps, observe the velocity too.
    env = ObsComponents(Pendulum(16, seed=2), {"angle": 2, "velocity": 1}, actor=["angle"])
    algorithm = {"class_name": "TPPO", "teacher_ac_path": f"{args.out}/teacher", "using_ppo": False}
    algorithm |= {"num_learning_epochs": 5, "num_mini_batches": 4, "learning_rate": 1e-3, "schedule": "fixed"}
    # At first the teacher acts in a share of the episodes, which decays to 0.
    algorithm |= {"teacher_act_prob": "linear", "update_times_scale": 5, "empirical_normalization": True}
    policy = {"class_name": "ActorCriticRecurrent", "rnn_type": "gru", "rnn_hidden_size": 64, "init_noise_std": 0.05}
    cfg = {"num_steps_per_env": 64, "seed": 1, "algorithm": algorithm, "policy": policy}
    student = OnPolicyRunner(env, cfg, f"{args.out}/student", "cpu")
    student.learn(total_timesteps=args.steps)
    print("student", student.eval(num_episodes=16)["eval/mean_reward"])
    student.close()


if __name__ == "__main__":
    main()
