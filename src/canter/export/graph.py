"""The step of a policy as one function of tensors, and its ONNX and TorchScript files."""

import contextlib
import copy
import io
import json
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import Distribution

from canter.modules.actor_critic_field_mutex import Velocities
from canter.modules.build import leaf_dtype
from canter.modules.distributions import Categorical
from canter.modules.policy import Context
from canter.modules.state_estimator import rescale
from canter.runners.evaluation import InferencePolicy
from canter.utils.tree import tree_leaves

OPSET = 18


class Port(NamedTuple):
    """A named input or output, with the shape of one row."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """float32, uint8 or int64."""


class StepModule(nn.Module):
    """One deterministic step: (observations..., memories...) -> (actions, other results..., memories...).

    Normalisation, squashing, scaling and clipping are inside. Every tensor has a leading batch dimension. Memories are
    those that the actor reads; an episode begins with zeros. Estimates are in physical units.
    """

    low: Tensor
    high: Tensor

    def __init__(self, acting: InferencePolicy) -> None:
        super().__init__()
        given = acting.policy
        self.policy = policy = copy.deepcopy(given).cpu().float().eval().requires_grad_(False)
        policy.set_hidden(dict.fromkeys(policy.memories))  # a step is given its memories
        self.obs_space = obs_space_of(acting)
        bounds = acting.action_bounds
        self.clips = bounds is not None
        for name, bound in zip(("low", "high"), bounds or ((), ()), strict=True):
            self.register_buffer(name, torch.as_tensor(np.array(bound, np.float32).ravel()))
        for state in policy.carried.values():
            if isinstance(state, Velocities):
                commands_middle_velocity(state)
        self.observations = [
            Port(name or "obs", tuple(space.shape), str(leaf_dtype(space)).removeprefix("torch."))
            for name, space in tree_leaves(self.obs_space)
        ]
        self.memories = self._used_memories()
        outputs = self._results(self.zeros(2))
        self.results = [
            Port(name, tuple(value.shape[1:]), str(value.dtype).removeprefix("torch."))
            for name, value in outputs.items()
        ]

    def _used_memories(self) -> list[Port]:
        """Memories that a step of the actor replaces; a mutex replaces those of its critics too, with zeros."""
        before = self.policy.initial_hidden(2)
        ctx = Context(dict(before))
        with torch.no_grad():
            self.policy.actor_params(self.policy.obs_normalizer.normalize(self._tree(self._zero_obs(2))), ctx)
        used = [n for n in before if ctx.hidden[n] is not before[n] and not n.startswith("memory_c")]
        return [Port(name, tuple(before[name].shape[1:]), "float32") for name in used]

    def _zero_obs(self, rows: int) -> list[Tensor]:
        return [torch.zeros(rows, *port.shape, dtype=getattr(torch, port.dtype)) for port in self.observations]

    def zeros(self, rows: int) -> tuple[Tensor, ...]:
        """Inputs of the right shapes and types."""
        return (*self._zero_obs(rows), *(torch.zeros(rows, *memory.shape) for memory in self.memories))

    def _tree(self, leaves: Sequence[Tensor]) -> Any:
        """Observations in the structure that the policy takes."""
        remaining = iter(leaves)

        def build(space: Any) -> Any:
            if isinstance(space, spaces.Dict):
                return {name: build(part) for name, part in space.spaces.items()}
            return next(remaining)

        return build(self.obs_space)

    def _results(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Every result of a step by name, memories included."""
        policy: Any = self.policy
        count = len(self.observations)
        names = [memory.name for memory in self.memories]
        unused = {name: state for name, state in policy.initial_hidden(1).items() if name not in names}
        ctx = Context({**unused, **dict(zip(names, tensors[count:], strict=True))})
        params = policy.actor_params(policy.obs_normalizer.normalize(self._tree(tensors[:count])), ctx)
        actions = policy.distribution.to_env(policy.distribution.mode(params))
        if self.clips:
            actions = torch.clamp(actions, self.low, self.high)
        found = {"actions": actions}
        if isinstance(policy.distribution, Categorical):
            found["logits"] = params["logits"].float()
        for estimate in getattr(policy, "estimates", {}).values():
            found[estimate.aux] = rescale(policy, estimate.target, ctx.aux[estimate.aux], inverse=True)
        return found | {memory: ctx.hidden[memory] for memory in names}

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """All results, actions first and memories last."""
        return tuple(self._results(tensors).values())

    def batch_axes(self) -> dict[str, int]:
        """The axis of every input and output along which environments are counted."""
        return dict.fromkeys((*self.input_names, *self.output_names), 0)

    @property
    def input_names(self) -> list[str]:
        """Names of the inputs, in order."""
        return [port.name for port in self.observations] + [f"{memory.name}_in" for memory in self.memories]

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs, in order."""
        names = [port.name for port in self.results]
        first = len(names) - len(self.memories)
        return names[:first] + [f"{name}_out" for name in names[first:]]


def obs_space_of(acting: InferencePolicy) -> spaces.Space:
    """The space of one observation: the given one, or a flat vector of the policy's width."""
    if acting.obs_space is not None:
        return acting.obs_space
    network = getattr(acting.policy, "actor", getattr(acting.policy, "q_network", None))
    space = getattr(network, "obs_space", None)
    if space is not None:
        return space
    layout = getattr(acting.policy, "obs_layout", None)
    if layout is None:
        name = type(acting.policy).__name__
        raise ValueError(f"{name} takes observations of any structure; give it their space: obs_space=...")
    return spaces.Box(-math.inf, math.inf, (layout.width,))


