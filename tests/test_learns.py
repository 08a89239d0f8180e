"""Training from the presets reaches the published scores; hours in all, so run with `-m slow`, one task at a time."""

import copy

import pytest

from canter.envs import make_env
from canter.presets import has_preset, load_preset
from canter.runners import OnPolicyRunner

pytestmark = pytest.mark.slow

SEED = 1
EPISODES = 20
# task -> score that the deterministic policy must reach, and the environment steps it may take
TASKS = {
    "CartPole-v1": (475, 100_000),
    "Acrobot-v1": (-90, None),
    "Pendulum-v1": (-200, 200_000),
    "LunarLanderContinuous-v3": (200, 500_000),
    "HalfCheetah-v5": (4000, 1_000_000),
    "Hopper-v5": (2400, 1_000_000),
    "Walker2d-v5": (3000, 1_000_000),
}
# CartPole without velocities: only a policy that remembers can balance it.
MASKED = {
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
        "learning_rate": 0.001,
        "schedule": "linear",
        "max_grad_norm": 0.5,
        "empirical_normalization": True,
        "normalize_rewards": True,
    },
    "policy": {"actor_hidden_dims": [64], "critic_hidden_dims": [64], "activation": "tanh", "orthogonal_init": True},
}


def train_and_score(preset, policy=None, total_timesteps=None):
    """Mean return of deterministic episodes after the preset's training."""
    cfg = copy.deepcopy(preset)
    task, num_envs, steps = cfg.pop("task"), cfg.pop("num_envs"), cfg.pop("total_timesteps")
    cfg["policy"] |= policy or {}
    env, eval_env = make_env(task, "cpu", num_envs, SEED), make_env(task, "cpu", EPISODES, SEED + 1000)
    cfg |= {"seed": SEED, "save_interval": 0, "log_interval": 0}
    runner = OnPolicyRunner(env, cfg, device="cpu", eval_env=eval_env, show_progress=False)
    runner.learn(total_timesteps=steps if total_timesteps is None else total_timesteps)
    score = runner.eval(EPISODES)["eval/mean_reward"]
    runner.close()
    return score


@pytest.mark.parametrize("task", TASKS)
def test_the_preset_reaches_its_score_within_its_steps(task):
    threshold, budget = TASKS[task]
    assert has_preset(task)
    preset = load_preset(task)
    if budget is not None:
        assert preset["total_timesteps"] <= budget
    assert train_and_score(preset) >= threshold


@pytest.mark.parametrize("rnn_type", ["lstm", "gru"])
def test_a_recurrent_policy_balances_without_seeing_velocities(rnn_type):
    policy = {"class_name": "ActorCriticRecurrent", "rnn_type": rnn_type, "rnn_hidden_size": 64}
    assert train_and_score(MASKED, policy) >= 450


def test_the_same_policy_without_memory_does_not():
    assert train_and_score(MASKED, {"class_name": "ActorCritic"}) < 300


@pytest.mark.parametrize("task", [*TASKS, MASKED["task"]])
def test_every_one_of_these_trainings_starts(task):
    """One iteration each, so that a task that cannot run is known before the hours are spent."""
    preset = MASKED if task == MASKED["task"] else load_preset(task)
    score = train_and_score(preset, total_timesteps=1)
    assert score == score  # a number
