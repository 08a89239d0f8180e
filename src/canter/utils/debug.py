"""A stand-in for `torch.cuda.set_sync_debug_mode("error")` that works without a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
MASKABLE = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class NoHostSync(TorchDispatchMode):
    """Raises where the same code on a GPU would make the host wait for the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let through what needs no answer from the device."""
        masked = func in MASKABLE and any(i is not None and i.dtype == torch.bool for i in args[1])
        if func in READS or masked:
            raise RuntimeError(f"host sync in a hot path: {func}")
        return func(*args, **(kwargs or {}))
