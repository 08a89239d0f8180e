"""Settings and networks that SAC and TD3 share: an actor, and twin critics of actions."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from canter.algorithms.off_policy import OffPolicyAlgorithm, OffPolicySettings
from canter.modules.q_networks import (
    CategoricalReturns,
    CNNContinuousQNetwork,
    MLPContinuousQNetwork,
    ScalarReturns,
    build_critics,
    find_normalized_layers,
)
from canter.utils.config import setting, settings

NETWORK_NAMES = ("actor_class", "critic_class", "actor_cfg", "critic_cfg")
CRITIC_CLASSES = (MLPContinuousQNetwork, CNNContinuousQNetwork)  # for vectors and for one image
NO_ATOMS = {"num_atoms": lambda atoms: atoms == 1}


@settings
class ActorQSettings(OffPolicySettings):
    """Hyperparameters of algorithms with an actor and twin critics."""

    actor_learning_rate: float = setting(3e-4, low=0.0)
    """Step size of the actor."""
    critic_learning_rate: float = setting(3e-4, low=0.0)
    """Step size of the critics."""
    actor_hidden_dims: tuple[int, ...] = setting((256, 256), low=1, fixed=True)
    """Widths of the actor's hidden layers."""
    critic_hidden_dims: tuple[int, ...] = setting((256, 256), low=1, fixed=True)
    """Widths of the critics' hidden layers."""
    critic_layer_norm: bool = setting(False, fixed=True)
    """Normalise the features of the critics' hidden layers, also where `layer_norm` is off."""
    normalize_weights: bool = setting(False, fixed=True)
    """Keep the norms of critic weights before layer norms constant, and with them the relative size of their steps."""
    policy_delay: int = setting(1, low=1)
    """Gradient steps of the critics per gradient step of the actor."""
    critic_reduction: str = setting("min", choices=("min", "mean"))
    """Value from two critics: "min" against overestimation, or "mean", where each critic has its own target."""
    num_atoms: int = setting(1, low=1, fixed=True)
    """Atoms of the distribution over returns that critics predict (Bellemare et al. 2017); 1 predicts the mean."""
    v_min: float = setting(-20.0, below="v_max", fixed=True, unused_if=NO_ATOMS)
    """Lowest return of the distribution."""
    v_max: float = setting(20.0, fixed=True, unused_if=NO_ATOMS)
    """Highest return of the distribution."""
    action_low: float | tuple[float, ...] | None = setting(None, fixed=True)
    """Lower bound of the actions, where the environment's is infinite or far off: see `joint_limit_bounds`."""
    action_high: float | tuple[float, ...] | None = setting(None, fixed=True)
    """Upper bound of the actions."""


def bounded_actions(alg: OffPolicyAlgorithm) -> spaces.Box:
    """The environment's Box of actions with the bounds of the settings."""
    space, cfg, owner = alg.action_space, alg.cfg, type(alg).__name__
    if not isinstance(space, spaces.Box):
        raise ValueError(f"{owner} needs a Box of actions, got {space}; use DQN for Discrete actions")
    low, high = (
        own if given is None else np.broadcast_to(np.asarray(given, np.float32), space.shape)
        for own, given in ((space.low, cfg.action_low), (space.high, cfg.action_high))
    )
    space = spaces.Box(low, high, space.shape, np.float32)
    if getattr(cfg, "use_tanh_squash", True) and not space.is_bounded():
        way_out = "set action_low and action_high (see joint_limit_bounds), or wrap the environment"
        raise ValueError(f"{owner} squashes actions into their bounds, but these are infinite: {space}; {way_out}")
    return space


def action_bounds(space: spaces.Box, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Lowest and highest actions and half the range, (A,) each."""
    low, high = (torch.tensor(bound.reshape(-1), device=device) for bound in (space.low, space.high))
    return low, high, (high - low) / 2


def build_actor(alg: OffPolicyAlgorithm, networks: Mapping[str, Any], classes: tuple[Any, Any], **own: Any) -> Any:
    """The actor `actor_class(obs_space=, action_space=, cfg=)`, or a default of `classes`, for vectors or an image."""
    own = {"use_tanh_squash": True, "hidden_dims": alg.cfg.actor_hidden_dims, **own}
    actor_class, cfg = alg.choose_network("actor", networks, classes, **own)
    return actor_class(obs_space=alg.obs_space, action_space=alg.action_space, cfg=cfg).to(alg.device)


def build_twin_critics(alg: OffPolicyAlgorithm, networks: Mapping[str, Any]) -> nn.Module:
    """Two critics `critic_class(obs_space=, action_space=, cfg=)`: MLPs by default, or CNNs for one image."""
    cfg, env = alg.cfg, alg.env
    own = {"hidden_dims": cfg.critic_hidden_dims, "num_atoms": cfg.num_atoms}
    own["layer_norm"] = cfg.layer_norm or cfg.critic_layer_norm
    critic_class, critic_cfg = alg.choose_network("critic", networks, CRITIC_CLASSES, **own)
    space = alg.obs_space if env.critic_obs_space is env.obs_space else env.critic_obs_space
    critics = build_critics(critic_class, space, alg.action_space, critic_cfg).to(alg.device)
    if cfg.normalize_weights and not find_normalized_layers(critics):
        raise ValueError("normalize_weights needs critics with layer norms: set critic_layer_norm")
    return critics


def build_returns(cfg: ActorQSettings, device: torch.device) -> ScalarReturns | CategoricalReturns:
    """How the outputs of the critics become values and losses."""
    if cfg.num_atoms == 1:
        return ScalarReturns()
    return CategoricalReturns(cfg.v_min, cfg.v_max, cfg.num_atoms, device)


def refuse_learning_rate(alg: Any, rate: float) -> None:
    """Raise: there are several rates."""
    raise AttributeError(f"{type(alg).__name__} has no single learning_rate; assign {' or '.join(alg.rates)}")


actor_rate = property(
    lambda alg: alg.cfg.actor_learning_rate,
    refuse_learning_rate,
    doc="The actor's learning rate, under its name in checkpoints.",
)


def joint_limit_bounds(
    lower: Sequence[float], upper: Sequence[float], default: Sequence[float], action_scale: float | Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """`action_low` and `action_high` for position targets `default + action_scale * action` within joint limits."""
    ends = [np.subtract(limit, default, dtype=float) / np.asarray(action_scale) for limit in (lower, upper)]
    return tuple(np.minimum(*ends).tolist()), tuple(np.maximum(*ends).tolist())
