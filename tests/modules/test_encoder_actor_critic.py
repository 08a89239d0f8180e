"""Encoders of components: the place of their features, sharing between actor and critic, errors."""

import pytest
import torch
from torch import nn

from canter.modules.encoder_actor_critic import (
    ENCODERS,
    EncoderActorCritic,
    EncoderActorCriticRecurrent,
    embed,
    register_encoder,
)
from canter.modules.mlp import MlpModel
from canter.modules.normalizer import EmpiricalNormalization
from canter.utils.obs_layout import ObsLayout, UnknownSegmentError

SEGMENTS = {"a": (2,), "image": (1, 5, 5), "b": (3,), "c": (4,)}
CRITIC_SEGMENTS = {"c": (4,), "secret": (2,), "image": (1, 5, 5), "b": (3,), "a": (2,)}
WIDTH, CRITIC_WIDTH = 34, 36
CONV = {"channels": [2], "kernel_sizes": [3], "strides": [1], "hidden_sizes": [6]}


def make(cls=EncoderActorCritic, **settings):
    torch.manual_seed(0)
    defaults = {"obs_segments": SEGMENTS, "critic_obs_segments": CRITIC_SEGMENTS, "encoder_output_size": 5}
    return cls(WIDTH, CRITIC_WIDTH, 2, **{"actor_hidden_dims": [8], "critic_hidden_dims": [8]} | defaults | settings)


def test_features_stand_where_the_components_stood_whatever_the_order_of_names():
    policy = make(encoder_component_names=["c", "a"])
    obs = torch.randn(3, WIDTH)
    encoder_c, encoder_a = policy.encoders
    by_hand = torch.cat([encoder_a(obs[:, :2]), obs[:, 2:30], encoder_c(obs[:, 30:])], 1)
    assert torch.equal(policy.embed_encoders_latent(obs), by_hand)
    assert torch.equal(policy.infer(obs)[0], policy.actor(by_hand))


