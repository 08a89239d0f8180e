"""Smooth policies: losses of how much the action changes between observations that are near each other.

With mu(s) the policy's action, V(c) its value, s' the observation after s in the same episode, and observations as the
networks get them, normalised:

    caps_temporal_loss   mean |mu(s) - mu(s')|                          CAPS (Mysore 2021, eq. 2)
    caps_spatial_loss    mean |mu(s) - mu(s + sigma e)|,  e ~ N(0, 1)   CAPS (eq. 3)
    l2c2_policy_loss     mean |mu(s) - mu(s + u (s' - s))|²,  u ~ U(0, 1)       L2C2 (Kobayashi 2022)
    l2c2_value_loss      mean (V(c) - V(c + u (c' - c)))²                       the same u
    action_rate_loss     mean |d - clip(d, -limit, limit)|²,  d = mu(s') - mu(s)

The last is a bound on the action rate: changes within the symmetric range cost nothing.
"""

from typing import Any

import torch
from torch import Tensor

from canter.algorithms.algorithm import Terms
from canter.algorithms.extension import Extension
from canter.modules.distributions import Categorical, MultiCategorical
from canter.modules.policy import Context, PolicyOutput
from canter.storage.rollout_storage import Field, MiniBatch
from canter.utils.config import setting, settings
from canter.utils.tree import tree_map


@settings
class SmoothnessSettings:
    """The setting that switches smoothness on."""

    smoothness_cfg: dict[str, Any] | None = setting(None, fixed=True)
    """Losses of jerky actions, the fields of `SmoothnessConfig`: CAPS, L2C2, bounded action rate; off if None."""


@settings
class SmoothnessConfig:
    """Weights of the losses of smoothness; one of weight 0 is not computed."""

    temporal_coef: float = setting(0.0, low=0.0)
    """Weight of CAPS' change of the action from one step to the next."""
    spatial_coef: float = setting(0.0, low=0.0)
    """Weight of CAPS' change of the action under noise on the observation."""
    spatial_std: float = setting(0.05, above=0.0)
    """Standard deviation of that noise, in units of the normalised observation."""
    policy_coef: float = setting(0.0, low=0.0)
    """Weight of L2C2's change of the action on the way to the next observation."""
    value_coef: float = setting(0.0, low=0.0)
    """Weight of L2C2's change of the value on that way."""
    rate_coef: float = setting(0.0, low=0.0)
    """Weight of what the change of the action from one step to the next exceeds `rate_limit` by."""
    rate_limit: float = setting(0.1, low=0.0)
    """Largest change of an action's component in one step that costs nothing."""


WEIGHTS = {
    "caps_temporal_loss": "temporal_coef",
    "caps_spatial_loss": "spatial_coef",
    "l2c2_policy_loss": "policy_coef",
    "l2c2_value_loss": "value_coef",
    "action_rate_loss": "rate_coef",
}


