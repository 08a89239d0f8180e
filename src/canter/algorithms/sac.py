"""Soft actor-critic (Haarnoja et al. 2018) with a learned temperature."""

import math
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from canter.algorithms.actor_q import ActorQAlgorithm, ActorQSettings
from canter.algorithms.off_policy import OffPolicyRunSettings
from canter.modules.actors import CNNSquashedGaussianActor, MLPSquashedGaussianActor
from canter.storage.replay import ReplayBatch
from canter.utils.config import setting, settings
from canter.utils.tree import Obs


@settings
class SACSettings(ActorQSettings):
    """Hyperparameters of SAC."""

    alpha_learning_rate: float = setting(3e-4, low=0.0, unused_if={"auto_alpha": operator.not_})
    """Step size of the temperature."""
    auto_alpha: bool = setting(True, fixed=True)
    """Learn the temperature, so that the entropy stays near `target_entropy`."""
    init_alpha: float = setting(0.2, above=0.0, fixed=True)
    """Temperature at the start, or always if `auto_alpha` is off."""
    target_entropy: float | None = setting(None, unused_if={"auto_alpha": operator.not_})
    """Target of the entropy in nats; None is -1 per action, in units of half the action's range."""
    use_tanh_squash: bool = setting(True, fixed=True)
    """Squash actions into their bounds; without it the environment has to clip them."""
    min_log_std: float = setting(-20.0, at_most="max_log_std", fixed=True)
    """Lower bound of the log standard deviation before squashing."""
    max_log_std: float = setting(2.0, fixed=True)
    """Upper bound of the log standard deviation before squashing."""
    init_std: float = setting(1.0, above=0.0, fixed=True)
    """Standard deviation before squashing at the start."""


@settings
class SACConfig(SACSettings, OffPolicyRunSettings):
    """A whole SAC run in one object."""


class SAC(ActorQAlgorithm):
    """SAC on a Box of actions: `SAC(env, cfg)`; see `OffPolicyAlgorithm` for the arguments."""

    settings_class = SACSettings
    config_class = SACConfig
    actor_classes = (MLPSquashedGaussianActor, CNNSquashedGaussianActor)
    actor_setting_names = ("min_log_std", "max_log_std", "init_std", "use_tanh_squash")

    def build(self, networks: Mapping[str, Any]) -> None:
        """Build the networks and the temperature."""
        super().build(networks)
        log_alpha = torch.tensor(math.log(self.cfg.init_alpha), device=self.device)
        self.temperature = nn.ParameterDict({"log_alpha": log_alpha})
        if self.cfg.auto_alpha:
            self.make_optimizer("alpha_optimizer", self.temperature)
        width = self.action_space.high.astype(np.float64) - self.action_space.low
        log_half_ranges = float(np.log(width / 2).sum()) if self.cfg.use_tanh_squash else 0.0
        self.default_target_entropy = log_half_ranges - width.size  # where `target_entropy` is None

    def explore_step(self, obs: Obs) -> Tensor:
        """A sample of the policy."""
        with self.executor.autocast():
            params = self.actor.get_params(self.policy.obs_normalizer.normalize(obs))
        distribution = self.policy.distribution
        return distribution.to_env(distribution.sample(params, self.generators["action"]))

    def sample(self, obs: Obs, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Reparameterised actions and their log-probabilities (B,)."""
        with self.executor.autocast():
            params = self.actor.get_params(obs)
        distribution = self.policy.distribution
        raw = torch.addcmul(params["mu"].float(), params["sigma"].float(), noise)
        return distribution.to_env(raw), distribution.log_prob(params, raw)

    def next_actions(self, batch: ReplayBatch, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Samples of the policy, and their entropy bonus."""
        actions, log_prob = self.sample(batch.next_obs, noise)
        return actions, -self.temperature["log_alpha"].exp() * log_prob

    def actor_loss(self, batch: ReplayBatch, noise: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean of the weighted log-probability minus the critics' value."""
        actions, log_prob = self.sample(batch.obs, noise)
        alpha = self.temperature["log_alpha"].detach().exp()
        values = self.action_values(batch, actions)
        value = values.amin(0) if self.cfg.critic_reduction == "min" else values.mean(0)
        return (alpha * log_prob - value).mean(), {"log_prob": log_prob.detach().mean(), "alpha": alpha}

    def learn_actor(self, loss: Tensor, stats: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take a gradient step of the actor and of the temperature."""
        metrics = super().learn_actor(loss, stats) | {"alpha": stats["alpha"], "entropy": -stats["log_prob"]}
        if self.cfg.auto_alpha:
            alpha_loss = self.alpha_loss(stats["log_prob"])
            self.optimizer_step("alpha_optimizer", alpha_loss)
            metrics["alpha_loss"] = alpha_loss.detach()
        return metrics

    def alpha_loss(self, mean_log_prob: Tensor) -> Tensor:
        """The temperature's loss: minimising it lowers the temperature while the entropy is above its target."""
        has_target = self.cfg.target_entropy is not None
        target = self.live.target_entropy if has_target else self.default_target_entropy
        return -self.temperature["log_alpha"] * (mean_log_prob + target)

    def checkpoint_parts(self) -> dict[str, Any]:
        """The parts of an actor with critics, and the temperature."""
        return super().checkpoint_parts() | {"temperature_state_dict": self.temperature}
