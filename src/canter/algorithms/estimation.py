"""State estimation: one supervised loss for every estimate that the policy makes."""

import inspect
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from canter.algorithms.algorithm import Terms
from canter.algorithms.extension import Extension
from canter.modules.policy import PolicyOutput
from canter.modules.state_estimator import Estimate, rescale
from canter.storage.rollout_storage import MiniBatch
from canter.utils.config import setting, settings


@settings
class EstimatorSettings:
    """Hyperparameters of state estimation."""

    estimator_loss_func: str = setting("mse_loss", fixed=True)
    """Loss of an estimate, any of torch.nn.functional that has a `reduction`, summed over the components."""
    estimator_loss_kwargs: dict[str, Any] | None = setting(None, fixed=True)
    """Options of that function."""
    estimator_loss_coef: float = setting(1.0, low=0.0)
    """Weight of the state estimator's loss."""
    adaptor_loss_coef: float = setting(1.0, low=0.0)
    """Weight of the privileged adaptor's loss."""


class Estimation(Extension):
    """Adds `<name>_loss` for every entry of the policy's `estimates`."""

    name = "estimation"
    settings_class = EstimatorSettings
    offered = ("estimator_obs_components", "estimator_target_obs_components", "estimator_target", "estimator_loss")

    def own_parameters(self, policy: Any) -> dict[str, list[str]]:
        """The estimators: they learn from their own losses, whose large first gradients would slow the policy."""
        estimates = getattr(policy, "estimates", {}).values()
        return {"separate": [name for estimate in estimates for name in estimate.networks]}

    def attach(self, alg: Any) -> None:
        """Check that the policy estimates something, and that the loss exists."""
        super().attach(alg)
        self.policy = alg.policy
        if not getattr(self.policy, "estimates", None):
            raise TypeError(
                f"{type(alg).__name__} needs a policy that estimates, such as StateAc; "
                f"{type(self.policy).__name__} does not"
            )
        function: Any = getattr(F, self.cfg.estimator_loss_func, None)
        if not callable(function) or "reduction" not in inspect.signature(function).parameters:
            raise ValueError(
                f"estimator_loss_func must name a loss of torch.nn.functional, such as mse_loss or huber_loss, "
                f"got {self.cfg.estimator_loss_func!r}"
            )

    @property
    def estimator_obs_components(self) -> list[str]:
        """Input components of the policy's estimator."""
        return self.policy.estimator_obs_components

    @property
    def estimator_target_obs_components(self) -> list[str]:
        """Components that the policy's estimator predicts."""
        return self.policy.estimator_target_components

    def losses(self, terms: Terms, batch: MiniBatch, out: PolicyOutput) -> None:
        """Add the loss and the mean square error of every estimate."""
        for name, estimate in self.policy.estimates.items():
            guess, target = out.aux[estimate.aux].float(), self.estimator_target(batch, estimate)
            terms.losses[f"{name}_loss"] = batch.mean(self.estimator_loss(guess, target))
            terms.stats[f"{name}_error"] = batch.mean((guess.detach() - target).square().mean(-1))

    def estimator_loss(self, guess: Tensor, target: Tensor) -> Tensor:
        """(...) loss of each step."""
        function = getattr(F, self.cfg.estimator_loss_func)
        return function(guess, target, reduction="none", **(self.cfg.estimator_loss_kwargs or {})).sum(-1)

    def estimator_target(self, batch: MiniBatch, estimate: Estimate) -> Tensor:
        """(..., size) the true values, in the scale that the actor sees, without a gradient."""
        names = list(estimate.target.shapes)
        layout, obs = self.policy.critic_obs_layout, batch.critic_obs
        if not all(name in layout for name in names):
            layout, obs = self.policy.obs_layout, batch.obs
        return rescale(self.policy, estimate.target, layout.take(layout.flat(obs), names)).detach()
