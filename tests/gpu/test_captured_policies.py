"""Every preset policy trains the same whether its steps are captured or not."""

import warnings

import pytest
import torch
from policy_table import PRESETS, KitEnv, build_algorithm

from canter.runners import OnPolicyRunner

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fixed_order(monkeypatch):
    """The gradients of a convolution are otherwise summed in another order every time."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def trained(case, execution):
    env = KitEnv(num_envs=32, device="cuda", seed=1, max_episode_length=7)
    settings = {"execution": execution, "precision": "fp32", "schedule": "adaptive", "empirical_normalization": True}
    alg = build_algorithm(case, env, num_steps=8, num_mini_batches=2, **settings)
    alg.check_can_learn = lambda **_: None  # deterministic policies too
    runner = OnPolicyRunner(env, agent=alg, show_progress=False)
    runner.learn(8)
    return runner


@pytest.mark.parametrize("case", PRESETS, ids=lambda case: case.id)
def test_captured_equals_eager(case):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # a capture that fails warns
        captured = trained(case, "graph")
    eager = trained(case, "eager")
    assert captured.alg.executor.graphs
    assert not captured.alg.executor.eager_only
    for (name, x), y in zip(captured.policy.state_dict().items(), eager.policy.state_dict().values(), strict=True):
        assert torch.equal(x, y), f"{name} differs by {(x.float() - y.float()).abs().max()}"
    assert list(captured.rewbuffer) == list(eager.rewbuffer)
