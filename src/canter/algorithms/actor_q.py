"""Base of SAC and TD3: an actor, twin critics of actions, and the losses of scalar and categorical critics."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor, nn

from canter.algorithms.off_policy import OffPolicyAlgorithm, OffPolicySettings, TargetNetwork
from canter.modules.q_networks import (
    ActorQPolicy,
    CNNContinuousQNetwork,
    MLPContinuousQNetwork,
    build_critics,
    find_normalized_layers,
    normalize_weights,
)
from canter.storage.replay import ReplayBatch
from canter.utils.config import setting, settings, unknown_name
from canter.utils.tree import Obs

CRITIC_CLASSES = (MLPContinuousQNetwork, CNNContinuousQNetwork)
# Thousands of environments on a GPU. Sources: FastTD3 (Seo et al. 2025), FastSAC (holosoma's published defaults).
MASSIVE: dict[str, Any] = {
    "gamma": 0.97,
    "tau": 0.125,
    "batch_size": 8192,
    "buffer_steps_per_env": 1024,
    "learning_starts": 0,
    "gradient_steps": 8,
    "policy_delay": 4,
    "num_atoms": 101,
    "v_min": -20.0,
    "v_max": 20.0,
    "normalize_rewards": True,
    "critic_reduction": "mean",
    "activation": "silu",
    "layer_norm": True,
    "actor_hidden_dims": (512, 256, 128),
    "critic_hidden_dims": (768, 384, 192),
    "optimizer_class_name": "AdamW",
    "weight_decay": 1e-3,
    "max_grad_norm": None,
    "empirical_normalization": True,
    "precision": "bf16",
}
# One environment and a fixed number of steps. docs/algorithms/sac.md has the reason and the source of every number.
STRONG: dict[str, Any] = {
    "critic_hidden_dims": (512, 512),
    "critic_layer_norm": True,
    "normalize_weights": True,
    "num_atoms": 101,
    "v_min": -20.0,
    "v_max": 20.0,
    "normalize_rewards": True,
    "empirical_normalization": True,
}
NO_ATOMS = {"num_atoms": lambda atoms: atoms == 1}
SAC_NOISE = {"init_alpha": 1e-3, "target_entropy": 0.0, "min_log_std": -5.0, "max_log_std": 0.0, "init_std": 0.5}
TD3_NOISE = {"exploration_noise": 0.01, "exploration_noise_max": 0.4}
PROFILES: dict[str, dict[str, dict[str, Any]]] = {
    "sac": {"classic": {}, "strong": {**STRONG, "init_alpha": 0.01}, "massive": {**MASSIVE, **SAC_NOISE}},
    "td3": {"classic": {}, "strong": STRONG, "massive": {**MASSIVE, **TD3_NOISE, "policy_delay": 2}},
}


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


class ActorQAlgorithm(OffPolicyAlgorithm):
    """Learns critics of actions, and an actor that maximises the critics' value.

    Networks are `actor_class(obs_space=, action_space=, cfg=)` and `critic_class(obs_space=, action_space=, cfg=)`;
    by default MLPs, or CNNs for one image. A subclass implements, with standard normal `noise` (B, A):
        next_actions(batch, noise): actions in the next states, and a bonus on their value.
        actor_loss(batch, noise): the loss of the actor, and statistics.
    """

    network_names = ("actor_class", "critic_class", "actor_cfg", "critic_cfg")
    actor_classes: ClassVar[tuple[Any, Any]]  # default actors for vectors and for an image
    actor_setting_names: ClassVar[tuple[str, ...]] = ()  # settings that the actor's network takes by their names

    def _set_bounds(self) -> None:
        """Require a Box of actions, and give it the bounds of the settings."""
        space, owner = self.action_space, type(self).__name__
        if not isinstance(space, spaces.Box):
            raise ValueError(f"{owner} needs a Box of actions, got {space}; use DQN for Discrete actions")
        low, high = (
            own if given is None else np.broadcast_to(np.asarray(given, np.float32), space.shape)
            for own, given in ((space.low, self.cfg.action_low), (space.high, self.cfg.action_high))
        )
        self.action_space = space = spaces.Box(low, high, space.shape, np.float32)
        if getattr(self.cfg, "use_tanh_squash", True) and not space.is_bounded():
            way_out = "set action_low and action_high (see joint_limit_bounds), or wrap the environment"
            raise ValueError(f"{owner} squashes actions into their bounds, but these are infinite: {space}; {way_out}")
        low, high = (torch.tensor(bound.reshape(-1), device=self.device) for bound in (space.low, space.high))
        self.action_bounds = (low, high, (high - low) / 2)

    def build(self, networks: Mapping[str, Any]) -> None:
        """Build actor, critics, their optimizers and the critics' target."""
        self._set_bounds()
        cfg = self.cfg
        own: dict[str, Any] = {"use_tanh_squash": True, "hidden_dims": cfg.actor_hidden_dims}
        own |= {name: getattr(cfg, name) for name in self.actor_setting_names}
        actor_class, actor_cfg = self.choose_network("actor", networks, self.actor_classes, **own)
        own = {"hidden_dims": cfg.critic_hidden_dims, "num_atoms": cfg.num_atoms}
        own["layer_norm"] = cfg.layer_norm or cfg.critic_layer_norm
        critic_class, critic_cfg = self.choose_network("critic", networks, CRITIC_CLASSES, **own)
        is_shared = self.env.critic_obs_space is self.env.obs_space
        critic_space = self.obs_space if is_shared else self.env.critic_obs_space
        actor = actor_class(obs_space=self.obs_space, action_space=self.action_space, cfg=actor_cfg)
        critics = build_critics(critic_class, critic_space, self.action_space, critic_cfg)
        self.actor, self.critics = actor.to(self.device), critics.to(self.device)
        self.policy = ActorQPolicy(actor, critics)
        self.normalized_layers = find_normalized_layers(critics) if cfg.normalize_weights else []
        if cfg.normalize_weights and not self.normalized_layers:
            raise ValueError("normalize_weights needs critics with layer norms: set critic_layer_norm")
        self.make_optimizer("actor_optimizer", actor)
        self.target = TargetNetwork(critics, self.make_optimizer("critic_optimizer", critics))
        self.targets = [self.target]
        self.returns: ScalarReturns | CategoricalReturns = ScalarReturns()
        if cfg.num_atoms > 1:
            self.returns = CategoricalReturns(cfg.v_min, cfg.v_max, cfg.num_atoms, self.device)
            self.return_bound = self.returns.bound
        self.critic_loss = self.executor.compile(self.critic_loss)
        self.actor_loss = self.executor.compile(self.actor_loss)

    @property
    def learning_rate(self) -> float:
        """The actor's learning rate, under its name in checkpoints."""
        return self.cfg.actor_learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        raise AttributeError(f"{type(self).__name__} has no single learning_rate; assign {' or '.join(self.rates)}")

    def random_actions(self) -> Tensor:
        """Uniform between the bounds; standard normal where there are none."""
        low, high, half = self.action_bounds
        is_bounded = self.action_space.is_bounded()
        draw = torch.rand if is_bounded else torch.randn
        drawn = draw(self.num_envs, len(low), generator=self.generators["action"], device=self.device)
        return torch.addcmul(low, drawn, 2 * half).clamp(low, high) if is_bounded else drawn

    @torch.no_grad()
    def act(self, obs: Obs, deterministic: bool = False) -> Tensor:
        """Actions for raw observations, in the form that the environment takes."""
        return self.policy.infer(obs)[0] if deterministic else self.explore_step(obs)

    def critic_loss(self, batch: ReplayBatch, noise: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the critics' losses, and statistics."""
        with torch.no_grad(), self.executor.autocast():
            actions, bonus = self.next_actions(batch, noise)
            out = self.target.module(batch.next_critic_obs, actions).float()
            discounts = batch.discounts * (1.0 - batch.dones)
            target = self.returns.target(out, batch.rewards, discounts, bonus, self.cfg.critic_reduction)
        with self.executor.autocast():
            predicted = self.critics(batch.critic_obs, batch.actions).float()
        losses = self.returns.losses(predicted, target)
        with torch.no_grad():
            stats = {"critic1_loss": losses[0], "critic2_loss": losses[1], "q_loss": losses.mean()}
            stats["mean_q"] = self.returns.values(predicted).mean()
            stats["td_target_mean"] = self.returns.expected(target).mean()
        return losses.sum(), {name: value.detach() for name, value in stats.items()}

    def action_values(self, batch: ReplayBatch, actions: Tensor) -> Tensor:
        """(E, B) values that the critics give to actions in the batch's states."""
        with self.executor.autocast():
            out = self.critics(batch.critic_obs, actions).float()
        return self.returns.values(out)

    def learn_step(self, batch: ReplayBatch, phase: int) -> None:
        """Take a gradient step of the critics and, every `policy_delay` steps, of the actor."""
        # Noise is drawn here, because code that draws from a generator cannot be compiled.
        shape = (2, len(batch.rewards), self.action_bounds[0].numel())
        noise = torch.randn(shape, generator=self.generators["replay"], device=self.device)
        loss, stats = self.critic_loss(batch, noise[0])
        norm, skipped = self.optimizer_step("critic_optimizer", loss)
        normalize_weights(self.normalized_layers)
        self.meter.add({**stats, "critic_grad_norm": norm, "nonfinite_updates": skipped})
        if (phase + 1) % self.cfg.policy_delay == 0:
            with frozen(self.critics):
                loss, stats = self.actor_loss(batch, noise[1])
            self.slow_meter.add(self.learn_actor(loss, stats))

    def learn_actor(self, loss: Tensor, stats: dict[str, Tensor]) -> dict[str, Tensor]:
        """Minimise the actor's loss by one step; returns metrics."""
        norm, _ = self.optimizer_step("actor_optimizer", loss)
        return {"actor_loss": loss.detach(), "actor_grad_norm": norm}


class ScalarReturns:
    """Values and losses of critics whose outputs (E, B) are the values."""

    def values(self, out: Tensor) -> Tensor:
        """(E, B) values."""
        return out

    expected = values

    def target(self, out: Tensor, rewards: Tensor, discounts: Tensor, bonus: Tensor | float, reduction: str) -> Tensor:
        """Targets (B,) or (E, B): rewards, plus the discounted next values and bonus."""
        value = out.amin(0) if reduction == "min" else out
        return rewards + discounts * (value + bonus)

    def losses(self, out: Tensor, target: Tensor) -> Tensor:
        """(E,) mean square errors."""
        return (out - target).square().mean(1)


class CategoricalReturns:
    """Values and losses of critics whose outputs (E, B, K) are logits over K returns (Bellemare et al. 2017)."""

    def __init__(self, v_min: float, v_max: float, num_atoms: int, device: torch.device) -> None:
        if not v_min < v_max:
            raise ValueError(f"v_min must be below v_max, got {v_min} and {v_max}")
        self.v_min, self.v_max, self.num_atoms = v_min, v_max, num_atoms
        self.step = (v_max - v_min) / (num_atoms - 1)
        self.atoms = torch.linspace(v_min, v_max, num_atoms, device=device)
        self.bound = min(abs(end) for end in (v_min, v_max) if end)

    def values(self, out: Tensor) -> Tensor:
        """(E, B) means."""
        return self.expected(out.float().softmax(-1))

    def expected(self, probs: Tensor) -> Tensor:
        """Means of probabilities (..., K)."""
        return (probs * self.atoms).sum(-1)

    def target(self, out: Tensor, rewards: Tensor, discounts: Tensor, bonus: Tensor | float, reduction: str) -> Tensor:
        """Target probabilities, (B, K) or (E, B, K)."""
        probs = out.float().softmax(-1)
        if reduction == "min":
            lowest = self.expected(probs).argmin(0)  # (B,)
            probs = probs.gather(0, lowest.view(1, -1, 1).expand(1, *probs.shape[1:])).squeeze(0)
        bonus = bonus.unsqueeze(-1) if isinstance(bonus, Tensor) else bonus
        moved = rewards.unsqueeze(-1) + discounts.unsqueeze(-1) * (self.atoms + bonus)  # (B, K)
        return self.project(moved.expand_as(probs), probs)

    def project(self, returns: Tensor, probs: Tensor) -> Tensor:
        """Probabilities of the atoms, from those of arbitrary returns split between the two nearest atoms."""
        place = ((returns - self.v_min) / self.step).clamp(0, self.num_atoms - 1)
        lower = place.floor()
        share, low = place - lower, lower.long()
        high = (low + 1).clamp(max=self.num_atoms - 1)
        shared = torch.zeros_like(probs).scatter_add(-1, low, probs * (1 - share))
        return shared.scatter_add(-1, high, probs * share)

    def losses(self, out: Tensor, target: Tensor) -> Tensor:
        """(E,) mean cross-entropies."""
        return -(target * F.log_softmax(out.float(), -1)).sum(-1).mean(1)


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Compute no gradients of the module's parameters, only through it; parameters frozen before stay frozen."""
    trained = [p for p in module.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def joint_limit_bounds(
    lower: Sequence[float], upper: Sequence[float], default: Sequence[float], action_scale: float | Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """`action_low` and `action_high` for position targets `default + action_scale * action` within joint limits."""
    ends = [np.subtract(limit, default, dtype=float) / np.asarray(action_scale) for limit in (lower, upper)]
    return tuple(np.minimum(*ends).tolist()), tuple(np.maximum(*ends).tolist())


def profile_settings(algorithm: str, name: str | None) -> dict[str, Any]:
    """The settings of a profile; {} for None."""
    if name is None:
        return {}
    profiles = PROFILES.get(algorithm.lower(), {})
    if name not in profiles:
        raise ValueError(unknown_name("profile", name, profiles, algorithm))
    return dict(profiles[name])
