"""Neptune."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from canter.utils.logging.backend import Backend, import_optional


class NeptuneBackend(Backend):
    """One Neptune run; settings are those of `neptune.init_run`."""

    def __init__(self, log_dir: Path | None, **kwargs: Any) -> None:
        super().__init__(log_dir)
        self._neptune = import_optional("neptune")
        offline = kwargs.get("mode") in ("offline", "debug")
        if not offline and "api_token" not in kwargs and "NEPTUNE_API_TOKEN" not in os.environ:
            raise KeyError("neptune needs a token: set the environment variable NEPTUNE_API_TOKEN")
        if log_dir is not None:
            kwargs.setdefault("name", log_dir.name)
        # The diff of the working tree is the user's, and is stored only where they asked for it.
        kwargs.setdefault("git_ref", False)
        self._run = self._neptune.init_run(**kwargs)

    def log_scalars(self, scalars: dict[str, float], step: int) -> None:
        """Append each scalar to its series."""
        for tag, value in scalars.items():
            self._run[tag].append(value, step=step)

    def log_config(self, config: dict[str, Any]) -> None:
        """Set the run's config, with what Neptune has no type for as text."""
        self._run["config"] = _stringify(config)

    def log_image(self, tag: str, image: np.ndarray, step: int) -> None:
        """Append a picture to its series."""
        as_image = self._neptune.types.File.as_image
        self._run[tag].append(as_image(image / 255.0), step=step)

    def save_file(self, path: Path) -> None:
        """Upload a file."""
        self._run[f"files/{path.name}"].upload(str(path))

    def save_model(self, path: Path, it: int) -> None:
        """Upload a checkpoint."""
        self._run[f"models/model_{it}"].upload(str(path))

    def close(self) -> None:
        """Finish the run."""
        self._run.stop()


def _stringify(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _stringify(part) for key, part in value.items()}
    return value if isinstance(value, (bool, int, float, str)) else str(value)