class Smoothness(Extension):
    """Compares the policy's action with those for the next, a noisy and an intermediate observation."""

    name = "smoothness"
    settings_class = SmoothnessSettings
    switch = "smoothness_cfg"

    def attach(self, alg: Any) -> None:
        """Take the weights of the losses that are on."""
        super().attach(alg)
        self.terms = SmoothnessConfig(**self.cfg.smoothness_cfg)
        weights = {loss: getattr(self.terms, name) for loss, name in WEIGHTS.items()}
        self.wanted = {loss for loss, weight in weights.items() if weight}
        if not self.wanted:
            raise ValueError(f"smoothness_cfg has no weight above 0; set one of {', '.join(WEIGHTS.values())}")
        if isinstance(alg.policy.distribution, Categorical | MultiCategorical):
            raise ValueError("smoothness_cfg compares continuous actions; this policy chooses one of several")
        alg.loss_weights |= {loss: weights[loss] for loss in self.wanted}
        self.generator = alg.new_generator("smoothness")

    def fields(self) -> dict[str, Field]:
        """The flat index of the next step of the same episode, or of the step itself where there is none."""
        return {"next_step": Field((1,), dtype=torch.long, default=0)}

    def begin_update(self, iteration: int) -> None:
        """Find the next step of every step."""
        rollout = self.alg.rollout
        rows, envs = rollout.filled, rollout.num_envs
        own = torch.arange(rows * envs, device=rollout.device).view(rows, envs, 1)
        ends = rollout.data["dones"][:rows].clone()
        ends[-1] = True
        rollout.data["next_step"][:rows].copy_(torch.where(ends, own, own + envs))

    def losses(self, terms: Terms, batch: MiniBatch, out: PolicyOutput) -> None:
        """Add the losses that are on."""
        rollout, policy, wanted = self.alg.rollout, self.alg.policy, self.wanted
        index: Tensor = batch.next_step.squeeze(-1)  # pyright: ignore[reportAttributeAccessIssue]
        action = policy.distribution.mode(out.params)
        seen = policy.obs_normalizer.normalize(batch.obs)
        later = policy.obs_normalizer.normalize(tree_map(lambda x: x.flatten(0, 1)[index], rollout.observations))
        if wanted & {"caps_temporal_loss", "action_rate_loss"}:
            change = self.change(batch, action, index, later)
            if "caps_temporal_loss" in wanted:
                terms.losses["caps_temporal_loss"] = batch.mean(torch.linalg.vector_norm(change, dim=-1))
            if "action_rate_loss" in wanted:
                limit = self.terms.rate_limit
                excess = change - change.clamp(-limit, limit)
                terms.losses["action_rate_loss"] = batch.mean(excess.square().sum(-1))
        if "caps_spatial_loss" in wanted:
            noisy = tree_map(lambda x: x + self.terms.spatial_std * self.draw(torch.randn, x.shape, x), seen)
            difference = action - self.action(batch, noisy)
            terms.losses["caps_spatial_loss"] = batch.mean(torch.linalg.vector_norm(difference, dim=-1))
        share = self.draw(torch.rand, (*index.shape, 1), out.value)

        def between(start: Any, end: Any) -> Any:
            return tree_map(
                lambda a, b: a + share.view(*index.shape, *[1] * (a.dim() - index.dim())) * (b - a), start, end
            )

        if "l2c2_policy_loss" in wanted:
            difference = action - self.action(batch, between(seen, later))
            terms.losses["l2c2_policy_loss"] = batch.mean(difference.square().sum(-1))
        if "l2c2_value_loss" in wanted:
            critic_obs = rollout.privileged_observations
            critic_obs = rollout.observations if critic_obs is None else critic_obs
            later = tree_map(lambda x: x.flatten(0, 1)[index], critic_obs)
            with self.alg.executor.autocast():
                value = policy.value(between(batch.critic_obs, later), batch.hidden, batch.trajectories)[0]
            terms.losses["l2c2_value_loss"] = batch.mean((out.value - value).square().squeeze(-1))

    def draw(self, kind: Any, shape: Any, like: Tensor) -> Tensor:
        """Random numbers on the device of `like`."""
        return kind(shape, generator=self.generator, device=like.device)

    def action(self, batch: MiniBatch, seen: Any) -> Tensor:
        """(..., A) actions for normalised observations in the place of the minibatch's."""
        policy = self.alg.policy
        ctx = Context(dict(batch.hidden), {}, batch.trajectories, batch.random_masks)
        with self.alg.executor.autocast():
            params = policy.actor_params(seen, ctx)
        return policy.distribution.mode({name: value.float() for name, value in params.items()})

    def change(self, batch: MiniBatch, action: Tensor, index: Tensor, later: Any) -> Tensor:
        """(..., A) the action at the next step minus that at this one; 0 at the end of an episode."""
        if batch.trajectories is None:
            return self.action(batch, later) - action
        # A memory has to see the steps in order: the next action is one row below, the row being t.
        envs = self.alg.rollout.num_envs
        own = torch.arange(len(index), device=index.device).unsqueeze(1) * envs + index % envs
        return torch.where((index != own).unsqueeze(-1), action.roll(-1, 0) - action, 0.0)
