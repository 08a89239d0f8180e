"""Off-policy learning on a GPU: captured and eager steps give the same, with new noise in every replay."""

import dataclasses

import pytest
import torch

from canter.algorithms import DQNConfig, SACConfig, TD3Config
from canter.envs.torch_envs import CartPole, PointRobot
from canter.runners import OffPolicyRunner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
SMALL = {"batch_size": 64, "learning_starts": 64, "buffer_size": 4096, "seed": 1, "save_interval": 0}
CONFIGS = {
    "dqn": DQNConfig(**SMALL, n_step=3, gradient_steps=3, target_update_interval=5, execution="eager"),
    "per": DQNConfig(**SMALL, prioritized_replay=True, execution="eager"),
    "sac": SACConfig(**SMALL, gradient_steps=4, policy_delay=2, empirical_normalization=True, execution="eager"),
    "atoms": SACConfig(**SMALL, num_atoms=21, layer_norm=True, critic_reduction="mean", execution="eager"),
    "td3": TD3Config(**SMALL, gradient_steps=2, execution="eager"),
}


def run(kind, execution, steps=60):
    env = (CartPole if kind in ("dqn", "per") else PointRobot)(16, "cuda", seed=0, max_episode_length=9)
    cfg = dataclasses.replace(CONFIGS[kind], execution=execution, precision="fp32")
    runner = OffPolicyRunner(env, cfg, device="cuda", show_progress=False)
    runner.learn(16 * steps)
    return runner


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_captured_learning_is_eager_learning(kind):
    # Sums of a distribution's shares are in no fixed order on a GPU, and their last bits grow from step to step.
    steps = 60 if kind != "atoms" else 9
    eager, captured = run(kind, "eager", steps), run(kind, "graph", steps)
    assert captured.alg.executor.graphs
    assert not captured.alg.executor.eager_only
    assert eager.alg.num_updates == captured.alg.num_updates > 0
    for name, value in eager.alg.replay.data.items():
        assert kind == "atoms" or name == "priorities" or torch.equal(value, captured.alg.replay.data[name]), name
    for a, b in zip(eager.policy.parameters(), captured.policy.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-3 if kind in ("atoms", "per") else 1e-5)


@pytest.mark.parametrize("kind", ["sac", "dqn"])
def test_the_fastest_way_learns_too(kind):
    runner = run(kind, "auto", steps=30)
    assert all(torch.isfinite(p).all() for p in runner.policy.parameters())
    obs, critic = runner.env.get_observations()
    first, second = (runner.alg.explore(obs, critic) for _ in range(2))
    assert not torch.equal(first, second), "every replay draws new noise"


def test_an_iteration_never_waits_for_the_device():
    runner = run("sac", "graph", steps=30)
    runner.log_interval = 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            runner.obs, runner.critic_obs, *_ = runner.rollout_step(runner.obs, runner.critic_obs)
        runner.alg.train(4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
