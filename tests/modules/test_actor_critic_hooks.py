"""Hooks of the actor-critic: conditioning in the head, written as a user writes it."""

import pytest
import torch
from policy_table import CRITIC_SEGMENTS, SEGMENTS, SMALL, KitEnv
from torch import nn

from canter.algorithms.ppo import PPO
from canter.modules import ActorCritic, ActorCriticRecurrent, EncoderActorCriticMixin


class FilmMixin(ActorCritic):
    """Scales and shifts the features of both networks by the velocity in the observation (FiLM, Perez et al. 2018)."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        widths = [self.actor[0].in_features, self.critic[0].in_features]
        self.film, self.critic_film = (nn.Linear(2, 2 * width) for width in widths)

    def head_params(self, features, obs, ctx):
        ctx.aux["scale"], shift = self.film(self.obs_layout.take(obs, ["vel"])).chunk(2, -1)
        return super().head_params((1 + ctx.aux["scale"]) * features + shift, obs, ctx)

    def head_value(self, features, obs, ctx):
        scale, shift = self.critic_film(self.critic_obs_layout.take(obs, ["vel"])).chunk(2, -1)
        return super().head_value((1 + scale) * features + shift, obs, ctx)


class Film(FilmMixin, ActorCritic):
    pass


class FilmRecurrent(FilmMixin, EncoderActorCriticMixin, ActorCriticRecurrent):
    pass


SETTINGS = {
    Film: {},
    FilmRecurrent: {"rnn_hidden_size": 6, "encoder_component_names": ["image"], "encoder_output_size": 4},
}


@pytest.mark.parametrize("cls", SETTINGS)
def test_a_film_policy_sees_the_same_in_collecting_and_learning_and_trains(cls, collect):
    torch.manual_seed(0)
    segments = {"obs_segments": SEGMENTS, "critic_obs_segments": CRITIC_SEGMENTS}
    policy = cls(49, 51, 2, **segments, **SMALL, **SETTINGS[cls])
    env = KitEnv()
    alg = PPO(policy, seed=3, num_mini_batches=2, learning_rate=1e-2, execution="eager", empirical_normalization=True)
    alg.prepare(env, 6)
    collect(alg, env)
    alg.update(0)  # the normalisers have statistics now
    collect(alg, env)
    for batch in alg.mini_batches():
        out = policy(batch.obs, batch.critic_obs, batch.hidden, batch.trajectories)
        assert out.aux["scale"].abs().max() > 0
        ratio = alg.compute_losses(batch).inter_vars["ratio"]
        torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(out.value, batch.values, rtol=1e-4, atol=1e-4)
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    alg.update(1)
    unchanged = [name for name, p in policy.named_parameters() if torch.equal(p, before[name])]
    assert unchanged == []


def test_the_head_gets_the_observation_before_the_stages():
    class Watching(EncoderActorCriticMixin, ActorCritic):
        def head_params(self, features, obs, ctx):
            ctx.aux["obs"], ctx.aux["features"] = obs, features
            return super().head_params(features, obs, ctx)

        def head_value(self, features, obs, ctx):
            ctx.aux["critic_obs"] = obs
            return super().head_value(features, obs, ctx)

    policy = Watching(5, 6, 2, obs_segments={"a": 3, "b": 2}, encoder_component_names=["a"], encoder_output_size=7)
    obs, critic_obs = torch.randn(4, 5), torch.randn(4, 6)
    aux = policy(obs, critic_obs).aux
    assert torch.equal(aux["obs"], obs)
    assert torch.equal(aux["critic_obs"], critic_obs)
    assert aux["features"].shape == (4, 9)
