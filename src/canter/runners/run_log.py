"""What a run leaves in its directory besides checkpoints: its configuration, its metrics, the state of the code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from canter.utils.files import atomic_write, store_code_state
from canter.utils.logging import Logger


class RunLog:
    """The logger of one run, opened when the training starts.

    Args:
        directory: The run directory; None writes nothing.
        cfg: The run's settings.
    """

    def __init__(self, directory: Path | None, cfg: Any) -> None:
        self.directory, self.cfg = directory, cfg
        self.writer: Logger | None = None
        self.git_repos: list[str] = [__file__]
        self.has_stored_code = False
        self._first_step: int | None = None

    def open(self, config: Mapping[str, Any]) -> None:
        """Write the configuration and open the backends, once."""
        if self.writer is None and self.directory is not None:
            self.write_config(config)
            self.writer = Logger(self.cfg.logger_backend, self.directory, self.cfg.logger_kwargs, config)
            if self._first_step is not None:
                self.writer.truncate_after(self._first_step)

    def continue_from(self, timesteps: int) -> None:
        """Drop, now or when the backends open, what an interrupted run logged after the checkpoint it goes on from."""
        if self.writer is None:
            self._first_step = timesteps
        else:
            self.writer.truncate_after(timesteps)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write config.yaml, from which the run can be built again."""

        def write(file: BinaryIO) -> None:
            file.write(yaml.safe_dump(dict(config), sort_keys=False).encode())

        if self.directory is not None:
            atomic_write(self.directory / "config.yaml", write)

    def log(self, metrics: Mapping[str, Any], timesteps: int) -> None:
        """Give metrics to every backend."""
        if self.writer is not None:
            self.writer.log_scalars(metrics, timesteps)

    def store_code(self) -> None:
        """Record, once, the state of the repositories the code is in."""
        if self.has_stored_code or self.directory is None:
            return
        self.has_stored_code = True
        for path in store_code_state(self.directory, self.git_repos, self.cfg.git_diff):
            if self.writer is not None:
                self.writer.save_file(path)

    def flush(self) -> None:
        """Let every backend write what it holds back."""
        if self.writer is not None:
            self.writer.flush()

    def close(self) -> None:
        """Close every backend."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None
