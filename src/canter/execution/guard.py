"""Host reads, which recorded or captured functions must not contain because they are replayed without Python.

If Python reads a tensor's value (`if x > 0`, `x.item()`), if a shape depends on values (`x[mask]`), or if a tensor is
made from Python or NumPy numbers, a replay repeats the decision or the numbers of the first run. On a GPU the same
calls make the host wait for the device.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from canter.execution.python_state import OWN_FOLDER, is_user_file

HOST_READ_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Host reads without such a tag: composite operations, which are not decomposed under inference_mode, and lift_fresh,
# with which torch.tensor(1.0), as_tensor and from_numpy end.
UNTAGGED_HOST_READS = {
    "aten::is_nonzero",
    "aten::where",
    "aten::nonzero_numpy",
    "aten::repeat_interleave.self_Tensor",
    "aten::tensor_split.tensor_indices_or_sections",
    "aten::lift_fresh",
    "aten::_linalg_check_errors",
    "aten::_nested_tensor_from_mask_left_aligned",
    "aten::linalg_cholesky",
    "aten::linalg_inv",
    "aten::linalg_solve",
    "aten::linalg_eig",
    "aten::inverse",
}
# Tagged, although only masks make their shapes depend on values.
INDEXING = {"aten::index.Tensor", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
# Reads that dispatch no operation if the tensor is on a CPU.
HOST_READ_FUNCTIONS = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__, Tensor.__format__, Tensor.__repr__}
EXECUTION_FOLDER = str(Path(__file__).parent)


def calling_frame() -> tuple[CodeType, int]:
    """Code and line of the innermost running code outside torch and canter, or of canter's where there is none.

    Inside a traced function, the code that called the executor is not looked at.
    """
    frame, own = sys._getframe(1), None
    while frame is not None and frame.f_code.co_name != "run_traced":
        name = frame.f_code.co_filename
        if is_user_file(name):
            return frame.f_code, frame.f_lineno
        if own is None and name.startswith(OWN_FOLDER) and not name.startswith(EXECUTION_FOLDER):
            own = frame
        frame = frame.f_back
    found = own or sys._getframe(1)
    return found.f_code, found.f_lineno


def calling_line() -> str:
    """File and line of `calling_frame`."""
    code, line = calling_frame()
    return f"{code.co_filename}:{line}"


class HostReadMode(TorchDispatchMode):
    """Dispatch mode that calls `on_host_read(name)` before every host read, also those that dispatch no operation."""

    def on_host_read(self, name: str) -> None:
        """React to a host read."""
        raise NotImplementedError

    def __enter__(self) -> Any:
        self.functions = self.function_mode()
        self.functions.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.functions.__exit__(*exception)

    def function_mode(self) -> Any:
        """Mode that sees the reads that dispatch no operation."""
        return HostReadFunctionMode(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name in INDEXING:
            reads = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        elif name == "aten::_to_copy":
            reads = args[0].is_cuda and str((kwargs or {}).get("device")) == "cpu"
        else:
            reads = name in UNTAGGED_HOST_READS or not HOST_READ_TAGS.isdisjoint(func.tags)
        if reads:
            self.on_host_read(name)
        with views_as_outside(func) if torch.is_inference_mode_enabled() else nullcontext():
            return func(*args, **(kwargs or {}))


def views_as_outside(func: Any) -> AbstractContextManager[Any]:
    """Let views that an operation makes in inference mode require gradients, as they do outside a mode.

    Products choose their kernel by it. An operation that is itself a view gets this from its caller.
    """
    if any(part.alias_info is not None for part in func._schema.returns):
        return nullcontext()
    try:
        return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)
    except AttributeError:
        return nullcontext()


class HostReadFunctionMode(TorchFunctionMode):
    """Function mode that reports the functions in `HOST_READ_FUNCTIONS` to a `HostReadMode`."""

    def __init__(self, mode: HostReadMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOST_READ_FUNCTIONS:
            self.mode.on_host_read(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


class NoHostSync(HostReadMode):
    """Raises where a GPU would make the host wait, like `torch.cuda.set_sync_debug_mode("error")` without a GPU."""

    def on_host_read(self, name: str) -> None:
        """Refuse the read."""
        raise RuntimeError(f"host sync in a hot path: {name} ({calling_line()})")
