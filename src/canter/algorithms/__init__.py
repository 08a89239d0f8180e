"""Algorithms: settings plus named, weighted loss terms."""

from canter.algorithms.ppo import PPO, PPOConfig
from canter.algorithms.rnd import RND, RNDConfig
from canter.algorithms.schedules import GET_PROB_FUNC

ALGORITHMS = {"PPO": PPO}

__all__ = ["ALGORITHMS", "GET_PROB_FUNC", "PPO", "RND", "PPOConfig", "RNDConfig"]
