"""TensorBoard event files."""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from canter.utils.logging.backend import Backend, encode_gif


class TensorboardBackend(Backend):
    """Writes event files into the run directory; settings are those of `SummaryWriter`."""

    def __init__(self, log_dir: Path | None, **kwargs: Any) -> None:
        super().__init__(log_dir)
        if log_dir is None:
            raise ValueError("the tensorboard backend needs a log_dir")
        self._settings = {"flush_secs": 10, **kwargs, "log_dir": str(log_dir)}
        self._writer = self._open()

    def _open(self, **kwargs: Any) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(**self._settings, **kwargs)

    def log_scalars(self, scalars: dict[str, float], step: int) -> None:
        """Add each scalar."""
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, step)

    def log_config(self, config: dict[str, Any]) -> None:
        """Show the settings as text."""
        self._writer.add_text("config", f"```json\n{json.dumps(config, indent=2)}\n```", 0)

    def log_histogram(self, tag: str, values: np.ndarray, step: int) -> None:
        """Add a histogram."""
        self._writer.add_histogram(tag, values, step)

    def log_image(self, tag: str, image: np.ndarray, step: int) -> None:
        """Add a picture."""
        self._writer.add_image(tag, image, step, dataformats="HWC")

    def log_video(self, tag: str, frames: np.ndarray, step: int, fps: int) -> None:
        """Add a film as an animated picture; `SummaryWriter.add_video` would need another package."""
        # Generated code, whose names a type checker cannot see.
        summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        height, width = frames.shape[1:3]
        image = summary.Image(height=height, width=width, colorspace=3, encoded_image_string=encode_gif(frames, fps))
        self._writer._get_file_writer().add_summary(summary(value=[summary.Value(tag=tag, image=image)]), step)

    def truncate_after(self, step: int) -> None:
        """Start a new event file that hides what older ones hold beyond `step`."""
        self._writer.close()
        wait_for_a_later_name(Path(self._settings["log_dir"]))
        self._writer = self._open(purge_step=step + 1)
        self.last_step = min(self.last_step, step)

    def flush(self) -> None:
        """Write out what is queued."""
        self._writer.flush()

    def close(self) -> None:
        """Write out what is queued and close the file."""
        self._writer.close()


def wait_for_a_later_name(directory: Path) -> None:
    """Let the second pass in which the newest event file was named.

    Files are read in the order of their names, and within a second the tenth that a process writes sorts before its
    ninth: what it hides would come after it.
    """
    newest = max((path.name for path in directory.glob("events.out.tfevents.*")), default="")
    named = newest.split(".")[3:4]
    if named and named[0].isdecimal() and int(named[0]) == int(time.time()):
        time.sleep(1.0 - time.time() % 1.0)
