"""Environments: the `VecEnv` contract, adapters for other interfaces, wrappers, and torch-native environments."""

from canter.compat.batched_envs import RslRlAdapter
from canter.envs.check import EnvReport, check_env
from canter.envs.components import MotionFeatures, ObsComponents
from canter.envs.dummy import DummyVecEnv
from canter.envs.gymnasium import FlatActions, GymVecEnv, GymVecEnvContinuous
from canter.envs.gymnasium_vector import EnvPoolAdapter, GymVectorEnvAdapter
from canter.envs.mjlab import MjlabAdapter
from canter.envs.records import step_record
from canter.envs.torch_envs import TORCH_ENVS, CartPole, Course, ImageReach, MaskedCartPole, Pendulum, PointRobot
from canter.envs.torch_envs.base import TorchEnv
from canter.envs.vec_env import StepRecord, VecEnv
from canter.envs.wrap import env_options, make_env, register_adapter, register_env, wrap_env
from canter.envs.wrappers import ChannelsFirst, ClipActions, FlattenObs, ToDevice, TransformObs, VecEnvWrapper

__all__ = ["EnvReport", "StepRecord", "VecEnv", "check_env", "step_record"]
__all__ += ["DummyVecEnv", "EnvPoolAdapter", "GymVecEnv", "GymVecEnvContinuous", "GymVectorEnvAdapter", "RslRlAdapter"]
__all__ += ["FlatActions", "MjlabAdapter"]
__all__ += ["env_options", "make_env", "register_adapter", "register_env", "wrap_env"]
__all__ += ["ChannelsFirst", "ClipActions", "FlattenObs", "ToDevice", "TransformObs", "VecEnvWrapper"]
__all__ += ["MotionFeatures", "ObsComponents"]
__all__ += ["TORCH_ENVS", "CartPole", "Course", "ImageReach", "MaskedCartPole", "Pendulum", "PointRobot", "TorchEnv"]
