"""Search settings of PPO with Optuna, stop bad trials early, then train a fresh seed with the best settings."""

import argparse
from pathlib import Path
from typing import Any

import optuna

from canter.envs import wrap_env
from canter.presets import load_preset
from canter.runners import OnPolicyRunner


def train(settings: dict[str, Any], seed: int, steps: int, out: Path, trial: optuna.Trial | None = None) -> float:
    """Train and return the mean return of 10 episodes without noise."""
    env = wrap_env("CartPole-v1", num_envs=settings["num_envs"])
    runner = OnPolicyRunner(env, settings | {"seed": seed}, log_dir=str(out), device="cpu", show_progress=False)
    try:
        runner.learn(total_timesteps=steps, trial=trial)  # raises optuna.TrialPruned if the trial is stopped
        return runner.eval(num_episodes=10)["eval/mean_reward"]
    finally:
        runner.close()


def main() -> None:
    """Search, then train the best."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("runs/sweep"))
    args = parser.parse_args()

    def settings(chosen: dict[str, Any]) -> dict[str, Any]:
        preset = load_preset("CartPole-v1")
        return preset | {"algorithm": preset["algorithm"] | chosen}

    def objective(trial: optuna.Trial) -> float:
        chosen = {
            "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
            "num_learning_epochs": trial.suggest_int("num_learning_epochs", 2, 20),
            "gamma": trial.suggest_categorical("gamma", [0.95, 0.98, 0.99]),
        }
        return train(settings(chosen), 1, args.steps, args.out / f"trial{trial.number}", trial)

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=1))
    first = load_preset("CartPole-v1")["algorithm"]  # tried first, so that the search never ends below it
    study.enqueue_trial({name: first[name] for name in ("learning_rate", "num_learning_epochs", "gamma")})
    study.optimize(objective, n_trials=args.trials)
    print("best settings", study.best_params, "return", study.best_value)
    print("with a fresh seed", train(settings(study.best_params), 2, args.steps, args.out / "best"))


if __name__ == "__main__":
    main()
