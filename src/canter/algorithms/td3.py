"""Twin delayed deterministic policy gradients (Fujimoto et al. 2018)."""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from canter.algorithms.actor_q import ActorQAlgorithm, ActorQSettings
from canter.algorithms.off_policy import OffPolicyRunSettings, TargetNetwork
from canter.modules.actors import CNNDeterministicActor, MLPDeterministicActor
from canter.storage.replay import ReplayBatch
from canter.utils.config import setting, settings
from canter.utils.tree import Obs


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


class TD3(ActorQAlgorithm):
    """TD3 on a Box of actions: `TD3(env, cfg)`; see `OffPolicyAlgorithm` for the arguments."""

    settings_class = TD3Settings
    config_class = TD3Config
    actor_classes = (MLPDeterministicActor, CNNDeterministicActor)

    def build(self, networks: Mapping[str, Any]) -> None:
        """Build the networks and the actor's target."""
        super().build(networks)
        self.target_actor = TargetNetwork(self.actor, self.optimizers["actor_optimizer"])
        self.targets.append(self.target_actor)
        self.spread = torch.linspace(0.0, 1.0, self.num_envs, device=self.device).unsqueeze(1)  # (N, 1)

    def explore_step(self, obs: Obs) -> Tensor:
        """The actor's action plus noise, within the bounds."""
        actions = self._actions(self.actor, self.policy.obs_normalizer.normalize(obs))
        noise = torch.randn(actions.shape, generator=self.generators["action"], device=self.device)
        return torch.addcmul(actions, noise, self.exploration_std()).clamp(*self.action_bounds[:2])

    def exploration_std(self) -> Tensor:
        """(A,) or (N, A) standard deviation of the exploration noise."""
        std = self.live.exploration_noise
        if self.cfg.exploration_noise_max is not None:
            std = torch.lerp(std, self.live.exploration_noise_max, self.spread)
        return std * self.action_bounds[2]

    def _actions(self, actor: nn.Module, obs: Obs) -> Tensor:
        with self.executor.autocast():
            params = actor.get_params(obs)  # pyright: ignore[reportCallIssue]
        return self.policy.distribution.to_env(params["mu"])

    def next_actions(self, batch: ReplayBatch, noise: Tensor) -> tuple[Tensor, float]:
        """The target actor's actions, smoothed by clipped noise."""
        actions, limit = self._actions(self.target_actor.module, batch.next_obs), self.live.target_noise_clip
        noise = (noise * self.live.target_noise).clamp(-limit, limit)
        return torch.addcmul(actions, noise, self.action_bounds[2]).clamp(*self.action_bounds[:2]), 0.0

    def actor_loss(self, batch: ReplayBatch, noise: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The negative value that the first critic, or the mean of both, gives to the actor's actions."""
        values = self.action_values(batch, self._actions(self.actor, batch.obs))
        return -(values[0] if self.cfg.critic_reduction == "min" else values.mean(0)).mean(), {}
