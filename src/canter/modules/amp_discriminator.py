"""Adversarial motion priors (Peng 2021): a discriminator of expert and policy motion, and its style reward."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from canter.modules.actor_critic import ActorCritic
from canter.modules.actor_critic_recurrent import ActorCriticRecurrent
from canter.modules.mlp import mlp
from canter.storage.rollout_storage import masked_mean
from canter.utils.config import check_settings, setting_names

WGAN_SLOPE = 0.3


class AdversarialLoss(NamedTuple):
    """Losses of the discriminator's output d on expert and on policy motion, and the style reward of d."""

    expert: Callable[[Tensor], Tensor]
    policy: Callable[[Tensor], Tensor]
    reward: Callable[[Tensor], Tensor]
    """Bounded, so that a saturated discriminator cannot outweigh the task reward."""
    floor: float
    """Below this d the reward is almost flat."""


# lsgan: least squares towards 1 and -1 (Mao 2017), reward in [0, 1].
# bce: logits, reward -log(1 - sigmoid(d)) cut off at 9.2 (Ho 2016).
# wgan: difference of means of tanh(0.3 d), reward in [1/e, e].
LOSSES: dict[str, AdversarialLoss] = {
    "lsgan": AdversarialLoss(
        expert=lambda d: 0.5 * (d - 1.0).square(),
        policy=lambda d: 0.5 * (d + 1.0).square(),
        reward=lambda d: (1.0 - 0.25 * (d - 1.0).square()).clamp(min=0.0),
        floor=-1.0,
    ),
    "bce": AdversarialLoss(
        expert=lambda d: 0.5 * F.softplus(-d),
        policy=lambda d: 0.5 * F.softplus(d),
        reward=lambda d: -torch.sigmoid(-d).clamp(min=1e-4).log(),
        floor=-4.0,
    ),
    "wgan": AdversarialLoss(
        expert=lambda d: -torch.tanh(WGAN_SLOPE * d),
        policy=lambda d: torch.tanh(WGAN_SLOPE * d),
        reward=lambda d: torch.tanh(WGAN_SLOPE * d).exp(),
        floor=-8.0,
    ),
}


