"""Activations by name, initial weights, sizes of convolutions."""

import math

import pytest
import torch
from torch import nn

from canter.modules.utils import activation, conv2d_output_shape, get_activation_Cls, orthogonal_init


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("elu", nn.ELU),
        ("ELU", nn.ELU),
        ("selu", nn.SELU),
        ("relu", nn.ReLU),
        ("crelu", nn.ReLU),
        ("lrelu", nn.LeakyReLU),
        ("tanh", nn.Tanh),
        ("sigmoid", nn.Sigmoid),
        ("Softplus", nn.Softplus),
        ("Hardtanh", nn.Hardtanh),
    ],
)
def test_activation_classes_are_found_by_name(name, cls):
    assert get_activation_Cls(name) is cls
    assert activation(name) is cls


@pytest.mark.parametrize("name", ["reluu", "functional", "init", "Parameter"])
def test_other_names_warn_and_give_none(name):
    with pytest.warns(UserWarning, match=name):
        assert get_activation_Cls(name) is None


@pytest.mark.parametrize("settings", [(3, 1, 0, 1), ((3, 5), (2, 1), (1, 0), (1, 2)), (4, 3, 2, 2)])
def test_conv_output_shape_equals_a_convolution(settings):
    out = nn.Conv2d(1, 1, *settings)(torch.zeros(1, 1, 21, 30))
    assert conv2d_output_shape(21, 30, *settings) == tuple(out.shape[2:])


def test_orthogonal_init_scales_the_last_layer_alone():
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    orthogonal_init(net, last_gain=0.01)
    torch.testing.assert_close(net[2].weight @ net[2].weight.T, 2 * torch.eye(6))
    torch.testing.assert_close(net[4].weight @ net[4].weight.T, 1e-4 * torch.eye(3))
    kernel = net[0].weight.flatten(1)
    torch.testing.assert_close((kernel @ kernel.T).diagonal(), torch.full((4,), math.sqrt(2) ** 2))
    assert all((layer.bias == 0).all() for layer in (net[0], net[2], net[4]))
