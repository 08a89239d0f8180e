"""The logger: cleans what it is given, hands it to every backend, and lets none of them stop the training."""

from __future__ import annotations

import importlib
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from canter.utils.logging.backend import Backend, read_floats, redact, sanitize_tag
from canter.utils.logging.jsonl import JsonlBackend

_MAX_FAILURES = 5
_MAX_TAGS = 10_000
DROPPED_TAG = "logging/nonfinite_dropped"


class Logger:
    """Sends metrics to several backends at once, and to `metrics.jsonl` whenever there is a run directory.

    Args:
        backends: A name, several names, or None for the file alone.
        log_dir: The run directory; None keeps nothing on disk.
        logger_kwargs: Settings of the one backend, or `{"wandb": {...}, ...}` by name.
        config: The run's settings; recorded with secrets redacted.
    """

    registry: ClassVar[dict[str, type[Backend] | str]] = {
        "tensorboard": "canter.utils.logging.tensorboard:TensorboardBackend",
        "wandb": "canter.utils.logging.wandb:WandbBackend",
        "swanlab": "canter.utils.logging.swanlab:SwanlabBackend",
        "neptune": "canter.utils.logging.neptune:NeptuneBackend",
    }

    def __init__(
        self,
        backends: str | Iterable[str] | None = "tensorboard",
        log_dir: str | os.PathLike[str] | None = None,
        logger_kwargs: Mapping[str, Any] | None = None,
        config: Any = None,
    ) -> None:
        self.log_dir = None if log_dir is None else Path(log_dir)
        names = [backends] if isinstance(backends, str) else list(dict.fromkeys(backends or ()))
        settings = _settings_by_name(names, logger_kwargs or {}, self.registry)
        self.metrics = None if self.log_dir is None else JsonlBackend(self.log_dir)
        self.backends: dict[str, Backend] = {} if self.metrics is None else {"jsonl": self.metrics}
        self.failures: Counter[str] = Counter()
        """How often each backend failed."""
        self._failures_in_a_row: Counter[str] = Counter()
        self._dropped = 0
        self._tags: dict[str, str] = {}
        self.backends.update(self._open(names, settings, must_have_all=isinstance(backends, str)))
        if config is not None:
            self.log_config(config)

    @classmethod
    def register_backend(cls, name: str, backend: type[Backend]) -> None:
        """Make `name` mean a backend of your own."""
        if not (isinstance(backend, type) and issubclass(backend, Backend)):
            raise TypeError(f"the backend {name!r} must be a subclass of canter.utils.logging.Backend, got {backend!r}")
        cls.registry[name] = backend

    def _open(self, names: list[str], settings: dict[str, dict[str, Any]], must_have_all: bool) -> dict[str, Backend]:
        opened: dict[str, Backend] = {}
        missing: list[ImportError] = []
        for name in names:
            made = self._open_one(name, settings[name])
            if isinstance(made, Backend):
                opened[name] = made
            elif must_have_all:
                raise made
            else:
                missing.append(made)
                warnings.warn(f"skipping a logging backend: {made}", stacklevel=3)
        if missing and not opened:
            raise ImportError(f"no logging backend is left: {'; '.join(map(str, missing))}") from missing[0]
        return opened

    def _open_one(self, name: str, settings: dict[str, Any]) -> Backend | ImportError:
        try:
            return _resolve(self.registry[name])(self.log_dir, **settings)
        except ImportError as error:
            return error

    def log_scalars(self, scalars: Mapping[str, Any], step: int) -> None:
        """Record numbers at an environment step; those that are not finite are dropped and counted."""
        finite: dict[str, float] = {}
        for tag, value in read_floats(scalars).items():
            if not math.isfinite(value):
                self._dropped += 1
            elif (clean := self._clean(tag)) is not None:
                finite[clean] = value
        if self._dropped:
            finite[DROPPED_TAG] = float(self._dropped)
        if finite:
            self._each(lambda backend: backend.log_scalars(finite, backend.last_step), step)

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        """Record one number, as a SummaryWriter does."""
        self.log_scalars({tag: value}, step)

    log_scalar = add_scalar

    def log_config(self, config: Any) -> None:
        """Record the run's settings, without secrets."""
        plain = redact(config)
        self._each(lambda backend: backend.log_config(plain))

    def log_histogram(self, tag: str, values: Tensor | np.ndarray, step: int) -> None:
        """Record a distribution; values that are not finite are left out."""
        flat = _to_numpy(values).reshape(-1)
        flat = flat[np.isfinite(flat)]
        clean = self._clean(tag)
        if clean is not None and flat.size:
            self._each(lambda backend: backend.log_histogram(clean, flat, backend.last_step), step)

    def log_image(self, tag: str, image: Tensor | np.ndarray, step: int) -> None:
        """Record a picture (H, W, 3) uint8."""
        picture = _check_picture(tag, _to_numpy(image), dims=3)
        if (clean := self._clean(tag)) is not None:
            self._each(lambda backend: backend.log_image(clean, picture, backend.last_step), step)

    def log_video(self, tag: str, frames: Tensor | np.ndarray, step: int, fps: int = 30) -> None:
        """Record a film (T, H, W, 3) uint8."""
        film = _check_picture(tag, _to_numpy(frames), dims=4)
        if (clean := self._clean(tag)) is not None:
            self._each(lambda backend: backend.log_video(clean, film, backend.last_step, fps), step)

    def save_file(self, path: str | os.PathLike[str]) -> None:
        """Upload a file where the backend can."""
        self._each(lambda backend: backend.save_file(Path(path)))

    def save_model(self, path: str | os.PathLike[str], it: int) -> None:
        """Upload the checkpoint of iteration `it` where the backend can."""
        self._each(lambda backend: backend.save_model(Path(path), it))

    def truncate_after(self, step: int) -> None:
        """Prepare for a run that resumes at `step`: forget what lies beyond it, where the backend can."""
        self._each(lambda backend: backend.truncate_after(step))

    def flush(self) -> None:
        """Hand over what backends have buffered."""
        self._each(lambda backend: backend.flush())

    def close(self) -> None:
        """Flush and close every backend; harmless when repeated."""
        self._each(lambda backend: backend.close())
        self.backends.clear()

    stop = close

    def __enter__(self) -> Logger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _clean(self, tag: str) -> str | None:
        clean = self._tags.get(tag)
        if clean is None and len(self._tags) < _MAX_TAGS:
            clean = self._tags[tag] = sanitize_tag(tag)
            if len(self._tags) == _MAX_TAGS:
                warnings.warn(f"{_MAX_TAGS} different metric names were logged; new ones are dropped", stacklevel=4)
        return clean

    def _each(self, call: Callable[[Backend], None], step: int = 0) -> None:
        for name, backend in list(self.backends.items()):
            # wandb drops points whose step is lower than one it has seen.
            backend.last_step = max(backend.last_step, int(step))
            try:
                call(backend)
                self._failures_in_a_row[name] = 0
            except Exception as error:
                self._count_failure(name, error)

    def _count_failure(self, name: str, error: Exception) -> None:
        self.failures[name] += 1
        self._failures_in_a_row[name] += 1
        reason = f"{type(error).__name__}: {error}"
        if self.failures[name] == 1:
            warnings.warn(f"the logging backend {name!r} failed; training goes on: {reason}", stacklevel=5)
        if self._failures_in_a_row[name] >= _MAX_FAILURES:
            del self.backends[name]
            warnings.warn(
                f"the logging backend {name!r} failed {_MAX_FAILURES} times in a row; it is off", stacklevel=5
            )


