"""PPO that also teaches its policy to estimate: one supervised loss per estimate the policy makes."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from canter.algorithms.ppo import PPO, PPOConfig, Terms
from canter.algorithms.tppo import TPPO, TPPOConfig
from canter.modules.policy import PolicyOutput
from canter.modules.state_estimator import Estimate, rescale
from canter.storage.fields import MiniBatch
from canter.utils.config import settings


@settings
class EstimatorSettings:
    """What learning to estimate can be told."""

    estimator_loss_func: str = "mse_loss"
    """Loss of an estimate, any of torch.nn.functional that has a `reduction`, summed over the components."""
    estimator_loss_kwargs: dict[str, Any] | None = None
    """Options of that function."""
    estimator_loss_coef: float = 1.0
    """Weight of the state estimator's loss."""
    adaptor_loss_coef: float = 1.0
    """Weight of the privileged adaptor's loss."""


@settings
class EstimatorAlgoMixin(EstimatorSettings):
    """Adds `<name>_loss` for every entry in the policy's `estimates` to an algorithm that it precedes."""

    policy: Any = dataclasses.field(init=False)
    loss_weights: dict[str, Any] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()  # pyright: ignore[reportAttributeAccessIssue]
        estimates = getattr(self.policy, "estimates", None)
        if not estimates:
            raise TypeError(
                f"{type(self).__name__} needs a policy that estimates, such as StateAc; "
                f"{type(self.policy).__name__} does not"
            )
        function = getattr(F, self.estimator_loss_func, None)
        if not callable(function) or "reduction" not in inspect.signature(function).parameters:
            raise ValueError(
                f"estimator_loss_func must name a loss of torch.nn.functional, such as mse_loss or huber_loss, "
                f"got {self.estimator_loss_func!r}"
            )
        self.loss_weights |= {f"{name}_loss": getattr(self, f"{name}_loss_coef", 1.0) for name in estimates}

    def clipped_apart(self) -> list[str]:
        """Estimators learn from their own losses alone, whose large gradients at first would hold up the policy's."""
        return [name for estimate in getattr(self.policy, "estimates", {}).values() for name in estimate.networks]

    def loss_terms(self, batch: MiniBatch, out: PolicyOutput) -> Terms:
        """The terms of the algorithm, and a loss and the explained variance of every estimate."""
        terms = super().loss_terms(batch, out)  # pyright: ignore[reportAttributeAccessIssue]
        for name, estimate in self.policy.estimates.items():
            guess, target = out.aux[estimate.aux].float(), self.estimator_target(batch, estimate)
            terms.losses[f"{name}_loss"] = batch.mean(self.estimator_loss(guess, target))
            terms.stats[f"{name}_error"] = batch.mean((guess.detach() - target).square().mean(-1))
        return terms

    def estimator_loss(self, guess: Tensor, target: Tensor) -> Tensor:
        """(...) loss of each step."""
        function = getattr(F, self.estimator_loss_func)
        return function(guess, target, reduction="none", **(self.estimator_loss_kwargs or {})).sum(-1)

    def estimator_target(self, batch: MiniBatch, estimate: Estimate) -> Tensor:
        """(..., size) what the estimate should be, in the scale that the actor sees; never a source of gradients."""
        names = list(estimate.target.shapes)
        layout, obs = self.policy.critic_obs_layout, batch.critic_obs
        if not all(name in layout for name in names):
            layout, obs = self.policy.obs_layout, batch.obs
        return rescale(self.policy, estimate.target, layout.take(layout.flat(obs), names)).detach()


@settings
class EstimatorPPO(EstimatorAlgoMixin, PPO):
    """PPO for policies with a state estimator or a privileged adaptor."""


@settings
class EstimatorTPPO(EstimatorAlgoMixin, TPPO):
    """TPPO for such policies: what to estimate comes from the simulator, what to do from the teacher."""


@settings
class EstimatorTPPOConfig(EstimatorSettings, TPPOConfig):
    """A whole run of EstimatorTPPO in one object."""


@settings
class EstimatorPPOConfig(EstimatorSettings, PPOConfig):
    """A whole run of EstimatorPPO in one object."""
