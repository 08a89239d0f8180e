"""Algorithms and extensions of PPO."""

from typing import Any, NamedTuple

from canter.algorithms.algorithm import Terms
from canter.algorithms.appo import APPO, ATPPO, APPOAlgoMixin, APPOConfig, ATPPOConfig
from canter.algorithms.constraints import ConstraintConfig, Constraints
from canter.algorithms.critic_groups import CriticGroupConfig, CriticGroups
from canter.algorithms.dqn import DQN, DQNConfig
from canter.algorithms.estimation import Estimation
from canter.algorithms.estimator import (
    EstimatorAlgoMixin,
    EstimatorPPO,
    EstimatorPPOConfig,
    EstimatorTPPO,
    EstimatorTPPOConfig,
)
from canter.algorithms.extension import Extension
from canter.algorithms.gradient_penalty import GradientPenalty
from canter.algorithms.motion_prior import MotionPrior
from canter.algorithms.ppo import PPO, PPOConfig
from canter.algorithms.rnd import RND, RNDConfig
from canter.algorithms.sac import SAC, SACConfig
from canter.algorithms.schedules import GET_PROB_FUNC
from canter.algorithms.smoothness import Smoothness, SmoothnessConfig
from canter.algorithms.symmetry import Symmetry
from canter.algorithms.td3 import TD3, TD3Config
from canter.algorithms.teacher import Teacher
from canter.algorithms.tppo import TPPO, TPPOConfig


class Entry(NamedTuple):
    """An algorithm, the config that describes a run of it, and the folder of its presets."""

    agent_class: Any
    config_class: Any
    presets: str | None = None
    """Folder of preset files: a name under `canter/presets`, or a path. None: the config's own defaults."""


REGISTRY: dict[str, Entry] = {
    "appo": Entry(APPO, APPOConfig, "ppo"),
    "atppo": Entry(ATPPO, ATPPOConfig, "ppo"),
    "tppo": Entry(TPPO, TPPOConfig, "ppo"),
    "ppo": Entry(PPO, PPOConfig, "ppo"),
    "estimatorppo": Entry(EstimatorPPO, EstimatorPPOConfig, "ppo"),
    "estimatortppo": Entry(EstimatorTPPO, EstimatorTPPOConfig, "ppo"),
    "dqn": Entry(DQN, DQNConfig, "dqn"),
    "sac": Entry(SAC, SACConfig, "sac"),
    "td3": Entry(TD3, TD3Config, "td3"),
}


def register_algorithm(name: str, agent_class: type, config_class: type, presets: str | None = None) -> None:
    """Make an algorithm known to runners, configurations and the command line by name."""
    REGISTRY[name.lower()] = Entry(agent_class, config_class, presets)


__all__ = [
    "APPO",
    "ATPPO",
    "DQN",
    "GET_PROB_FUNC",
    "PPO",
    "REGISTRY",
    "RND",
    "SAC",
    "TD3",
    "TPPO",
    "APPOAlgoMixin",
    "APPOConfig",
    "ATPPOConfig",
    "ConstraintConfig",
    "Constraints",
    "CriticGroupConfig",
    "CriticGroups",
    "DQNConfig",
    "Entry",
    "Estimation",
    "EstimatorAlgoMixin",
    "EstimatorPPO",
    "EstimatorPPOConfig",
    "EstimatorTPPO",
    "EstimatorTPPOConfig",
    "Extension",
    "GradientPenalty",
    "MotionPrior",
    "PPOConfig",
    "RNDConfig",
    "SACConfig",
    "Smoothness",
    "SmoothnessConfig",
    "Symmetry",
    "TD3Config",
    "TPPOConfig",
    "Teacher",
    "Terms",
    "register_algorithm",
]
