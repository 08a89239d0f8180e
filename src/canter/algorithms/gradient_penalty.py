"""Lipschitz-constrained policies (Chen 2024): a penalty on the gradient of the log-probability by the observation.

    gradient_penalty = mean |d log pi(a | s) / d s|²      s normalised, a the action that was taken

It bounds how fast the policy changes with what it sees, at every observation and in every direction.
"""

from typing import Any

import torch

from canter.algorithms.algorithm import Terms
from canter.algorithms.extension import Extension
from canter.modules.policy import Context, PolicyOutput
from canter.storage.rollout_storage import MiniBatch
from canter.utils.config import setting, settings
from canter.utils.tree import tree_leaves, tree_map


@settings
class GradientPenaltySettings:
    """The setting that switches the gradient penalty on."""

    gradient_penalty_coef: float | None = setting(None, low=0.0, fixed=True)
    """Weight of the squared gradient of the log-probability by the observation, such as 0.002; off if None."""


class GradientPenalty(Extension):
    """Adds the squared gradient of the log-probability of the actions by the normalised observation."""

    name = "gradient_penalty"
    settings_class = GradientPenaltySettings
    switch = "gradient_penalty_coef"
    can_compile = False

    def attach(self, alg: Any) -> None:
        """Refuse a policy with a memory: its backward pass has no gradient."""
        super().attach(alg)
        if alg.policy.is_recurrent:
            raise ValueError("gradient_penalty_coef is for policies without a memory; use smoothness_cfg instead")

    def losses(self, terms: Terms, batch: MiniBatch, out: PolicyOutput) -> None:
        """Add the penalty, from a pass of the actor of its own."""
        policy = self.alg.policy
        seen = tree_map(lambda x: x.detach().requires_grad_(), policy.obs_normalizer.normalize(batch.obs))
        params = policy.actor_params(seen, Context(dict(batch.hidden), {}, None, batch.random_masks))
        log_prob = policy.distribution.log_prob(params, batch.actions)
        leaves = [leaf for _, leaf in tree_leaves(seen)]
        slopes = torch.autograd.grad(log_prob.sum(), leaves, create_graph=True)
        terms.losses["gradient_penalty"] = batch.mean(sum(slope.square().flatten(1).sum(1) for slope in slopes))  # pyright: ignore[reportArgumentType]
