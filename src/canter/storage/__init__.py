"""Rollouts and replay in memory, and trajectories on disk."""

from canter.storage.queue_rollout_storage import (
    ActionLabelRollout,
    AmpRolloutStorage,
    QueueRolloutStorage,
    SarsaRolloutStorage,
)
from canter.storage.replay import PrioritizedReplayBuffer, ReplayBatch, TransitionReplayBuffer
from canter.storage.replay_buffer import ReplayBuffer
from canter.storage.rollout_files import RolloutDataset, RolloutFileBase, TrajectoryWriter
from canter.storage.rollout_storage import Field, MiniBatch, RolloutStorage, Transition
from canter.storage.trajectories import Trajectories, split_and_pad_trajectories, unpad_trajectories

__all__ = ["ActionLabelRollout", "AmpRolloutStorage", "Field", "MiniBatch", "PrioritizedReplayBuffer", "ReplayBatch"]
__all__ += ["QueueRolloutStorage", "ReplayBuffer", "RolloutDataset", "RolloutFileBase", "RolloutStorage"]
__all__ += ["SarsaRolloutStorage", "Trajectories", "TrajectoryWriter", "Transition", "TransitionReplayBuffer"]
__all__ += ["split_and_pad_trajectories", "unpad_trajectories"]
