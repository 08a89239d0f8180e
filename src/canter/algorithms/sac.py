"""Soft actor-critic (Haarnoja et al. 2018) with a learned temperature."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from canter.algorithms.actor_q import ActorQAlgorithm
from canter.algorithms.off_policy_settings import SACConfig, SACSettings
from canter.modules.actors import CNNSquashedGaussianActor, MLPSquashedGaussianActor
from canter.storage.replay import ReplayBatch
from canter.utils.config import settings
from canter.utils.tree import Obs

__all__ = ["SAC", "SACConfig", "SACSettings", "Temperature"]


class Temperature(nn.Module):
    """The logarithm of the price of entropy."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(math.log(alpha)))


@settings
class SAC(SACSettings, ActorQAlgorithm):
    """SAC on a Box of actions: `SAC(env, cfg)`."""

    actor_classes = (MLPSquashedGaussianActor, CNNSquashedGaussianActor)

    def build(self) -> None:
        """The networks, and the temperature."""
        super().build()
        self.temperature = Temperature(self.init_alpha).to(self.device)
        if self.auto_alpha:
            self.make_optimizer("alpha_optimizer", self.temperature, self.alpha_learning_rate)
        half = self.action_space.high.astype(np.float64) - self.action_space.low
        per_action = np.log(half / 2).sum() if self.use_tanh_squash else 0.0
        aim = float(per_action) - half.size if self.target_entropy is None else self.target_entropy
        self.entropy_aim = aim

    def actor_settings(self) -> dict[str, Any]:
        """Bounds and start of the noise besides."""
        own = ("min_log_std", "max_log_std", "init_std", "use_tanh_squash")
        return super().actor_settings() | {name: getattr(self, name) for name in own}

    def explore_step(self, obs: Obs) -> Tensor:
        """A sample of the policy."""
        with self.executor.autocast():
            params = self.actor.get_params(self.policy.obs_normalizer.normalize(obs))  # pyright: ignore[reportCallIssue]
        distribution = self.policy.distribution
        return distribution.to_env(distribution.sample(params, self.generators["action"]))

    def sample(self, obs: Obs, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions that carry the actor's gradient, and their log-probabilities (B,)."""
        with self.executor.autocast():
            params = self.actor.get_params(obs)
        distribution = self.policy.distribution
        raw = torch.addcmul(params["mu"].float(), params["sigma"].float(), noise)
        return distribution.to_env(raw), distribution.log_prob(params, raw)

    def next_actions(self, batch: ReplayBatch, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Samples, worth their entropy besides."""
        actions, log_prob = self.sample(batch.next_obs, noise)
        return actions, -self.temperature.log_alpha.exp() * log_prob

    def actor_loss(self, batch: ReplayBatch, noise: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """What an action's log-probability costs, less what the critics say it is worth."""
        actions, log_prob = self.sample(batch.obs, noise)
        alpha = self.temperature.log_alpha.detach().exp()
        loss = (alpha * log_prob - self.value_of(batch, actions)).mean()
        return loss, {"log_prob": log_prob.detach().mean(), "alpha": alpha}

    def learn_actor(self, loss: Tensor, known: dict[str, Tensor]) -> dict[str, Tensor]:
        """Actor and temperature."""
        report = super().learn_actor(loss, known) | {"alpha": known["alpha"], "entropy": -known["log_prob"]}
        if self.auto_alpha:
            alpha_loss = self.alpha_loss(known["log_prob"])
            self.descend("alpha_optimizer", alpha_loss)
            report["alpha_loss"] = alpha_loss.detach()
        return report

    def alpha_loss(self, mean_log_prob: Tensor) -> Tensor:
        """Falls while the entropy is above its aim, by lowering the temperature."""
        return -self.temperature.log_alpha * (mean_log_prob + self.entropy_aim)

    def get_epsilon(self, timesteps: int) -> float:
        """Nothing is left to chance beside the policy."""
        return 0.0

    def checkpoint_parts(self) -> dict[str, Any]:
        """The temperature besides."""
        return super().checkpoint_parts() | {"temperature_state_dict": self.temperature}
