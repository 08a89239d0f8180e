"""Every setting of learning from a teacher and from motion, declared once."""

from __future__ import annotations

from typing import Any

from canter.algorithms.settings import PPOConfig
from canter.utils.config import settings


@settings
class TPPOSettings:
    """What a teacher adds to PPO."""

    ppo: dict[str, Any] | None = None
    """Settings of PPO, as one dict; those given by themselves come first."""
    teacher_policy_class_name: str = "ActorCritic"
    """Class of the teacher, where neither `teacher_policy` nor its checkpoint says."""
    teacher_policy: dict[str, Any] | None = None
    """The teacher's settings; what they leave open comes from its checkpoint."""
    teacher_ac_path: str | None = None
    """The teacher's checkpoint, or its run directory."""
    teachers: tuple[dict[str, Any], ...] | None = None
    """Several teachers, each as `teacher_policy` with its `teacher_ac_path`; the observation says who is asked."""
    teacher_id_component: str | None = None
    """Segment of the teachers' observation with the number of the one asked, or one column for each."""
    label_action_with_critic_obs: bool = True
    """The teacher sees the critic's observation; the student's if not."""
    action_labels_from_sample: bool = False
    """Labels are drawn from the teacher's distribution; its mode if not."""
    teacher_act_prob: Any = "exp"
    """Probability that the teacher acts in an episode: a number, linear, exp or tanh decay, or a function."""
    update_times_scale: float = 100
    """Iterations over which schedules decay."""
    using_ppo: bool = True
    """Learn from rewards too; if not, this is DAgger, and an adaptive learning rate stays where it is."""
    exclude_teacher_steps_from_surrogate: bool = True
    """Steps in which the teacher acted do not count in the surrogate loss."""
    distillation_loss_coef: Any = 1.0
    """Weight of the distance to the teacher: a number, the name of a decay, or a function."""
    distill_target: str = "real"
    """The distance: real, mse_sum, l1, tanh, scaled_tanh or max_log_prob."""
    distill_latent_coef: float = 1.0
    """Weight of the distance between encoder outputs."""
    distill_latent_target: str = "real"
    """That distance: real, mse_sum, l1, tanh or scaled_tanh."""
    distill_latent_obs_component_mapping: dict[str, str] | None = None
    """Component of the student -> component of the teacher, whose encoders are to agree."""
    buffer_dilation_ratio: float = 1.0
    """Steps kept to learn from, as a multiple of a rollout."""
    lr_scheduler_class_name: str | None = None
    """A class of torch.optim.lr_scheduler, stepped once per update."""
    lr_scheduler: dict[str, Any] | None = None
    """Its settings."""
    hidden_state_resample_prob: float = 0.0
    """Share of trajectories that are learned from a random memory, so that students recover from any."""
    critic_warmup_iterations: int = 0
    """Iterations at the start in which only the critic learns, for a policy that can act already."""


@settings
class MotionPriorSettings:
    """How the discriminator of motion is trained."""

    discriminator_loss_coef: float = 1.0
    """Weight of the discriminator's three losses; 0 leaves it as it is."""
    discriminator_optimizer: str = "own"
    """"own": its own Adam, which the KL schedule does not touch; "shared": the policy's, as documented."""
    discriminator_learning_rate: float | None = None
    """Step size of its own optimizer; the policy's first one if None."""
    discriminator_max_grad_norm: float = 1.0
    """Its gradients are scaled down to this norm."""
    discriminator_weight_decay: float = 1e-4
    """Weight decay of its hidden layers."""
    discriminator_head_weight_decay: float = 1e-2
    """Weight decay of its last layer."""
    discriminator_accuracy_limit: float = 0.95
    """While it tells more than this share apart it is updated less often; 1 never slows it."""
    discriminator_slow_down: int = 4
    """One of so many minibatches updates it while it is that good."""
    separate_amp_normalizers: bool = False
    """A normaliser each for policy and expert, as documented; it hides the differences that are to be seen."""
    amp_obs_dim: int | None = None
    """Width D of a feature window; the discriminator's if None."""
    amp_replay_buffer_size: int = 0
    """Past windows of the policy to mix with fresh ones, half and half; 0 for none."""
    amp_motion_loader: Any = None
    """Expert data where the environment gives none: an `AMPLoader`, its settings, or windows (M, D)."""
    amp_num_frames: int = 2
    """Frames of a window drawn from a loader."""
    amp_preload: int = 100_000
    """Windows drawn from a loader, once."""


@settings
class APPOSettings(MotionPriorSettings):
    """What adversarial motion priors add to an algorithm."""

    mimic_loss_coef: float = 0.0
    """Weight of the documented mimic loss, which has no gradient: both its sides are data. Use mimic_reward_coef."""
    mimic_reward_coef: float = 0.0
    """Distance to the reference at the same step, times this, is taken off the reward."""
    dagger_loss_coef: float = 0.0
    """Weight of the distance to the teacher's action; needs a teacher, that is ATPPO."""


@settings
class TPPOConfig(TPPOSettings, PPOConfig):
    """A whole TPPO run in one object."""


@settings
class APPOConfig(APPOSettings, PPOConfig):
    """A whole APPO run in one object."""


@settings
class ATPPOConfig(APPOSettings, TPPOConfig):
    """A whole ATPPO run in one object."""
