"""Twin delayed deterministic policy gradients (Fujimoto et al. 2018)."""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from canter.algorithms.actor_q import (
    NETWORK_NAMES,
    ActorQSettings,
    action_bounds,
    actor_rate,
    bounded_actions,
    build_actor,
    build_returns,
    build_twin_critics,
)
from canter.algorithms.off_policy import OffPolicyAlgorithm, OffPolicyRunSettings, TargetNetwork, frozen
from canter.modules.actors import CNNDeterministicActor, MLPDeterministicActor
from canter.modules.q_networks import ActorQPolicy, critic_loss, find_normalized_layers, normalize_weights
from canter.storage.replay import ReplayBatch
from canter.utils.config import setting, settings
from canter.utils.tree import Obs

ACTOR_CLASSES = (MLPDeterministicActor, CNNDeterministicActor)  # for vectors and for one image


@settings
class TD3Settings(ActorQSettings):
    """Hyperparameters of TD3."""

    policy_delay: int = 2
    exploration_noise: float = setting(0.1, low=0.0)
    """Standard deviation of the exploration noise, in units of half the action's range."""
    exploration_noise_max: float | None = setting(None, low=0.0)
    """Spread the standard deviation evenly over the environments, from `exploration_noise` to this."""
    target_noise: float = setting(0.2, low=0.0)
    """Standard deviation of the noise on the target's actions, in units of half the action's range."""
    target_noise_clip: float = setting(0.5, low=0.0, unused_if={"target_noise": operator.not_})
    """Bound of the noise on the target's actions."""


@settings
class TD3Config(TD3Settings, OffPolicyRunSettings):
    """A whole TD3 run in one object."""


class TD3(OffPolicyAlgorithm):
    """TD3 on a Box of actions: `TD3(env, cfg)`; see `OffPolicyAlgorithm` for the arguments."""

    settings_class = TD3Settings
    config_class = TD3Config
    network_names = NETWORK_NAMES
    learning_rate = actor_rate

    def build(self, networks: Mapping[str, Any]) -> None:
        """Build actor, twin critics, and a target of each."""
        cfg = self.cfg
        self.action_space = bounded_actions(self)
        self.action_bounds = action_bounds(self.action_space, self.device)
        self.actor = build_actor(self, networks, ACTOR_CLASSES)
        self.critics = build_twin_critics(self, networks)
        self.returns = build_returns(cfg, self.device)
        self.return_bound = self.returns.bound
        self.normalized_layers = find_normalized_layers(self.critics) if cfg.normalize_weights else []
        self.policy = ActorQPolicy(self.actor, self.critics)
        actor_optimizer = self.make_optimizer("actor_optimizer", self.actor)
        self.target = TargetNetwork(self.critics, self.make_optimizer("critic_optimizer", self.critics))
        self.target_actor = TargetNetwork(self.actor, actor_optimizer)
        self.targets = [self.target, self.target_actor]
        self.spread = torch.linspace(0.0, 1.0, self.num_envs, device=self.device).unsqueeze(1)  # (N, 1)
        self.critic_loss = self.executor.compile(self.critic_loss)
        self.actor_loss = self.executor.compile(self.actor_loss)

    def explore_step(self, obs: Obs) -> Tensor:
        """The actor's action plus noise, within the bounds."""
        actions = self.actions_of(self.actor, self.policy.obs_normalizer.normalize(obs))
        noise = torch.randn(actions.shape, generator=self.generators["action"], device=self.device)
        return torch.addcmul(actions, noise, self.exploration_std()).clamp(*self.action_bounds[:2])

    def exploration_std(self) -> Tensor:
        """(A,) or (N, A) standard deviation of the exploration noise."""
        std = self.live.exploration_noise
        if self.cfg.exploration_noise_max is not None:
            std = torch.lerp(std, self.live.exploration_noise_max, self.spread)
        return std * self.action_bounds[2]

    def learn_steps(self, count: int, phase: int) -> None:
        """Take gradient steps of the critics, every `policy_delay` steps of the actor too."""
        for number, batch in enumerate(self.batches(count), phase):
            # Noise is drawn here, because code that draws from a generator cannot be compiled.
            shape = (2, len(batch.rewards), self.action_bounds[0].numel())
            noise = torch.randn(shape, generator=self.generators["replay"], device=self.device)

            loss, stats = self.critic_loss(batch, noise[0])
            norm, skipped = self.optimizer_step("critic_optimizer", loss)
            if self.normalized_layers:
                normalize_weights(self.normalized_layers)
            self.meter.add({**stats, "critic_grad_norm": norm, "nonfinite_updates": skipped})

            if (number + 1) % self.cfg.policy_delay == 0:
                with frozen(self.critics):
                    loss = self.actor_loss(batch)
                norm, _ = self.optimizer_step("actor_optimizer", loss)
                self.slow_meter.add({"actor_loss": loss.detach(), "actor_grad_norm": norm})

            if self.cfg.target_update_interval == 1:
                self.update_targets()

    def critic_loss(self, batch: ReplayBatch, noise: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Errors of the critics against r + gamma (1 - d) min_i Q_i(s', a'), and statistics."""
        with torch.no_grad(), self.executor.autocast():
            next_actions = self.next_actions(batch, noise)
            next_values = self.target.module(batch.next_critic_obs, next_actions).float()
            discounts = batch.discounts * (1.0 - batch.dones)
            target = self.returns.target(next_values, batch.rewards, discounts, 0.0, self.cfg.critic_reduction)
        with self.executor.autocast():
            predicted = self.critics(batch.critic_obs, batch.actions).float()
        return critic_loss(self.returns, predicted, target)

    def next_actions(self, batch: ReplayBatch, noise: Tensor) -> Tensor:
        """The target actor's actions in the next states, smoothed by clipped noise."""
        actions, limit = self.actions_of(self.target_actor.module, batch.next_obs), self.live.target_noise_clip
        noise = (noise * self.live.target_noise).clamp(-limit, limit)
        return torch.addcmul(actions, noise, self.action_bounds[2]).clamp(*self.action_bounds[:2])

    def actor_loss(self, batch: ReplayBatch) -> Tensor:
        """The negative value that the first critic, or the mean of both, gives to the actor's actions."""
        actions = self.actions_of(self.actor, batch.obs)
        with self.executor.autocast():
            values = self.returns.values(self.critics(batch.critic_obs, actions).float())
        return -(values[0] if self.cfg.critic_reduction == "min" else values.mean(0)).mean()

    def actions_of(self, actor: nn.Module, obs: Obs) -> Tensor:
        """Actions of an actor or its target for normalised observations."""
        with self.executor.autocast():
            params = actor.get_params(obs)  # pyright: ignore[reportCallIssue]
        return self.policy.distribution.to_env(params["mu"])
