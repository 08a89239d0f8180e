"""Bundles that several tests read; a test that changes one gets a copy."""

import shutil

import pytest
import torch

from canter.export.bundle import export_bundle
from canter.modules import ActorCritic, ActorCriticRecurrent
from canter.runners.evaluation import InferencePolicy

SEGMENTS = {"base": (3,), "joints": (2, 2)}
ROBOT = {
    "control_period": 0.02,
    "action": {"names": ["hip", "knee"], "target": "position", "scale": [0.5], "default_pose": [0.1, -0.2]},
}
INFO = {"config": {"run": {"task": "canter/Nothing"}}, "environment": {"robot": ROBOT}, "iteration": 3, "timesteps": 96}


def small_policy(cls=ActorCritic, **settings):
    torch.manual_seed(0)
    sizes = {"actor_hidden_dims": (8, 5), "critic_hidden_dims": (4,)}
    return cls(7, 7, 2, obs_segments=SEGMENTS, **sizes, **settings).eval()


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Bundles by name, each written once: an MLP in all formats, an LSTM in all formats."""
    folder = tmp_path_factory.mktemp("bundles")
    policies = {
        "mlp": small_policy(),
        "lstm": small_policy(ActorCriticRecurrent, rnn_type="lstm", rnn_hidden_size=6),
    }
    results = {}
    for name, policy in policies.items():
        acting = InferencePolicy(policy, segments=SEGMENTS, info=INFO, action_bounds=([-0.05, -1.0], [0.05, 1.0]))
        results[name] = acting, export_bundle(acting, folder / name)
    return results


@pytest.fixture
def bundle(made, tmp_path):
    """A copy of the MLP's bundle."""
    return shutil.copytree(made["mlp"][1].path, tmp_path / "bundle")