class AMPDiscriminator(nn.Module):
    """An MLP whose output is high on expert motion and low on policy motion.

    Args:
        input_dim: Width D of a feature window, all its frames side by side.
        style_reward_coef: Weight of the style reward.
        hidden_dims: Widths of the hidden layers, each followed by a ReLU.
        task_reward_lerp: Share of the task reward in the total; the rest is style.
        discriminator_grad_pen: Weight of the gradient penalty on expert windows.
        loss_type: "lsgan", "bce" or "wgan"; each has its own reward.
        style_dt: Seconds of a control step, for environments that multiply their rewards by it; else 1.
        amp_obs_dim: The documented second name of `input_dim`; must agree with it.
    """

    def __init__(
        self,
        input_dim: int,
        style_reward_coef: float,
        hidden_dims: Sequence[int],
        task_reward_lerp: float = 0.0,
        discriminator_grad_pen: float = 5.0,
        *,
        loss_type: str = "lsgan",
        style_dt: float = 1.0,
        amp_obs_dim: int | None = None,
    ) -> None:
        super().__init__()
        if not 0.0 <= task_reward_lerp <= 1.0:
            raise ValueError(f"task_reward_lerp must be from 0 (style alone) to 1, got {task_reward_lerp}")
        if loss_type not in LOSSES:
            raise ValueError(f"loss_type must be one of {', '.join(LOSSES)}, got {loss_type!r}")
        if amp_obs_dim is not None and amp_obs_dim != input_dim:
            raise ValueError(f"amp_obs_dim is {amp_obs_dim}, but the discriminator's input_dim is {input_dim}")
        self.input_dim, self.style_reward_coef, self.task_reward_lerp = input_dim, style_reward_coef, task_reward_lerp
        self.discriminator_grad_pen, self.style_dt, self.loss_type = discriminator_grad_pen, style_dt, loss_type
        self.trunk = mlp([input_dim, *hidden_dims], "relu", "relu") if hidden_dims else nn.Sequential()
        self.head = nn.Linear(hidden_dims[-1] if hidden_dims else input_dim, 1)
        self.has_warned = False

    @property
    def loss(self) -> AdversarialLoss:
        """The functions of `loss_type`, which cannot be pickled with the discriminator."""
        return LOSSES[self.loss_type]

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., 1)."""
        return self.head(self.trunk(x))

    def compute_grad_pen(self, amp_obs: Tensor, valid: Tensor | None = None) -> Tensor:
        """Its weight times the mean squared gradient norm at features (..., D), those where `valid` (...)."""
        x = amp_obs.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return self.discriminator_grad_pen * masked_mean(gradient.square().sum(-1), valid)

    def adversarial_losses(
        self,
        expert: Tensor,
        policy: Tensor,
        valid: Tensor | None = None,
        expert_valid: Tensor | None = None,
        penalizes_policy: bool = False,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Losses on expert and policy features (..., D) and statistics of the classification.

        `valid` (...) masks the policy's features, `expert_valid` (...) the expert's; None uses all. The gradient
        penalty is on the expert's features, or on the policy's where the expert's are one point.
        """
        penalized = (policy, valid) if penalizes_policy else (expert, expert_valid)
        expert_d, policy_d = self(expert).squeeze(-1), self(policy).squeeze(-1)
        losses = {
            "discriminator_expert_loss": masked_mean(self.loss.expert(expert_d), expert_valid),
            "discriminator_policy_loss": masked_mean(self.loss.policy(policy_d), valid),
            "discriminator_grad_pen_loss": self.compute_grad_pen(*penalized),
        }
        with torch.no_grad():
            hits = masked_mean((expert_d > 0.0).float(), expert_valid)
            rejections = masked_mean((policy_d < 0.0).float(), valid)
            stats = {
                "amp/expert_d": masked_mean(expert_d, expert_valid),
                "amp/policy_d": masked_mean(policy_d, valid),
                "amp/expert_accuracy": hits,
                "amp/policy_accuracy": rejections,
                "amp/accuracy": 0.5 * (hits + rejections),
                "amp/saturation": masked_mean((policy_d <= self.loss.floor).float(), valid),
            }
        return losses, stats

    @torch.no_grad()
    def predict_style_reward(self, state: Tensor, task_reward: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Style reward of features (N, D), the task reward (N,) or (N, 1), and the two blended, in its shape."""
        if self.task_reward_lerp == 0.0 and not self.has_warned:
            self.has_warned = True
            warnings.warn("task_reward_lerp is 0: the policy learns from the style alone", stacklevel=2)
        style = self.style_reward_coef * self.style_dt * self.loss.reward(self(state).squeeze(-1))
        if task_reward.shape == (*style.shape, 1):
            style = style.unsqueeze(-1)
        if task_reward.shape != style.shape:  # they would be broadcast to a matrix
            want = f"must have the shape {tuple(style.shape)} of the style reward"
            raise ValueError(f"the task reward {want}, got {tuple(task_reward.shape)}")
        return style, task_reward, (1.0 - self.task_reward_lerp) * style + self.task_reward_lerp * task_reward


class AmpMixin(ActorCritic):
    """A policy with a discriminator of motion.

    Args:
        amp_discriminator: Settings of `AMPDiscriminator`, as a dict or a config object.
    """

    def __init__(self, *args: Any, amp_discriminator: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        cfg = {} if amp_discriminator is None else amp_discriminator
        given = dict(cfg if isinstance(cfg, Mapping) else vars(cfg))
        missing = [name for name in ("input_dim", "style_reward_coef", "hidden_dims") if given.get(name) is None]
        if missing:
            raise ValueError(f"amp_discriminator needs {', '.join(missing)}; it has {', '.join(given) or 'nothing'}")
        known = check_settings("AMPDiscriminator", given, setting_names(AMPDiscriminator))
        self.discriminator = AMPDiscriminator(**known)


class AmpActorCritic(AmpMixin, ActorCritic):
    """An actor-critic with a motion discriminator."""


class AmpActorCriticRecurrent(AmpMixin, ActorCriticRecurrent):
    """A recurrent actor-critic with a motion discriminator."""
