"""The logger: cleans metrics and passes them to every backend. A failing backend does not stop the training."""

import contextlib
import dataclasses
import math
import os
import queue
import re
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.utils.config import unknown_name
from canter.utils.logging.backends import BACKENDS, Backend, register_logger

_MAX_FAILURES = 5
_MAX_TAGS = 10_000
_MAX_TAG_LENGTH = 128
_NOT_IN_TAGS = re.compile(r"[^A-Za-z0-9_./-]+")
_RESERVED_TAGS = frozenset({"step", "time"})  # columns of metrics.jsonl
_SECRET_KEY = re.compile(r"token|secret|password|passwd|api_?key|credential", re.IGNORECASE)
DROPPED_TAG = "logging/nonfinite_dropped"


class _CallingThread(threading.Thread):
    """The thread in which a backend is called; a call that never returns stops neither training nor the process."""

    def __init__(self, name: str) -> None:
        super().__init__(name=f"canter logging to {name}", daemon=True)
        self.calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None ends the thread
        self.result: Future[None] = Future()
        self.result.set_result(None)
        self.start()

    def run(self) -> None:
        while (call := self.calls.get()) is not None:
            try:
                call()
                self.result.set_result(None)
            except BaseException as error:
                self.result.set_exception(error)

    def has_returned(self, call: Callable[[], None], seconds: float | None) -> bool:
        """Call a function, which may raise; False if it has not returned after a time."""
        self.result = Future()
        self.calls.put(call)
        if is_done := bool(wait([self.result], seconds).done):
            self.result.result()
        return is_done


