"""Algorithms: settings plus named, weighted loss terms."""

from typing import Any, NamedTuple

from canter.algorithms.estimator import EstimatorAlgoMixin, EstimatorPPO, EstimatorPPOConfig
from canter.algorithms.ppo import PPO, PPOConfig
from canter.algorithms.rnd import RND, RNDConfig
from canter.algorithms.schedules import GET_PROB_FUNC


class Entry(NamedTuple):
    """An algorithm and the config that describes a run of it."""

    agent_class: Any
    config_class: Any


REGISTRY: dict[str, Entry] = {
    "ppo": Entry(PPO, PPOConfig),
    "estimatorppo": Entry(EstimatorPPO, EstimatorPPOConfig),
}


def register_algorithm(name: str, agent_class: type, config_class: type) -> None:
    """Make an algorithm known to runners and configurations by name."""
    REGISTRY[name.lower()] = Entry(agent_class, config_class)


__all__ = [
    "GET_PROB_FUNC",
    "PPO",
    "REGISTRY",
    "RND",
    "Entry",
    "EstimatorAlgoMixin",
    "EstimatorPPO",
    "EstimatorPPOConfig",
    "PPOConfig",
    "RNDConfig",
    "register_algorithm",
]
