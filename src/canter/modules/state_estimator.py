"""A stage that estimates components of the state, for a loss and for the stages that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from canter.modules.actor_critic import ActorCritic
from canter.modules.actor_critic_recurrent import ActorCriticRecurrent
from canter.modules.mlp import MlpModel
from canter.modules.policy import Context, Hidden
from canter.modules.prediction import Estimate, Prediction, last_estimate
from canter.utils.utils import namedarraytuple

EstimatorActorHiddenState = namedarraytuple("EstimatorActorHiddenState", ["estimator", "actor"])


class IncompatibleSettingsError(ValueError, AssertionError):
    """Two settings that cannot be true together."""


class EstimatorMixin(ActorCritic):
    """Estimates components of the state: from the observation, from a memory of it, or from the actor's memory.

    Args:
        estimator_obs_components: What it estimates from; everything but the targets if None.
        estimator_target_components: What it estimates, by the names in the critic's observation (or the actor's).
        estimator_kwargs: Settings of its MLP.
        use_actor_rnn: Estimate from the output of the actor's memory instead of a memory of its own.
        replace_state_prob: Probability, at each step of collecting, that what follows sees the estimate in place of the
            component. Inference replaces it always if this is above 0.
        append_estimate: Give the actor the estimate beside its observation, which lacks the component.
    """

    estimates: dict[str, Estimate]
    state_estimator: MlpModel

    def __init__(
        self,
        num_actor_obs: int,
        num_critic_obs: int,
        num_actions: int | None = None,
        *,
        estimator_obs_components: Sequence[str] | None = None,
        estimator_target_components: Sequence[str] | None = None,
        estimator_kwargs: Any = None,
        use_actor_rnn: bool = False,
        replace_state_prob: float = 0.0,
        append_estimate: bool = False,
        **kwargs: Any,
    ) -> None:
        name = "append_estimate" if append_estimate else "replace_state_prob"
        if use_actor_rnn and (replace_state_prob > 0 or append_estimate):
            raise IncompatibleSettingsError(f"{name} needs the estimate before the actor's memory: use_actor_rnn=False")
        if replace_state_prob > 0 and append_estimate:
            raise IncompatibleSettingsError("an estimate is either appended or replaces: replace_state_prob=0")
        if use_actor_rnn and not self.is_recurrent:
            raise IncompatibleSettingsError(f"use_actor_rnn: {type(self).__name__} has no memory; take a recurrent one")
        self.use_actor_rnn = use_actor_rnn
        self.estimator_stage = Prediction(
            "estimated_state", "state_estimator", "memory_s", "estimator",
            estimator_obs_components, estimator_target_components, replace_state_prob, append_estimate,
            EstimatorActorHiddenState,
        )  # fmt: skip
        super().__init__(num_actor_obs, num_critic_obs, num_actions, **kwargs)
        self.build_estimator(estimator_kwargs)
        stage = self.estimator_stage
        self.estimates = {**getattr(self, "estimates", {}), "estimator": stage.estimate()}

    def build_estimator(self, estimator_kwargs: Mapping[str, Any] | None) -> None:
        """The estimator's MLP, and a memory of its own before it where the policy has memories."""
        stage = self.estimator_stage
        width = self.rnn_hidden_size if self.use_actor_rnn else stage.layout.size(stage.inputs or ())  # pyright: ignore[reportAttributeAccessIssue]
        has_memory = self.is_recurrent and not self.use_actor_rnn
        stage.build(self, width, has_memory, estimator_kwargs)  # pyright: ignore[reportArgumentType]

    def feature_widths(self, num_actor_obs: int, num_critic_obs: int) -> tuple[int, int]:
        """The actor's observation grows by an appended estimate."""
        return super().feature_widths(num_actor_obs + self.estimator_stage.join(self), num_critic_obs)

    def actor_features(self, obs: Tensor, ctx: Context) -> Tensor:
        """Estimate, and let what follows see it where that was asked for."""
        stage = self.estimator_stage
        if self.use_actor_rnn:
            features = super().actor_features(obs, ctx)
            ctx.aux[stage.aux] = self.state_estimator(features)
            return features
        estimate = self.state_estimator(stage.features(self, obs, ctx))
        ctx.aux[stage.aux] = estimate
        return super().actor_features(stage.place(obs, estimate, ctx), ctx)

    def get_estimated_state(self, name: str | None = None, denormalize: bool = False) -> Tensor:
        """The estimate of the last act, with its gradient; in physical units if `denormalize`."""
        return last_estimate(self, name or "estimator", denormalize)

    @property
    def estimator_obs_components(self) -> list[str]:
        """What the estimator sees."""
        return list(self.estimator_stage.inputs or ())

    @property
    def estimator_target_components(self) -> list[str]:
        """What it estimates."""
        return list(self.estimator_stage.target.shapes)

    def get_hidden_states(self) -> Any:
        """ActorCriticHiddenState whose actor is EstimatorActorHiddenState, if the estimator has a memory."""
        return self.estimator_stage.nest_hidden(self, super().get_hidden_states())

    def unpack_hidden(self, hidden_states: Any, branch: str) -> Hidden:
        """The state of the branch's memories."""
        own, rest = self.estimator_stage.peel_hidden(self, hidden_states, branch)
        return own | super().unpack_hidden(rest, branch)


class StateAc(EstimatorMixin, ActorCritic):
    """An estimator, then MLPs."""


class StateAcRecurrent(EstimatorMixin, ActorCriticRecurrent):
    """An estimator, then memories, then MLPs."""
