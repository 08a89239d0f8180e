"""A policy in the form in which the runners of rsl_rl 5.x and mjlab export it, and the files they write."""

import importlib
import io
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.export.bundle import export_runner, record, runner_policy
from canter.export.graph import StepModule, Unregistered, need_export_extra, quiet
from canter.export.runtime import difference, refuse_difference
from canter.runners.evaluation import InferencePolicy
from canter.utils.files import atomic_write


class OnnxStep(Unregistered):
    """A step for `torch.onnx.export`: (observations..., memories...) -> actions, or (actions, memories...)."""

    def __init__(self, acting: InferencePolicy) -> None:
        step = StepModule(acting)
        super().__init__(step)
        self.is_recurrent, self.input_names = bool(step.memories), step.input_names
        self.output_names = ["actions", *(f"{memory.name}_out" for memory in step.memories)]
        self.input_size = sum(math.prod(port.shape) for port in step.observations)

    def forward(self, *tensors: Tensor) -> Any:
        """Actions, then memories; estimates and logits are left out."""
        actions, *others = super().forward(*tensors)
        return (actions, *others[1 - len(self.output_names) :]) if self.is_recurrent else actions

    def get_dummy_inputs(self) -> tuple[Tensor, ...]:
        """Zeros for one robot."""
        return self.called[0].zeros(1)


class JitStep(Unregistered):
    """A step for TorchScript: (observations...) -> actions. The memories of one robot are buffers."""

    def __init__(self, acting: InferencePolicy) -> None:
        step = StepModule(acting)
        super().__init__(step)
        for name, tensor in (*step.named_parameters(), *step.named_buffers()):  # so that `to(device)` moves them
            self.register_buffer(name.replace(".", "_"), tensor)
        for memory in step.memories:
            self.register_buffer(memory.name, torch.zeros(1, *memory.shape))

    def states(self) -> list[Tensor]:
        """The buffers of the memories."""
        return [getattr(self, memory.name) for memory in self.called[0].memories]

    def forward(self, *obs: Tensor) -> Tensor:
        """Actions; the memories advance."""
        states = self.states()
        actions, *others = super().forward(*obs, *states)
        for state, new in zip(states, others[len(others) - len(states) :], strict=True):
            state.copy_(new)
        return actions

    def reset(self) -> Tensor:
        """Clear the memories when an episode begins; the result has no meaning, but the tracer needs one."""
        return torch.stack([torch.zeros(()), *(state.zero_().sum() for state in self.states())])


def jit_module(acting: InferencePolicy) -> Any:
    """The TorchScript module of a policy: `module(obs)` gives actions, `module.reset()` begins an episode."""
    step = JitStep(acting).eval()
    obs = step.called[0].zeros(1 if step.states() else 3)[: len(step.called[0].observations)]
    inputs = {"forward": obs, "reset": ()}
    with quiet():
        graph: Any = torch.jit.trace_module(step, inputs, check_trace=False).graph
        used = {node.s("name") for node in graph.findAllNodes("prim::GetAttr")}
        for name in [name for name, _ in step.named_buffers() if name not in used]:  # weights of the critic
            delattr(step, name)
        made: Any = torch.jit.trace_module(step, inputs, check_trace=False)
        made.reset()
    return made


def refuse_other_actions(acting: InferencePolicy, act: Callable[..., Any], reset: Callable[[], Any], name: str) -> None:
    """Raise if `act(observations...)` of one robot does not give the actions of the policy on samples."""
    step = StepModule(acting)
    samples, _ = record(step, acting, None)
    largest = 0.0
    for number, is_new in enumerate(samples["resets"][:, 0]):
        if is_new:
            reset()
        actions = act(*(samples[f"input.{port.name}"][number, :1] for port in step.observations))
        largest = max(largest, difference(actions, samples["output.actions"][number, :1]))
    refuse_difference(largest, name)


def write_jit(runner: Any, path: Path) -> None:
    """Write a runner's policy as a TorchScript file, which is compared with the policy first."""
    acting = runner_policy(runner)
    made = jit_module(acting)
    refuse_other_actions(acting, lambda *obs: made(*map(torch.from_numpy, obs)).numpy(), made.reset, path.name)
    made.reset()
    buffer = io.BytesIO()
    torch.jit.save(made, buffer)
    atomic_write(path, buffer.getvalue())


def write_onnx(runner: Any, path: Path) -> None:
    """Write the ONNX file of a runner's bundle, which is compared with the policy first."""
    with tempfile.TemporaryDirectory() as folder:
        made = export_runner(runner, Path(folder) / "bundle", ("onnx",))
        atomic_write(path, (made.path / "policy.onnx").read_bytes())


def write_onnx_with_motion(runner: Any, path: Path) -> None:
    """Write the ONNX file of mjlab's tracking runner, which also gives the motion at an input `time_step`."""
    need_export_extra()
    import onnxruntime

    mjlab = importlib.import_module("mjlab.tasks.tracking.rl.runner")
    with tempfile.TemporaryDirectory() as folder:
        mjlab.MotionTrackingOnPolicyRunner.export_policy_to_onnx(runner, folder, path.name)
        made = (Path(folder) / path.name).read_bytes()
    session, start = onnxruntime.InferenceSession(made), np.zeros((1, 1), np.float32)

    def act(obs: Any) -> Any:
        return session.run(["actions"], {"obs": obs, "time_step": start})[0]

    refuse_other_actions(InferencePolicy(runner.policy), act, lambda: None, path.name)
    atomic_write(path, made)
