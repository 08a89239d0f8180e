"""The logging backends and their table. A backend's own package is imported when the backend is opened."""

import importlib
import io
import itertools
import json
import os
import re
import socket
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from canter.utils.files import StrPath, atomic_write, make_folder, open_append, open_read
from canter.utils.reading import read_limited
from canter.utils.tree import tree_leaves

METRICS_NAME = "metrics.jsonl"
MAX_LINE, MAX_ROWS = 1 << 22, 1 << 32  # bytes of a row of metrics, and of all rows
MAX_UNWRITTEN, MAX_UNWRITTEN_BYTES = 10_000, 1 << 26  # records that are kept while a disk is full
NUM_BINS = 64  # of a histogram
_FILES = itertools.count()


class Backend:
    """Base class of logging backends. A subclass implements `log_scalars` and any other method it supports.

    The step is always the number of environment steps. It never decreases between calls. With a `timeout`, a
    backend is made and called in a thread of its own.
    """

    last_step: int = 0  # the highest step so far; set by the logger
    loadable: ClassVar[frozenset[str]] = frozenset()
    """Settings that are taken from a loaded config too: none that names a host, a key, an account, a path or code."""
    retry_seconds: ClassVar[float] = 30.0
    """Seconds in which a backend that failed several times in a row is not called."""
    timeout: ClassVar[float | None] = 30.0
    """Seconds that training waits for a call, ten times as long for `close`; then it goes on, and the backend is not
    called until that call has returned. None calls it in the thread that trains, without a limit."""

    def __init__(self, log_dir: Path | None, **kwargs: Any) -> None:
        if kwargs:
            raise TypeError(f"{type(self).__name__} has no setting {next(iter(kwargs))!r}")
        self.log_dir = log_dir

    def log_scalars(self, scalars: dict[str, float], step: int) -> None:
        """Record finite numbers by tag."""
        raise NotImplementedError

    def log_config(self, config: dict[str, Any]) -> None:
        """Record the run's settings, given as JSON types without secrets."""

    def log_histogram(self, tag: str, values: np.ndarray, step: int) -> None:
        """Record the distribution of a flat array."""

    def log_image(self, tag: str, image: np.ndarray, step: int) -> None:
        """Record an image (H, W, 3) uint8."""

    def log_video(self, tag: str, frames: np.ndarray, step: int, fps: int) -> None:
        """Record a video (T, H, W, 3) uint8."""

    def save_file(self, path: Path) -> None:
        """Store a copy of a file with the run."""

    def save_model(self, path: Path, it: int) -> None:
        """Store a copy of the checkpoint of iteration `it` with the run."""

    def truncate_after(self, step: int) -> None:
        """Delete the records beyond `step`, which a resumed run logs again; do nothing if the service cannot."""

    def flush(self) -> None:
        """Write buffered records."""

    def reopen(self) -> None:
        """Prepare to work again after failures, or after the run directory was deleted."""

    def close(self) -> None:
        """Write buffered records and free all resources."""


class _RecordFile:
    """A file to which whole records are appended; those that cannot be written are kept, and written with later ones.

    A last record that a crash cut short is removed where the file is opened again: lines end with `end`.
    """

    def __init__(self, path: Path, end: bytes = b"") -> None:
        self.path, self.end = path, end
        self._unwritten: deque[bytes] = deque()
        self._file = self._open()

    def _open(self) -> io.FileIO:
        file = open_append(self.path)
        if self.end:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - (1 << 20)))
            torn = file.readall().rpartition(self.end)[2]
            file.truncate(size - len(torn))
        return file

    def write(self, record: bytes) -> None:
        self._unwritten.append(record)
        while len(self._unwritten) > MAX_UNWRITTEN or sum(map(len, self._unwritten)) > MAX_UNWRITTEN_BYTES:
            self._unwritten.popleft()

    def flush(self) -> None:
        if self._file.closed or os.fstat(self._file.fileno()).st_nlink == 0:  # deleted during the run
            self._file.close()
            self._file = self._open()
        # One write, so that a kill damages at most the last record.
        records, size = b"".join(self._unwritten), os.fstat(self._file.fileno()).st_size
        if self._file.write(records) != len(records):
            self._file.truncate(size)
            raise OSError(f"only a part could be written to {self.path}")
        self._unwritten.clear()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._file.close()


