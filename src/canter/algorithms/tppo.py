"""Teacher-guided PPO: distillation, DAgger (Ross 2011), and fine-tuning of what was distilled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from canter.algorithms.distill_targets import DISTANCES, TANH_TARGETS, tanh_stats
from canter.algorithms.imitation_settings import TPPOConfig, TPPOSettings
from canter.algorithms.ppo import Terms
from canter.algorithms.taught_setup import TaughtSetup
from canter.envs.vec_env import StepRecord
from canter.modules.policy import Hidden, PolicyOutput
from canter.storage.rollout_storage import MiniBatch, normalize_advantages
from canter.utils.config import settings
from canter.utils.metrics import MeanMeter
from canter.utils.tree import Obs

__all__ = ["TPPO", "TPPOConfig", "TPPOSettings"]


@settings
class TPPO(TaughtSetup):
    """PPO beside a frozen teacher that labels every step and, at first, acts itself."""

    # ------------------------------------------------------------------ collecting
    def act_step(self, obs: Obs, critic_obs: Obs | None, hidden: Hidden) -> dict[str, Any]:
        """The student's step, the teacher's label, and the teacher's action where it is its turn."""
        step = super().act_step(obs, critic_obs, hidden)
        if self.teacher is None:
            return {**step, "action_labels": step["actions"]}
        seen = step["critic_observations"] if self.label_action_with_critic_obs else obs
        labels = self.teacher.label(seen, self.generators["teacher"])
        mask = self.use_teacher_act_mask
        actions = torch.where(mask.view(-1, *[1] * (labels.dim() - 1)), labels, step["actions"])
        distribution = self.policy.distribution
        return {
            **step,
            "actions": actions,
            "actions_log_prob": distribution.log_prob(step["params"], actions),
            "for_env": distribution.to_env(actions),
            "action_labels": labels,
            "teacher_acted": mask.clone(),
        }

    def finish_step(self, transition: Mapping[str, Any], record: StepRecord) -> Hidden:
        """Write the row; the teacher forgets episodes that ended, and who acts in the next ones is drawn."""
        hidden = super().finish_step(transition, record)
        if self.teacher is not None:
            ended = record.done | ~record.valid if self.rollout.has_invalid_steps else record.done
            self.teacher.reset(ended)
            mask = self.use_teacher_act_mask
            draws = torch.rand(mask.shape, generator=self.generators["teacher"], device=self.device)
            mask.copy_(torch.where(record.done, draws < self.teacher_prob, mask))
        return hidden

    @torch.no_grad()
    def collect_transition_from_dataset(self, transition: Any, infos: dict[str, Any]) -> None:
        """Take a step of a dataset instead of one of the environment; its action is the label."""
        obs, critic_obs = transition.observation, transition.privileged_observation
        self.act(obs, obs if critic_obs is None else critic_obs)
        labels = transition.action.to(self.device, self.rollout.action_dtype)
        self.transition.action_labels = labels  # pyright: ignore[reportAttributeAccessIssue]
        self.acted = {**self.acted, "action_labels": labels}
        self.on_dataset = True
        self.process_env_step(transition.reward.reshape(-1), transition.done.reshape(-1), infos)

    def compute_returns(self, last_critic_obs: Obs) -> None:
        """Returns and advantages, where something is learned from them."""
        if self.using_ppo and not self.on_dataset:
            super().compute_returns(last_critic_obs)

    def returns_step(self, last_critic_obs: Obs, hidden: Hidden, num_steps: int) -> None:
        """Fill returns and advantages, where something is learned from them."""
        if self.using_ppo:
            super().returns_step(last_critic_obs, hidden, num_steps)

    # ------------------------------------------------------------------ learning
    def note_constants(self) -> None:
        """Tell the executor what else decides which losses there are."""
        super().note_constants()
        self.executor.constants = (*self.executor.constants, self.on_dataset, self.is_warming_up)

    def deal(self, num_epochs: int = 1) -> list[list[tuple[Any, ...]]]:
        """What each minibatch is made of, from rows in the order of time."""
        self.rollout.untie_buffer_loop()  # pyright: ignore[reportAttributeAccessIssue]
        return super().deal(num_epochs)

    def update(self, current_learning_iteration: int | None = None) -> tuple[dict[str, float], dict[str, float]]:
        """Learn from the rollout, then move every schedule on."""
        if current_learning_iteration is not None:
            self.current_learning_iteration = current_learning_iteration
        self.is_warming_up = self.current_learning_iteration < self.critic_warmup_iterations
        self.distillation_weight.fill_(self._distillation_coef(self.current_learning_iteration))
        self.meter = self.meters.setdefault((self.on_dataset, self.is_warming_up), MeanMeter())  # other names in each
        size = len(self.rollout.data["rewards"])
        report = super().update()
        self.on_dataset = False
        if len(self.rollout.data["rewards"]) != size:
            self.executor.forget()  # graphs hold the tensors of the smaller ring
        if self.lr_scheduler_object is not None:
            self.lr_scheduler_object.step()
            self.learning_rate = float(self.lr)
        report[1]["teacher_act_prob"] = float(self.teacher_prob)
        self.teacher_prob.fill_(self.act_prob(self.current_learning_iteration + 1))
        return report

    def batch_output(self, batch: MiniBatch) -> PolicyOutput:
        """The policy's pass over a minibatch, some of whose trajectories begin with another memory."""
        if self.hidden_state_resample_prob > 0.0:
            batch.hidden = self.resampled(batch.hidden)
        return super().batch_output(batch)

    def resampled(self, hidden: Hidden) -> Hidden:
        """(M, S, L, H) states, a share of them replaced by U(-1, 1); the same trajectories in every memory."""
        if not hidden:
            return hidden
        stream, some = self.generators["resample"], next(iter(hidden.values()))
        chosen = torch.rand(len(some), 1, 1, 1, generator=stream, device=some.device) < self.hidden_state_resample_prob
        draws = {name: torch.rand(s.shape, generator=stream, device=s.device) * 2 - 1 for name, s in hidden.items()}
        return {name: torch.where(chosen, draws[name], state) for name, state in hidden.items()}

    def loss_terms(self, batch: MiniBatch, out: PolicyOutput) -> Terms:
        """PPO's terms where rewards count, and the distance to the teacher."""
        if self.using_ppo and not self.on_dataset:
            terms = super().loss_terms(self._without_teacher_steps(batch, out), out)
            if self.is_warming_up:
                return terms._replace(losses={"value_loss": terms.losses["value_loss"]})
        else:
            terms = Terms({}, {}, {"kl": torch.zeros_like(self.lr)})  # 0 leaves an adaptive learning rate alone
        if self.teacher is not None or self.on_dataset:
            self._add_distillation(terms, batch, out)
        elif not self.using_ppo:
            raise ValueError("there is nothing to learn from: no teacher, no dataset, and using_ppo is off")
        return terms

    def _without_teacher_steps(self, batch: MiniBatch, out: PolicyOutput) -> MiniBatch:
        """The batch with ratio 1 and advantage 0 where the teacher acted."""
        if self.exclude_teacher_steps_from_surrogate and self.teacher is not None:
            taught = batch.teacher_acted  # pyright: ignore[reportAttributeAccessIssue]
            now = self.policy.distribution.log_prob(out.params, batch.actions).detach().unsqueeze(-1)
            batch.old_actions_log_prob = torch.where(taught, now, batch.old_actions_log_prob)
            if (
                self.normalize_advantage_per_mini_batch
            ):  # so that their mean is 0, and PPO's own scaling keeps the zeros
                own = ~taught.squeeze(-1) if batch.valid is None else ~taught.squeeze(-1) & batch.valid
                batch.advantages = normalize_advantages(batch.advantages.squeeze(-1), own).unsqueeze(-1)
            batch.advantages = batch.advantages.masked_fill(taught, 0.0)
        return batch

    def _add_distillation(self, terms: Terms, batch: MiniBatch, out: PolicyOutput) -> None:
        labels, distribution = batch.action_labels, self.policy.distribution  # pyright: ignore[reportAttributeAccessIssue]
        if self.distill_target == "max_log_prob":
            distance = -distribution.log_prob(out.params, labels)
        else:
            mean = distribution.mode(out.params)
            distance = DISTANCES[self.distill_target](mean, labels)
            if self.distill_target in TANH_TARGETS:
                stats = tanh_stats(mean.detach(), labels)
                terms.stats.update({name: batch.mean(value) for name, value in stats.items()})
        terms.losses["distillation_loss"] = batch.mean(distance)
        latent_distance = DISTANCES[self.distill_latent_target]
        for student, teacher in (self.distill_latent_obs_component_mapping or {}).items():
            assert self.teacher is not None
            policy, guide = self.policy, self.teacher.policies[0]
            with torch.no_grad():
                wanted = guide.get_encoder_latent(guide.obs_normalizer.normalize(batch.critic_obs), teacher)  # pyright: ignore[reportCallIssue]
            latent = policy.get_encoder_latent(policy.obs_normalizer.normalize(batch.obs), student)  # pyright: ignore[reportCallIssue]
            terms.losses[f"distill_latent_{student}"] = batch.mean(latent_distance(latent, wanted))

    # ------------------------------------------------------------------ saving
    def checkpoint_parts(self) -> dict[str, Any]:
        """PPO's parts and the scheduler; the teacher stays where it is."""
        parts = super().checkpoint_parts()
        return (
            parts if self.lr_scheduler_object is None else parts | {"lr_scheduler_state_dict": self.lr_scheduler_object}
        )

    def resume_state(self) -> dict[str, Any]:
        """What PPO needs, the teacher's memories, and who acts where."""
        own = {"use_teacher_act_mask": self.use_teacher_act_mask.clone(), "teacher_prob": self.teacher_prob.clone()}
        return super().resume_state() | own | {"teacher": [] if self.teacher is None else self.teacher.state()}

    def load_resume_state(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `resume_state` was taken."""
        super().load_resume_state(state)
        self.teacher_prob.copy_(state["teacher_prob"])
        self.use_teacher_act_mask.copy_(state["use_teacher_act_mask"])
        if self.teacher is not None:
            self.teacher.load_state(state["teacher"])
