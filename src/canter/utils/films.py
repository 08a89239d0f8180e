"""Films of policies: frames go to an encoder as they are rendered, and are read back small enough to be logged."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

# Colours are chosen for every frame on its own, so that the encoder keeps none.
_GIF_COLORS = "split[a][b];[a]palettegen=stats_mode=single[p];[b][p]paletteuse=new=1"
_FORMATS: dict[str, dict[str, Any]] = {
    ".mp4": {"macro_block_size": 2},
    ".gif": {"codec": "gif", "pix_fmt_out": "pal8", "quality": None, "output_params": ["-filter_complex", _GIF_COLORS]},
}


def _ffmpeg() -> Any:
    try:
        import imageio_ffmpeg
    except ImportError as error:
        raise ImportError('videos need imageio-ffmpeg: pip install "canter[video]"') from error
    return imageio_ffmpeg


class FilmError(OSError):
    """A film could not be written; an earlier one of the same name is intact."""


class Film(AbstractContextManager["Film"]):
    """An .mp4 or .gif file to which frames (H, W, 3) uint8 are encoded as they are added; none is kept in memory."""

    def __init__(self, path: str | Path, fps: float = 30) -> None:
        self.path, self.fps, self.num_frames = Path(path), min(120.0, max(1.0, fps)), 0
        if self.path.suffix not in _FORMATS:
            raise ValueError(f"a film must be {' or '.join(_FORMATS)}, not {self.path.name}")
        self._ffmpeg, self._encoder = _ffmpeg(), None
        self._shape: tuple[int, ...] = ()
        self._folder = self.path.parent  # one of its own while frames are encoded

    def add(self, frame: Any) -> None:
        """Encode one frame; every frame has the size of the first."""
        frame = np.asarray(frame, np.uint8)
        if self._encoder is None:
            if frame.ndim != 3 or frame.shape[2] != 3:
                raise ValueError(f"a frame must be (H, W, 3) uint8, got {frame.shape}")
            self._shape = frame.shape
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._folder = Path(tempfile.mkdtemp(prefix=".film-", dir=self.path.parent))
            except OSError as error:
                raise FilmError(error.errno, error.strerror, str(self.path)) from error
            options: dict[str, Any] = {"macro_block_size": 1, **_FORMATS[self.path.suffix], "ffmpeg_log_level": "error"}
            height, width = self._even(frame).shape[:2]
            self._encoder = self._ffmpeg.write_frames(str(self._made), (width, height), fps=self.fps, **options)
            self._encoder.send(None)
        if frame.shape != self._shape:
            raise ValueError(f"the frame {self.num_frames} is {frame.shape}, the first one was {self._shape}")
        try:
            self._encoder.send(np.ascontiguousarray(self._even(frame)))
        except OSError as error:
            raise FilmError(errno.EIO, "the encoder stopped, for the reason above", str(self.path)) from error
        self.num_frames += 1

    def _even(self, frame: np.ndarray) -> np.ndarray:
        """The codec of .mp4 needs even sides."""
        return frame[: frame.shape[0] // 2 * 2, : frame.shape[1] // 2 * 2] if self.path.suffix == ".mp4" else frame

    def close(self) -> None:
        """Complete the file; may be called twice."""
        if self._encoder is not None:
            self._encoder.close()
            if not self._made.is_file() or not self._made.stat().st_size:
                self.discard()
                raise FilmError(errno.EIO, "the encoder wrote nothing", str(self.path))
            os.replace(self._made, self.path)  # which replaces a link, and does not write through it
        self.discard()

    def discard(self) -> None:
        """Drop the frames of a film that was not completed."""
        if self._encoder is not None:
            with contextlib.suppress(OSError):
                self._encoder.close()
            shutil.rmtree(self._folder, ignore_errors=True)
        self._encoder = None

    @property
    def _made(self) -> Path:
        return self._folder / f"film{self.path.suffix}"

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is not None and issubclass(kind, Exception):
            self.discard()
        else:  # Ctrl-C ends a film
            self.close()


def read_film(path: str | Path, max_frames: int = 150, max_width: int = 320) -> tuple[np.ndarray, float]:
    """Frames (T, H, W, 3) of a film and their rate, thinned out in time and space to the limits."""
    try:
        frames = _ffmpeg().read_frames(str(path), output_params=["-fps_mode", "passthrough"])
        info = next(frames)
    except RuntimeError as error:  # the decoder cannot be started
        raise FilmError(errno.EIO, str(error).strip(), str(path)) from error
    width, height = info["size"]
    every, step, kept = 1, -(-width // max_width), list[np.ndarray]()
    for number, data in enumerate(frames):
        if number % every == 0:
            kept.append(np.frombuffer(data, np.uint8).reshape(height, width, 3)[::step, ::step].copy())
        if len(kept) > max_frames:  # the length of a film is not known before its end
            kept, every = kept[::2], 2 * every
    return np.stack(kept), info["fps"] / every
