"""The documented name of PPO with a teacher."""

from canter.algorithms.ppo import PPO, PPOConfig
from canter.algorithms.schedules import GET_PROB_FUNC
from canter.algorithms.teacher import Teacher, TeacherSettings
from canter.utils.config import settings

__all__ = ["GET_PROB_FUNC", "TPPO", "TPPOConfig"]


@settings
class TPPOConfig(TeacherSettings, PPOConfig):
    """A whole TPPO run in one object."""


class TPPO(PPO):
    """PPO beside a frozen teacher that labels every step and, at first, acts itself."""

    config_class = TPPOConfig
    extension_classes = (Teacher,)
