"""The page "Runners" of ApexRL, section by section."""

import gymnasium
import pytest
import torch

from canter.algorithms import PPO, DQNConfig, PPOConfig, SACConfig
from canter.envs import GymVecEnv, GymVecEnvContinuous
from canter.modules import MLPActor, MLPCritic, MLPDiscreteActor, MLPQNetwork
from canter.runners import OffPolicyRunner, OnPolicyRunner

SMALL = {"hidden_dims": [8]}
NETWORKS = {"actor_class": MLPActor, "critic_class": MLPCritic, "actor_cfg": SMALL, "critic_cfg": SMALL}


def pendulums(num_envs=2):
    return GymVecEnvContinuous([lambda: gymnasium.make("Pendulum-v1", max_episode_steps=5)] * num_envs, device="cpu")


def poles(num_envs=2):
    return GymVecEnv([lambda: gymnasium.make("CartPole-v1") for _ in range(num_envs)], device="cpu")


def config(**more):
    return PPOConfig(num_steps_per_env=4, num_learning_epochs=1, num_mini_batches=1, **more)


def on_policy(tmp_path=None, **more):
    given = {"cfg": config(), **NETWORKS, "device": torch.device("cpu"), "show_progress": False}
    return OnPolicyRunner(env=pendulums(), log_dir=tmp_path, **{**given, **more})


def off_policy(**more):
    cfg = DQNConfig(double_dqn=True, dueling=True, learning_starts=4, batch_size=4, buffer_size=64, log_interval=8)
    given = {"cfg": cfg, "q_network_class": MLPQNetwork, "device": torch.device("cpu"), "show_progress": False}
    return OffPolicyRunner(env=poles(), **{**given, **more})


def test_on_policy_runner_basic_usage(tmp_path):
    runner = OnPolicyRunner(
        env=pendulums(),
        algorithm="ppo",
        actor_class=MLPActor,
        critic_class=MLPCritic,
        log_dir=str(tmp_path / "logs"),
        save_dir=str(tmp_path / "checkpoints"),
        log_interval=10,
        save_interval=100,
        show_progress=False,
    )
    runner.learn(total_timesteps=100)
    assert runner.tot_timesteps >= 100
    stats = runner.eval(num_episodes=2)
    assert {f"eval/{name}_reward" for name in ("mean", "std", "min", "max")} <= stats.keys()
    runner.save_checkpoint("final_model.pt")
    assert (tmp_path / "checkpoints" / "final_model.pt").is_file()
    runner.close()


def test_configuration_takes_network_settings_and_intervals():
    runner = on_policy(log_interval=7, save_interval=9)
    assert (runner.log_interval, runner.save_interval) == (7, 9)
    assert sum(p.numel() for p in runner.policy.critic.parameters()) == 3 * 8 + 8 + 8 + 1


def test_ppo_learn_delegates_to_the_runner():
    agent = PPO(env=pendulums(), cfg=config(), **NETWORKS)
    agent.learn(total_timesteps=8)
    assert isinstance(agent.runner(), OnPolicyRunner)
    assert agent.runner().agent is agent


def test_callbacks_of_every_event_in_order():
    events = []
    runner = on_policy(log_interval=1)
    names = ("pre_iteration", "pre_rollout", "post_rollout", "pre_update", "post_update", "post_iteration")
    for name in names:
        runner.add_callback(name, lambda runner, *stats, name=name: events.append((name, runner.iteration, len(stats))))
    rewards = []
    runner.add_callback("post_iteration", lambda runner, stats: rewards.append(stats["rollout/mean_reward"]))
    runner.learn(1)
    assert [name for name, _, _ in events] == list(names)
    assert [count for name, _, count in events if name.startswith("post")] == [1, 1, 1]
    assert len(rewards) == 1


def test_callbacks_of_an_off_policy_runner_get_the_mean_reward_in_every_iteration():
    rewards = []
    runner = off_policy()
    runner.add_callback("post_iteration", lambda runner, stats: rewards.append(stats["rollout/mean_reward"]))
    runner.learn(total_timesteps=24)
    assert rewards == [1.0] * 12  # CartPole pays 1 for every step


def test_logging_has_the_documented_metrics():
    seen = {}
    runner = on_policy(log_interval=1)
    runner.add_callback("post_iteration", lambda runner, stats: seen.update(stats))
    runner.learn(3)
    for name in ("policy_loss", "value_loss", "entropy_loss", "approx_kl", "learning_rate"):
        assert f"train/{name}" in seen
    assert {"episode/mean_reward", "episode/mean_length", "rollout/mean_reward", "rollout/mean_value"} <= seen.keys()


