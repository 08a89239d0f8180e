"""A convolutional encoder of one image component, a stage before actor and critic."""

from typing import Any

from torch import Tensor

from canter.modules.actor_critic import ActorCritic
from canter.modules.actor_critic_recurrent import ActorCriticRecurrent
from canter.modules.conv2d import Conv2dHeadModel, image_shape
from canter.modules.deterministic_policy import DeterministicPolicyMixin
from canter.modules.encoder_actor_critic import embed, resize_features
from canter.modules.normalizer import normalized
from canter.modules.policy import Context
from canter.modules.utils import orthogonal_init

FORWARD_DEPTH = "forward_depth"
VISUAL_DEFAULTS: dict[str, Any] = {
    "channels": (64, 64),
    "kernel_sizes": (3, 3),
    "strides": (1, 1),
    "hidden_sizes": (256,),
}


class VisualActorCriticMixin(ActorCritic):
    """Replaces the image in the actor's observation by its features.

    Args:
        visual_component_name: The image component, (C, H, W) or (H, W, C); without one of this name the only image.
        visual_kwargs: Settings of the `Conv2dHeadModel`, over channels [64, 64], kernel_sizes [3, 3], strides [1, 1],
            hidden_sizes [256].
        visual_latent_size: Number of features.
        visual_critic: Encode the image in the critic's observation too, with the same encoder.
    """

    def __init__(
        self,
        *args: Any,
        visual_component_name: str = FORWARD_DEPTH,
        visual_kwargs: Any = None,
        visual_latent_size: int = 256,
        visual_critic: bool = False,
        **kwargs: Any,
    ) -> None:
        self.visual_component_name, self.visual_latent_size = visual_component_name, visual_latent_size
        self.visual_critic = visual_critic
        super().__init__(*args, **kwargs)
        options = {**VISUAL_DEFAULTS, **(visual_kwargs or {})}
        shape = self.visual_layout.shapes[self.visual_component_name]
        self.visual_encoder = Conv2dHeadModel(image_shape(shape) or shape, output_size=visual_latent_size, **options)
        if kwargs.get("orthogonal_init"):
            orthogonal_init(self.visual_encoder)

    def feature_widths(self, num_actor_obs: int, num_critic_obs: int) -> tuple[int, int]:
        """The image gets the width of its features, for the critic too if it is encoded there."""
        self.visual_layout, self.critic_visual_layout = self.feature_layout, self.critic_feature_layout
        images = [name for name, shape in self.visual_layout.shapes.items() if image_shape(shape) is not None]
        is_named = self.visual_component_name != FORWARD_DEPTH or FORWARD_DEPTH in self.visual_layout
        if not is_named and len(images) == 1:
            self.visual_component_name = images[0]
        names = self.visual_layout.ordered([self.visual_component_name])
        shape = self.visual_layout.shapes[names[0]]
        if len(shape) not in (3, 4):
            raise ValueError(f"the image {names[0]!r} must have a shape (C, H, W), got {shape}")
        grows = resize_features(self, names, names if self.visual_critic else (), self.visual_latent_size, True)
        return super().feature_widths(num_actor_obs + grows[0], num_critic_obs + grows[1])

    def actor_features(self, obs: Tensor, ctx: Context) -> Tensor:
        """Encode the image for the next stages."""
        return super().actor_features(self._embed(obs, critic=False), ctx)

    def critic_features(self, obs: Tensor, ctx: Context) -> Tensor:
        """The same for the critic with `visual_critic`."""
        return super().critic_features(self._embed(obs, critic=True) if self.visual_critic else obs, ctx)

    def embed_visual_latent(self, observations: Any) -> Tensor:
        """Raw observations (..., D), a dict of them or an image, normalised and with features instead of the image."""
        return self._embed(self.obs_layout.flat(normalized(observations, self.obs_normalizer)), critic=False)

    def act_with_embedded_latent(
        self, observations: Tensor, masks: Tensor | None = None, hidden_states: Any = None
    ) -> Tensor:
        """`act` on the result of `embed_visual_latent`, which is neither normalised nor encoded again."""
        features = super().actor_features
        self._params = self._run_branch(
            "actor", observations, masks, hidden_states, core=lambda x, ctx: self.head_params(features(x, ctx), x, ctx)
        )
        return self.sample_action(self._last(), self.generator)

    def _embed(self, obs: Tensor, critic: bool) -> Tensor:
        layout = self.critic_visual_layout if critic else self.visual_layout
        return embed(obs, layout, {self.visual_component_name: self.visual_encoder})


class VisualActorCritic(VisualActorCriticMixin, ActorCritic):
    """An image encoder, then MLPs."""


class VisualActorCriticRecurrent(VisualActorCriticMixin, ActorCriticRecurrent):
    """An image encoder, then memories, then MLPs."""


class VisualDeterministicAC(DeterministicPolicyMixin, VisualActorCriticMixin, ActorCritic):
    """An image encoder, then MLPs; acts without noise, as students of a teacher do."""


class VisualDeterministicRecurrent(DeterministicPolicyMixin, VisualActorCriticMixin, ActorCriticRecurrent):
    """An image encoder, then memories, then MLPs; acts without noise, as students of a teacher do."""
