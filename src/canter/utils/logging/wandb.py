"""Weights & Biases."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from canter.utils.logging.backend import Backend, encode_gif, import_optional


class WandbBackend(Backend):
    """One wandb run; settings are those of `wandb.init`."""

    def __init__(self, log_dir: Path | None, **kwargs: Any) -> None:
        super().__init__(log_dir)
        self._wandb = import_optional("wandb")
        kwargs.setdefault("project", "canter")
        if log_dir is not None:
            kwargs.setdefault("dir", str(log_dir))
            kwargs.setdefault("name", log_dir.name)
        # wandb would upload a diff of whatever repository the run lies in, secrets included; `disable_code` alone does
        # not stop it where code saving is on.
        kwargs.setdefault("settings", {"disable_code": True, "disable_git": True})
        self._run = self._wandb.init(**kwargs)

    def log_scalars(self, scalars: dict[str, float], step: int) -> None:
        """Log all scalars as one row."""
        self._run.log(dict(scalars), step=step)

    def log_config(self, config: dict[str, Any]) -> None:
        """Set the run's config."""
        self._run.config.update(config, allow_val_change=True)

    def log_histogram(self, tag: str, values: np.ndarray, step: int) -> None:
        """Log a histogram."""
        self._run.log({tag: self._wandb.Histogram(values)}, step=step)

    def log_image(self, tag: str, image: np.ndarray, step: int) -> None:
        """Log a picture."""
        self._run.log({tag: self._wandb.Image(image)}, step=step)

    def log_video(self, tag: str, frames: np.ndarray, step: int, fps: int) -> None:
        """Log a film, encoded here because wandb would need another package to do it."""
        film = self._wandb.Video(io.BytesIO(encode_gif(frames, fps)), format="gif")
        self._run.log({tag: film}, step=step)

    def save_file(self, path: Path) -> None:
        """Upload a file."""
        self._run.save(str(path), base_path=str(path.parent), policy="now")

    def save_model(self, path: Path, it: int) -> None:
        """Upload a checkpoint."""
        self.save_file(path)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
