"""A stage that predicts the privileged state, which only the critic observes, from the actor's observation."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from canter.modules.actor_critic import ActorCritic
from canter.modules.actor_critic_recurrent import ActorCriticRecurrent
from canter.modules.policy import Context
from canter.modules.state_estimator import Estimate, EstimatingActorCritic, EstimatorMixin
from canter.utils.utils import namedarraytuple

AdaptorActorHiddenState = namedarraytuple("AdaptorActorHiddenState", ["adaptor", "actor"])


class PrivilegeEstimatorMixin(EstimatingActorCritic):
    """Predicts privileged components; through a memory of its own if the policy is recurrent.

    Args:
        adaptor_obs_components: Input components; all but the targets if None.
        adaptor_target_components: Predicted components, by their names in the critic's observation (or the actor's).
        adaptor_kwargs: Settings of its MLP.
        privilege_replace_state_prob: Probability, at each collecting step, that the prediction replaces the component
            in the input of the next stages. Inference always replaces it if this is above 0.
        append_adapted_state: Append the prediction to the actor's observation, which lacks the component.
    """

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
        self.adaptor_stage = Estimate(
            "adaptor",
            "adapted_state",
            ("adaptor", "memory_p"),
            AdaptorActorHiddenState,
            adaptor_obs_components,
            adaptor_target_components,
            privilege_replace_state_prob,
            append_adapted_state,
        )
        super().__init__(*args, **kwargs)
        self.adaptor_stage.build(self, adaptor_kwargs)

    def feature_widths(self, num_actor_obs: int, num_critic_obs: int) -> tuple[int, int]:
        """The actor's observation grows by an appended prediction."""
        return super().feature_widths(num_actor_obs + self.adaptor_stage.join(self), num_critic_obs)

    def actor_features(self, obs: Tensor, ctx: Context) -> Tensor:
        """Predict, and pass the prediction to the next stages if it is appended or replaces."""
        return super().actor_features(self.adaptor_stage.embed(self, obs, ctx), ctx)

    def get_adapted_state(self, denormalize: bool = False) -> Tensor:
        """The prediction of the last act, with its gradient; in physical units if `denormalize`."""
        return self.get_estimated_state("adaptor", denormalize)


class PrivilegeStateAc(PrivilegeEstimatorMixin, EstimatorMixin, ActorCritic):
    """An adaptor, an estimator, then MLPs."""


class PrivilegeStateAcRecurrent(PrivilegeEstimatorMixin, EstimatorMixin, ActorCriticRecurrent):
    """An adaptor, an estimator, then memories, then MLPs."""