@pytest.mark.parametrize("critic", [None, "shared", ["secret"]])
def test_orthogonal_weights_reach_every_encoder(critic):
    given = {"encoder_component_names": ["b"], "encoder_class_name": "MlpModel", "orthogonal_init": True}
    policy = make(critic_encoder_component_names=critic, **given)
    encoders = [*policy.encoders, *getattr(policy, "critic_encoders", ())]
    assert len(encoders) == (2 if critic == ["secret"] else 1)
    for layer in (layer for encoder in encoders for layer in encoder.modules() if isinstance(layer, nn.Linear)):
        columns = layer.weight.detach() if layer.out_features < layer.in_features else layer.weight.detach().T
        torch.testing.assert_close(columns @ columns.T, 2.0 * torch.eye(len(columns)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("lead", [(3,), (4, 3)])
def test_the_latent_of_a_component_is_the_output_of_its_encoder(lead):
    classes, kwargs = ["MlpModel", "Conv2dHeadModel"], [None, CONV]
    policy = make(encoder_component_names=["b", "image"], encoder_class_name=classes, encoder_kwargs=kwargs)
    obs = torch.randn(*lead, WIDTH)
    assert torch.equal(policy.get_encoder_latent(obs, "b"), policy.encoders[0](obs[..., 27:30]))
    latent = policy.get_encoder_latent(obs, "image")
    assert latent.shape == (*lead, 5)
    torch.testing.assert_close(latent, policy.encoders[1](obs[..., 2:27].reshape(*lead, 1, 5, 5)))
    with pytest.raises(ValueError, match=r"no encoder of 'a'; there are encoders of \['b', 'image'\]"):
        policy.get_encoder_latent(obs, "a")


def test_a_latent_is_made_of_normalised_observations():
    policy = make(encoder_component_names=["b"])
    policy.obs_normalizer = EmpiricalNormalization(WIDTH)
    rows = 3 * torch.randn(50, WIDTH) + 1
    policy.obs_normalizer.update(rows)
    seen = policy.obs_normalizer.normalize(rows)
    assert torch.equal(policy.get_encoder_latent(rows, "b"), policy.encoders[0](seen[:, 27:30]))
    shared = make(encoder_component_names=["b"], critic_encoder_component_names="shared")
    shared.critic_obs_normalizer = EmpiricalNormalization(CRITIC_WIDTH)
    rows = 3 * torch.randn(50, CRITIC_WIDTH) + 1
    shared.critic_obs_normalizer.update(rows)
    seen = shared.critic_obs_normalizer.normalize(rows)
    assert torch.equal(shared.get_encoder_latent(rows, "b", critic=True), shared.encoders[0](seen[:, 31:34]))


def test_shared_encoders_are_found_by_name_in_the_critics_own_layout():
    policy = make(encoder_component_names=["b", "a"], critic_encoder_component_names="shared")
    obs = torch.randn(3, CRITIC_WIDTH)
    encoder_b, encoder_a = policy.encoders
    by_hand = torch.cat([obs[:, :31], encoder_b(obs[:, 31:34]), encoder_a(obs[:, 34:])], 1)
    assert torch.equal(policy.evaluate(obs), policy.critic(by_hand))
    assert torch.equal(policy.get_encoder_latent(obs, "a", critic=True), encoder_a(obs[:, 34:]))
    assert not any(name.startswith("critic_encoders") for name in policy.state_dict())


def test_the_critic_may_have_encoders_of_its_own():
    policy = make(
        encoder_component_names=["b"],
        critic_encoder_component_names=["secret"],
        critic_encoder_kwargs={"hidden_sizes": [3]},
    )
    obs = torch.randn(3, CRITIC_WIDTH)
    (encoder,) = policy.critic_encoders
    by_hand = torch.cat([obs[:, :4], encoder(obs[:, 4:6]), obs[:, 6:]], 1)
    assert torch.equal(policy.evaluate(obs), policy.critic(by_hand))
    assert encoder.model[0].out_features == 3
    assert torch.equal(policy.get_encoder_latent(obs, "secret", critic=True), encoder(obs[:, 4:6]))
    with pytest.raises(ValueError, match=r"encoders of \['secret'\]"):
        policy.get_encoder_latent(obs, "b", critic=True)


def test_the_critics_encoders_are_by_default_like_the_actors_of_the_same_component():
    settings = {
        "encoder_component_names": ["b", "image"],
        "encoder_class_name": ["MlpModel", "Conv2dHeadModel"],
        "encoder_kwargs": [{"hidden_sizes": [3]}, CONV],
    }
    policy = make(**settings, critic_encoder_component_names=["image"])
    assert policy.critic_encoders[0].image_shape == (1, 5, 5)
    assert policy.critic_encoders[0].conv.out_channels == 2
    with pytest.raises(ValueError, match="the actor does not encode 'secret': give critic_encoder_class_name"):
        make(**settings, critic_encoder_component_names=["secret"])


def test_the_memories_see_features():
    policy = make(
        EncoderActorCriticRecurrent,
        encoder_component_names=["image"],
        encoder_class_name="Conv2dHeadModel",
        encoder_kwargs=CONV,
        critic_encoder_component_names="shared",
        rnn_hidden_size=6,
    )
    assert (policy.memory_a.rnn.input_size, policy.memory_c.rnn.input_size) == (WIDTH - 20, CRITIC_WIDTH - 20)
    assert policy.actor[0].in_features == 6


def test_an_encoder_of_ones_own_is_known_by_name(monkeypatch):
    monkeypatch.setattr("canter.modules.encoder_actor_critic.ENCODERS", dict(ENCODERS))

    class Sum(nn.Module):
        def __init__(self, shape, output_size, scale=1.0):
            super().__init__()
            self.scale, self.output_size, self.shape = scale, output_size, shape

        def forward(self, x):
            assert x.shape[-3:] == self.shape
            return self.scale * x.flatten(-3).sum(-1, keepdim=True).expand(*x.shape[:-3], self.output_size)

    register_encoder("Sum", Sum)
    policy = make(encoder_component_names=["image"], encoder_class_name="Sum", encoder_kwargs={"scale": 2.0})
    obs = torch.ones(3, WIDTH)
    assert policy.get_encoder_latent(obs, "image").tolist() == [[50.0] * 5] * 3


def test_wrong_settings_are_named():
    with pytest.raises(UnknownSegmentError, match=r"no segment 'hight'; it has \['a', 'image', 'b', 'c'\]"):
        make(encoder_component_names=["hight"])
    with pytest.raises(UnknownSegmentError, match="no segment 'b2'"):
        make(critic_encoder_component_names=["b2"])
    with pytest.raises(NotImplementedError, match="no encoder 'Resnet'; there are MlpModel, Conv2dHeadModel"):
        make(encoder_component_names=["a"], encoder_class_name="Resnet")
    with pytest.raises(ValueError, match=r"the encoder of 'a': Conv2dHeadModel encodes images .* shape \(2,\)"):
        make(encoder_component_names=["a"], encoder_class_name="Conv2dHeadModel")
    with pytest.raises(TypeError, match="the encoder of 'a': .*hiden_sizes"):
        make(encoder_component_names=["a"], encoder_kwargs={"hiden_sizes": [3]})
    with pytest.raises(ValueError, match="encoder_class_name has 1 entries for 2 components"):
        make(encoder_component_names=["a", "b"], encoder_class_name=["MlpModel"])
    with pytest.raises(ValueError, match="named only once"):
        make(encoder_component_names=["a", "a"])


def test_encoders_are_shared_only_between_equal_components():
    critic = {**CRITIC_SEGMENTS, "a": (2, 1)}
    with pytest.raises(ValueError, match=r"'a' cannot be shared: it is \(2,\) in the actor's .* and \(2, 1\)"):
        make(encoder_component_names=["a"], critic_encoder_component_names="shared", critic_obs_segments=critic)
    with pytest.raises(UnknownSegmentError, match="no segment 'a'"):
        make(
            encoder_component_names=["a"],
            critic_encoder_component_names="shared",
            critic_obs_segments={"other": (CRITIC_WIDTH,)},
        )


def test_embedding_checks_the_width():
    with pytest.raises(ValueError, match="observation is 4 wide"):
        embed(torch.zeros(1, 4), ObsLayout({"a": 3}), {"a": MlpModel(3, [2])})


def test_the_slices_of_encoded_components_are_in_the_order_of_their_names():
    segments = {"a": (3,), "b": (2, 2), "c": (1,)}
    policy = EncoderActorCritic(8, 8, 2, obs_segments=segments, encoder_component_names=["c", "b"])
    assert policy.encoder_obs_slices == [(slice(7, 8), (1,)), (slice(3, 7), (2, 2))]
