"""Every private name of torch that canter uses. Without one of them functions run eagerly, or slower."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

script: Any = torch._C  # the graphs and types of TorchScript
no_function_modes: Any = getattr(torch._C, "DisableTorchFunction", nullcontext)


def __getattr__(name: str) -> Any:
    """A class that is imported when it is needed, so that canter can be imported without it."""
    if name != "TorchDispatchMode":
        raise AttributeError(name)
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode


def address(tensor: Tensor) -> int:
    """Address of a tensor's first value, read without being noted; 0 if it has none."""
    with no_function_modes():
        return tensor.data_ptr() if tensor.layout is torch.strided and not tensor.is_nested else 0


def views_as_outside(func: Any) -> AbstractContextManager[Any]:
    """Let views that an operation makes in inference mode require gradients, as they do outside a dispatch mode.

    Products choose their kernel by it. An operation that is itself a view gets this from its caller.
    """
    if not torch.is_inference_mode_enabled() or any(part.alias_info is not None for part in func._schema.returns):
        return nullcontext()
    try:
        return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)
    except AttributeError:
        return nullcontext()


def script_runner(graph: Any, num_results: int) -> Callable[..., Any]:
    """A function that runs a TorchScript graph and returns the first of its results."""
    function = script._create_function_from_graph("recording", graph)
    get_optimize, set_optimize = script._get_graph_executor_optimize, script._set_graph_executor_optimize
    # Outside inference mode no argument of a graph requires a gradient, so every operation can begin at its kernel.
    keys = script.DispatchKeySet(script.DispatchKey.AutogradCPU)
    keys = keys | script.DispatchKeySet(script.DispatchKey.ADInplaceOrView)

    def run(*args: Any) -> Any:
        optimizes = get_optimize()
        set_optimize(False)  # an optimised graph would be traced, specialised and fused: other kernels, other numbers
        try:
            if torch.is_inference_mode_enabled():  # some kernels there depend on whether a view requires a gradient
                return function(*args)[:num_results]
            with script._ExcludeDispatchKeyGuard(keys):
                return function(*args)[:num_results]
        finally:
            set_optimize(optimizes)

    return run


def copy_one_by_one(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors, each by an operation of its own."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


copy_all: Callable[[list[Tensor], list[Tensor]], Any] = getattr(torch, "_foreach_copy_", copy_one_by_one)


def sample_dirichlet(concentration: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw from Dirichlet distributions (..., K) with a generator, without gradient."""
    if hasattr(torch, "_sample_dirichlet"):  # the public class takes no generator
        return torch._sample_dirichlet(concentration, generator=generator)  # pyright: ignore
    device = concentration.device  # the host reads a seed, so this cannot be captured or recorded
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(torch.randint(2**62, (), generator=generator, device=device)))
        return torch.distributions.Dirichlet(concentration, validate_args=False).sample()


@contextmanager
def inductor(**options: Any) -> Iterator[Any]:
    """The module of torch's compiler that compiles fx graphs, with settings of it."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    # A hit of the autograd cache would skip the function that is given as the inner compiler.
    with config.patch(options), functorch_config.patch(enable_autograd_cache=False):
        from torch._inductor import compile_fx

        yield compile_fx


def inductor_pass(change: Callable[[Any], None], file: str) -> Any:
    """A last pass of the compiler that calls `change(graph)`; its file is part of the key of the compiler's cache."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Pass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            change(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((file,))

    return Pass()
