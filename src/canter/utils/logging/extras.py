"""Numbers that an environment reports in `extras`: flattened into metrics, averaged without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

# What holds observations, not measurements, even where its shape would pass for one.
_PAYLOADS = frozenset(
    {"final_observation", "final_obs", "final_critic_obs", "final_info", "terminal_observation", "observations"}
)
_FOLD_EVERY = 64


def flatten_extras(extras: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Tensor | float]:
    """The listed entries of `extras` as `extra/<key>/<sub>/...`; a value per environment becomes its mean.

    Tensors stay on their device. A name ending in `_max` or `_min` takes the maximum or minimum over environments.
    Where Gymnasium's convention gives a mask `_<name>` beside an entry, only the environments it marks count.
    """
    scalars: dict[str, Tensor | float] = {}
    for key in keys:
        if key in extras and key not in _PAYLOADS:
            _flatten(extras[key], f"extra/{key.lstrip('/')}", extras.get(f"_{key}"), scalars)
    return scalars


def _flatten(value: Any, tag: str, mask: Any, scalars: dict[str, Tensor | float]) -> None:
    if not isinstance(value, Mapping):
        scalar = _to_scalar(value, tag, mask)
        if scalar is not None:
            scalars[tag] = scalar
        return
    for key, part in value.items():
        name = str(key).strip("/")
        is_mask = name.startswith("_") and name[1:] in value
        if not is_mask and name.rsplit("/", 1)[-1] not in _PAYLOADS:
            _flatten(part, f"{tag}/{name}", value.get(f"_{key}", mask), scalars)


def _to_scalar(value: Any, tag: str, mask: Any) -> Tensor | float | None:
    if isinstance(value, (bool, int, float)):
        return float(value)
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind not in "biuf":
            return None
        reduced = _reduce(torch.from_numpy(np.asarray(value, dtype=np.float64)), tag, mask)
        return None if reduced is None else reduced.item()  # already on the host
    return _reduce(value, tag, mask) if isinstance(value, Tensor) and not value.is_complex() else None


def _reduce(value: Tensor, tag: str, mask: Any) -> Tensor | None:
    if value.dim() > 1 or value.numel() == 0:
        return None
    value = value.detach()
    if not value.is_floating_point():
        value = value.float()
    if value.dim() == 0:
        return value
    if isinstance(mask, (Tensor, np.ndarray)) and mask.shape == value.shape:
        value = torch.where(torch.as_tensor(mask, device=value.device).bool(), value, math.nan)
    if tag.endswith("_max"):
        return value.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).amax()
    if tag.endswith("_min"):
        return value.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf).amin()
    return value.nanmean() if mask is not None else value.mean()


class ScalarAverager:
    """Gathers scalars over many steps on their device; `take` reads them all at once and starts anew.

    Names ending in `_max` or `_min` give the extreme, all others the mean of what is not NaN.
    """

    def __init__(self) -> None:
        # One group per device and set of names, which are nearly always the same from step to step.
        self._rows: dict[tuple[torch.device | None, tuple[str, ...]], list[Tensor]] = {}
        self._folded: dict[tuple[torch.device | None, tuple[str, ...]], Tensor] = {}

    def add(self, scalars: Mapping[str, Tensor | float]) -> None:
        """Take one step's values; tensors are copied, so their owner may overwrite them."""
        groups: dict[torch.device | None, list[str]] = {}
        for name, value in scalars.items():
            groups.setdefault(value.device if isinstance(value, Tensor) else None, []).append(name)
        for device, names in groups.items():
            key = (device, tuple(names))
            values = [scalars[name] for name in names]
            rows = self._rows.setdefault(key, [])
            rows.append(torch.tensor(values, dtype=torch.float64) if device is None else _stack(values))
            if len(rows) >= _FOLD_EVERY:
                self._fold(key)

    def _fold(self, key: tuple[torch.device | None, tuple[str, ...]]) -> None:
        rows = torch.stack(self._rows.pop(key))  # (R, K)
        missing = rows.isnan()
        folded = torch.stack(
            [
                rows.masked_fill(missing, 0.0).sum(0),
                (~missing).sum(0).to(rows.dtype),
                rows.masked_fill(missing, -math.inf).amax(0),
                rows.masked_fill(missing, math.inf).amin(0),
            ]
        )  # (4, K)
        before = self._folded.get(key)
        self._folded[key] = folded if before is None else _merge(before, folded)

    def take(self) -> dict[str, float]:
        """What was gathered since the last call; names without any observation are left out."""
        for key in list(self._rows):
            self._fold(key)
        by_device: dict[torch.device | None, list[tuple[tuple[str, ...], Tensor]]] = {}
        for (device, names), folded in self._folded.items():
            by_device.setdefault(device, []).append((names, folded))
        self._folded = {}
        columns: dict[str, Tensor] = {}
        for groups in by_device.values():
            on_host = torch.cat([folded for _, folded in groups], dim=1).cpu().double()  # the one transfer
            all_names = [name for names, _ in groups for name in names]
            for index, name in enumerate(all_names):
                column = on_host[:, index]
                columns[name] = _merge(columns[name], column) if name in columns else column
        values = {name: _result(name, *column.tolist()) for name, column in columns.items()}
        return {name: value for name, value in values.items() if value is not None}


def _stack(values: list[Any]) -> Tensor:
    dtype = torch.float32 if values[0].device.type == "mps" else torch.float64
    return torch.stack([value.detach().reshape(()).to(dtype) for value in values])


def _merge(a: Tensor, b: Tensor) -> Tensor:
    """Combine two (4, ...) tables of sum, count, maximum and minimum."""
    return torch.stack([a[0] + b[0], a[1] + b[1], torch.maximum(a[2], b[2]), torch.minimum(a[3], b[3])])


def _result(name: str, total: float, count: float, high: float, low: float) -> float | None:
    if count == 0:
        return None
    # A maximum or minimum over no environment arrives as its neutral element.
    if name.endswith("_max"):
        return high if high > -math.inf else None
    if name.endswith("_min"):
        return low if low < math.inf else None
    return total / count
