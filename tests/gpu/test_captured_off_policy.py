"""Off-policy learning on a GPU: captured steps equal eager ones, with new noise in every replay."""

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


CHANGES = {"gamma": 0.5, "tau": 0.9, "max_grad_norm": 1e-2, "target_noise": 0.5, "exploration_noise": 0.3}
CHANGES |= {"target_entropy": 3.0, "learning_rate": 0.01, "actor_learning_rate": 0.01, "epsilon_end": 0.5}


def make(kind, execution, **given):
    env = (CartPole if kind in ("dqn", "per") else PointRobot)(16, "cuda", seed=0, max_episode_length=9)
    cfg = dataclasses.replace(CONFIGS[kind], execution=execution, precision="fp32", **given)
    return OffPolicyRunner(env, cfg, device="cuda", show_progress=False)


def run(kind, execution, steps=60):
    runner = make(kind, execution)
    runner.learn(16 * steps)
    return runner


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_captured_learning_equals_eager_learning(kind):
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


@pytest.mark.parametrize("execution", ["graph", "compile"])
@pytest.mark.parametrize("kind", ["dqn", "sac", "td3"])
def test_assigned_floats_take_effect_in_captured_graphs(kind, execution):
    given = {"target_entropy": -1.0} if kind == "sac" else {}
    runners = {mode: make(kind, mode, **given) for mode in ("eager", execution)}
    for runner in runners.values():
        runner.learn(16 * 30)
        captured = set(runner.alg.executor.graphs)
        before = [p.detach().clone() for p in runner.policy.parameters()]
        for name in CHANGES.keys() & runner.alg.setting_fields.keys():
            setattr(runner.alg, name, CHANGES[name])
        runner.learn(16 * 10)
        assert set(runner.alg.executor.graphs) == captured
        assert any(not torch.equal(a, b) for a, b in zip(before, runner.policy.parameters(), strict=True))
    eager, fast = (runner.policy.parameters() for runner in runners.values())
    for a, b in zip(eager, fast, strict=True):
        assert torch.allclose(a, b, atol=1e-4 if execution == "graph" else 2e-2)


@pytest.mark.parametrize("execution", ["eager", "graph", "compile"])
def test_a_frozen_actor_keeps_its_parameters(execution):
    runner = make("sac", execution)
    runner.learn(16 * 20)
    parts = (runner.alg.actor, runner.alg.critics)
    actor, critics = ([p.detach().clone() for p in part.parameters()] for part in parts)
    runner.alg.actor.requires_grad_(False)
    runner.learn(16 * 10)
    assert all(torch.equal(a, b) for a, b in zip(actor, runner.alg.actor.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(critics, runner.alg.critics.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["sac", "dqn"])
def test_compiled_learning_stays_finite(kind):
    runner = run(kind, "compile", steps=30)
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