def test_environment_extras_are_logged_by_key():
    class Extras(gymnasium.Wrapper):
        def step(self, action):
            obs, reward, terminated, truncated, info = self.env.step(action)
            parts = {"velocity": 2.0, "energy": -1.0}
            return (
                obs,
                reward,
                terminated,
                truncated,
                {**info, "reward_components": parts, "log": {"/robot/height": 0.5}},
            )

    seen = {}
    env = GymVecEnvContinuous([lambda: Extras(gymnasium.make("Pendulum-v1"))] * 2, device="cpu")
    cfg = config(extra_log_keys=["log", "reward_components", "time_outs", "terminated", "truncated"])
    runner = OnPolicyRunner(env=env, cfg=cfg, **NETWORKS, log_interval=1, show_progress=False)
    runner.add_callback("post_iteration", lambda runner, stats: seen.update(stats))
    runner.learn(1)
    assert seen["extra/reward_components/velocity"] == 2.0
    assert seen["extra/log/robot/height"] == 0.5
    assert seen["extra/time_outs"] == seen["extra/terminated"] == 0.0
    assert PPOConfig().extra_log_keys == DQNConfig().extra_log_keys == SACConfig().extra_log_keys
    assert not any(name.startswith("extra/final_observation") for name in seen)


def test_timeouts_follow_gymnasium():
    env = pendulums()
    env.reset()
    for _ in range(5):
        record = env.step(torch.zeros(2, 1))
    assert record.truncated.tolist() == record.extras["time_outs"].tolist() == [True, True]
    assert record.terminated.tolist() == [False, False]
    assert record.extras["final_observation"].shape == (2, 3)


def test_checkpointing_restores_networks_optimizer_and_counters(tmp_path):
    runner = on_policy(tmp_path)
    runner.learn(2)
    path = runner.save_checkpoint(f"checkpoint_{runner.iteration}.pt")
    assert path.name == "checkpoint_2.pt"
    again = on_policy(tmp_path)
    again.load_checkpoint("checkpoint_2.pt")
    assert (again.iteration, again.tot_timesteps) == (2, 16)
    torch.testing.assert_close(again.policy.state_dict(), runner.policy.state_dict())
    assert again.checkpoints.loaded_config["algorithm"]["class_name"] == "PPO"
    runner.close()


def test_evaluation_is_deterministic():
    runner = on_policy()
    first, second = (runner.get_inference_policy()(torch.ones(3, 3)) for _ in range(2))
    torch.testing.assert_close(first, second)
    stats = runner.eval(num_episodes=3)
    assert stats["eval/min_reward"] <= stats["eval/mean_reward"] <= stats["eval/max_reward"]


def test_a_pre_configured_agent_is_trained():
    cfg, env = config(learning_rate=3e-4), pendulums()
    agent = PPO(env=env, cfg=cfg, **NETWORKS)
    runner = OnPolicyRunner(agent=agent, env=env, cfg=cfg, show_progress=False)
    assert runner.agent is agent
    runner.learn(1)


def test_off_policy_runner_basic_usage_and_metrics():
    seen = {}
    runner = off_policy()
    runner.add_callback("post_iteration", lambda runner, stats: seen.update(stats))
    runner.learn(total_timesteps=32)
    assert {"train/q_loss", "train/mean_q", "train/td_target_mean", "exploration/epsilon", "buffer/size"} <= seen.keys()
    assert seen["buffer/size"] == 32


@pytest.mark.parametrize("actor", [MLPDiscreteActor])
def test_discrete_actions_train_with_ppo(actor):
    runner = OnPolicyRunner(
        env=poles(), cfg=config(), actor_class=actor, critic_class=MLPCritic, show_progress=False, log_interval=1
    )
    runner.learn(1)


def test_off_policy_sac_metrics():
    seen = {}
    cfg = SACConfig(learning_starts=4, batch_size=4, buffer_size=64, log_interval=8)
    runner = OffPolicyRunner(env=pendulums(), cfg=cfg, show_progress=False)
    runner.add_callback("post_iteration", lambda runner, stats: seen.update(stats))
    runner.learn(total_timesteps=24)
    assert {f"train/{n}" for n in ("actor_loss", "critic1_loss", "critic2_loss", "alpha", "entropy")} <= seen.keys()
