"""Storage: tables of named fields."""

from canter.storage.action_label_rollout import ActionLabelRollout
from canter.storage.amp_rollout_storage import AmpRolloutStorage
from canter.storage.fields import Field, MiniBatch, Transition
from canter.storage.prioritized_replay import PrioritizedReplayBuffer
from canter.storage.queue_rollout_storage import QueueRolloutStorage
from canter.storage.replay import ReplayBatch, TransitionReplayBuffer
from canter.storage.replay_buffer import ReplayBuffer
from canter.storage.rollout_files import RolloutDataset, RolloutFileBase, TrajectoryWriter
from canter.storage.rollout_storage import RolloutStorage
from canter.storage.sarsa_rollout_storage import SarsaRolloutStorage
from canter.storage.trajectories import Trajectories, split_and_pad_trajectories, unpad_trajectories

__all__ = [
    "ActionLabelRollout",
    "AmpRolloutStorage",
    "Field",
    "MiniBatch",
    "PrioritizedReplayBuffer",
    "QueueRolloutStorage",
    "ReplayBatch",
    "ReplayBuffer",
    "RolloutDataset",
    "RolloutFileBase",
    "RolloutStorage",
    "SarsaRolloutStorage",
    "Trajectories",
    "TrajectoryWriter",
    "Transition",
    "TransitionReplayBuffer",
    "split_and_pad_trajectories",
    "unpad_trajectories",
]
