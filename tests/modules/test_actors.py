"""ApexRL-style actors and critics: settings, observations of any structure, custom classes."""

import math

import pytest
import torch
from gymnasium import spaces
from no_host_sync import NoHostSync
from torch import distributions as td
from torch import nn

from canter.modules.actors import (
    Actor,
    CNNActor,
    CNNCritic,
    ContinuousActor,
    Critic,
    DiscreteActor,
    MLPActor,
    MLPCritic,
    MLPDiscreteActor,
    flatten_obs,
)
from canter.modules.distributions import SquashedGaussian
from canter.modules.mlp import layer_sizes

VECTOR = spaces.Box(-math.inf, math.inf, (5,))
ARM = spaces.Box(-2.0, 2.0, (3,))
PIXELS = spaces.Box(0, 255, (3, 40, 48), dtype="uint8")
PIXELS_LAST = spaces.Box(0, 255, (40, 48, 3), dtype="uint8")
SMALL_CNN = {"conv_channels": [4, 4], "conv_kernels": [4, 3], "conv_strides": [4, 2], "hidden_dims": [16]}


def linears(module):
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


def sizes(module):
    return [(layer.in_features, layer.out_features) for layer in linears(module)]


@pytest.mark.parametrize("make", [lambda cfg: MLPActor(VECTOR, ARM, cfg), lambda cfg: MLPCritic(VECTOR, cfg)])
def test_a_misspelt_setting_is_an_error_with_a_suggestion(make):
    with pytest.raises(TypeError, match="'hidden_dims'"):
        make({"hiden_dims": [8]})
    make({"nonsense": None})


def test_wrong_action_spaces_are_refused():
    with pytest.raises(TypeError, match="MLPActor needs a Box"):
        MLPActor(VECTOR, spaces.Discrete(3))
    with pytest.raises(TypeError, match="MLPDiscreteActor needs discrete"):
        MLPDiscreteActor(VECTOR, ARM)


def test_weights_are_orthogonal_with_the_documented_gains():
    actor, critic = MLPActor(VECTOR, ARM, {"hidden_dims": [8]}), MLPCritic(VECTOR, {"hidden_dims": [8]})
    first, last = linears(actor)
    torch.testing.assert_close(first.weight.T @ first.weight, 2 * torch.eye(5))
    torch.testing.assert_close(last.weight @ last.weight.T, 1e-4 * torch.eye(3))
    torch.testing.assert_close(linears(critic)[-1].weight.norm(), torch.tensor(1.0))
    assert all((layer.bias == 0).all() for layer in linears(actor) + linears(critic))


def test_squashing_is_a_setting():
    actor = MLPActor(VECTOR, ARM, {"use_tanh_squash": True, "init_std": 5.0})
    assert isinstance(actor.distribution, SquashedGaussian)
    sent = actor.distribution.to_env(actor.act(torch.randn(100, 5))[0])
    assert sent.abs().max() <= 2.0
    assert isinstance(actor.get_action_dist(torch.zeros(1, 5)), td.Normal)


def test_noise_is_a_parameter_or_a_buffer_within_bounds():
    learned = MLPActor(VECTOR, ARM, {"init_std": [0.1, 1.0, 2.0], "min_log_std": -1.0})
    assert "log_std" in dict(learned.named_parameters())
    torch.testing.assert_close(learned.get_params(torch.zeros(1, 5))["sigma"], torch.tensor([[math.exp(-1), 1.0, 2.0]]))
    fixed = MLPActor(VECTOR, ARM, {"learn_std": False, "init_std": 0.5})
    assert "log_std" not in dict(fixed.named_parameters())
    assert "log_std" in fixed.state_dict()
    torch.testing.assert_close(fixed.get_params(torch.zeros(1, 5))["sigma"], torch.full((1, 3), 0.5))


def test_dict_observations_are_flattened_in_the_order_of_the_space():
    space = spaces.Dict(b=spaces.Dict(y=VECTOR, x=spaces.Box(-1, 1, (2, 2))), a=spaces.Box(-1, 1, (1,)))
    obs = {
        "b": {"x": torch.full((2, 3, 2, 2), 20.0), "y": torch.full((2, 3, 5), 30.0)},
        "a": torch.full((2, 3, 1), 10.0),
    }
    assert flatten_obs(obs, space)[1, 2].tolist() == [30.0] * 5 + [20.0] * 4 + [10.0]
    assert MLPActor(space, ARM, {"hidden_dims": [4]}).get_params(obs)["mu"].shape == (2, 3, 3)
    assert MLPCritic(space, {"hidden_dims": [4]}).get_value(obs).shape == (2, 3)


