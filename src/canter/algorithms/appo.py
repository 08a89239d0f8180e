"""The documented names of PPO with adversarial motion priors."""

from typing import Any

from torch import Tensor

from canter.algorithms.motion_prior import MotionPrior, MotionPriorSettings
from canter.algorithms.ppo import PPO, PPOConfig
from canter.algorithms.schedules import GET_PROB_FUNC
from canter.algorithms.tppo import TPPO, TPPOConfig
from canter.utils.config import settings

__all__ = ["APPO", "ATPPO", "GET_PROB_FUNC", "APPOAlgoMixin", "APPOConfig", "ATPPOConfig"]


@settings
class APPOConfig(MotionPriorSettings, PPOConfig):
    """A whole APPO run in one object."""


@settings
class ATPPOConfig(MotionPriorSettings, TPPOConfig):
    """A whole ATPPO run in one object."""


class APPOAlgoMixin:
    """Adds `MotionPrior` to the algorithm that it precedes: `class Mine(APPOAlgoMixin, TPPO): pass`."""

    extension_classes = (MotionPrior,)

    def process_env_step(
        self, rewards: Tensor, dones: Tensor, infos: dict[str, Any], *more: Any, **others: Any
    ) -> None:
        """Store the step that `act` began; style and task reward are added to `infos["log"]`."""
        super().process_env_step(rewards, dones, infos, *more, **others)  # pyright: ignore[reportAttributeAccessIssue]
        alg: Any = self
        infos.setdefault("log", {}).update(alg.motion_prior.rewards_of_step(alg.storage.step - 1))


class APPO(APPOAlgoMixin, PPO):
    """PPO whose reward is the style of reference motion, mixed with the task's."""

    config_class = APPOConfig


class ATPPO(APPOAlgoMixin, TPPO):
    """PPO with a teacher and a motion prior: teacher, style and task together."""

    config_class = ATPPOConfig
