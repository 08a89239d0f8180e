"""Algorithms: settings plus named, weighted loss terms."""

from typing import Any, NamedTuple

from canter.algorithms.appo import APPO, ATPPO, APPOConfig, ATPPOConfig
from canter.algorithms.dqn import DQN, DQNConfig
from canter.algorithms.estimator import (
    EstimatorAlgoMixin,
    EstimatorPPO,
    EstimatorPPOConfig,
    EstimatorTPPO,
    EstimatorTPPOConfig,
)
from canter.algorithms.ppo import PPO, PPOConfig
from canter.algorithms.rnd import RND, RNDConfig
from canter.algorithms.sac import SAC, SACConfig
from canter.algorithms.schedules import GET_PROB_FUNC
from canter.algorithms.td3 import TD3, TD3Config
from canter.algorithms.tppo import TPPO, TPPOConfig


class Entry(NamedTuple):
    """An algorithm and the config that describes a run of it."""

    agent_class: Any
    config_class: Any


REGISTRY: dict[str, Entry] = {
    "appo": Entry(APPO, APPOConfig),
    "atppo": Entry(ATPPO, ATPPOConfig),
    "tppo": Entry(TPPO, TPPOConfig),
    "ppo": Entry(PPO, PPOConfig),
    "estimatorppo": Entry(EstimatorPPO, EstimatorPPOConfig),
    "estimatortppo": Entry(EstimatorTPPO, EstimatorTPPOConfig),
    "dqn": Entry(DQN, DQNConfig),
    "sac": Entry(SAC, SACConfig),
    "td3": Entry(TD3, TD3Config),
}


def register_algorithm(name: str, agent_class: type, config_class: type) -> None:
    """Make an algorithm known to runners and configurations by name."""
    REGISTRY[name.lower()] = Entry(agent_class, config_class)


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
    "APPOConfig",
    "ATPPOConfig",
    "DQNConfig",
    "Entry",
    "EstimatorAlgoMixin",
    "EstimatorPPO",
    "EstimatorPPOConfig",
    "EstimatorTPPO",
    "EstimatorTPPOConfig",
    "PPOConfig",
    "RNDConfig",
    "SACConfig",
    "TD3Config",
    "TPPOConfig",
    "register_algorithm",
]
