"""The interface of a logging backend, and what is done to data before any backend sees it."""

from __future__ import annotations

import dataclasses
import importlib
import io
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_SECRET_KEY = re.compile(r"token|secret|password|passwd|api_?key|credential", re.IGNORECASE)
_NOT_IN_TAGS = re.compile(r"[^A-Za-z0-9_./-]+")
_MAX_TAG = 128
_RESERVED_TAGS = frozenset({"step", "time"})  # columns of metrics.jsonl


class Backend:
    """One place that metrics go to; a subclass overrides what its service can show.

    The step is always the number of environment steps, and never decreases between calls.
    """

    last_step: int = 0
    """The highest step given so far; kept by the logger."""

    def __init__(self, log_dir: Path | None, **kwargs: Any) -> None:
        if kwargs:
            raise TypeError(f"{type(self).__name__} has no setting {next(iter(kwargs))!r}")
        self.log_dir = log_dir

    def log_scalars(self, scalars: dict[str, float], step: int) -> None:
        """Record finite numbers by tag."""
        raise NotImplementedError

    def log_config(self, config: dict[str, Any]) -> None:
        """Record the run's settings, as JSON types, without secrets."""

    def log_histogram(self, tag: str, values: np.ndarray, step: int) -> None:
        """Record the distribution of a flat array."""

    def log_image(self, tag: str, image: np.ndarray, step: int) -> None:
        """Record a picture (H, W, 3) uint8."""

    def log_video(self, tag: str, frames: np.ndarray, step: int, fps: int) -> None:
        """Record a film (T, H, W, 3) uint8."""

    def save_file(self, path: Path) -> None:
        """Keep a copy of a file with the run."""

    def save_model(self, path: Path, it: int) -> None:
        """Keep a copy of the checkpoint of iteration `it` with the run."""

    def truncate_after(self, step: int) -> None:
        """Forget what was recorded beyond `step`, which a resumed run is about to do again, if the service can."""

    def flush(self) -> None:
        """Hand over what is buffered."""

    def close(self) -> None:
        """Hand over what is buffered and free everything."""


def import_optional(package: str) -> Any:
    """Import an optional package, or say how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f'the logging backend {package!r} is not installed ({error}); pip install "canter[{package}]"',
            name=package,
        ) from error


def sanitize_tag(tag: str) -> str:
    """A metric name that every backend accepts: letters, digits, `_ . / -`, at most 128 of them."""
    clean = _NOT_IN_TAGS.sub("_", tag)
    clean = "/".join(part for part in clean.split("/") if part)[:_MAX_TAG] or "unnamed"
    return f"{clean}_" if clean in _RESERVED_TAGS else clean


def redact(config: Any) -> Any:
    """`config` as JSON types, with the value of every key that names a secret replaced."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {
            str(key): "<redacted>" if _SECRET_KEY.search(str(key)) and part is not None else redact(part)
            for key, part in config.items()
        }
    if isinstance(config, (list, tuple, set, frozenset)):
        return [redact(part) for part in config]
    if config is None or isinstance(config, (bool, int, float, str)):
        return config
    if isinstance(config, (np.generic, np.ndarray, Tensor)):
        return config.tolist()
    return f"{config.__module__}.{config.__qualname__}" if isinstance(config, type) else str(config)


def read_floats(scalars: Mapping[str, Any]) -> dict[str, float]:
    """Every value as a python float, with one transfer per device for the tensors among them."""
    by_device: dict[torch.device, list[str]] = {}
    for tag, value in scalars.items():
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise TypeError(f"the metric {tag!r} is a tensor of shape {tuple(value.shape)}; log its mean")
            by_device.setdefault(value.device, []).append(tag)
    read: dict[str, float] = {}
    for tags in by_device.values():
        stacked = torch.stack([scalars[tag].detach().reshape(()).double() for tag in tags])
        read.update(zip(tags, stacked.tolist(), strict=True))
    return {tag: read[tag] if tag in read else _to_float(tag, value) for tag, value in scalars.items()}


def _to_float(tag: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the metric {tag!r} is not a number but {value!r}") from error


def encode_gif(frames: Iterable[np.ndarray], fps: int) -> bytes:
    """A looping GIF of (H, W, 3) uint8 frames; needs no video package."""
    from PIL import Image

    images = [Image.fromarray(frame) for frame in frames]
    if not images:
        raise ValueError("a video needs at least one frame")
    buffer = io.BytesIO()
    images[0].save(buffer, "GIF", save_all=True, append_images=images[1:], duration=max(20, round(1000 / fps)), loop=0)
    return buffer.getvalue()
