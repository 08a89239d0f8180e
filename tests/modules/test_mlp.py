"""MLPs: which layers they have."""

import numpy as np
import pytest
import torch
from torch import nn

from canter.modules.mlp import MlpModel, mlp


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