class _JsonlBackend(Backend):
    """Appends one JSON object per call (`step`, `time` and the scalars) to `metrics.jsonl`; writes `config.json`."""

    retry_seconds: ClassVar[float] = 0.0
    timeout: ClassVar[float | None] = None

    def __init__(self, log_dir: Path | None, **kwargs: Any) -> None:
        super().__init__(log_dir, **kwargs)
        if log_dir is None:
            raise ValueError("the jsonl backend needs a log_dir")
        self.path = log_dir / METRICS_NAME
        self._file = _RecordFile(self.path, b"\n")

    def log_scalars(self, scalars: dict[str, float], step: int) -> None:
        line = json.dumps({**scalars, "step": step, "time": round(time.time(), 3)}, allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def flush(self) -> None:
        self._file.flush()

    def log_config(self, config: dict[str, Any]) -> None:
        atomic_write(self.path.with_name("config.json"), json.dumps(config, indent=2).encode())

    def truncate_after(self, step: int) -> None:
        rows = read_rows(self.path, self.path.parent)
        kept = "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step)
        self._file.close()
        try:
            atomic_write(self.path, kept.encode())
        finally:
            self._file = _RecordFile(self.path, b"\n")
        self.last_step = min(self.last_step, step)

    def close(self) -> None:
        self._file.close()


def read_rows(path: StrPath, root: StrPath | None = None) -> Iterator[dict[str, Any]]:
    """Yield every complete row of a `metrics.jsonl`; other lines, and all after `MAX_ROWS` bytes, are skipped."""
    with io.BufferedReader(open_read(path, root)) as file:
        while file.tell() < MAX_ROWS and (line := file.readline(MAX_LINE)):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and type(row.get("step")) is int and 0 <= row["step"] < 1 << 63:
                yield row


class _TensorboardBackend(Backend):
    """Writes event files into the run directory, in the thread that trains: TensorBoard's own writer fails in another.

    Args:
        filename_suffix: Ends the names of the files; other settings of `SummaryWriter` have no effect.
    """

    loadable = frozenset({"comment", "filename_suffix", "flush_secs", "max_queue"})
    timeout: ClassVar[float | None] = None

    def __init__(
        self,
        log_dir: Path | None,
        filename_suffix: str = "",
        comment: Any = None,
        flush_secs: Any = 0,
        max_queue: Any = 0,
    ) -> None:
        super().__init__(log_dir)
        if log_dir is None:
            raise ValueError("the tensorboard backend needs a log_dir")
        if re.search(r"[/\\\0]", filename_suffix):
            raise ValueError(f"filename_suffix must be part of a file's name, got {filename_suffix!r}")
        # Modules whose names a type checker cannot see: they are generated code.
        self._summary: Any = importlib.import_module("torch.utils.tensorboard.summary")
        self._protos: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._records: Any = importlib.import_module("tensorboard.summary.writer.record_writer").RecordWriter
        self._directory, self._suffix = log_dir, filename_suffix
        self._writer = self._open()

    def _open(self, purge_step: int | None = None) -> Any:
        """A new file; it hides the events of older ones from `purge_step` on."""
        # Files are read in the order of their names, in which a count follows the second.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_FILES):06d}"
        self._writer = self._records(_RecordFile(self._directory / f"{name}{self._suffix}"))
        self._add(0, file_version="brain.Event:2")
        if purge_step is not None:
            self._add(purge_step, session_log=self._protos.SessionLog(status=self._protos.SessionLog.START))
        return self._writer

    def _add(self, step: int, **content: Any) -> None:
        event = self._protos.Event(wall_time=time.time(), step=step, **content)
        self._writer.write(event.SerializeToString())

    def log_scalars(self, scalars: dict[str, float], step: int) -> None:
        for tag, value in scalars.items():
            self._add(step, summary=self._summary.scalar(tag, value))
        self.flush()

    def log_config(self, config: dict[str, Any]) -> None:
        self._add(0, summary=self._summary.text("config", f"```json\n{json.dumps(config, indent=2)}\n```"))

    def log_histogram(self, tag: str, values: np.ndarray, step: int) -> None:
        self._add(step, summary=self._summary.histogram(tag, values.astype(np.float64), NUM_BINS))

    def log_image(self, tag: str, image: np.ndarray, step: int) -> None:
        self._add(step, summary=self._summary.image(tag, image, dataformats="HWC"))

    def log_video(self, tag: str, frames: np.ndarray, step: int, fps: int) -> None:
        # An animated GIF, because torch's function for videos needs another package.
        summary = self._summary.Summary
        height, width = frames.shape[1:3]
        image = summary.Image(height=height, width=width, colorspace=3, encoded_image_string=encode_gif(frames, fps))
        self._add(step, summary=summary(value=[summary.Value(tag=tag, image=image)]))

    def save_file(self, path: Path) -> None:
        # Event files hold no files; those of a bundle lie in the run directory. A page is shown with the run.
        if path.suffix == ".md":
            text = read_limited(path, root=path.parent).decode(errors="replace")
            self._add(self.last_step, summary=self._summary.text(path.stem, text))

    def truncate_after(self, step: int) -> None:
        self._writer.close()
        self._writer = self._open(purge_step=step + 1)
        self.last_step = min(self.last_step, step)

    def flush(self) -> None:
        self._writer.flush()

    def reopen(self) -> None:
        """Nothing to do: a file that was deleted is made again, and records that were not written are kept."""

    def close(self) -> None:
        self._writer.close()


class _RunServiceBackend(Backend):
    """The common part of W&B, SwanLab and Trackio, whose runs share `log`, `config` and `finish`."""

    video_options: ClassVar[dict[str, Any]] = {}
    config_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, log_dir: Path | None, package: str, settings: dict[str, Any]) -> None:
        super().__init__(log_dir)
        self._package = import_optional(package)
        self._run = self._package.init(**{"project": "canter", **settings})

    def log_scalars(self, scalars: dict[str, float], step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def log_config(self, config: dict[str, Any]) -> None:
        self._run.config.update(config, **self.config_options)

    def log_image(self, tag: str, image: np.ndarray, step: int) -> None:
        self._run.log({tag: self._package.Image(image)}, step=step)

    def log_video(self, tag: str, frames: np.ndarray, step: int, fps: int) -> None:
        # An animated GIF: other formats need another package.
        video = self._package.Video(io.BytesIO(encode_gif(frames, fps)), **self.video_options)
        self._run.log({tag: video}, step=step)

    def save_file(self, path: Path) -> None:
        self._run.save(str(path), base_path=str(path.parent), policy="now")

    def save_model(self, path: Path, it: int) -> None:
        self.save_file(path)

    def close(self) -> None:
        self._run.finish()


class _WandbBackend(_RunServiceBackend):
    """One Weights & Biases run; settings are those of `wandb.init`."""

    loadable = frozenset({"group", "id", "job_type", "mode", "name", "notes", "project", "resume", "tags"})
    video_options: ClassVar[dict[str, Any]] = {"format": "gif"}
    config_options: ClassVar[dict[str, Any]] = {"allow_val_change": True}  # by a resumed run

    def __init__(self, log_dir: Path | None, **kwargs: Any) -> None:
        # By default wandb uploads a diff of the repository around the run, secrets included. `disable_code` alone does
        # not prevent this where code saving is on.
        private = {"settings": {"disable_code": True, "disable_git": True}}
        place = {} if log_dir is None else {"dir": str(log_dir), "name": log_dir.name}
        if log_dir is not None:
            make_folder(log_dir / "wandb", log_dir)
            if (log_dir / "wandb" / "settings").exists():  # wandb would take the server from it, and send the key there
                raise ValueError(f"{log_dir / 'wandb' / 'settings'} has settings of W&B for any host; remove the file")
        super().__init__(log_dir, "wandb", {**private, **place, **kwargs})

    def log_histogram(self, tag: str, values: np.ndarray, step: int) -> None:
        self._run.log({tag: self._package.Histogram(values)}, step=step)


class _SwanlabBackend(_RunServiceBackend):
    """One SwanLab run; settings are those of `swanlab.init`."""

    loadable = frozenset({"description", "experiment_name", "group", "id", "mode", "project", "resume", "tags"})

    def __init__(self, log_dir: Path | None, **kwargs: Any) -> None:
        if log_dir is not None:
            make_folder(log_dir / "swanlab", log_dir)
            kwargs.setdefault("log_dir", str(log_dir / "swanlab"))
        super().__init__(log_dir, "swanlab", kwargs)


class _TrackioBackend(_RunServiceBackend):
    """One Trackio run, on this machine unless a Space or server is given; settings are those of `trackio.init`."""

    loadable = frozenset({"group", "name", "project", "resume"})

    def __init__(self, log_dir: Path | None, **kwargs: Any) -> None:
        name = {} if log_dir is None else {"name": log_dir.name}
        super().__init__(log_dir, "trackio", {"embed": False, **name, **kwargs})

    def log_histogram(self, tag: str, values: np.ndarray, step: int) -> None:
        self._run.log({tag: self._package.Histogram(values)}, step=step)

    def log_video(self, tag: str, frames: np.ndarray, step: int, fps: int) -> None:
        with gif_file(frames, fps, tag) as path:  # Trackio copies it
            self._run.log({tag: self._package.Video(str(path))}, step=step)

    def save_file(self, path: Path) -> None:
        self._run.log_artifact(path, type="file")

    def save_model(self, path: Path, it: int) -> None:
        self._run.log_artifact(path, name=f"{self._run.name}-model", type="model")


class _MlflowBackend(Backend):
    """One MLflow run, in `mlflow.db` of the working directory unless MLflow is told another place.

    Args:
        experiment: Its name; it is made where there is none.
        tracking_uri: A database or server; None takes MLFLOW_TRACKING_URI.
        run_id: A run to continue.
        settings: Those of `MlflowClient.create_run`: `run_name` and `tags`.
    """

    loadable = frozenset({"experiment", "run_id", "run_name"})

    def __init__(
        self,
        log_dir: Path | None,
        experiment: str = "canter",
        tracking_uri: str | None = None,
        run_id: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(log_dir)
        self._package = import_optional("mlflow")
        self._client = self._package.MlflowClient(tracking_uri)
        self._is_new = run_id is None
        if run_id is None:
            found = self._client.get_experiment_by_name(experiment)
            experiment_id = found.experiment_id if found else self._client.create_experiment(experiment)
            name = {} if log_dir is None else {"run_name": log_dir.name}
            run_id = self._client.create_run(experiment_id, **{**name, **settings}).info.run_id
        self._run_id = run_id

    def log_scalars(self, scalars: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [self._package.entities.Metric(tag, value, now, step) for tag, value in scalars.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def log_config(self, config: dict[str, Any]) -> None:
        self._client.log_dict(self._run_id, config, "config.json")
        if self._is_new:  # a param of MLflow is written once
            params = [self._package.entities.Param(name, str(value)) for name, value in tree_leaves(config)]
            for start in range(0, len(params), 100):  # as many as it takes at once
                self._client.log_batch(self._run_id, params=params[start : start + 100])

    def log_image(self, tag: str, image: np.ndarray, step: int) -> None:
        self._client.log_image(self._run_id, image, key=tag, step=step)

    def log_video(self, tag: str, frames: np.ndarray, step: int, fps: int) -> None:
        with gif_file(frames, fps, f"{tag}-{step}") as path:
            self._client.log_artifact(self._run_id, str(path), "films")

    def save_file(self, path: Path) -> None:
        self._client.log_artifact(self._run_id, str(path))

    def save_model(self, path: Path, it: int) -> None:
        self._client.log_artifact(self._run_id, str(path), "models")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def import_optional(package: str) -> Any:
    """Import an optional package; the ImportError names the install command."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        problem = f"the logging backend {package!r} is not installed ({error})"
        raise ImportError(f'{problem}; pip install "canter[{package}]"', name=package) from error


@contextmanager
def gif_file(frames: np.ndarray, fps: int, name: str) -> Iterator[Path]:
    """A temporary GIF of (T, H, W, 3) uint8 frames, for services that take files."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name.replace('/', '_')}.gif"
        path.write_bytes(encode_gif(frames, fps))
        yield path


def encode_gif(frames: Iterable[np.ndarray], fps: int) -> bytes:
    """Encode (H, W, 3) uint8 frames as a looping GIF."""
    from PIL import Image

    if not (images := [Image.fromarray(frame) for frame in frames]):
        raise ValueError("a video needs at least one frame")
    buffer = io.BytesIO()
    images[0].save(buffer, "GIF", save_all=True, append_images=images[1:], duration=max(20, round(1000 / fps)), loop=0)
    return buffer.getvalue()


BACKENDS: dict[str, type[Backend]] = {
    "jsonl": _JsonlBackend,
    "tensorboard": _TensorboardBackend,
    "wandb": _WandbBackend,
    "swanlab": _SwanlabBackend,
    "trackio": _TrackioBackend,
    "mlflow": _MlflowBackend,
}


def register_logger(name: str, backend_class: type[Backend]) -> None:
    """Register a class for `logger_backend=name`; each run opens one `backend_class(log_dir, **logger_kwargs)`."""
    if not (isinstance(backend_class, type) and issubclass(backend_class, Backend)):
        base = "canter.utils.logging.Backend"
        raise TypeError(f"the logging backend {name!r} must be a subclass of {base}, got {backend_class!r}")
    BACKENDS[name] = backend_class
