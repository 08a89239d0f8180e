"""A user's script: settings, training, evaluation, a callback and a policy of its own settings."""

from pathlib import Path

import gymnasium

import canter
from canter import PPOConfig, SACConfig
from canter.envs import VecEnv
from canter.modules import ActorCritic, MLPCritic, MLPDiscreteActor
from canter.runners import OffPolicyRunner, OnPolicyRunner, Runner


def report(runner: Runner, stats: dict[str, float]) -> None:
    """Print the return of an iteration."""
    print(runner.iteration, stats.get("episode/mean_reward"))


def make() -> VecEnv:
    """Four poles."""
    return canter.wrap_env(lambda: gymnasium.make("CartPole-v1"), num_envs=4, seed=1)


config = PPOConfig(gamma=0.98, num_steps_per_env=32, seed=1)
config.learning_rate = 1e-3
runner = OnPolicyRunner(make(), config, actor_class=MLPDiscreteActor, critic_class=MLPCritic, log_dir="runs/mine")
runner.add_callback("post_iteration", report)
runner.learn(2)
scores = runner.eval(num_episodes=2)
print(scores["eval/mean_reward"])
policy = ActorCritic(4, 4, 2, actor_hidden_dims=(32, 32))
agent = canter.PPO(policy, clip_param=0.1)
print(agent.cfg.clip_param, Path("runs/mine").exists())
sac = OffPolicyRunner("Pendulum-v1", SACConfig(learning_starts=64, batch_size=64))
sac.learn(total_timesteps=100)
trained = canter.train("CartPole-v1", total_timesteps=512, settings={"seed": 1})
print(canter.evaluate(trained, episodes=2), canter.load_preset("CartPole-v1")["num_envs"])
actions = trained.get_inference_policy()(make().reset()[0])
print(actions, canter.check_env("CartPole-v1", num_steps=20).ok)
