"""Policies as rsl_rl's and mjlab's exporters call them: `as_onnx`, `as_jit`, and the files of a runner."""

import functools
import importlib.util
import io
import math
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from canter.compat import exporters
from canter.envs import PointRobot
from canter.export.runtime import BundleError
from canter.runners import OnPolicyRunner

TESTS = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("policy_table", TESTS / "policy_table.py")
table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(table)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
KINDS = {"mlp": {}} | {
    kind: {"class_name": "ActorCriticRecurrent", "rnn_type": kind, "rnn_hidden_size": 8} for kind in ("lstm", "gru")
}


@functools.cache
def trained(kind):
    """A runner whose policy has a memory of `kind` and a normaliser with statistics."""
    policy = {"actor_hidden_dims": [8], "critic_hidden_dims": [64], **KINDS[kind]}
    cfg = {"num_steps_per_env": 4, "seed": 1, "policy": policy, "empirical_normalization": True, "execution": "eager"}
    runner = OnPolicyRunner(PointRobot(2), cfg, None, "cpu", show_progress=False)
    runner.learn(1)
    runner.eval_mode()
    return runner


def saved(module):
    """A TorchScript module after it was written and read."""
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(module), buffer)  # rsl_rl scripts what it gets
    buffer.seek(0)
    return torch.jit.load(buffer)


def check_episodes(act, policy, width=6):
    """Two episodes of one robot: the actions of the policy, memories cleared in between."""
    for _ in range(2):
        policy.reset()
        for _ in range(3):
            obs = 2 * torch.randn(1, width)
            torch.testing.assert_close(act(obs), policy.act_inference(obs).detach(), rtol=0, atol=1e-6)
        act.reset()


@pytest.mark.parametrize("kind", KINDS)
def test_a_jit_module_takes_observations_alone_and_keeps_its_memory(kind):
    policy = trained(kind).alg.get_policy()
    module = saved(policy.as_jit().to("cpu"))
    check_episodes(module, policy)
    assert not any(64 in weight.shape for weight in module.buffers()), "weights of the critic"


@pytest.mark.parametrize("case", table.PRESETS, ids=lambda case: case.id)
def test_every_policy_of_the_table_has_a_jit_module_with_its_actions(case):
    policy = table.build(case).eval()
    check_episodes(policy.as_jit(), policy, sum(math.prod(shape) for shape in table.SEGMENTS.values()))


