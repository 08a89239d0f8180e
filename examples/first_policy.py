"""Train PPO on CartPole with its preset, evaluate the policy, load it again and act with it."""

import argparse

import gymnasium

import canter
from canter.envs import wrap_env
from canter.presets import load_preset
from canter.runners import OnPolicyRunner


def main() -> None:
    """Train, evaluate, load, act."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--out", default="runs/first_policy")
    args = parser.parse_args()

    settings = load_preset("CartPole-v1") | {"seed": 1}  # a dict to change as you like
    env = wrap_env("CartPole-v1", num_envs=settings["num_envs"])
    runner = OnPolicyRunner(env, settings, log_dir=args.out, device="cpu")
    runner.learn(total_timesteps=args.steps)
    print("mean return", runner.eval(num_episodes=10)["eval/mean_reward"])  # 500 is perfect
    runner.close()

    policy = canter.load(args.out)  # needs no environment
    game = gymnasium.make("CartPole-v1")
    obs, _ = game.reset(seed=1)
    total, has_ended = 0.0, False
    while not has_ended:
        obs, reward, terminated, truncated, _ = game.step(policy.predict(obs).item())
        total, has_ended = total + float(reward), terminated or truncated
    print("one episode of the loaded policy", total)


if __name__ == "__main__":
    main()
