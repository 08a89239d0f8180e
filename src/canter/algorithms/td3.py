"""Twin delayed deterministic policy gradients (Fujimoto et al. 2018)."""

from __future__ import annotations

import torch
from torch import Tensor

from canter.algorithms.actor_q import ActorQAlgorithm
from canter.algorithms.off_policy_settings import TD3Config, TD3Settings
from canter.algorithms.targets import TargetNetwork
from canter.modules.actors import CNNDeterministicActor, MLPDeterministicActor
from canter.storage.replay import ReplayBatch
from canter.utils.config import settings
from canter.utils.tree import Obs

__all__ = ["TD3", "TD3Config", "TD3Settings"]


@settings
class TD3(TD3Settings, ActorQAlgorithm):
    """TD3 on a Box of actions: `TD3(env, cfg)`."""

    actor_classes = (MLPDeterministicActor, CNNDeterministicActor)

    def build(self) -> None:
        """The networks, a target of the actor, and the noise of every environment."""
        super().build()
        self.target_actor = TargetNetwork(self.actor, self.optimizers["actor_optimizer"])
        self.targets.append(self.target_actor)
        most = self.exploration_noise if self.exploration_noise_max is None else self.exploration_noise_max
        noise = torch.linspace(self.exploration_noise, most, self.num_envs, device=self.device)
        self.noise = noise.unsqueeze(1) * self.action_bounds[2]  # (N, A)

    def explore_step(self, obs: Obs) -> Tensor:
        """The policy's action and noise."""
        actions = self._actions(self.actor, self.policy.obs_normalizer.normalize(obs))  # pyright: ignore[reportCallIssue]
        chance = torch.randn(actions.shape, generator=self.generators["action"], device=self.device)
        return self.bounded(torch.addcmul(actions, chance, self.noise))

    def _actions(self, actor: torch.nn.Module, obs: Obs) -> Tensor:
        with self.executor.autocast():
            params = actor.get_params(obs)  # pyright: ignore[reportCallIssue]
        return self.policy.distribution.to_env(params["mu"])

    def next_actions(self, batch: ReplayBatch, noise: Tensor) -> tuple[Tensor, float]:
        """The target's actions, smoothed by bounded noise."""
        actions = self._actions(self.target_actor.module, batch.next_obs)
        noise = (noise * self.target_noise).clamp(-self.target_noise_clip, self.target_noise_clip)
        return self.bounded(torch.addcmul(actions, noise, self.action_bounds[2])), 0.0

    def actor_loss(self, batch: ReplayBatch, noise: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """What the first critic says against the policy's actions."""
        actions = self._actions(self.actor, batch.obs)
        with self.executor.autocast():
            values = self.returns.values(self.critics(batch.critic_obs, actions).float())
        return -(values[0] if self.critic_reduction == "min" else values.mean(0)).mean(), {}

    def get_epsilon(self, timesteps: int) -> float:
        """Nothing is left to chance beside the noise."""
        return 0.0