def test_cnn_scales_bytes_and_leaves_floats():
    critic = CNNCritic(PIXELS, SMALL_CNN)
    image = torch.randint(0, 256, (2, 3, 40, 48), dtype=torch.uint8)
    torch.testing.assert_close(critic.get_value(image), critic.get_value(image.float() / 255))


def test_cnn_takes_channels_last_where_the_space_says_so():
    first, last = CNNCritic(PIXELS, SMALL_CNN), CNNCritic(PIXELS_LAST, SMALL_CNN)
    last.load_state_dict(first.state_dict())
    image = torch.randint(0, 256, (5, 2, 3, 40, 48), dtype=torch.uint8)
    torch.testing.assert_close(first.get_value(image), last.get_value(image.movedim(-3, -1)))
    with pytest.raises(TypeError, match="3-D image"):
        CNNActor(VECTOR, ARM)


class CustomActor(ContinuousActor):
    def __init__(self, obs_space, action_space, cfg):
        super().__init__(obs_space, action_space, cfg)
        self.body = nn.Linear(obs_space.shape[0], self.action_dim)
        self.log_std = nn.Parameter(torch.full((self.action_dim,), math.log(self.cfg["noise"])))

    def get_action_dist(self, obs):
        return td.Normal(self.body(obs), self.log_std.exp())


class CustomDiscrete(DiscreteActor):
    def __init__(self, obs_space, action_space, cfg):
        super().__init__(obs_space, action_space, cfg)
        self.body = nn.Linear(5, self.action_dim)

    def get_action_dist(self, obs):
        return td.Categorical(logits=self.body(obs))


def test_a_custom_actor_only_writes_its_distribution(monkeypatch):
    monkeypatch.setattr(td.Distribution, "_validate_args", True)  # torch's compiler switches it off for a whole process
    actor = CustomActor(obs_space=VECTOR, action_space=ARM, cfg={"noise": 0.3})
    obs = torch.randn(4, 5)
    with NoHostSync():  # although Normal validates its arguments by default
        params = actor.get_params(obs)
    torch.testing.assert_close(params["mu"], actor.body(obs))
    torch.testing.assert_close(params["sigma"], torch.full((4, 3), 0.3))
    assert td.Distribution._validate_args  # the setting is put back
    actor.clip_std(min=0.5)
    torch.testing.assert_close(actor.log_std.exp().detach(), torch.full((3,), 0.5))

    discrete = CustomDiscrete(obs_space=VECTOR, action_space=spaces.Discrete(4), cfg=None)
    actions, log_probs = discrete.act(obs)
    torch.testing.assert_close(log_probs, td.Categorical(logits=discrete.body(obs)).log_prob(actions))


def test_gradients_reach_a_custom_actor():
    actor = CustomActor(VECTOR, ARM, {"noise": 0.3})
    log_probs, entropy = actor.evaluate(torch.randn(4, 5), torch.randn(4, 3))
    (log_probs + entropy).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in actor.parameters())


def test_an_actor_without_a_distribution_raises_with_the_method_to_implement():
    with pytest.raises(NotImplementedError, match="Actor must implement get_action_dist"):
        Actor(VECTOR, ARM).get_params(torch.zeros(1, 5))
    with pytest.raises(NotImplementedError, match="Critic must implement forward"):
        Critic(VECTOR).get_value(torch.zeros(1, 5))


@pytest.mark.parametrize("sizes", [[0], [8, -4]])
def test_a_layer_without_width_names_the_setting(sizes):
    with pytest.raises(ValueError, match="hidden_dims must be layer sizes of at least 1"):
        layer_sizes("actor_hidden_dims", sizes)
    with pytest.raises(ValueError, match=r"\w+: hidden_dims must be layer sizes of at least 1"):
        MLPActor(spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, (1,)), {"hidden_dims": sizes})
