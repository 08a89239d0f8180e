"""Encoders of named observation components, a stage before actor and critic."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from canter.modules.actor_critic import ActorCritic
from canter.modules.actor_critic_recurrent import ActorCriticRecurrent
from canter.modules.amp_discriminator import AmpActorCritic, AmpActorCriticRecurrent
from canter.modules.conv2d import Conv2dHeadModel, HistoryEncoder, channels_first, image_shape
from canter.modules.mlp import MlpModel
from canter.modules.normalizer import normalized
from canter.modules.policy import Context
from canter.modules.utils import orthogonal_init
from canter.utils.obs_layout import ObsLayout

Shape = tuple[int, ...]
OUTPUT_SIZE, HIDDEN_SIZES = 32, (128, 64)
CONV_DEFAULTS: dict[str, Any] = {"channels": (32, 64), "kernel_sizes": (3, 3), "strides": (2, 2)}


def mlp_encoder(shape: Shape, output_size: int, hidden_sizes: Sequence[int] = HIDDEN_SIZES, **kwargs: Any) -> nn.Module:
    """An MLP of a component's values, with a nonlinearity at the end."""
    return MlpModel(math.prod(shape), [*hidden_sizes, output_size], **kwargs)


def conv_encoder(
    shape: Shape, output_size: int, hidden_sizes: Sequence[int] = HIDDEN_SIZES, **kwargs: Any
) -> nn.Module:
    """Convolutions over an image, an MLP, and a nonlinearity at the end."""
    if len(shape) not in (3, 4):
        raise ValueError(f"Conv2dHeadModel encodes images (C, H, W); this component has the shape {shape}")
    return Conv2dHeadModel(
        image_shape(shape) or shape, hidden_sizes=[*hidden_sizes, output_size], **{**CONV_DEFAULTS, **kwargs}
    )


ENCODERS: dict[str, Callable[..., nn.Module]] = {
    "MlpModel": mlp_encoder,
    "Conv2dHeadModel": conv_encoder,
    "HistoryEncoder": HistoryEncoder,
}


def register_encoder(name: str, build: Callable[..., nn.Module]) -> None:
    """Register an encoder by name: `build(shape, output_size, **kwargs)` returns a module (..., *shape) -> (..., E)."""
    ENCODERS[name] = build


def embed(obs: Tensor, layout: ObsLayout, encoders: Mapping[str, nn.Module]) -> Tensor:
    """The observation (..., D) with each named component replaced, in its place, by its encoder's output."""
    parts = layout.split(obs)
    for name, encoder in encoders.items():
        part, shape = parts[name], layout.shapes[name]
        part = part if isinstance(encoder, MlpModel) else part.unflatten(-1, shape)
        is_image = isinstance(encoder, Conv2dHeadModel)
        parts[name] = encoder(channels_first(part, shape) if is_image and encoder.image_shape != shape else part)
    return torch.cat(list(parts.values()), dim=-1) if len(parts) > 1 else next(iter(parts.values()))


def aligned(values: Any, names: Sequence[str], setting: str) -> dict[str, Any]:
    """The value of each component from a setting that is given once for all, or one by one."""
    if isinstance(values, str | Mapping) or values is None:
        return dict.fromkeys(names, values)
    if len(values) != len(names):
        raise ValueError(f"{setting} has {len(values)} entries for {len(names)} components; give one for all, or each")
    return dict(zip(names, values, strict=True))


class SegmentEncoders(nn.ModuleList):
    """One encoder per named component."""

    def __init__(
        self, layout: ObsLayout, names: Sequence[str], class_names: Any, kwargs: Any, output_size: int
    ) -> None:
        super().__init__()
        self.names = tuple(names)
        classes, options = aligned(class_names, names, "encoder_class_name"), aligned(kwargs, names, "encoder_kwargs")
        for name in names:
            kind = classes[name]
            if kind not in ENCODERS:
                known = ", ".join(ENCODERS)
                raise NotImplementedError(f"no encoder {kind!r}; there are {known}. register_encoder adds others")
            try:
                self.append(ENCODERS[kind](layout.shapes[name], output_size=output_size, **(options[name] or {})))
            except (TypeError, ValueError) as error:
                raise type(error)(f"the encoder of {name!r}: {error}") from error


