"""Storage: tables of named fields."""

from canter.storage.fields import Field, MiniBatch, Transition
from canter.storage.rollout_storage import RolloutStorage
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
