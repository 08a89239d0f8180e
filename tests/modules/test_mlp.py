"""MLPs: which layers they have."""

import re

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from canter.envs.torch_envs import CartPole
from canter.modules.actor_critic import ActorCritic
from canter.modules.actors import MLPActor
from canter.modules.mlp import MlpModel, layer_sizes, mlp
from canter.modules.q_networks import MLPQNetwork
from canter.runners import OnPolicyRunner


def kinds(model):
    return [type(layer).__name__ for layer in model]


def test_no_activation_follows_the_last_layer():
    assert kinds(mlp([4, 8, 6, 2], "elu")) == ["Linear", "ELU", "Linear", "ELU", "Linear"]
    assert kinds(mlp([4, 8, 2], nn.Tanh, "Sigmoid")) == ["Linear", "Tanh", "Linear", "Sigmoid"]


def test_an_empty_hidden_list_is_one_linear_layer():
    assert kinds(mlp([4, 2], "elu")) == ["Linear"]
    with pytest.raises(ValueError, match="input and an output size"):
        mlp([4], "elu")


def test_layer_norm_comes_before_the_activation_of_hidden_layers():
    layers = mlp([4, 8, 8, 2], "tanh", layer_norm=True)
    assert kinds(layers) == ["Linear", "LayerNorm", "Tanh"] * 2 + ["Linear"]
    with pytest.raises(ValueError, match="no activation 'swoosh'"):
        mlp([4, 8, 2], "swoosh")


def test_only_wide_unaligned_inputs_use_the_padding_layer():
    layers = [layer for layer in mlp([12, 5, 16, 2]) if isinstance(layer, nn.Linear)]
    assert [type(layer) is nn.Linear for layer in layers] == [False, True, True]
    x = torch.randn(3, 12)
    assert torch.equal(layers[0](x), nn.functional.linear(x, layers[0].weight, layers[0].bias))


@pytest.mark.parametrize("hidden", [None, [], ()])
def test_mlp_model_without_hidden_layers_is_linear(hidden):
    model = MlpModel(3, hidden, 2)
    assert kinds(model.model) == ["Linear"]
    assert model.output_size == 2


def test_mlp_model_without_output_size_ends_in_its_nonlinearity():
    model = MlpModel(3, [8, 5], nonlinearity="Tanh")
    assert kinds(model.model) == ["Linear", "Tanh", "Linear", "Tanh"]
    assert model.output_size == 5
    assert model(torch.zeros(2, 7, 3)).shape == (2, 7, 5)


def test_mlp_model_with_output_size_ends_in_a_linear_layer():
    model = MlpModel(3, 8, 4)
    assert kinds(model.model) == ["Linear", "ReLU", "Linear"]
    assert model.output_size == 4
    assert model(torch.zeros(2, 3)).shape == (2, 4)


def test_mlp_model_of_nothing_is_refused():
    with pytest.raises(ValueError, match="output_size"):
        MlpModel(3, None)


def test_sizes_become_python_ints():
    assert type(mlp([np.int64(3), np.int64(2)])[0].in_features) is int
    assert type(MlpModel(3, [np.int64(4)]).output_size) is int


@pytest.mark.parametrize("sizes", [64, "64", None, ["64"], [True], [None], {"a": 1}])
def test_hidden_layers_that_are_no_list_of_numbers_are_refused_with_the_setting_and_an_example(sizes):
    message = f"must be a list of layer sizes such as [64, 64], got {sizes!r}"
    for name in ("actor_hidden_dims", "critic_hidden_dims"):
        with pytest.raises(TypeError, match=re.escape(f"{name} {message}")):
            OnPolicyRunner(CartPole(2), {"policy": {name: sizes}}, device="cpu")
    space = spaces.Box(-1.0, 1.0, (3,))
    with pytest.raises(TypeError, match=re.escape(f"MLPActor: hidden_dims {message}")):
        MLPActor(space, space, {"hidden_dims": sizes})
    with pytest.raises(TypeError, match=re.escape(f"MLPQNetwork: hidden_dims {message}")):
        MLPQNetwork(space, spaces.Discrete(2), {"hidden_dims": sizes})


@pytest.mark.parametrize("sizes", [[4, 5], (4, 5), np.array([4, 5]), [np.int64(4), 5.0], []])
def test_hidden_layers_may_be_any_list_of_numbers(sizes):
    assert layer_sizes("actor_hidden_dims", sizes) == ([4, 5] if len(sizes) else [])
    assert ActorCritic(3, 2, actor_hidden_dims=sizes).actor[0].in_features == 3
