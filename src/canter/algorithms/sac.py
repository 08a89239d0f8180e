"""Soft actor-critic (Haarnoja et al. 2018) with a learned temperature."""

import math
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
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
from canter.modules.actors import CNNSquashedGaussianActor, MLPSquashedGaussianActor
from canter.modules.q_networks import ActorQPolicy, HeldNoise, critic_loss, find_normalized_layers, normalize_weights
from canter.storage.replay import ReplayBatch
from canter.utils.config import setting, settings
from canter.utils.distributed import RANKS
from canter.utils.tree import Obs

NORMAL_ENTROPY = 0.5 * math.log(2 * math.pi * math.e)  # of a standard deviation of 1
ACTOR_CLASSES = (MLPSquashedGaussianActor, CNNSquashedGaussianActor)  # for vectors and for one image


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
    target_std: float | None = setting(None, above=0.0, unused_if={"auto_alpha": operator.not_})
    """Standard deviation of normal noise, in units of half the action's range, whose entropy is the target; None:
    `target_entropy`."""
    noise_repeats: int = setting(1, low=1, fixed=True)
    """Most steps for which exploration noise is held; n of them have a probability proportional to 1 / n²."""
    reset_interval: int = setting(0, low=0, host=True)
    """Gradient steps between two resets of networks, temperature and optimizers to a new start; 0 for none."""
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