def commands_middle_velocity(state: Velocities) -> None:
    """Make a mutex policy command the middle of each velocity range: a file draws no random numbers."""
    low, high = state.policy.velocity_low, state.policy.velocity_high
    middle = state.policy.tie_velocities(((low + high) / 2).expand(state.state_shape))
    state.for_all = middle
    state.draw = lambda num_envs: middle  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide what torch's exporters print and warn about their own future, and undo what they switch off."""
    logger = logging.getLogger("torch.onnx")
    level, checks = logger.level, Distribution._validate_args
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        Distribution.set_default_validate_args(checks)


def exported_program(module: Any, rows: int | None = None) -> Any:
    """The graph of a step by `torch.export`; for any batch, or with a fixed number of rows."""
    inputs = module.zeros(rows or 3)
    dynamic = None
    if rows is None:
        batch = torch.export.Dim("batch", min=1)
        axes = module.batch_axes()
        dynamic = {"tensors": tuple({axes[name]: batch} for name in module.input_names)}
    with quiet():
        module(*inputs)  # constants that distributions make at the first call must be real tensors
        try:
            return torch.export.export(module, inputs, dynamic_shapes=dynamic, strict=False)
        except Exception as error:
            name, reason = type(module.policy).__name__, str(error).strip().splitlines()[0]
            way_out = "its code must be tensor operations for any batch: x.shape[0], not len(x); torch.where, not if"
            raise ValueError(f"{name} cannot be exported: {reason}; {way_out}") from error


def onnx_bytes(module: Any, metadata: Mapping[str, Any], properties: Mapping[str, str] | None = None) -> bytes:
    """A `StepModule`, or a step with its description of inputs and outputs, as an ONNX file of opset 18 for any batch.

    `metadata` is in its properties as JSON, under the name "canter"; `properties` are further ones.
    """
    need_export_extra()
    program = exported_program(module)
    with quiet():
        made: Any = torch.onnx.export(
            program,
            (),
            dynamo=True,
            opset_version=OPSET,
            verbose=False,
            input_names=module.input_names,
            output_names=module.output_names,
        )
    model = made.model_proto
    del model.metadata_props[:]
    for part in (*model.graph.input, *model.graph.output):
        part.type.tensor_type.shape.dim[module.batch_axes()[part.name]].dim_param = "batch"
    for node in model.graph.node:  # stack traces with paths of the exporting machine
        del node.metadata_props[:]
        node.doc_string = ""
    for value in (*model.graph.value_info, *model.graph.input, *model.graph.output, *model.graph.initializer):
        del value.metadata_props[:]
        value.doc_string = ""
    del model.graph.value_info[:]
    del model.graph.metadata_props[:]
    for key, value in {"canter": json.dumps(metadata), **(properties or {})}.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value
    return model.SerializeToString(deterministic=True)


def need_export_extra() -> None:
    """Name the install command if a package for exporting is missing."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise ImportError(f'exporting needs {", ".join(missing)}: pip install "canter[export]"')


def torchscript_bytes(module: StepModule) -> bytes:
    """The step as a TorchScript archive, which libtorch loads with `torch::jit::load`."""
    with quiet():
        # Weights become constants: the tracer would read every property of a policy that it knew as a submodule.
        traced = torch.jit.trace(Unregistered(module).eval(), module.zeros(3), check_trace=False)
        buffer = io.BytesIO()
        torch.jit.save(torch.jit.freeze(traced), buffer)
    return buffer.getvalue()


class Unregistered(nn.Module):
    """Calls a step that is not its submodule."""

    def __init__(self, module: StepModule) -> None:
        super().__init__()
        self.called = (module,)

    def forward(self, *tensors: Tensor) -> Any:
        """The module's result."""
        return self.called[0](*tensors)
