"""Adversarial motion priors: a discriminator rewards motion that looks like the reference clips (Peng 2021)."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from canter.algorithms.algorithm import Terms
from canter.algorithms.extension import Extension
from canter.algorithms.optim import GuardedOptimizer, backward
from canter.envs.vec_env import StepRecord
from canter.modules.normalizer import EmpiricalNormalization
from canter.modules.policy import PolicyOutput
from canter.storage.queue_rollout_storage import AmpRolloutStorage
from canter.storage.replay_buffer import ReplayBuffer
from canter.storage.rollout_storage import MiniBatch, RolloutStorage, masked_mean
from canter.utils.config import setting, settings
from canter.utils.metrics import MeanMeter
from canter.utils.tree import Obs

LARGEST_FEATURE = 10.0  # in standard deviations; one broken joint reading must not decide everything
ACCURACY_RATE = 0.05  # weight of the newest minibatch in the running accuracy
REWARD_NAMES = ("Episode_Reward/style_reward", "Episode_Reward/task_reward")
SHARED = {"discriminator_optimizer": lambda kind: kind == "shared"}
NO_LOADER = {"amp_motion_loader": lambda loader: loader is None}
LOSS_NAMES = ("discriminator_expert_loss", "discriminator_policy_loss", "discriminator_grad_pen_loss")


@settings
class MotionPriorSettings:
    """Hyperparameters of adversarial motion priors."""

    discriminator_loss_coef: float = setting(1.0, low=0.0)
    """Weight of the discriminator's three losses; 0 freezes it."""
    discriminator_optimizer: str = setting("own", choices=("own", "shared"), fixed=True)
    """"own": its own Adam, which the KL schedule does not change; "shared": the policy's, as documented."""
    discriminator_learning_rate: float | None = setting(None, low=0.0, unused_if=SHARED)
    """Step size of its own optimizer; the policy's first one if None."""
    discriminator_max_grad_norm: float = setting(1.0, low=0.0, high=math.inf, unused_if=SHARED)
    """Its gradients are scaled down to this norm."""
    discriminator_weight_decay: float = setting(1e-4, low=0.0, fixed=True, unused_if=SHARED)
    """Weight decay of its hidden layers."""
    discriminator_head_weight_decay: float = setting(1e-2, low=0.0, fixed=True, unused_if=SHARED)
    """Weight decay of its last layer."""
    discriminator_accuracy_limit: float = setting(0.95, low=0.0, high=1.0)
    """While its accuracy is above this it is updated less often; 1 never slows it."""
    discriminator_slow_down: int = setting(4, low=1)
    """One of so many minibatches updates it while it is that accurate."""
    separate_amp_normalizers: bool = setting(False, fixed=True)
    """A normaliser each for policy and expert, as documented; it hides differences of mean and scale."""
    amp_obs_dim: int | None = setting(None, low=1, fixed=True)
    """Width D of a feature window; the discriminator's if None."""
    amp_replay_buffer_size: int = setting(0, low=0, fixed=True)
    """Past windows of the policy to mix with fresh ones, half and half; 0 for none."""
    amp_motion_loader: Any = setting(None, fixed=True)
    """Expert data where the environment gives none: an `AMPLoader`, its settings, or windows (M, D)."""
    amp_num_frames: int = setting(2, low=1, fixed=True, unused_if=NO_LOADER)
    """Frames of a window sampled from a loader."""
    amp_preload: int = setting(100_000, low=1, fixed=True, unused_if=NO_LOADER)
    """Windows sampled from a loader, once."""
    motion_difference: bool = setting(False, fixed=True)
    """ADD: discriminate the reference of the same step minus the policy's motion from zero: tracking, not style."""
    mimic_loss_coef: float = setting(0.0, low=0.0)
    """Weight of the documented mimic loss, which has no gradient: both its sides are data. Use mimic_reward_coef."""
    mimic_reward_coef: float = setting(0.0, low=0.0)
    """The distance to the reference at the same step, times this, is subtracted from the reward."""
    dagger_loss_coef: float = setting(0.0, low=0.0)
    """Weight of the distance to the teacher's action; needs a teacher, that is ATPPO."""


