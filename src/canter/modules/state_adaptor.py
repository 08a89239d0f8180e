"""A stage that predicts the privileged state, which only the critic observes, from the actor's observation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from canter.modules.actor_critic import ActorCritic
from canter.modules.actor_critic_recurrent import ActorCriticRecurrent
from canter.modules.mlp import MlpModel
from canter.modules.policy import Context, Hidden
from canter.modules.state_estimator import Estimate, EstimatorMixin, Prediction, last_estimate
from canter.utils.utils import namedarraytuple

AdaptorActorHiddenState = namedarraytuple("AdaptorActorHiddenState", ["adaptor", "actor"])


class PrivilegeEstimatorMixin(ActorCritic):
    """Predicts privileged components; through a memory of its own if the policy is recurrent.

    Args:
        adaptor_obs_components: Input components; all but the targets if None.
        adaptor_target_components: Predicted components, by their names in the critic's observation (or the actor's).
        adaptor_kwargs: Settings of its MLP.
        privilege_replace_state_prob: Probability, at each collecting step, that the prediction replaces the component
            in the input of the next stages. Inference always replaces it if this is above 0.
        append_adapted_state: Append the prediction to the actor's observation, which lacks the component.
    """

    estimates: dict[str, Estimate]
    adaptor: MlpModel

    def __init__(
        self,
        *args: Any,
        adaptor_obs_components: Sequence[str] | None = None,
        adaptor_target_components: Sequence[str] | None = None,
        adaptor_kwargs: Any = None,
        privilege_replace_state_prob: float = 0.0,
        append_adapted_state: bool = False,
        **kwargs: Any,
    ) -> None:
        self.adaptor_stage = Prediction(
            "adapted_state", "adaptor", "memory_p", "adaptor",
            adaptor_obs_components, adaptor_target_components, privilege_replace_state_prob, append_adapted_state,
            AdaptorActorHiddenState,
        )  # fmt: skip
        super().__init__(*args, **kwargs)
        self.estimates = {**getattr(self, "estimates", {}), "adaptor": self.build_adaptor(adaptor_kwargs)}

    def build_adaptor(self, adaptor_kwargs: Mapping[str, Any] | None) -> Estimate:
        """Build the adaptor's MLP, and a memory before it if the policy is recurrent."""
        stage = self.adaptor_stage
        return stage.build(self, stage.layout.size(stage.inputs or ()), self.is_recurrent, adaptor_kwargs)

    def feature_widths(self, num_actor_obs: int, num_critic_obs: int) -> tuple[int, int]:
        """The actor's observation grows by an appended prediction."""
        return super().feature_widths(num_actor_obs + self.adaptor_stage.join(self), num_critic_obs)

    def actor_features(self, obs: Tensor, ctx: Context) -> Tensor:
        """Predict, and pass the prediction to the next stages if it is appended or replaces."""
        stage = self.adaptor_stage
        prediction = self.adaptor(stage.features(self, obs, ctx))
        ctx.aux[stage.aux] = prediction
        return super().actor_features(stage.place(obs, prediction, ctx), ctx)

    def get_estimated_state(self, name: str | None = None, denormalize: bool = False) -> Tensor:
        """The estimator's estimate of the last act, or the adaptor's if there is no estimator or it is named."""
        return last_estimate(self, name or next(iter(self.estimates)), denormalize)

    def get_adapted_state(self, denormalize: bool = False) -> Tensor:
        """The prediction of the last act, with its gradient; in physical units if `denormalize`."""
        return last_estimate(self, "adaptor", denormalize)

    def get_hidden_states(self) -> Any:
        """ActorCriticHiddenState whose actor is AdaptorActorHiddenState, if the adaptor has a memory."""
        return self.adaptor_stage.nest_hidden(self, super().get_hidden_states())

    def unpack_hidden(self, hidden_states: Any, branch: str) -> Hidden:
        """The state of the branch's memories."""
        own, rest = self.adaptor_stage.peel_hidden(self, hidden_states, branch)
        return own | super().unpack_hidden(rest, branch)


class PrivilegeStateAc(PrivilegeEstimatorMixin, EstimatorMixin, ActorCritic):
    """An adaptor, an estimator, then MLPs."""


class PrivilegeStateAcRecurrent(PrivilegeEstimatorMixin, EstimatorMixin, ActorCriticRecurrent):
    """An adaptor, an estimator, then memories, then MLPs."""
