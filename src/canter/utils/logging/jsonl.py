"""`metrics.jsonl`: one JSON object per log call, holding `step`, `time` and the scalars; what other tools read."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from canter.utils.files import atomic_write
from canter.utils.logging.backend import Backend

METRICS_NAME = "metrics.jsonl"
CONFIG_NAME = "config.json"


class JsonlBackend(Backend):
    """Appends scalars to `metrics.jsonl` and writes the settings to `config.json`."""

    def __init__(self, log_dir: Path | None, **kwargs: Any) -> None:
        super().__init__(log_dir, **kwargs)
        if log_dir is None:
            raise ValueError("the jsonl backend needs a log_dir")
        self.directory = log_dir
        self.path = log_dir / METRICS_NAME
        self._file = self._open()

    def _open(self) -> BinaryIO:
        self.directory.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b") as old:
            size = old.seek(0, os.SEEK_END)
            old.seek(max(0, size - (1 << 20)))
            end = old.read()
            torn = len(end) - (end.rfind(b"\n") + 1)
            if torn:
                old.truncate(size - torn)
        return open(self.path, "ab", buffering=0)

    def log_scalars(self, scalars: dict[str, float], step: int) -> None:
        """Append one line, in one write, so that a kill leaves at most the last one torn."""
        line = json.dumps({**scalars, "step": step, "time": round(time.time(), 3)}, allow_nan=False).encode() + b"\n"
        state = os.fstat(self._file.fileno())
        if state.st_nlink == 0:  # somebody deleted the file or its directory while the run goes on
            self._file.close()
            self._file = self._open()
        if self._file.write(line) != len(line):
            self._file.truncate(state.st_size)
            raise OSError(f"only part of a line could be written to {self.path}")

    def log_config(self, config: dict[str, Any]) -> None:
        """Write `config.json`."""
        text = json.dumps(config, indent=2)
        atomic_write(self.directory / CONFIG_NAME, lambda file: _write_text(file, text))

    def truncate_after(self, step: int) -> None:
        """Drop lines beyond `step`, torn ones too."""
        kept = "".join(json.dumps(row) + "\n" for row in read_rows(self.path) if row["step"] <= step)
        self._file.close()
        try:
            atomic_write(self.path, lambda file: _write_text(file, kept))
        finally:
            self._file = self._open()
        self.last_step = min(self.last_step, step)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _write_text(file: BinaryIO, text: str) -> None:
    file.write(text.encode())


def read_rows(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Every whole line of a `metrics.jsonl`; what is torn or is no metric line is passed over."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and type(row.get("step")) is int:
                yield row
