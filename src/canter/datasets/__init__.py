"""Motion clips, and conversion of recorded trajectories."""

from canter.datasets.motion_clip import MotionClip, read_clip, write_clip
from canter.datasets.motion_loader import CLIPS, AMPLoader
from canter.datasets.motion_tracking import write_tracking

__all__ = ["CLIPS", "AMPLoader", "MotionClip", "read_clip", "write_clip", "write_tracking"]
