"""Motion clips, and conversion of recorded trajectories."""

from canter.datasets.motion_clip import MotionClip, read_clip, write_clip
from canter.datasets.motion_loader import CLIPS, AMPLoader

__all__ = ["CLIPS", "AMPLoader", "MotionClip", "read_clip", "write_clip"]
