"""Making TPPO ready: its teacher, who acts where, its targets and schedules."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch

from canter.algorithms.distill_targets import DISTANCES, TANH_TARGETS, check_target
from canter.algorithms.imitation_settings import TPPOSettings
from canter.algorithms.ppo import PPO, PPOSettings
from canter.algorithms.schedules import GET_PROB_FUNC
from canter.algorithms.teacher import Teacher, build_teacher
from canter.storage.queue_rollout_storage import ActionLabelRollout
from canter.utils.config import check_settings, settings
from canter.utils.metrics import MeanMeter


@settings
class TaughtSetup(TPPOSettings, PPO):
    """PPO with a frozen teacher, before either acts."""

    new_storage = ActionLabelRollout

    def __post_init__(self) -> None:
        self._merge_ppo()
        self.teacher: Teacher | None = None
        self.on_dataset = False
        self.is_warming_up = False
        """Whether only the critic learns; no property, since compiled code is compiled anew when a number changes."""
        super().__post_init__()
        self._check_targets()
        if not self.using_ppo:  # no ratio, so nothing to measure a step by
            self.schedule = "fixed" if self.schedule == "adaptive" else self.schedule
            self.target_kl = None
        if self.using_ppo and self.buffer_dilation_ratio > 1.0:
            warnings.warn(
                "buffer_dilation_ratio > 1 lets PPO learn from old policies; it suits imitation", stacklevel=3
            )
        self._init_teaching()
        self.meters: dict[Any, MeanMeter] = {}
        latents = self.distill_latent_obs_component_mapping or {}
        self.distillation_weight = torch.tensor(self._distillation_coef(0), device=self.device)
        self.loss_weights["distillation_loss"] = self.distillation_weight
        self.loss_weights |= {f"distill_latent_{name}": self.distill_latent_coef for name in latents}
        self.lr_scheduler_object: Any = None
        if self.lr_scheduler_class_name is not None:
            if self.schedule not in ("fixed", "constant"):
                raise ValueError(f"lr_scheduler_class_name needs schedule='fixed', got {self.schedule!r}")
            made = getattr(torch.optim.lr_scheduler, self.lr_scheduler_class_name)
            self.lr_scheduler_object = made(self.optimizer.optimizer, **(self.lr_scheduler or {}))

    # ------------------------------------------------------------------ set-up
    def _merge_ppo(self) -> None:
        """`ppo` under what is given by itself: a value that is not the default."""
        given = getattr(self.cfg or self, "ppo", None) or {}
        source = self if self.cfg is None else self.cfg
        known = {f.name for f in dataclasses.fields(PPOSettings)}
        defaults = {f.name: f.default for f in dataclasses.fields(source) if f.name in known}
        open_ones = {n: v for n, v in check_settings("ppo", given, known).items() if getattr(source, n) == defaults[n]}
        if self.cfg is not None:
            self.cfg = dataclasses.replace(self.cfg, **open_ones)  # the user's own stays as it is
        else:
            vars(self).update(open_ones)

    def _check_targets(self) -> None:
        check_target("distill_target", self.distill_target)
        check_target("distill_latent_target", self.distill_latent_target, tuple(DISTANCES))
        if "mu" not in self.policy.distribution.param_shapes and self.distill_target != "max_log_prob":
            raise ValueError(f"distill_target {self.distill_target!r} is for Gaussian actions; use 'max_log_prob'")
        if self.distill_target in TANH_TARGETS and not isinstance(self._last_layer(), torch.nn.Tanh):
            raise ValueError(f"distill_target {self.distill_target!r} needs a policy with mu_activation='tanh'")

    def _last_layer(self) -> Any:
        actor = getattr(self.policy, "actor", None)
        return actor[-1] if isinstance(actor, torch.nn.Sequential) else None

    def _init_teaching(self) -> None:
        if hasattr(self, "act_prob"):
            return
        for name in ("teacher", "resample"):
            self.executor.generators.append(self.new_generator(name))
        self.act_prob = GET_PROB_FUNC(self.teacher_act_prob, self.update_times_scale)
        self.teacher_prob = torch.tensor(self.act_prob(0), device=self.device)
        self.use_teacher_act_mask = torch.zeros(0, dtype=torch.bool, device=self.device)
        given = self.teachers or (self.teacher_policy or ({} if self.teacher_ac_path else None),)
        if given[0] is None:
            warnings.warn("TPPO has no teacher: only datasets label its actions", stacklevel=5)
            return
        made = [
            build_teacher(self.teacher_policy_class_name, one, self.teacher_ac_path, self.policy, self.device)
            for one in given
            if one is not None
        ]
        ids = None
        if self.teacher_id_component is not None:
            side: Any = "critic_obs_layout" if self.label_action_with_critic_obs else "obs_layout"
            ids = getattr(self.policy, side).slice(self.teacher_id_component)
        self.teacher = Teacher(made, self.action_labels_from_sample, ids)
        self._check_latents(made[0])

    def _check_latents(self, teacher: Any) -> None:
        for who, policy in (("student", self.policy), ("teacher", teacher)):
            if self.distill_latent_obs_component_mapping and not hasattr(policy, "get_encoder_latent"):
                raise TypeError(f"latent distillation needs encoders; the {who} {type(policy).__name__} has none")

    def init_storage(self, num_envs: int, *args: Any, **kwargs: Any) -> None:
        """Allocate the rollout, the teacher's memories, and who acts in which environment."""
        super().init_storage(num_envs, *args, **{"buffer_dilation_ratio": self.buffer_dilation_ratio, **kwargs})
        self._init_teaching()
        if self.teacher is not None:
            self.teacher.begin(num_envs)
            draws = torch.rand(num_envs, generator=self.generators["teacher"], device=self.device)
            self.use_teacher_act_mask = draws < self.teacher_prob

    def _distillation_coef(self, iteration: int) -> float:
        return GET_PROB_FUNC(self.distillation_loss_coef, self.update_times_scale)(iteration)
