"""Environments: the `VecEnv` contract, adapters for other interfaces, wrappers, and torch-native environments."""

from __future__ import annotations

from canter.envs.check import EnvReport, check_env
from canter.envs.components import ObsComponents
from canter.envs.dummy import DummyVecEnv
from canter.envs.gymnasium import GymVecEnv, GymVecEnvContinuous
from canter.envs.gymnasium_vector import EnvPoolAdapter, GymVectorEnvAdapter
from canter.envs.motion_features import MotionFeatures
from canter.envs.records import step_record
from canter.envs.rsl_rl import RslRlAdapter
from canter.envs.torch_envs import (
    TORCH_ENVS,
    CartPole,
    Course,
    ImageReach,
    MaskedCartPole,
    Pendulum,
    PointRobot,
    TorchEnv,
)
from canter.envs.vec_env import StepRecord, VecEnv
from canter.envs.wrap import make_env, register_adapter, register_env, wrap_env
from canter.envs.wrappers import ChannelsFirst, FlattenObs, ToDevice, TransformObs, VecEnvWrapper

__all__ = [
    "TORCH_ENVS",
    "CartPole",
    "ChannelsFirst",
    "Course",
    "DummyVecEnv",
    "EnvPoolAdapter",
    "EnvReport",
    "FlattenObs",
    "GymVecEnv",
    "GymVecEnvContinuous",
    "GymVectorEnvAdapter",
    "ImageReach",
    "MaskedCartPole",
    "MotionFeatures",
    "ObsComponents",
    "Pendulum",
    "PointRobot",
    "RslRlAdapter",
    "StepRecord",
    "ToDevice",
    "TorchEnv",
    "TransformObs",
    "VecEnv",
    "VecEnvWrapper",
    "check_env",
    "make_env",
    "register_adapter",
    "register_env",
    "step_record",
    "wrap_env",
]
