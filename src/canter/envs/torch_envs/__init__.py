"""Environments written as tensor code: they live on any device and step thousands of copies at once."""

from __future__ import annotations

from canter.envs.torch_envs.base import TorchEnv
from canter.envs.torch_envs.classic import CartPole, MaskedCartPole, Pendulum
from canter.envs.torch_envs.course import Course
from canter.envs.torch_envs.image_reach import ImageReach
from canter.envs.torch_envs.point_robot import PointRobot

TORCH_ENVS: dict[str, type[TorchEnv]] = {
    cls.__name__: cls for cls in (CartPole, Course, MaskedCartPole, Pendulum, ImageReach, PointRobot)
}

__all__ = ["TORCH_ENVS", "CartPole", "Course", "ImageReach", "MaskedCartPole", "Pendulum", "PointRobot", "TorchEnv"]
