"""SwanLab."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from canter.utils.logging.backend import Backend, encode_gif, import_optional


class SwanlabBackend(Backend):
    """One SwanLab run; settings are those of `swanlab.init`."""

    def __init__(self, log_dir: Path | None, **kwargs: Any) -> None:
        super().__init__(log_dir)
        self._swanlab = import_optional("swanlab")
        kwargs.setdefault("project", "canter")
        if log_dir is not None:
            kwargs.setdefault("log_dir", str(log_dir / "swanlab"))
            Path(kwargs["log_dir"]).mkdir(parents=True, exist_ok=True)
        self._run = self._swanlab.init(**kwargs)

    def log_scalars(self, scalars: dict[str, float], step: int) -> None:
        """Log all scalars at one step."""
        self._run.log(dict(scalars), step=step)

    def log_config(self, config: dict[str, Any]) -> None:
        """Set the run's config."""
        self._run.config.update(config)

    def log_image(self, tag: str, image: np.ndarray, step: int) -> None:
        """Log a picture."""
        self._run.log({tag: self._swanlab.Image(image)}, step=step)

    def log_video(self, tag: str, frames: np.ndarray, step: int, fps: int) -> None:
        """Log a film."""
        self._run.log({tag: self._swanlab.Video(io.BytesIO(encode_gif(frames, fps)))}, step=step)

    def save_file(self, path: Path) -> None:
        """Upload a file."""
        self._run.save(str(path), base_path=str(path.parent), policy="now")

    def save_model(self, path: Path, it: int) -> None:
        """Upload a checkpoint."""
        self.save_file(path)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
