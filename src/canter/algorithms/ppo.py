"""Proximal policy optimisation (Schulman 2017) as named, weighted loss terms."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from canter.algorithms.on_policy import OnPolicyAlgorithm
from canter.algorithms.optim import GuardedOptimizer, backward
from canter.algorithms.settings import PPOConfig, PPOSettings
from canter.envs.wrap import wrap_env
from canter.modules.policy import Policy, PolicyOutput
from canter.storage.rollout_storage import MiniBatch, normalize_advantages
from canter.utils.config import settings
from canter.utils.devices import resolve_device

__all__ = ["PPO", "PPOConfig", "PPOSettings", "Terms"]


class Terms(NamedTuple):
    """What a minibatch's loss is made of: named losses to weigh, intermediates, and statistics to report."""

    losses: dict[str, Tensor]
    inter_vars: dict[str, Tensor]
    stats: dict[str, Tensor]


@settings
class PPO(OnPolicyAlgorithm):
    """PPO on a policy, `PPO(actor_critic, clip_param=0.1)`, or on an environment, `PPO(env=env, actor_class=...)`."""

    actor_critic: Policy | None = dataclasses.field(default=None, kw_only=False)  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        if self.cfg is not None:
            self.take_settings(self.cfg)
        self.device = resolve_device(self.device)
        self._check()
        if self.env is not None:
            self.env = wrap_env(self.env, self.device)
        if self.actor_critic is None:
            self.actor_critic = self._build_pair()
        self.init_collection(self.actor_critic.to(self.device), self.seed)
        self.optimizer = GuardedOptimizer(
            self.policy, self.optimizer_class_name, self.learning_rate, self.parameter_groups, self.clipped_apart()
        )
        self.lr, self.initial_learning_rate = self.optimizer.lr, self.learning_rate
        self.clip = torch.tensor(self.clip_param, device=self.device)
        self.min_std, self.max_std = self._bound(self.clip_min_std), self._bound(self.clip_max_std)
        self.loss_weights = {
            "surrogate_loss": 1.0,
            "value_loss": self.value_loss_coef,
            "entropy": self.entropy_coef,
            "rnd_loss": 1.0,
            "mirror_loss": 0.0 if self.symmetry is None else self.symmetry.cfg.mirror_loss_coef,
        }
        if not self.policy.is_recurrent:  # LSTM and GRU cannot be compiled
            self.forward = self.executor.compile(self.forward)
            self.flat_loss = self.executor.compile(self.flat_loss)
        self.has_warned = False
        if self.env is not None:
            self.prepare(self.env, getattr(self.cfg, "num_steps_per_env", 24))

    # ------------------------------------------------------------------ learning
    def update(self, current_learning_iteration: int | None = None) -> tuple[dict[str, float], dict[str, float]]:
        """Learn from the rollout; mean losses and mean statistics."""
        if current_learning_iteration is not None:
            self.current_learning_iteration = current_learning_iteration
        self.note_constants()
        self.meter.reset()
        for deals in self.deal(self.num_learning_epochs):
            before = self.meter.means() if self.target_kl is not None else {}
            for deal in deals:
                self.executor.run("learn", self.learn_step, *deal)
            if self.target_kl is not None and self._epoch_kl(before) > self.target_kl:
                break
        report = self._report()
        self._update_normalizers()
        self.rollout.clear()
        return report

    def deal(self, num_epochs: int = 1) -> list[list[tuple[Any, ...]]]:
        """What each minibatch of each pass is made of: steps; or environments, their trajectories and T."""
        shuffle, parts = self.generators["shuffle"], self.num_mini_batches
        if not self.policy.is_recurrent:
            return [[(index,) for index in self.rollout.step_minibatches(parts, shuffle)] for _ in range(num_epochs)]
        dealt = self.rollout.env_minibatches(parts, num_epochs, shuffle)
        deals = [(envs, self.executor.bucket(total, len(envs)), self.rollout.filled) for envs, total in dealt]
        return [deals[i : i + parts] for i in range(0, len(deals), parts)]

    def mini_batches(self) -> Iterator[MiniBatch]:
        """The minibatches of one pass."""
        for index, *trajectories in self.deal()[0]:
            yield self.rollout.take_envs(index, trajectories[0]) if trajectories else self.rollout.take(index)

    def learn_step(self, index: Tensor, total: int | None = None, num_steps: int | None = None) -> None:
        """One gradient step on flat steps `index`, or on the `total` trajectories of environments `index`."""
        if total is None:
            terms, loss = self.flat_loss(index)
        else:
            terms, loss = self.batch_loss(self.rollout.take_envs(index, total))
        self.meter.add(self.descend(terms, loss))

    def flat_loss(self, index: Tensor) -> tuple[Terms, Tensor]:
        """Terms of the steps at flat indices and their weighted sum."""
        return self.batch_loss(self.rollout.take(index))

    def batch_loss(self, batch: MiniBatch) -> tuple[Terms, Tensor]:
        """Terms of a minibatch and their weighted sum."""
        terms = self.compute_losses(batch)
        return terms, self.weigh(terms.losses)

    def clipped_apart(self) -> list[str]:
        """Parts of the policy whose gradients are clipped by themselves. Extended by subclasses."""
        return []

    def minibatch_step(self, batch: MiniBatch) -> dict[str, Tensor]:
        """One gradient step on a minibatch; its losses and statistics."""
        return self.descend(*self.batch_loss(batch))

    def descend(self, terms: Terms, total: Tensor) -> dict[str, Tensor]:
        """Step down the total loss: nothing is kept on self but parameters, moments and the learning rate."""
        others = [] if self.rnd is None else [self.rnd.optimizer]
        backward(total, self.optimizer, *others)
        norm, skipped = self.optimizer.clip(self.max_grad_norm)
        if self.schedule == "adaptive":
            self.adapt_learning_rate(terms.stats["kl"])
        self.optimizer.apply(skipped)
        for optimizer in others:
            optimizer.apply(optimizer.clip(math.inf)[1])
        self.policy.clip_std(min=self.min_std, max=self.max_std)
        stats = {**terms.stats, "grad_norm": norm, "nonfinite_updates": skipped}
        losses = {f"losses/{name}": loss for name, loss in {**terms.losses, "total_loss": total}.items()}
        return losses | {f"stats/{name}": value for name, value in stats.items()}

    def _epoch_kl(self, before: Mapping[str, float]) -> float:
        """Mean KL of the pass since `before`, from the running means."""
        now, name = self.meter.means(), "stats/approx_kl"
        added = now["count"] - before.get("count", 0.0)
        return (now[name] * now["count"] - before.get(name, 0.0) * before.get("count", 0.0)) / added

    def weigh(self, losses: Mapping[str, Tensor]) -> Tensor:
        """The sum of the losses, each times its weight; a loss without a weight is an error."""
        weighed = [(loss, self.loss_weights[name]) for name, loss in losses.items()]
        # A loss of weight 0 is only reported; without its gradient the pass back is shorter.
        parts = [loss * w for loss, w in weighed if torch.is_tensor(w) or w != 0.0]
        return functools.reduce(torch.add, parts) if parts else weighed[0][0] * 0.0

    def compute_losses(self, minibatch: MiniBatch) -> Terms:
        """Losses, intermediates and statistics of a minibatch."""
        out = self.batch_output(minibatch)
        terms = self.loss_terms(minibatch, out)
        return terms if self.symmetry is None else self.symmetry.extend(terms, minibatch, out, self)

    def batch_output(self, batch: MiniBatch) -> PolicyOutput:
        """The policy's pass over a minibatch."""
        with self.executor.autocast():
            return self.policy(batch.obs, batch.critic_obs, batch.hidden, batch.trajectories, batch.random_masks)

    def loss_terms(self, batch: MiniBatch, out: PolicyOutput) -> Terms:
        """Every term named in `loss_weights`. Subclasses extend it through super()."""
        distribution, clip = self.policy.distribution, self.clip
        advantages = batch.advantages.squeeze(-1)
        if self.normalize_advantage_per_mini_batch:
            advantages = normalize_advantages(advantages, batch.valid)
        log_ratio = distribution.log_prob(out.params, batch.actions) - batch.old_actions_log_prob.squeeze(-1)
        if batch.valid is not None:  # the mean leaves these out, but not the NaN gradient of a ratio that overflows
            log_ratio = log_ratio.masked_fill(~batch.valid, 0.0)
        ratio = log_ratio.exp()
        surrogate = -advantages * ratio
        # The larger of this and the clipped one: only the bound on the advantage's side can be reached (eq. 7).
        bound = -advantages * (1 + clip * advantages.sign())
        normalize: Any = self.policy.value_normalizer.normalize
        value, old_value, returns = (normalize(x).squeeze(-1) for x in (out.value, batch.values, batch.returns))
        value_error = (value - returns).square()
        clipped = -advantages * torch.clamp(ratio.detach(), 1 - clip, 1 + clip)
        inter_vars = {"ratio": ratio, "surrogate": surrogate, "surrogate_clipped": clipped}
        if self.use_clipped_value_loss:
            value_clipped = old_value + torch.clamp(value - old_value, -clip, clip)
            value_error = torch.maximum(value_error, (value_clipped - returns).square())
            inter_vars["value_clipped"] = value_clipped
        losses = {
            "surrogate_loss": batch.mean(torch.maximum(surrogate, bound)),
            "value_loss": batch.mean(value_error),
        }
        if self.policy.has_entropy:
            losses["entropy"] = -batch.mean(distribution.entropy(out.params))
        if self.rnd is not None:
            losses["rnd_loss"] = self.rnd.loss(batch.critic_obs, batch.valid)  # pyright: ignore[reportArgumentType]
        with torch.no_grad():
            stats = {
                "approx_kl": batch.mean(ratio - 1 - log_ratio),
                "clip_fraction": batch.mean(((ratio - 1).abs() > clip).float()),
            }
            if self.schedule == "adaptive":
                kl = distribution.kl(batch.old_params, out.params)
                inter_vars["kl"], stats["kl"] = kl, batch.mean(kl)
        return Terms(losses, inter_vars, stats)

    @torch.no_grad()
    def adapt_learning_rate(self, kl: Tensor) -> None:
        """Keep the policy's KL step near desired_kl; decided on the device."""
        slower, faster = kl > 2 * self.desired_kl, (kl < self.desired_kl / 2) & (kl > 0)
        factor = torch.where(slower, 1 / 1.5, torch.where(faster, 1.5, 1.0))
        bounded = (self.lr * factor).clamp(1e-5, 1e-2)
        self.lr.copy_(torch.where(slower | faster, bounded, self.lr))

    def adjust_learning_rate(self, progress: float) -> None:
        """Move what is scheduled by the fraction of the run that is done."""
        left = max(0.0, 1.0 - progress)
        if self.schedule == "linear":
            self.lr.fill_(self.initial_learning_rate * left)
            self.learning_rate = self.initial_learning_rate * left
        if self.clip_schedule == "linear":
            self.clip.fill_(self.clip_param * left)

    # ------------------------------------------------------------------ saving
    def checkpoint_parts(self) -> dict[str, Any]:
        """Policy with its normalisers, optimizer, and what is switched on."""
        parts: dict[str, Any] = {"model_state_dict": self.policy, "optimizer_state_dict": self.optimizer}
        if self.rnd is not None:
            parts |= {"rnd_state_dict": self.rnd, "rnd_optimizer_state_dict": self.rnd.optimizer}
        if self.return_scaler is not None:
            parts["return_scaler_state_dict"] = self.return_scaler
        return parts

    def _after_load(self, state: Mapping[str, Any], load_optimizer: bool) -> None:
        if load_optimizer:
            self.learning_rate = float(self.lr)
