"""Trajectories on disk: file format, directories, writer and dataset."""

from canter.storage.rollout_files.base import RolloutFileBase
from canter.storage.rollout_files.catalog import (
    DatasetError,
    Trajectory,
    TrajectoryWriter,
    read_manifest,
    read_trajectory,
    rebuild_manifest,
)
from canter.storage.rollout_files.container import ChunkInfo, TrajectoryFileError, get_frame_range, read_chunk
from canter.storage.rollout_files.rollout_dataset import RolloutDataset, Transition

__all__ = ["ChunkInfo", "DatasetError", "RolloutDataset", "RolloutFileBase", "Trajectory", "TrajectoryFileError"]
__all__ += ["TrajectoryWriter", "Transition", "get_frame_range", "read_chunk", "read_manifest", "read_trajectory"]
__all__ += ["rebuild_manifest"]