class MotionPrior(Extension):
    """A policy's discriminator with its optimizer, feature normalisers, expert data and replay of past motion."""

    name = "motion_prior"
    settings_class = MotionPriorSettings
    storage_class = AmpRolloutStorage
    can_compile = False
    extras = ("observations", "final_observation", "ref_motion")
    offered = ("ref_obs_normalizer", "ref_motion_normalizer")

    def __init__(self, cfg: Any = None, **given: Any) -> None:
        super().__init__(cfg, **given)
        self.has_own_optimizer = self.cfg.discriminator_optimizer == "own"
        self.own_losses = LOSS_NAMES if self.has_own_optimizer else ()

    def own_parameters(self, policy: Any) -> dict[str, list[str]]:
        """The discriminator, where it has an optimizer of its own."""
        return {"excluded": ["discriminator"]} if self.has_own_optimizer else {}

    def attach(self, alg: Any) -> None:
        """Build the optimizer, the normalisers and the expert data."""
        super().attach(alg)
        cfg = self.cfg
        self.discriminator: Any = getattr(alg.policy, "discriminator", None)
        if self.discriminator is None:
            needs = f"{type(alg).__name__} needs a policy with a discriminator, such as AmpActorCritic"
            raise ValueError(f"{needs}; {type(alg.policy).__name__} has none")
        self.width = self.discriminator.input_dim
        if cfg.amp_obs_dim not in (None, self.width):
            raise ValueError(f"amp_obs_dim is {cfg.amp_obs_dim}, the discriminator's input is {self.width}")
        if cfg.dagger_loss_coef and not getattr(alg.extensions.get("teacher"), "policies", None):
            raise ValueError("dagger_loss_coef needs a teacher, or the policy would imitate itself: use ATPPO")
        if cfg.mimic_loss_coef:
            warnings.warn("mimic_loss has no gradient, it is only reported; use mimic_reward_coef", stacklevel=4)
        if cfg.motion_difference and (cfg.amp_motion_loader is not None or cfg.separate_amp_normalizers):
            needs = "the reference of the same step in extras['ref_motion'], and one normaliser"
            raise ValueError(
                f"motion_difference needs {needs}; leave out amp_motion_loader and separate_amp_normalizers"
            )
        self.generator, self.device = alg.new_generator("motion"), alg.device
        self.ref_obs_normalizer = EmpiricalNormalization([self.width], until=1e8).to(self.device)
        self.ref_motion_normalizer = self.ref_obs_normalizer
        if cfg.separate_amp_normalizers:
            self.ref_motion_normalizer = EmpiricalNormalization([self.width], until=1e8).to(self.device)
        self.own_optimizer: GuardedOptimizer | None = None
        if self.has_own_optimizer:
            decays = {"trunk": cfg.discriminator_weight_decay, "head": cfg.discriminator_head_weight_decay}
            present = {name.split(".")[0] for name, _ in self.discriminator.named_parameters()}
            groups = {part: {"weight_decay": decay} for part, decay in decays.items() if part in present}
            self.rate = cfg.discriminator_learning_rate or alg.cfg.learning_rate
            self.own_optimizer = GuardedOptimizer(self.discriminator, "Adam", self.rate, groups)
        self.accuracy = torch.full((), 0.5, device=self.device)
        self.count = torch.zeros((), device=self.device)
        self.bank = expert_bank(cfg, self.width, self.device)
        size = cfg.amp_replay_buffer_size
        self.replay = ReplayBuffer((self.width + 1) // 2, size, self.device) if size else None
        self.has_past = torch.zeros((), dtype=torch.bool, device=self.device)
        self.coef = cfg.discriminator_loss_coef
        alg.loss_weights |= dict.fromkeys(LOSS_NAMES, self.coef)
        self.storage_options = {"amp_obs_shape": (self.width,)}
        self.rewards = MeanMeter()

    def normalized(self, features: Tensor, owner: str) -> Tensor:
        """(..., D) raw features of the "policy" or the "expert", normalised for the discriminator."""
        normalizer = self.ref_motion_normalizer if owner == "expert" else self.ref_obs_normalizer
        return normalizer.normalize(features).clamp(-LARGEST_FEATURE, LARGEST_FEATURE)

    def after_act(self, step: dict[str, Any], obs: Obs, critic_obs: Obs) -> None:
        """Label the step with its own action, where no teacher did."""
        step.setdefault("action_labels", step["actions"])

    def record(self, record: StepRecord) -> dict[str, Tensor]:
        """Motion features of the step: the policy's, from the episode the step belongs to, and the expert's.

        A step of a dataset has none: it is masked in the discriminator's data and gets no style reward.
        """
        if getattr(self.alg.extensions.get("teacher"), "on_dataset", False):
            none = torch.zeros(len(record.reward), self.width, device=self.device)
            unknown = torch.zeros_like(record.done)
            return {"ref_obs": none, "ref_motion": none, "ref_valid": unknown, "ref_motion_valid": unknown}
        ref_obs = self._flat((record.extras.get("observations") or {}).get("ref_obs"), "observations']['ref_obs")
        finals = record.extras.get("final_observation")
        finals = finals if isinstance(finals, Mapping) else {}
        final, valid = finals.get("ref_obs"), record.valid
        if final is None:
            valid = valid & ~record.done  # features after an episode's end belong to the next episode
        else:
            ref_obs = torch.where(record.done.unsqueeze(1), self._flat(final, "final_observation']['ref_obs"), ref_obs)
        expert = record.extras.get("ref_motion")
        if expert is not None:
            expert = self._flat(expert, "ref_motion")
        elif self.bank is not None:
            draws = torch.rand(len(ref_obs), generator=self.generator, device=self.device, dtype=torch.float64)
            expert = self.bank[(draws * len(self.bank)).long()]
        else:
            raise KeyError("the environment gives no 'ref_motion' in its extras; give it, or set amp_motion_loader")
        if self.cfg.motion_difference:
            last = finals.get("ref_motion")
            if last is None:
                valid = valid & ~record.done  # the reference belongs to the next episode
            else:
                expert = torch.where(
                    record.done.unsqueeze(1), self._flat(last, "final_observation']['ref_motion"), expert
                )
            ref_obs, expert = expert - ref_obs, torch.zeros_like(expert)
        return {"ref_obs": ref_obs, "ref_motion": expert, "ref_valid": valid}

    def _flat(self, features: Any, name: str) -> Tensor:
        if features is None:
            raise KeyError(f"the environment gives no motion features: extras['{name}'] is missing")
        flat = torch.as_tensor(features, device=self.device).flatten(1).float()
        if flat.shape[1] != self.width:
            raise ValueError(f"extras['{name}'] is {flat.shape[1]} wide, the discriminator's input {self.width}")
        return flat

    def reward(self, rewards: Tensor, rollout: RolloutStorage) -> Tensor:
        """Blend of style and task reward; rows whose features are unknown get no style reward."""
        rows = {name: rollout.column(name) for name in ("ref_obs", "ref_motion")}
        known = rollout.column("ref_valid")
        style, task, total = self.discriminator.predict_style_reward(
            self.normalized(rows["ref_obs"], "policy"), rewards
        )
        total = torch.where(known, total, self.discriminator.task_reward_lerp * task)
        if self.cfg.mimic_reward_coef:
            error = torch.where(known, self._mimic_error(rows), 0.0)
            total = total - self.alg.live.mimic_reward_coef * error
        both = zip(REWARD_NAMES, (style, task), (known, rollout.newest_valid), strict=True)
        self.rewards.add({name: masked_mean(reward, valid) for name, reward, valid in both})
        return total

    def _mimic_error(self, rows: Mapping[str, Tensor]) -> Tensor:
        policy = self.normalized(rows["ref_obs"], "policy")
        return torch.linalg.vector_norm(policy - self.normalized(rows["ref_motion"], "expert"), dim=-1)

    def rewards_of_step(self, number: int) -> dict[str, float]:
        """Mean style and task reward of one step of the rollout, before it is finished."""
        rollout = self.alg.rollout
        features, known, task = (
            rollout.data[n][rollout.rows[number]][0] for n in ("ref_obs", "ref_valid", "env_rewards")
        )
        found = self.discriminator.predict_style_reward(self.normalized(features, "policy"), task.squeeze(-1))[:2]
        valid = rollout.data["valid"][rollout.rows[number]].reshape(-1) if rollout.has_invalid_steps else None
        means = [masked_mean(found[0], known.squeeze(-1)), masked_mean(found[1], valid)]
        return dict(zip(REWARD_NAMES, torch.stack(means).tolist(), strict=True))

    def begin_update(self, iteration: int) -> None:
        """Copy a changed weight, and a changed learning rate to the discriminator's optimizer."""
        if self.cfg.discriminator_loss_coef != self.coef:
            self.coef = self.cfg.discriminator_loss_coef
            self.alg.loss_weights |= dict.fromkeys(LOSS_NAMES, self.coef)
        wanted = self.cfg.discriminator_learning_rate
        if self.own_optimizer is not None and wanted is not None and wanted != self.rate:
            self.rate = wanted
            self.own_optimizer.lr.fill_(wanted)

    def losses(self, terms: Terms, batch: MiniBatch, out: PolicyOutput) -> None:
        """Add the distances to the reference and to the teacher, and keep the features for the discriminator."""
        rows = {name: getattr(batch, name) for name in ("ref_obs", "ref_motion")}
        valid = batch.ref_valid.squeeze(-1)  # pyright: ignore[reportAttributeAccessIssue]
        with torch.no_grad():
            terms.stats["mimic_error"] = error = masked_mean(self._mimic_error(rows), valid)
        if self.cfg.mimic_loss_coef:
            terms.losses["mimic_loss"] = error
        if self.cfg.dagger_loss_coef:
            difference = self.alg.policy.distribution.mode(out.params) - batch.action_labels  # pyright: ignore[reportAttributeAccessIssue]
            terms.losses["dagger_loss"] = batch.mean(torch.linalg.vector_norm(difference, dim=-1))
        has_motion = batch.ref_motion_valid.squeeze(-1)  # pyright: ignore[reportAttributeAccessIssue]
        terms.inter_vars.update(rows, ref_valid=valid, ref_motion_valid=has_motion)
        if self.cfg.discriminator_loss_coef:
            self.add_adversarial_losses(terms)

    def add_adversarial_losses(self, terms: Terms) -> None:
        """Add the discriminator's losses on fresh and replayed features."""
        expert, policy = (terms.inter_vars[name].reshape(-1, self.width) for name in ("ref_motion", "ref_obs"))
        valid, has_motion = (terms.inter_vars[name].reshape(-1) for name in ("ref_valid", "ref_motion_valid"))
        if self.replay is not None:
            past = torch.cat(self.replay.sample(len(policy), self.generator), -1)[:, : self.width]
            policy = torch.cat([policy, past])
            valid = torch.cat([valid, self.has_past.expand(len(past))])
        expert, policy = self.normalized(expert, "expert"), self.normalized(policy, "policy")
        parts: dict[str, Any] = {"penalizes_policy": True} if self.cfg.motion_difference else {}
        losses, stats = self.discriminator.adversarial_losses(expert, policy, valid, has_motion, **parts)
        terms.losses.update(losses)
        terms.stats.update(stats)

    def learn(self, terms: Terms) -> Terms | None:
        """Take a step of the discriminator's own optimizer, skipped now and then while it is too accurate."""
        if self.own_optimizer is None or not self.cfg.discriminator_loss_coef:
            return None
        accuracy = terms.stats["amp/accuracy"]
        has_data = terms.inter_vars["ref_valid"].any().to(accuracy.dtype)  # 0 while learning from a dataset
        own = {name: terms.losses[name] for name in self.own_losses}
        backward(self.alg.weighted_sum(own), self.own_optimizer, scalars=[accuracy, has_data])
        self.accuracy.lerp_(accuracy, ACCURACY_RATE * has_data)
        self.count += has_data
        is_off_beat = self.count.remainder(self.cfg.discriminator_slow_down) != 0
        paused = (self.accuracy > self.alg.live.discriminator_accuracy_limit) & is_off_beat
        paused = torch.maximum(paused.to(has_data.dtype), 1.0 - has_data)
        norm, _ = self.own_optimizer.step(self.alg.live.discriminator_max_grad_norm, paused)
        return Terms({}, {}, {"amp/grad_norm": norm, "amp/updates": 1.0 - paused})

    def end_update(self, rollout: RolloutStorage) -> None:
        """Take the rollout's features into the statistics, and its valid windows into the replay."""
        policy, expert = (rollout.data[name][rollout.newest] for name in ("ref_obs", "ref_motion"))
        masks = (rollout.data[name][rollout.newest].squeeze(-1) for name in ("ref_valid", "ref_motion_valid"))
        valid, has_motion = masks
        self.ref_obs_normalizer.update(policy, valid)
        if not self.cfg.motion_difference:  # zeros say nothing about the scale of differences
            self.ref_motion_normalizer.update(expert, has_motion)
        if self.replay is not None:
            rows = torch.nn.functional.pad(policy[valid], (0, self.width % 2))
            self.replay.insert(*rows.chunk(2, dim=-1))
            self.has_past.fill_(len(rows) > 0 or bool(self.has_past))

    def metrics(self) -> dict[str, Tensor]:
        """Mean style and task reward of the rollout."""
        return self.rewards.take()

    def checkpoint_parts(self) -> dict[str, Any]:
        """Feature normalisers and the discriminator's optimizer; the discriminator is part of the policy."""
        parts: dict[str, Any] = {"amp_norm_state_dict": self.ref_obs_normalizer}
        if self.cfg.separate_amp_normalizers:
            own, expert = self.ref_obs_normalizer, self.ref_motion_normalizer
            parts = {"ref_obs_norm_state_dict": own, "ref_motion_norm_state_dict": expert}
        if self.own_optimizer is not None:
            parts["discriminator_optimizer_state_dict"] = self.own_optimizer
        return parts

    def resume_state(self) -> dict[str, Any]:
        """Running accuracy, step count, and the replay."""
        state = {"accuracy": self.accuracy.clone(), "count": self.count.clone()}
        return {"motion": state | ({} if self.replay is None else self.replay.state_dict())}

    def load_resume_state(self, state: Mapping[str, Any]) -> None:
        """Continue exactly from a `resume_state`."""
        saved = state.get("motion")
        if saved is None:
            return
        self.accuracy.copy_(saved["accuracy"])
        self.count.copy_(saved["count"])
        if self.replay is not None:
            none = self.replay.states[:0]  # the checkpoint may be of a run without replay, or of before "step"
            self.replay.load_state_dict({"states": none, "next_states": none, "step": 0, **saved})
            self.has_past.fill_(self.replay.num_samples > 0)


def expert_bank(cfg: MotionPriorSettings, width: int, device: torch.device) -> Tensor | None:
    """(M, D) expert windows from `amp_motion_loader`; None where the environment gives them."""
    source = cfg.amp_motion_loader
    if source is None:
        return None
    if isinstance(source, Mapping):
        from canter.datasets.motion_loader import AMPLoader

        source = AMPLoader(**{"device": device, **source})
    if hasattr(source, "expert_features"):
        source = source.expert_features(cfg.amp_preload, cfg.amp_num_frames)
    bank = torch.as_tensor(source, dtype=torch.float32, device=device)
    if bank.dim() != 2 or bank.shape[1] != width or not len(bank):
        raise ValueError(f"expert windows have shape {tuple(bank.shape)}, the discriminator wants (M, {width})")
    return bank
