"""How observations are kept: tensors in one of two dtypes, in plain dicts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from canter.utils.tree import Obs, tree_map


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype an observation is kept in: uint8 stays (images), everything else becomes float32."""
    return dtype if dtype == torch.uint8 else torch.float32


def take_tensor(value: Any, device: torch.device | None = None, copy: bool = False) -> Tensor:
    """One observation leaf in its stored dtype on `device`; `copy` makes it share no memory with `value`."""
    leaf = torch.as_tensor(value).detach()
    device = device or leaf.device
    return leaf.to(device, stored_dtype(leaf.dtype), copy=copy, memory_format=torch.contiguous_format)


def take_obs(obs: Any, device: torch.device | None = None, copy: bool = False) -> Obs:
    """An observation of tensors or arrays as tensors or plain dicts of tensors, in stored dtypes."""
    return tree_map(lambda leaf: take_tensor(leaf, device, copy), obs)