class Motion(nn.Module):
    """mjlab's pattern for tracking tasks: the exported policy inside of a module with the motion."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy.as_onnx(verbose=False)
        self.register_buffer("joints", torch.arange(10.0).view(5, 2))

    def forward(self, x, time_step):
        return self.policy(x), self.joints[time_step.long().squeeze(-1)]


@pytest.mark.parametrize("case", [c for c in table.PRESETS if c.id in ("ActorCritic-mlp", "StateAc-mlp")])
def test_a_step_for_onnx_gives_actions_alone_inside_of_another_module(case, tmp_path):
    policy = table.build(case).eval()
    model = Motion(policy).to("cpu").eval()
    names = {"input_names": ["obs", "time_step"], "output_names": ["actions", "joints"]}
    inputs = torch.zeros(1, model.policy.input_size), torch.zeros(1, 1)
    file = tmp_path / "policy.onnx"
    torch.onnx.export(model, inputs, file, opset_version=18, dynamic_axes={}, dynamo=False, **names)
    obs = torch.randn(1, model.policy.input_size)
    given = {"obs": obs.numpy(), "time_step": np.full((1, 1), 3, np.float32)}
    actions, joints = onnxruntime.InferenceSession(file).run(["actions", "joints"], given)
    assert np.abs(actions - policy.act_inference(obs).detach().numpy()).max() < 1e-6
    assert joints.tolist() == [[6.0, 7.0]]


def test_the_ports_of_a_step_for_onnx_are_named():
    step = trained("lstm").policy.as_onnx(verbose=True)
    assert (step.input_names, step.output_names) == (["obs", "h_in", "c_in"], ["actions", "h_out", "c_out"])
    assert (step.is_recurrent, step.input_size) == (True, 6)
    assert [tuple(part.shape) for part in step.get_dummy_inputs()] == [(1, 6), (1, 1, 8), (1, 1, 8)]
    assert [tuple(part.shape) for part in step(*step.get_dummy_inputs())] == [(1, 2), (1, 1, 8), (1, 1, 8)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_onnx_file_of_a_runner_has_the_ports_of_rsl_rl_for_any_batch_and_its_actions(kind, tmp_path):
    runner = trained(kind)
    runner.export_policy_to_onnx(tmp_path)
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    memories = {"mlp": [], "gru": ["h"], "lstm": ["h", "c"]}[kind]
    state = [(f"{name}_in", [1, "batch", 8]) for name in memories]
    assert [(port.name, port.shape) for port in session.get_inputs()] == [("obs", ["batch", 6]), *state]
    assert [port.name for port in session.get_outputs()] == ["actions", *(f"{name}_out" for name in memories)]
    runner.policy.reset()
    state = [np.zeros((1, 3, 8), np.float32) for _ in memories]
    names = [port.name for port in session.get_inputs()]
    for _ in range(3):
        obs = torch.randn(3, 6)
        actions, *state = session.run(None, dict(zip(names, [obs.numpy(), *state], strict=True)))
        assert np.abs(actions - runner.policy.act_inference(obs).detach().numpy()).max() < 1e-6


def test_an_onnx_file_with_other_actions_is_refused(tmp_path, monkeypatch):
    runner, right = trained("lstm"), exporters.OnnxStep.forward

    def wrong(self, *tensors):
        actions, *states = right(self, *tensors)
        return (actions + 1e-3, *states)

    monkeypatch.setattr(exporters.OnnxStep, "forward", wrong)
    with pytest.raises(BundleError, match=r"policy.onnx differs from the recorded samples by .*, more than 1e-05"):
        runner.export_policy_to_onnx(tmp_path)
    assert not (tmp_path / "policy.onnx").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_of_a_runner_have_its_actions(kind, tmp_path):
    runner = trained(kind)
    runner.export_policy_to_jit(str(tmp_path / "exported"))
    check_episodes(torch.jit.load(tmp_path / "exported" / "policy.pt"), runner.policy)


def test_a_jit_file_with_other_actions_is_refused(tmp_path, monkeypatch):
    runner, right = trained("lstm"), exporters.jit_module

    def wrong(acting):
        module = right(acting)
        dict(module.named_buffers())["policy_actor_0_bias"].add_(1e-3)
        return module

    monkeypatch.setattr(exporters, "jit_module", wrong)
    with pytest.raises(BundleError, match=r"policy.pt differs from the recorded samples by .*, more than 1e-05"):
        runner.export_policy_to_jit(tmp_path)
    assert not (tmp_path / "policy.pt").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_the_real_runner_of_rsl_rl_exports_canters_policies(kind, tmp_path):
    theirs = pytest.importorskip("rsl_rl.runners", reason="needs the real rsl_rl: pip install 'rsl-rl-lib>=5'")
    runner = trained(kind)
    theirs.OnPolicyRunner.export_policy_to_jit(runner, str(tmp_path))
    theirs.OnPolicyRunner.export_policy_to_onnx(runner, str(tmp_path))
    check_episodes(torch.jit.load(tmp_path / "policy.pt"), runner.policy)
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    names = [port.name for port in session.get_inputs()]
    state = [np.zeros(port.shape, np.float32) for port in session.get_inputs()[1:]]
    runner.policy.reset()
    for _ in range(3):
        obs = torch.randn(1, 6)
        actions, *state = session.run(None, dict(zip(names, [obs.numpy(), *state], strict=True)))
        assert np.abs(actions - runner.policy.act_inference(obs).detach().numpy()).max() < 1e-6
