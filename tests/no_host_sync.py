"""A check that code reads no values of tensors on the host, which would make it wait for a GPU."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from canter.execution.record import READS, reads_values
from canter.execution.torch_private import TorchDispatchMode, no_function_modes

MASKED = ("aten::index_put_", "aten::index_put", "aten::_index_put_impl_")  # a GPU counts the mask's members
READS_ON_A_GPU = {*READS, torch.Tensor.cpu} - {torch.Tensor.data_ptr}


class NoHostSync(TorchDispatchMode):
    """Raises where a GPU would make the host wait, like `torch.cuda.set_sync_debug_mode("error")` without a GPU."""

    def __enter__(self) -> Any:
        self.functions = Functions()
        self.functions.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.functions.__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with no_function_modes():
            is_masked = func.name() in MASKED and any(
                index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
            )
            if is_masked or reads_values(func, args) or func.name() == "aten::lift_fresh":  # a copy from the host
                refuse(func.name())
            return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Refuses the reads that dispatch no operation on a CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS_ON_A_GPU:
            refuse(func.__name__)
        return func(*args, **(kwargs or {}))


def refuse(name: str) -> None:
    """Raise an error."""
    raise RuntimeError(f"host sync in a hot path: {name}")
