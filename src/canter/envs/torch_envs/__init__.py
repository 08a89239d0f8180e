"""Environments written as tensor code: thousands of copies step at once on any device."""

from canter.envs.torch_envs.base import TorchEnv
from canter.envs.torch_envs.tasks import CartPole, Course, ImageReach, MaskedCartPole, Pendulum, PointRobot

TORCH_ENVS: dict[str, type[TorchEnv]] = {
    cls.__name__: cls for cls in (CartPole, Course, MaskedCartPole, Pendulum, ImageReach, PointRobot)
}

__all__ = ["TORCH_ENVS", "CartPole", "Course", "ImageReach", "MaskedCartPole", "Pendulum", "PointRobot", "TorchEnv"]
