"""A stand-in for `torch.cuda.set_sync_debug_mode("error")` that works without a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
READS = {
    aten._local_scalar_dense,  # item(), bool(), float(), int()
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten.allclose,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.repeat_interleave,
    aten.bincount,
    aten.lift_fresh,  # torch.tensor(1.0): a copy from pageable memory, which waits and cannot be captured
}
MASKABLE = {aten.index, aten.index_put, aten.index_put_}
COPIES = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__}


class NoHostSync(TorchDispatchMode):
    """Raises where the same code on a GPU would make the host wait for the device."""

    def __enter__(self) -> Any:
        """Watch from here on."""
        self._calls = _NoHostCopy()
        self._calls.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        """Stop watching."""
        super().__exit__(*exception)
        self._calls.__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let through what needs no answer from the device."""
        packet = func.overloadpacket
        masked = packet in MASKABLE and any(i is not None and i.dtype == torch.bool for i in args[1])
        if packet in READS or masked:
            raise RuntimeError(f"host sync in a hot path: {func}")
        return func(*args, **(kwargs or {}))


class _NoHostCopy(TorchFunctionMode):
    """Sees the copies to the host that a CPU tensor makes without dispatching anything."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let through what leaves a tensor where it is."""
        if func in COPIES:
            raise RuntimeError(f"host sync in a hot path: Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))
