"""Policies composed of mixins: the class statement is the pipeline, read from left to right."""

from __future__ import annotations

from canter.modules.actor_critic import ActorCritic
from canter.modules.actor_critic_recurrent import ActorCriticRecurrent
from canter.modules.amp_discriminator import AmpMixin
from canter.modules.encoder_actor_critic import EncoderActorCriticMixin
from canter.modules.misaligned import MisalignedLoadMixin
from canter.modules.state_estimator import EstimatorMixin


class AmpActorCritic(AmpMixin, ActorCritic):
    """An actor-critic with a discriminator of motion."""


class AmpActorCriticRecurrent(AmpMixin, ActorCriticRecurrent):
    """A recurrent actor-critic with a discriminator of motion."""


class EncoderAmpActorCritic(EncoderActorCriticMixin, AmpMixin, ActorCritic):
    """Encoders, then MLPs, with a discriminator of motion."""


class EncoderAmpActorCriticRecurrent(EncoderActorCriticMixin, AmpMixin, ActorCriticRecurrent):
    """Encoders, then memories, then MLPs, with a discriminator of motion."""


class EncoderStateAc(MisalignedLoadMixin, EstimatorMixin, EncoderActorCriticMixin, ActorCritic):
    """An estimator that sees raw components, then encoders, then MLPs."""


class EncoderStateAcRecurrent(MisalignedLoadMixin, EstimatorMixin, EncoderActorCriticMixin, ActorCriticRecurrent):
    """An estimator that sees raw components, then encoders, then memories, then MLPs."""