def _resolve(entry: type[Backend] | str) -> type[Backend]:
    if isinstance(entry, str):
        module, name = entry.split(":")
        return getattr(importlib.import_module(module), name)
    return entry


def _settings_by_name(
    names: list[str], given: Mapping[str, Any], registry: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    for name in names:
        if name not in registry:
            raise ValueError(f"no logging backend is named {name!r}; there are {', '.join(sorted(registry))}")
    nested = [key for key, value in given.items() if key in registry and isinstance(value, Mapping)]
    if nested and len(nested) < len(given):
        flat = next(key for key in given if key not in nested)
        raise ValueError(f"logger_kwargs mixes {flat!r} with settings by backend; put it under a backend's name")
    if nested or not given:
        return {name: dict(given.get(name, {})) for name in names}
    if len(names) == 1:
        return {names[0]: dict(given)}
    example = {names[-1] if names else "wandb": dict(given)}
    raise ValueError(f"with {len(names)} backends logger_kwargs must say whose they are, for example {example}")


def _to_numpy(values: Tensor | np.ndarray) -> np.ndarray:
    if not isinstance(values, Tensor):
        return np.asarray(values)
    on_host = values.detach().cpu()
    return (on_host.float() if on_host.is_floating_point() else on_host).numpy()  # numpy has no bfloat16


def _check_picture(tag: str, array: np.ndarray, dims: int) -> np.ndarray:
    if array.ndim != dims or array.shape[-1] != 3 or array.dtype != np.uint8:
        layout = "(H, W, 3)" if dims == 3 else "(T, H, W, 3)"
        raise ValueError(f"{tag!r} must be {layout} uint8, got {array.shape} {array.dtype}")
    return array
