"""bfloat16 matrix products on a CPU: they replay as they ran, and what is not a product stays float32."""

import pytest
import torch

from canter.envs import CartPole, PointRobot
from canter.execution import executor
from canter.execution.executor import Executor, cpu_has_bf16
from canter.runners import OffPolicyRunner, OnPolicyRunner

SMALL = {"actor_hidden_dims": [16], "critic_hidden_dims": [16]}
OFF = {"learning_starts": 32, "batch_size": 16, "empirical_normalization": True}
RNN = {**SMALL, "class_name": "ActorCriticRecurrent", "rnn_hidden_size": 8}
RUNS = {
    "mlp": ("PPO", PointRobot, SMALL),
    "discrete": ("PPO", CartPole, SMALL),
    "lstm": ("PPO", PointRobot, RNN),
    "gru": (
        "PPO",
        PointRobot,
        {**RNN, "rnn_type": "gru"},
    ),
    "dqn": ("DQN", CartPole, None),
    "sac": ("SAC", PointRobot, None),
    "td3": ("TD3", PointRobot, None),
}
pytestmark = pytest.mark.filterwarnings("ignore:the training dict leaves out settings")


@pytest.fixture
def has_bf16(monkeypatch):
    """A CPU with instructions for bfloat16; without them the same products are emulated."""
    monkeypatch.setattr(executor, "cpu_has_bf16", lambda: True)


def train(kind, execution, precision):
    algorithm, env, policy = RUNS[kind]
    cfg = {"seed": 3, "execution": execution, "algorithm": {"class_name": algorithm, "precision": precision}}
    if policy is None:
        cfg["algorithm"] |= OFF
        runner = OffPolicyRunner(env(8, seed=3), cfg, device="cpu", show_progress=False)
        runner.learn(160)
    else:
        cfg |= {"num_steps_per_env": 6, "policy": policy}
        runner = OnPolicyRunner(env(8, seed=3), cfg, device="cpu", show_progress=False)
        runner.learn(5)
    return runner


@pytest.mark.parametrize("kind", RUNS)
def test_recorded_training_in_bf16_is_the_eager_training(kind, has_bf16):
    eager, recorded, plain = train(kind, "eager", "bf16"), train(kind, "graph", "bf16"), train(kind, "eager", "tf32")
    assert recorded.alg.executor.graphs
    assert not recorded.alg.executor.eager_only
    states = [runner.policy.state_dict() for runner in (eager, recorded, plain)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert any(not torch.equal(value, states[2][name]) for name, value in states[0].items())  # the products differ
    weights = [value for value in states[0].values() if value.is_floating_point()]
    assert all(value.dtype != torch.bfloat16 and value.isfinite().all() for value in weights)


def test_log_probabilities_and_returns_stay_float32(has_bf16):
    alg = train("lstm", "graph", "bf16").alg
    for name in ("actions_log_prob", "values", "returns", "advantages"):
        stored = getattr(alg.storage, name)
        assert stored.dtype == torch.float32
        assert name == "values" or not torch.equal(stored, stored.bfloat16().float())


def test_values_of_actions_are_not_rounded(has_bf16):
    alg = train("sac", "graph", "bf16").alg
    with torch.no_grad():
        alg.critics.mlp[-1].bias.fill_(1000.0)
        with alg.executor.autocast():
            values = alg.critics(
                torch.randn(64, *alg.env.critic_obs_space.shape), torch.rand(64, *alg.action_space.shape)
            )
    assert values.dtype == torch.float32
    assert values.std() < 1.0
    assert len(values.unique()) > 64  # bfloat16 has steps of 4 there


def test_a_cpu_without_bf16_computes_in_float32(monkeypatch):
    monkeypatch.setattr(executor, "cpu_has_bf16", lambda: False)
    x = torch.randn(4, 4)
    for precision, dtype in (("bf16", torch.float32), ("tf32", torch.float32)):
        with Executor(torch.device("cpu"), precision=precision).autocast():
            assert (x @ x).dtype == dtype
    monkeypatch.setattr(executor, "cpu_has_bf16", lambda: True)
    with Executor(torch.device("cpu"), precision="bf16").autocast():
        assert (x @ x).dtype == torch.bfloat16


def test_what_torch_says_of_the_cpu_decides(monkeypatch):
    for found, want in ({"avx2": True, "avx512_bf16": False}, False), ({"amx_bf16": True}, True), ({}, False):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=found: found, raising=False)
        cpu_has_bf16.cache_clear()
        assert cpu_has_bf16() is want
    cpu_has_bf16.cache_clear()
