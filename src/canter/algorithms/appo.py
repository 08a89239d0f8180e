"""PPO with adversarial motion priors: the style of reference clips is a reward (Peng 2021)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from canter.algorithms.imitation_settings import APPOConfig, APPOSettings, ATPPOConfig
from canter.algorithms.motion_prior import MotionPrior
from canter.algorithms.ppo import PPO, Terms
from canter.algorithms.tppo import TPPO
from canter.envs.vec_env import StepRecord
from canter.modules.policy import Hidden, PolicyOutput
from canter.storage.queue_rollout_storage import AmpRolloutStorage
from canter.storage.rollout_storage import MiniBatch, masked_mean
from canter.utils.config import settings
from canter.utils.metrics import MeanMeter
from canter.utils.tree import Obs

__all__ = ["APPO", "ATPPO", "APPOAlgoMixin", "APPOConfig", "APPOSettings", "ATPPOConfig"]

REWARD_NAMES = ("Episode_Reward/style_reward", "Episode_Reward/task_reward")


@settings
class APPOAlgoMixin(APPOSettings, PPO):
    """Adds a discriminator's reward and its learning to an algorithm of the PPO family."""

    new_storage = AmpRolloutStorage

    def __post_init__(self) -> None:
        discriminator = getattr(self.actor_critic, "discriminator", None)
        if discriminator is None:
            raise ValueError(
                f"{type(self).__name__} needs a policy with a discriminator, such as AmpActorCritic; "
                f"{type(self.actor_critic).__name__} has none"
            )
        wanted = getattr(self.cfg or self, "discriminator_optimizer", "own")
        if wanted not in ("own", "shared"):
            raise ValueError(f"discriminator_optimizer must be 'own' or 'shared', got {wanted!r}")
        discriminator.requires_grad_(wanted == "shared")  # the policy's optimizer takes only what has a gradient
        super().__post_init__()
        discriminator.requires_grad_(True)
        if self.amp_obs_dim not in (None, discriminator.input_dim):
            raise ValueError(
                f"amp_obs_dim is {self.amp_obs_dim}, the discriminator's input is {discriminator.input_dim}"
            )
        if self.dagger_loss_coef and getattr(self, "teacher", None) is None:
            raise ValueError("dagger_loss_coef needs a teacher, or the policy would imitate itself: use ATPPO")
        if self.mimic_loss_coef:
            warnings.warn("mimic_loss has no gradient, it is only reported; use mimic_reward_coef", stacklevel=3)
        stream = self.new_generator("motion")
        self.executor.generators.append(stream)
        self.prior = MotionPrior(discriminator, self, self.initial_learning_rate, stream, self.device)
        names = ("discriminator_expert_loss", "discriminator_policy_loss", "discriminator_grad_pen_loss")
        self.loss_weights |= dict.fromkeys(names, self.discriminator_loss_coef)
        self.loss_weights |= {"mimic_loss": self.mimic_loss_coef, "dagger_loss": self.dagger_loss_coef}
        self.amp_rewards = MeanMeter()
        self.last_rewards = torch.zeros(2, device=self.device)

    def init_storage(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the rollout, with room for motion features."""
        super().init_storage(*args, **{"amp_obs_shape": (self.policy.discriminator.input_dim,), **kwargs})  # pyright: ignore[reportAttributeAccessIssue]

    # ------------------------------------------------------------------ collecting
    def act_step(self, obs: Obs, critic_obs: Obs | None, hidden: Hidden) -> dict[str, Any]:
        """What acting adds to a transition; labels are a teacher's where there is one."""
        step = super().act_step(obs, critic_obs, hidden)
        return {"action_labels": step["actions"], **step}

    def step_extras(self, record: StepRecord) -> dict[str, Tensor]:
        """Motion features of the step: the policy's, of the episode that the step belongs to, and the expert's."""
        ref_obs = self._flat((record.extras.get("observations") or {}).get("ref_obs"), "observations']['ref_obs")
        final = record.extras.get("final_observation")
        final = final.get("ref_obs") if isinstance(final, Mapping) else None
        if final is None:  # what is there after an episode's end belongs to the next episode
            valid = record.valid & ~record.done
        else:
            valid = record.valid
            ref_obs = torch.where(record.done.unsqueeze(1), self._flat(final, "final_observation']['ref_obs"), ref_obs)
        expert = record.extras.get("ref_motion")
        expert = self.prior.expert_rows(len(ref_obs)) if expert is None else self._flat(expert, "ref_motion")
        return {**super().step_extras(record), "ref_obs": ref_obs, "ref_motion": expert, "ref_valid": valid}

    def _flat(self, features: Any, name: str) -> Tensor:
        if features is None:
            raise KeyError(f"the environment gives no motion features: extras['{name}'] is missing")
        flat = torch.as_tensor(features, device=self.device).flatten(1).float()
        if flat.shape[1] != self.prior.width:
            raise ValueError(f"extras['{name}'] is {flat.shape[1]} wide, the discriminator's input {self.prior.width}")
        return flat

    def learned_reward(self, record: StepRecord) -> Tensor:
        """Style and task blended; rows whose features are unknown have no style."""
        discriminator, valid = self.prior.discriminator, record.extras["ref_valid"]
        features = self.prior.normalized(record.extras["ref_obs"], "policy")
        style, task, total = discriminator.predict_style_reward(features, super().learned_reward(record))
        total = torch.where(valid, total, discriminator.task_reward_lerp * task)
        if self.mimic_reward_coef:
            total = total - self.mimic_reward_coef * torch.where(valid, self._mimic_error(record.extras), 0.0)
        means = [masked_mean(style, valid), masked_mean(task, record.valid)]
        self.last_rewards.copy_(torch.stack(means))
        self.amp_rewards.add(dict(zip(REWARD_NAMES, means, strict=True)))
        return total

    def _mimic_error(self, rows: Mapping[str, Tensor]) -> Tensor:
        policy = self.prior.normalized(rows["ref_obs"], "policy")
        return torch.linalg.vector_norm(policy - self.prior.normalized(rows["ref_motion"], "expert"), dim=-1)

    def process_env_step(
        self, rewards: Tensor, dones: Tensor, infos: dict[str, Any], next_obs: Any = None, next_critic_obs: Any = None
    ) -> None:
        """Finish the transition, and tell what the step was worth in `infos["log"]`."""
        super().process_env_step(rewards, dones, infos, next_obs, next_critic_obs)
        infos.setdefault("log", {}).update(zip(REWARD_NAMES, self.last_rewards.tolist(), strict=True))

    # ------------------------------------------------------------------ learning
    def loss_terms(self, batch: MiniBatch, out: PolicyOutput) -> Terms:
        """The parent's terms, and what the discriminator's need, left in `inter_vars`."""
        terms = super().loss_terms(batch, out)
        rows = {name: getattr(batch, name) for name in ("ref_obs", "ref_motion")}
        valid = batch.ref_valid.squeeze(-1)  # pyright: ignore[reportAttributeAccessIssue]
        with torch.no_grad():
            terms.stats["mimic_error"] = error = masked_mean(self._mimic_error(rows), valid)
        if self.mimic_loss_coef:
            terms.losses["mimic_loss"] = error
        if self.dagger_loss_coef:
            apart = self.policy.distribution.mode(out.params) - batch.action_labels  # pyright: ignore[reportAttributeAccessIssue]
            terms.losses["dagger_loss"] = batch.mean(torch.linalg.vector_norm(apart, dim=-1))
        terms.inter_vars.update(rows, ref_valid=valid)
        return terms

    def compute_losses(self, minibatch: MiniBatch) -> Terms:
        """Losses, intermediates and statistics of a minibatch, the discriminator's among them."""
        terms = super().compute_losses(minibatch)
        if self.discriminator_loss_coef:
            losses, stats = self._discriminator_terms(terms)
            terms.losses.update(losses)
            terms.stats.update(stats)
        return terms

    def batch_loss(self, batch: MiniBatch) -> tuple[Terms, Tensor]:
        """The parent's terms and their weighted sum; `descend` makes the discriminator's.

        This is compiled, which the gradient of a gradient cannot be.
        """
        terms = super().compute_losses(batch)
        return terms, self.weigh(terms.losses)

    def _discriminator_terms(self, terms: Terms) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return self.prior.losses(*(terms.inter_vars[name] for name in ("ref_motion", "ref_obs", "ref_valid")))

    def descend(self, terms: Terms, total: Tensor) -> dict[str, Tensor]:
        """The parent's step, and the discriminator's."""
        if not self.discriminator_loss_coef:
            return super().descend(terms, total)
        losses, stats = self._discriminator_terms(terms)
        loss = self.weigh(losses)
        if self.prior.optimizer is None:
            report = super().descend(terms, total + loss)
        else:
            report = super().descend(terms, total)
            stats |= self.prior.descend(loss, stats["amp/accuracy"])
        report |= {f"losses/{name}": value for name, value in losses.items()}
        return report | {f"stats/{name}": value for name, value in stats.items()}

    def _extra_scalars(self) -> dict[str, Tensor]:
        rewards = {f"stats/{name}": value for name, value in self.amp_rewards.averages().items() if name != "count"}
        extra = super()._extra_scalars() | rewards
        self.amp_rewards.reset()
        return extra

    def _update_normalizers(self) -> None:
        super()._update_normalizers()
        data, used = self.rollout.data, self.rollout.newest
        self.prior.observe(data["ref_obs"][used], data["ref_motion"][used], data["ref_valid"][used].squeeze(-1))

    # ------------------------------------------------------------------ saving
    def checkpoint_parts(self) -> dict[str, Any]:
        """The parent's parts, the feature normaliser and the discriminator's optimizer."""
        return super().checkpoint_parts() | self.prior.parts()

    def resume_state(self) -> dict[str, Any]:
        """What the parent needs, and the discriminator's pace and replay."""
        return super().resume_state() | {"motion": self.prior.state()}

    def load_resume_state(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `resume_state` was taken."""
        super().load_resume_state(state)
        if "motion" in state:
            self.prior.load_state(state["motion"])


@settings
class APPO(APPOAlgoMixin, PPO):
    """PPO whose reward is the style of reference motion, mixed with the task's."""


@settings
class ATPPO(APPOAlgoMixin, TPPO):
    """TPPO whose reward is the style of reference motion: teacher, style and task together."""