class SAC(OffPolicyAlgorithm):
    """SAC on a Box of actions: `SAC(env, cfg)`; see `OffPolicyAlgorithm` for the arguments."""

    settings_class = SACSettings
    config_class = SACConfig
    network_names = NETWORK_NAMES
    learning_rate = actor_rate

    def build(self, networks: Mapping[str, Any]) -> None:
        """Build actor, twin critics, their target and the temperature."""
        cfg = self.cfg
        self.action_space = bounded_actions(self)
        self.action_bounds = action_bounds(self.action_space, self.device)
        self.networks = dict(networks)
        self.actor, self.critics = self.new_actor(), build_twin_critics(self, networks)
        self.returns = build_returns(cfg, self.device)
        self.return_bound = self.returns.bound
        self.normalized_layers = find_normalized_layers(self.critics) if cfg.normalize_weights else []
        self.policy = ActorQPolicy(self.actor, self.critics)
        self.make_optimizer("actor_optimizer", self.actor)
        self.target = TargetNetwork(self.critics, self.make_optimizer("critic_optimizer", self.critics))
        self.targets = [self.target]
        log_alpha = torch.tensor(math.log(cfg.init_alpha), device=self.device)
        self.temperature = nn.ParameterDict({"log_alpha": log_alpha})
        if cfg.auto_alpha:
            self.make_optimizer("alpha_optimizer", self.temperature)
        width = self.action_space.high.astype(np.float64) - self.action_space.low
        self.log_half_ranges = float(np.log(width / 2).sum()) if cfg.use_tanh_squash else 0.0
        self.default_target_entropy = self.log_half_ranges - width.size  # where `target_entropy` is None
        self.held_noise: HeldNoise | None = None
        if cfg.noise_repeats > 1:
            self.held_noise = HeldNoise(self.num_envs, width.size, cfg.noise_repeats, self.device)
        self.critic_loss = self.executor.compile(self.critic_loss)
        self.actor_loss = self.executor.compile(self.actor_loss)

    def new_actor(self) -> Any:
        """An actor with fresh weights."""
        names = ("use_tanh_squash", "min_log_std", "max_log_std", "init_std")
        own = {name: getattr(self.cfg, name) for name in names}
        return build_actor(self, self.networks, ACTOR_CLASSES, **own)

    @torch.no_grad()
    def act(self, obs: Obs, deterministic: bool = False) -> Tensor:
        """Actions for raw observations, in the form that the environment takes."""
        return self.policy.infer(obs)[0] if deterministic else self.explore_step(obs, holds_noise=False)

    def explore_step(self, obs: Obs, holds_noise: bool = True) -> Tensor:
        """A sample of the policy."""
        with self.executor.autocast():
            params = self.actor.get_params(self.policy.obs_normalizer.normalize(obs))
        distribution, generator = self.policy.distribution, self.generators["action"]
        if self.held_noise is None or not holds_noise:
            return distribution.to_env(distribution.sample(params, generator))
        raw = torch.addcmul(params["mu"].float(), params["sigma"].float(), self.held_noise.draw(generator))
        return distribution.to_env(raw)

    def learn_steps(self, count: int, phase: int) -> None:
        """Take gradient steps of the critics, every `policy_delay` steps of the actor and the temperature too."""
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
                    loss, stats = self.actor_loss(batch, noise[1])
                norm, _ = self.optimizer_step("actor_optimizer", loss)
                metrics = {"actor_loss": loss.detach(), "actor_grad_norm": norm, "alpha": stats["alpha"]}
                metrics["entropy"] = -stats["log_prob"]
                if self.cfg.auto_alpha:
                    loss = self.alpha_loss(stats["log_prob"])
                    self.optimizer_step("alpha_optimizer", loss)
                    metrics["alpha_loss"] = loss.detach()
                self.slow_meter.add(metrics)

            if self.cfg.target_update_interval == 1:
                self.target.update(self.live.tau)

    def critic_loss(self, batch: ReplayBatch, noise: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Errors of the critics against r + gamma (1 - d) (min_i Q_i(s', a') - alpha log pi(a'|s')), and statistics."""
        with torch.no_grad(), self.executor.autocast():
            next_actions, log_prob = self.sample(batch.next_obs, noise)
            entropy_bonus = -self.temperature["log_alpha"].exp() * log_prob
            next_values = self.target.module(batch.next_critic_obs, next_actions).float()
            discounts = batch.discounts * (1.0 - batch.dones)
            reduction = self.cfg.critic_reduction
            target = self.returns.target(next_values, batch.rewards, discounts, entropy_bonus, reduction)
        with self.executor.autocast():
            predicted = self.critics(batch.critic_obs, batch.actions).float()
        return critic_loss(self.returns, predicted, target)

    def actor_loss(self, batch: ReplayBatch, noise: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean of alpha log pi(a|s) - min_i Q_i(s, a) for reparameterised actions, and statistics."""
        actions, log_prob = self.sample(batch.obs, noise)
        with self.executor.autocast():
            values = self.returns.values(self.critics(batch.critic_obs, actions).float())
        value = values.amin(0) if self.cfg.critic_reduction == "min" else values.mean(0)
        alpha = self.temperature["log_alpha"].detach().exp()
        return (alpha * log_prob - value).mean(), {"log_prob": log_prob.detach().mean(), "alpha": alpha}

    def alpha_loss(self, mean_log_prob: Tensor) -> Tensor:
        """-log alpha (mean log pi + target entropy): the temperature falls while the entropy is above its target."""
        target = self.default_target_entropy
        if self.cfg.target_std is not None:
            count = self.action_bounds[0].numel()
            target = count * (self.live.target_std.log() + NORMAL_ENTROPY) + self.log_half_ranges
        elif self.cfg.target_entropy is not None:
            target = self.live.target_entropy
        return -self.temperature["log_alpha"] * (mean_log_prob + target)

    def sample(self, obs: Obs, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Reparameterised actions and their log-probabilities (B,)."""
        with self.executor.autocast():
            params = self.actor.get_params(obs)
        distribution = self.policy.distribution
        raw = torch.addcmul(params["mu"].float(), params["sigma"].float(), noise)
        return distribution.to_env(raw), distribution.log_prob(params, raw)

    @torch.no_grad()
    def reset_networks(self) -> None:
        """Give networks and temperature new starting values, and optimizers no moments; the replay buffer stays."""
        with torch.random.fork_rng(devices=[]):  # seeded by the step, so that a resumed run draws the same weights
            torch.manual_seed((self.stream_seed + self.num_updates) % 2**63)
            fresh = self.new_actor(), build_twin_critics(self, self.networks)
        for module, new in zip((self.actor, self.critics), fresh, strict=True):
            for own, value in zip(module.parameters(), new.parameters(), strict=True):
                own.copy_(value)
        if self.cfg.auto_alpha:
            self.temperature["log_alpha"].fill_(math.log(self.cfg.init_alpha))
        if RANKS.size > 1:  # every rank drew its own
            named = {"actor": self.actor, "critics": self.critics}
            RANKS.broadcast({f"{k}.{n}": p for k, module in named.items() for n, p in module.named_parameters()})
        self.target.update(torch.ones((), device=self.device))
        for optimizer in self.optimizers.values():
            for moments in optimizer.optimizer.state.values():
                for value in moments.values():
                    value.zero_()

    def resume_state(self) -> dict[str, Any]:
        """Random streams, and the noise that is held."""
        held = self.held_noise
        return super().resume_state() | ({} if held is None else {"held_noise": [held.noise, held.left]})

    def load_resume_state(self, state: Mapping[str, Any]) -> None:
        """Continue exactly from a `resume_state`."""
        super().load_resume_state(state)
        if self.held_noise is not None and "held_noise" in state:
            for own, value in zip((self.held_noise.noise, self.held_noise.left), state["held_noise"], strict=True):
                own.copy_(value)

    def checkpoint_parts(self) -> dict[str, Any]:
        """Policy, targets and optimizers, and the temperature."""
        return super().checkpoint_parts() | {"temperature_state_dict": self.temperature}
