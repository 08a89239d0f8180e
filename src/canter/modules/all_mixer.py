"""Policies composed of mixins: the class statement is the pipeline, read from left to right."""

from __future__ import annotations

from canter.modules.actor_critic import ActorCritic
from canter.modules.actor_critic_recurrent import ActorCriticRecurrent
from canter.modules.amp_discriminator import AmpMixin


class AmpActorCritic(AmpMixin, ActorCritic):
    """An actor-critic with a discriminator of motion."""


class AmpActorCriticRecurrent(AmpMixin, ActorCriticRecurrent):
    """A recurrent actor-critic with a discriminator of motion."""
