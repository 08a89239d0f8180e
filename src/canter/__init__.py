"""canter teaches robots to move: reinforcement learning and imitation in PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from canter.runners.evaluation import InferencePolicy

__version__ = "0.1.0"


def load(path: str | Path, **options: Any) -> InferencePolicy:
    """The trained policy of a run, a checkpoint or `hf://USER/NAME`; see `canter.export.load.load` for the options."""
    from canter.export.load import load  # imported here: a robot's computer may have no torch

    return load(path, **options)
