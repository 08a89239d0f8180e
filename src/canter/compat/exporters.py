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

from canter.export.bundle import describe, record, runner_policy
from canter.export.graph import StepModule, Unregistered, need_export_extra, onnx_bytes, quiet
from canter.export.runtime import difference, refuse_difference
from canter.modules.actor_critic_recurrent import Memory
from canter.runners.evaluation import InferencePolicy
from canter.utils.files import atomic_write


class OnnxStep(Unregistered):
    """A step for `torch.onnx.export`: (observations..., memories...) -> actions, or (actions, memories...).

    The state of one LSTM or GRU is `h_in` and `c_in`, (L, N, H), as in the files of rsl_rl; other memories are as in a
    bundle.
    """

    def __init__(self, acting: InferencePolicy) -> None:
        step = StepModule(acting)
        super().__init__(step)
        names = [memory.name for memory in step.memories]
        self.has_one_rnn = len(names) == 1 and isinstance(step.policy.memories[names[0]], Memory)
        if self.has_one_rnn:
            names = ["h", "c"][: step.memories[0].shape[0]]
        self.is_recurrent, self.memory_names = bool(names), names
        self.input_names = [port.name for port in step.observations] + [f"{name}_in" for name in names]
        self.output_names = ["actions", *(f"{name}_out" for name in names)]
        self.input_size = sum(math.prod(port.shape) for port in step.observations)

    def forward(self, *tensors: Tensor) -> Any:
        """Actions, then memories; estimates and logits are left out."""
        if not self.is_recurrent:
            return super().forward(*tensors)[0]
        count = len(tensors) - len(self.memory_names)
        if not self.has_one_rnn:
            actions, *others = super().forward(*tensors)
            return (actions, *others[-len(self.memory_names) :])
        state = torch.stack(tensors[count:]).movedim(2, 0)  # S tensors (L, N, H) -> (N, S, L, H)
        actions, *_, state = super().forward(*tensors[:count], state)
        return (actions, *state.movedim(0, 2).unbind(0))

    @property
    def policy(self) -> Any:
        """The policy whose step this is."""
        return self.called[0].policy

    def zeros(self, rows: int) -> tuple[Tensor, ...]:
        """Inputs of the right shapes and types."""
        inputs = self.called[0].zeros(rows)
        return (*inputs[:-1], *inputs[-1].movedim(0, 2).unbind(0)) if self.has_one_rnn else inputs

    def batch_axes(self) -> dict[str, int]:
        """The axis of every input and output along which environments are counted."""
        axes = dict.fromkeys((*self.input_names, *self.output_names), 0)
        memories = [f"{name}_{end}" for name in self.memory_names for end in ("in", "out")]
        return axes | dict.fromkeys(memories, int(self.has_one_rnn))

    def get_dummy_inputs(self) -> tuple[Tensor, ...]:
        """Zeros for one robot."""
        return self.zeros(1)


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
    """Write a runner's policy as an ONNX file, which is compared with the policy first."""
    need_export_extra()
    import onnxruntime

    acting = runner_policy(runner)
    step = OnnxStep(acting)
    made = onnx_bytes(step, describe(step.called[0], acting))
    session, state = onnxruntime.InferenceSession(made), []

    def reset() -> None:
        state[:] = [tensor.numpy() for tensor in step.zeros(1)[len(step.input_names) - len(step.memory_names) :]]

    def act(*obs: Any) -> Any:
        actions, *state[:] = session.run(None, dict(zip(step.input_names, (*obs, *state), strict=True)))
        return actions

    reset()
    refuse_other_actions(acting, act, reset, path.name)
    atomic_write(path, made)


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
