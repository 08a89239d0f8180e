"""Algorithms with an actor and twin critics: what SAC and TD3 share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from canter.algorithms.off_policy import OffPolicyAlgorithm
from canter.algorithms.off_policy_settings import ActorQSettings
from canter.algorithms.targets import CategoricalReturns, ScalarReturns, TargetNetwork
from canter.modules.normalizer import ReturnScaler
from canter.modules.q_networks import ActorQPolicy, CNNContinuousQNetwork, MLPContinuousQNetwork, build_critics
from canter.storage.replay import ReplayBatch
from canter.utils.config import settings
from canter.utils.tree import Obs


@settings
class ActorQAlgorithm(ActorQSettings, OffPolicyAlgorithm):
    """Learns critics of actions and an actor that pleases them; a subclass says what both learn from.

    Networks are those given, `actor_class(obs_space=, action_space=, cfg=)` and `critic_class(obs_space=,
    action_space=, cfg=)`, or MLPs, or CNNs for one image.
    """

    actor_class: Any = None
    critic_class: Any = None
    actor_cfg: Mapping[str, Any] | None = None
    critic_cfg: Mapping[str, Any] | None = None
    network_names = ("actor_class", "critic_class", "actor_cfg", "critic_cfg")
    actor_classes: ClassVar[tuple[Any, Any]]
    """Default actors for vectors and for an image."""

    # ------------------------------------------------------------------ networks
    def check_actions(self) -> None:
        """A Box, with the bounds that were given instead of its own."""
        space = self.action_space
        if not isinstance(space, spaces.Box):
            raise ValueError(f"{type(self).__name__} needs a Box of actions, got {space}; use DQN for Discrete actions")
        low, high = (
            own if given is None else np.broadcast_to(np.asarray(given, np.float32), space.shape)
            for own, given in ((space.low, self.action_low), (space.high, self.action_high))
        )
        self.action_space = space = spaces.Box(low, high, space.shape, np.float32)
        if getattr(self, "use_tanh_squash", True) and not space.is_bounded():
            raise ValueError(
                f"{type(self).__name__} presses actions into bounds, but these are infinite: {space}; set action_low "
                "and action_high (see joint_limit_bounds), or wrap the environment"
            )

    def actor_settings(self) -> dict[str, Any]:
        """What the actor's network is told."""
        shared = {"hidden_dims": self.actor_hidden_dims, "activation": self.activation, "layer_norm": self.layer_norm}
        return {**shared, "use_tanh_squash": True}

    def build(self) -> None:
        """Actor, critics, their targets and optimizers."""
        is_image = isinstance(self.obs_space, spaces.Box) and len(self.obs_space.shape) == 3
        actor_class = self.actor_class or self.actor_classes[is_image]
        critic_class = self.critic_class or (CNNContinuousQNetwork if is_image else MLPContinuousQNetwork)
        critic_told = {"hidden_dims": self.critic_hidden_dims, "activation": self.activation}
        critic_told |= {"layer_norm": self.layer_norm, "num_atoms": self.num_atoms}
        actor = actor_class(
            obs_space=self.obs_space, action_space=self.action_space,
            cfg=network_cfg(actor_class, self.actor_settings(), self.actor_cfg, is_image),
        )  # fmt: skip
        critic_space = self.obs_space if self.env.critic_obs_space is self.env.obs_space else self.env.critic_obs_space
        cfg = network_cfg(critic_class, critic_told, self.critic_cfg, is_image)
        critics = build_critics(critic_class, critic_space, self.action_space, cfg)
        self.policy = ActorQPolicy(actor.to(self.device), critics.to(self.device))
        self.actor, self.critics = actor, critics
        self.make_optimizer("actor_optimizer", actor, self.actor_learning_rate)
        optimizer = self.make_optimizer("critic_optimizer", critics, self.critic_learning_rate)
        self.target = TargetNetwork(critics, optimizer)
        self.targets = [self.target]
        self.returns: Any = ScalarReturns()
        if self.num_atoms > 1:
            self.returns = CategoricalReturns(self.v_min, self.v_max, self.num_atoms, self.device)
        if self.normalize_rewards:
            self.return_scaler = ReturnScaler(self.num_envs, self.gamma).to(self.device)
        self.phases = self.policy_delay
        low, high = (
            torch.as_tensor(np.asarray(bound).reshape(-1), dtype=torch.float32, device=self.device)
            for bound in (self.action_space.low, self.action_space.high)
        )
        self.action_bounds = (low, high, (high - low) / 2)
        self.critic_loss = self.executor.compile(self.critic_loss)
        self.actor_loss = self.executor.compile(self.actor_loss)

    # ------------------------------------------------------------------ acting
    def random_actions(self) -> Tensor:
        """Uniform between the bounds; standard normal where there are none."""
        low, high, half = self.action_bounds
        shape = (self.num_envs, len(low))
        if self.action_space.is_bounded():
            chance = torch.rand(shape, generator=self.generators["action"], device=self.device)
            return torch.addcmul(low, chance, 2 * half).clamp(low, high)
        return torch.randn(shape, generator=self.generators["action"], device=self.device)

    @torch.no_grad()
    def act(self, obs: Obs, deterministic: bool = False) -> Tensor:
        """Actions for raw observations, as the environment wants them."""
        return self.policy.infer(obs)[0] if deterministic else self.explore_step(obs)

    def bounded(self, actions: Tensor) -> Tensor:
        """Actions within their bounds."""
        return actions.clamp(self.action_bounds[0], self.action_bounds[1])

    # ------------------------------------------------------------------ learning
    def batches(self, count: int) -> Iterator[ReplayBatch]:
        """With rewards in units in which returns fit."""
        for batch in super().batches(count):
            if self.return_scaler is not None:
                batch = batch._replace(rewards=batch.rewards * (self.returns.bound / self.return_scaler.reach()))
            yield batch

    def next_actions(self, batch: ReplayBatch, noise: Tensor) -> tuple[Tensor, Tensor | float]:
        """Actions in the states that follow, and what else they are worth; `noise` (B, A) is standard normal."""
        raise NotImplementedError

    def actor_loss(self, batch: ReplayBatch, noise: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """What the actor steps down, and what is known then."""
        raise NotImplementedError

    def critic_loss(self, batch: ReplayBatch, noise: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The critics' loss, and what is known then."""
        with torch.no_grad(), self.executor.autocast():
            actions, bonus = self.next_actions(batch, noise)
            out = self.target.module(batch.next_critic_obs, actions).float()
            left = batch.discounts * (1.0 - batch.dones)
            target = self.returns.target(out, batch.rewards, left, bonus, self.critic_reduction)
        with self.executor.autocast():
            predicted = self.critics(batch.critic_obs, batch.actions).float()
        losses = self.returns.losses(predicted, target)
        with torch.no_grad():
            stats = {
                "critic1_loss": losses[0],
                "critic2_loss": losses[1],
                "q_loss": losses.mean(),
                "mean_q": self.returns.values(predicted).mean(),
                "td_target_mean": self.returns.mean_target(target),
            }
        return losses.sum(), {name: value.detach() for name, value in stats.items()}

    def learn_step(self, batch: ReplayBatch, phase: int) -> None:
        """Critics, and every `policy_delay` steps the actor."""
        # Drawn out here, since what draws from a generator cannot be compiled.
        shape = (2, self.batch_size, self.action_bounds[0].numel())
        noise = torch.randn(shape, generator=self.generators["replay"], device=self.device)
        loss, stats = self.critic_loss(batch, noise[0])
        norm, skipped = self.descend("critic_optimizer", loss)
        self.meter.add({**stats, "critic_grad_norm": norm, "nonfinite_updates": skipped})
        if phase == self.policy_delay - 1:
            with frozen(self.critics):
                loss, known = self.actor_loss(batch, noise[1])
            self.slow_meter.add(self.learn_actor(loss, known))

    def learn_actor(self, loss: Tensor, known: dict[str, Tensor]) -> dict[str, Tensor]:
        """Step down the actor's loss; what to report."""
        norm, _ = self.descend("actor_optimizer", loss)
        return {"actor_loss": loss.detach(), "actor_grad_norm": norm}

    def value_of(self, batch: ReplayBatch, actions: Tensor) -> Tensor:
        """(B,) what the critics say together of other actions in the batch's states."""
        with self.executor.autocast():
            out = self.critics(batch.critic_obs, actions).float()
        values = self.returns.values(out)
        return values.amin(0) if self.critic_reduction == "min" else values.mean(0)

    def report(self) -> dict[str, float]:
        """Means since the last report, and the rates."""
        rates = {
            f"train/{name.replace('optimizer', 'learning_rate')}": float(o.lr) for name, o in self.optimizers.items()
        }
        found = super().report()
        return found | rates if found else {}


def network_cfg(cls: Any, told: Mapping[str, Any], given: Mapping[str, Any] | None, is_image: bool) -> dict[str, Any]:
    """A network's `cfg`: what its class knows of the algorithm's settings, and what was given for it.

    Widths of hidden layers are for vectors; image networks keep their own.
    """
    known = getattr(cls, "defaults", None)
    if known is None:
        squash = {name: value for name, value in told.items() if name == "use_tanh_squash"}
        return {**squash, **(given or {})}
    fitting = {
        name: value for name, value in told.items() if name in known and not (is_image and name == "hidden_dims")
    }
    return {**fitting, **(given or {})}


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """A pass inside computes no gradients of the module's parameters, only through it."""
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in module.parameters():
            parameter.requires_grad_(True)


def joint_limit_bounds(
    lower: Sequence[float], upper: Sequence[float], default: Sequence[float], action_scale: float | Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """`action_low` and `action_high` for position targets `default + action_scale * action` within joint limits.

    Simulators leave actions unbounded or at +-100, of which a uniform exploration wastes nearly everything.
    """
    ends = [
        (np.asarray(limit, float) - np.asarray(default, float)) / np.asarray(action_scale) for limit in (lower, upper)
    ]
    low, high = np.minimum(*ends), np.maximum(*ends)
    return tuple(low.tolist()), tuple(high.tolist())