class Logger(contextlib.AbstractContextManager["Logger"]):
    """Sends metrics to several backends, and to `metrics.jsonl` whenever there is a run directory.

    Args:
        backends: One or several registered names; None writes `metrics.jsonl` only.
        log_dir: The run directory; None writes no `metrics.jsonl`.
        logger_kwargs: Settings of the only backend, or `{"wandb": {...}, ...}` by name.
        config: The run's settings; recorded with secrets redacted.
    """

    register_backend = staticmethod(register_logger)

    def __init__(
        self,
        backends: str | Iterable[str] | None = "tensorboard",
        log_dir: str | os.PathLike[str] | None = None,
        logger_kwargs: Mapping[str, Any] | None = None,
        config: Any = None,
    ) -> None:
        self.log_dir = None if log_dir is None else Path(log_dir)
        self.backends: dict[str, Backend] = {}
        self.failures: Counter[str] = Counter()  # failed calls of each backend
        self._failures_in_a_row: Counter[str] = Counter()
        self._retry_at: dict[str, float] = {}
        self._threads: dict[str, _CallingThread] = {}
        self._dropped = 0
        self._tags: dict[str, str] = {}
        names = [backends] if isinstance(backends, str) else list(dict.fromkeys(backends or ()))
        settings = _settings_by_name(names, logger_kwargs or {})
        missing: list[ImportError] = []
        for name, kwargs in {**({} if self.log_dir is None else {"jsonl": {}}), **settings}.items():
            backend_class = BACKENDS[name]
            try:
                self.backends[name] = self._open(name, backend_class, kwargs)
            except ImportError as error:
                if isinstance(backends, str):
                    raise
                missing.append(error)
                warnings.warn(f"skipping a logging backend: {error}", stacklevel=2)
        if missing and len(missing) == len(settings):
            raise ImportError(f"no logging backend is left: {'; '.join(map(str, missing))}") from missing[0]
        if config is not None:
            self.log_config(config)

    def log_scalars(self, scalars: Mapping[str, Any], step: int) -> None:
        """Record numbers at an environment step. NaN and infinities are dropped and counted."""
        finite: dict[str, float] = {}
        for tag, value in _read_floats(scalars).items():
            if not math.isfinite(value):
                self._dropped += 1
            elif (clean := self._clean(tag)) is not None:
                finite[clean] = value
        if self._dropped:
            finite[DROPPED_TAG] = float(self._dropped)
        if finite:
            self._each(lambda backend: backend.log_scalars(finite, backend.last_step), step)

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        """Record one number, with the signature of `SummaryWriter.add_scalar`."""
        self.log_scalars({tag: value}, step)

    log_scalar = add_scalar

    def log_config(self, config: Any) -> None:
        """Record the run's settings without secrets."""
        plain = redact(config)
        self._each(lambda backend: backend.log_config(plain))

    def log_histogram(self, tag: str, values: Tensor | np.ndarray, step: int) -> None:
        """Record the distribution of the finite values."""
        array, clean = _to_numpy(values), self._clean(tag)
        if clean is not None and (flat := array[np.isfinite(array)]).size:
            self._each(lambda backend: backend.log_histogram(clean, flat, backend.last_step), step)

    def log_image(self, tag: str, image: Tensor | np.ndarray, step: int) -> None:
        """Record an image (H, W, 3) uint8."""
        array = _to_images(tag, image, "(H, W, 3)")
        if (clean := self._clean(tag)) is not None:
            self._each(lambda backend: backend.log_image(clean, array, backend.last_step), step)

    def log_video(self, tag: str, frames: Tensor | np.ndarray, step: int, fps: int = 30) -> None:
        """Record a video (T, H, W, 3) uint8."""
        array = _to_images(tag, frames, "(T, H, W, 3)")
        if (clean := self._clean(tag)) is not None:
            self._each(lambda backend: backend.log_video(clean, array, backend.last_step, fps), step)

    def save_file(self, path: str | os.PathLike[str]) -> None:
        """Upload a file to the backends that store files."""
        self._each(lambda backend: backend.save_file(Path(path)))

    def save_model(self, path: str | os.PathLike[str], it: int) -> None:
        """Upload the checkpoint of iteration `it` to the backends that store files."""
        self._each(lambda backend: backend.save_model(Path(path), it))

    def truncate_after(self, step: int) -> None:
        """Delete the records beyond `step`, where a run resumes, in the backends that can."""
        self._each(lambda backend: backend.truncate_after(step))

    def reopen(self) -> None:
        """Let every backend begin again in a run directory that was deleted."""
        self._each(lambda backend: backend.reopen())

    def flush(self) -> None:
        """Write buffered records."""
        self._each(lambda backend: backend.flush())

    def close(self) -> None:
        """Flush and close every backend; may be called twice."""
        self._retry_at.clear()
        self._each(lambda backend: backend.close(), patience=10.0)
        self.backends.clear()
        for thread in self._threads.values():
            thread.calls.put(None)
        self._threads.clear()

    stop = close

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _clean(self, tag: str) -> str | None:
        clean = self._tags.get(tag)
        if clean is None and len(self._tags) < _MAX_TAGS:
            clean = self._tags[tag] = sanitize_tag(tag)
            if len(self._tags) == _MAX_TAGS:
                warnings.warn(f"{_MAX_TAGS} different metric names were logged; new ones are dropped", stacklevel=3)
        return clean

    def _each(self, call: Callable[[Backend], None], step: int = 0, patience: float = 1.0) -> None:
        for name, backend in list(self.backends.items()):
            # wandb drops rows whose step is lower than an earlier one.
            backend.last_step = max(backend.last_step, int(step))
            is_hung = name in self._threads and not self._threads[name].result.done()
            if is_hung or time.monotonic() < self._retry_at.get(name, 0.0):
                continue
            problem = f"the logging backend {name!r} failed"
            try:
                if not self._has_returned(name, backend, call, patience):
                    self.failures[name] += 1
                    self._failures_in_a_row[name] = _MAX_FAILURES
                    seconds = f"{type(backend).__name__} has not returned for {patience * (backend.timeout or 0):.0f} s"
                    warnings.warn(f"{problem}; training goes on without it until it returns: {seconds}", stacklevel=3)
                elif self._failures_in_a_row.pop(name, 0) >= _MAX_FAILURES:
                    warnings.warn(f"the logging backend {name!r} works again", stacklevel=3)
            except Exception as error:
                self.failures[name] += 1
                self._failures_in_a_row[name] += 1
                if self.failures[name] == 1:
                    warnings.warn(f"{problem}; training goes on: {type(error).__name__}: {error}", stacklevel=3)
                if self._failures_in_a_row[name] >= _MAX_FAILURES:
                    self._retry_at[name] = time.monotonic() + backend.retry_seconds
                if self._failures_in_a_row[name] == _MAX_FAILURES and backend.retry_seconds:
                    pause = f"it is tried again every {backend.retry_seconds:.0f} s"
                    warnings.warn(f"{problem} {_MAX_FAILURES} times in a row; {pause}", stacklevel=3)

    def _open(self, name: str, backend_class: type[Backend], settings: Mapping[str, Any]) -> Backend:
        if backend_class.timeout is None:
            return backend_class(self.log_dir, **settings)
        thread, opened = _CallingThread(name), []
        try:
            thread.has_returned(lambda: opened.append(backend_class(self.log_dir, **settings)), None)
        except BaseException:
            thread.calls.put(None)
            raise
        self._threads[name] = thread
        return opened[0]

    def _has_returned(self, name: str, backend: Backend, call: Callable[[Backend], None], patience: float) -> bool:
        """Call a backend, which is opened again after failures; False if it does not return in its time."""

        def work() -> None:
            if self._failures_in_a_row[name] >= _MAX_FAILURES:
                backend.reopen()
            call(backend)

        if name in self._threads:
            return self._threads[name].has_returned(work, backend.timeout and patience * backend.timeout)
        work()
        return True


