"""The documented names of PPO with state estimation."""

from canter.algorithms.estimation import Estimation, EstimatorSettings
from canter.algorithms.ppo import PPO, PPOConfig
from canter.algorithms.tppo import TPPO, TPPOConfig
from canter.utils.config import settings


@settings
class EstimatorPPOConfig(EstimatorSettings, PPOConfig):
    """A whole run of EstimatorPPO in one object."""


@settings
class EstimatorTPPOConfig(EstimatorSettings, TPPOConfig):
    """A whole run of EstimatorTPPO in one object."""


class EstimatorAlgoMixin:
    """Adds `Estimation` to the algorithm that it precedes: `class Mine(EstimatorAlgoMixin, PPO): pass`."""

    extension_classes = (Estimation,)


class EstimatorPPO(EstimatorAlgoMixin, PPO):
    """PPO for policies with a state estimator or a privileged adaptor."""

    config_class = EstimatorPPOConfig


class EstimatorTPPO(EstimatorAlgoMixin, TPPO):
    """TPPO for such policies: the simulator gives the true state, the teacher the actions."""

    config_class = EstimatorTPPOConfig
