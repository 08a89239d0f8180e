"""Data from elsewhere: motion clips, and converters of recorded trajectories."""

from canter.datasets.motion_clip import MotionClip
from canter.datasets.motion_files import read_clip, write_clip
from canter.datasets.motion_loader import AMPLoader

__all__ = ["AMPLoader", "MotionClip", "read_clip", "write_clip"]