def _settings_by_name(names: list[str], given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    if unknown := [name for name in names if name not in BACKENDS]:
        known = f"there are {', '.join(sorted(BACKENDS))}; canter.utils.logging.register_logger adds your own"
        raise ValueError(unknown_name("logging backend", unknown[0], BACKENDS, otherwise=known))
    nested = [key for key, value in given.items() if key in BACKENDS and isinstance(value, Mapping)]
    if nested and len(nested) < len(given):
        flat = next(key for key in given if key not in nested)
        raise ValueError(f"logger_kwargs mixes {flat!r} with settings by backend; put it under a backend's name")
    if nested or not given:
        return {name: dict(given.get(name, {})) for name in names}
    if len(names) == 1:
        return {names[0]: dict(given)}
    example = {names[-1] if names else "wandb": dict(given)}
    raise ValueError(f"with {len(names)} backends logger_kwargs must be nested by name, for example {example}")


def loaded_settings(
    backends: str | Iterable[str] | None, loaded: Mapping[str, Any] | None, given: Mapping[str, Any] | None
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """`logger_kwargs` of a loaded config without what its author must not choose, and the names of what is left out.

    A loaded setting is kept if its backend declares it `loadable` and it is plain text, a number or a list of texts
    without a path in it. Settings that the user has `given` replace them.
    """
    names = [backends] if isinstance(backends, str) else list(dict.fromkeys(backends or ()))
    kept, left_out = _settings_by_name(names, given or {}), []
    for name, settings in _settings_by_name(names, loaded or {}).items():
        for key, value in settings.items():
            texts = value if isinstance(value, list) else [value]
            is_plain = all(isinstance(text, (str, int, float)) and not re.search(r"[/\\]", str(text)) for text in texts)
            if key in kept[name]:
                continue
            if value is None or (is_plain and key in BACKENDS[name].loadable):
                kept[name][key] = value
            else:
                left_out.append(f"{name}.{key}")
    return kept, left_out


def sanitize_tag(tag: str) -> str:
    """Return a metric name that every backend accepts: letters, digits and `_ . / -`, at most 128 characters."""
    clean = "/".join(filter(None, _NOT_IN_TAGS.sub("_", tag).split("/")))[:_MAX_TAG_LENGTH] or "unnamed"
    return f"{clean}_" if clean in _RESERVED_TAGS else clean


def redact(config: Any) -> Any:
    """Convert `config` to JSON types and replace the value of every key that names a secret."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        hidden = {key for key, part in config.items() if _SECRET_KEY.search(str(key)) and part is not None}
        return {str(key): "<redacted>" if key in hidden else redact(part) for key, part in config.items()}
    if isinstance(config, (list, tuple, set, frozenset)):
        return [redact(part) for part in config]
    if config is None or isinstance(config, (bool, int, float, str)):
        return config
    if isinstance(config, (np.generic, np.ndarray, Tensor)):
        return config.tolist()
    return f"{config.__module__}.{config.__qualname__}" if isinstance(config, type) else str(config)


def _read_floats(scalars: Mapping[str, Any]) -> dict[str, float]:
    """Convert every value to a Python float, with one transfer per device."""
    by_device: dict[torch.device, list[str]] = {}
    read: dict[str, float] = {}
    for tag, value in scalars.items():
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise TypeError(f"the metric {tag!r} is a tensor of shape {tuple(value.shape)}; log its mean")
            by_device.setdefault(value.device, []).append(tag)
        try:  # for a tensor NaN, which is replaced below, to keep the order of the tags
            read[tag] = math.nan if isinstance(value, Tensor) else float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"the metric {tag!r} is not a number but {value!r}") from error
    for tags in by_device.values():
        stacked = torch.stack([scalars[tag].detach().reshape(()).double() for tag in tags])
        read.update(zip(tags, stacked.tolist(), strict=True))
    return read


def _to_numpy(values: Tensor | np.ndarray) -> np.ndarray:
    if not isinstance(values, Tensor):
        return np.asarray(values)
    on_host = values.detach().cpu()
    return (on_host.float() if on_host.is_floating_point() else on_host).numpy()  # numpy has no bfloat16


def _to_images(tag: str, values: Tensor | np.ndarray, layout: str) -> np.ndarray:
    array = _to_numpy(values)
    if array.ndim != len(layout.split()) or array.shape[-1] != 3 or array.dtype != np.uint8:
        raise ValueError(f"{tag!r} must be {layout} uint8, got {array.shape} {array.dtype}")
    return array
