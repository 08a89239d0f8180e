"""MLPs: which layers they have."""

import re

import pytest
import torch
from gymnasium import spaces
from torch import nn

from canter.envs.torch_envs import CartPole
from canter.modules.actors import MLPActor
from canter.modules.mlp import MlpModel, mlp
from canter.modules.q_networks import MLPQNetwork
from canter.runners import OnPolicyRunner


def kinds(model):
    return [type(layer).__name__ for layer in model]


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


def test_mlp_model_of_nothing_is_refused():
    with pytest.raises(ValueError, match="output_size"):
        MlpModel(3, None)


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