class EncoderActorCriticMixin(ActorCritic):
    """Replaces components of the observations by features for the next stages.

    Args:
        encoder_component_names: Components to encode.
        encoder_class_name: MlpModel, Conv2dHeadModel or HistoryEncoder; one for all components, or one for each.
        encoder_kwargs: Settings of the encoders, one dict for all or one for each.
        encoder_output_size: Features per component; 32 if None.
        critic_encoder_component_names: None does not encode the critic's observation, "shared" encodes the same
            components with the actor's encoders, a list gives the critic encoders of its own.
        critic_encoder_class_name: The actor's if None.
        critic_encoder_kwargs: The actor's if None.
    """

    def __init__(
        self,
        *args: Any,
        encoder_component_names: Sequence[str] = (),
        encoder_class_name: str | Sequence[str] = "MlpModel",
        encoder_kwargs: Any = None,
        encoder_output_size: int | None = None,
        critic_encoder_component_names: str | Sequence[str] | None = None,
        critic_encoder_class_name: str | Sequence[str] | None = None,
        critic_encoder_kwargs: Any = None,
        **kwargs: Any,
    ) -> None:
        names = self.encoder_component_names = names_of(encoder_component_names)
        self.shares_encoders = critic_encoder_component_names == "shared"
        critic_names = names_of(names if self.shares_encoders else critic_encoder_component_names or ())
        self.critic_encoder_component_names = critic_names
        size = self.encoder_output_size = OUTPUT_SIZE if encoder_output_size is None else encoder_output_size
        super().__init__(*args, **kwargs)
        self.encoders = SegmentEncoders(self.encoder_layout, names, encoder_class_name, encoder_kwargs, size)
        if critic_names and not self.shares_encoders:
            settings = [(critic_encoder_class_name, encoder_class_name), (critic_encoder_kwargs, encoder_kwargs)]
            given = [self._for_critic(actors) if own is None else own for own, actors in settings]
            self.critic_encoders = SegmentEncoders(self.critic_encoder_layout, critic_names, *given, output_size=size)
        if kwargs.get("orthogonal_init"):
            for encoder in (*self.encoders, *getattr(self, "critic_encoders", ())):
                orthogonal_init(encoder)

    def _for_critic(self, values: Any) -> Any:
        """The actor's setting for the critic's components: one for all, or that of the component of the same name."""
        if isinstance(values, str | Mapping) or values is None:
            return values
        by_name = dict(zip(self.encoder_component_names, values, strict=True))
        for name in (name for name in self.critic_encoder_component_names if name not in by_name):
            settings = "critic_encoder_class_name and critic_encoder_kwargs"
            raise ValueError(f"the actor does not encode {name!r}: give {settings}")
        return [by_name[name] for name in self.critic_encoder_component_names]

    def feature_widths(self, num_actor_obs: int, num_critic_obs: int) -> tuple[int, int]:
        """Every encoded component gets the width of the encoders' output."""
        self.encoder_layout, self.critic_encoder_layout = self.feature_layout, self.critic_feature_layout
        names, critic_names = self.encoder_component_names, self.critic_encoder_component_names
        grows = resize_features(self, names, critic_names, self.encoder_output_size, self.shares_encoders)
        return super().feature_widths(num_actor_obs + grows[0], num_critic_obs + grows[1])

    def actor_features(self, obs: Tensor, ctx: Context) -> Tensor:
        """Encode the components for the next stages."""
        return super().actor_features(self.embed_encoders_latent(obs), ctx)

    def critic_features(self, obs: Tensor, ctx: Context) -> Tensor:
        """The same for the critic, if it has encoders."""
        return super().critic_features(self.embed_encoders_latent(obs, critic=True), ctx)

    def embed_encoders_latent(self, observations: Tensor, critic: bool = False) -> Tensor:
        """Observations (..., D), normalised, with every encoded component replaced by its features."""
        layout = self.critic_encoder_layout if critic else self.encoder_layout
        encoders = self._encoders(critic)
        return embed(observations, layout, encoders) if encoders else observations

    @property
    def encoder_obs_slices(self) -> list[tuple[slice, Shape]]:
        """Columns and shape of every encoded component, in the order of `encoder_component_names`."""
        layout = self.encoder_layout
        return [(layout.slice(name), layout.shapes[name]) for name in self.encoder_component_names]

    def get_encoder_latent(self, observations: Any, obs_component: str, critic: bool = False) -> Tensor:
        """(..., encoder_output_size) features of one component of raw observations."""
        encoders, layout, normalizer = self._encoders(critic), self.obs_layout, self.obs_normalizer
        if critic:
            layout, normalizer = self.critic_obs_layout, self.critic_obs_normalizer
        if obs_component not in encoders or obs_component not in layout:
            raise ValueError(f"no encoder of {obs_component!r}; there are encoders of {list(encoders)}")
        part = layout.take(layout.flat(normalized(observations, normalizer)), [obs_component])
        return embed(part, layout.part([obs_component]), {obs_component: encoders[obs_component]})

    def _encoders(self, critic: bool) -> dict[str, nn.Module]:
        encoders = getattr(self, "critic_encoders", ()) if critic and not self.shares_encoders else self.encoders
        return dict(zip(self.critic_encoder_component_names if critic else self.encoders.names, encoders, strict=True))


def names_of(names: str | Sequence[str]) -> tuple[str, ...]:
    """Component names as a tuple, from one name or several different ones."""
    names = (names,) if isinstance(names, str) else tuple(names)
    if len(set(names)) < len(names):
        raise ValueError(f"a component can be named only once, got {list(names)}")
    return names


def resize_features(
    policy: ActorCritic, names: Sequence[str], critic_names: Sequence[str], size: int, is_shared: bool
) -> tuple[int, int]:
    """Give encoded components the width `size` in the policy's feature layouts; returns by how much both grow."""
    actor, critic = policy.feature_layout, policy.critic_feature_layout
    policy.feature_layout = actor.resized(dict.fromkeys(actor.ordered(names), (size,)))
    policy.critic_feature_layout = critic.resized(dict.fromkeys(critic.ordered(critic_names), (size,)))
    for name in critic_names if is_shared else ():
        if actor.shapes[name] != critic.shapes[name]:
            shapes = f"{actor.shapes[name]} in the actor's observation and {critic.shapes[name]} in the critic's"
            raise ValueError(f"the encoder of {name!r} cannot be shared: it is {shapes}")
    return policy.feature_layout.width - actor.width, policy.critic_feature_layout.width - critic.width


class EncoderActorCritic(EncoderActorCriticMixin, ActorCritic):
    """Encoders, then MLPs."""


class EncoderActorCriticRecurrent(EncoderActorCriticMixin, ActorCriticRecurrent):
    """Encoders, then memories, then MLPs."""


class EncoderAmpActorCritic(EncoderActorCriticMixin, AmpActorCritic):
    """Encoders, then MLPs, with a motion discriminator."""


class EncoderAmpActorCriticRecurrent(EncoderActorCriticMixin, AmpActorCriticRecurrent):
    """Encoders, then memories, then MLPs, with a motion discriminator."""
