"""Storage: tables of named fields."""

from canter.storage.rollout_storage import Field, MiniBatch, RolloutStorage, Transition
from canter.storage.trajectories import Trajectories, split_and_pad_trajectories, unpad_trajectories

__all__ = [
    "Field",
    "MiniBatch",
    "RolloutStorage",
    "Trajectories",
    "Transition",
    "split_and_pad_trajectories",
    "unpad_trajectories",
]
