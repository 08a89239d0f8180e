"""Convolutional encoders: shapes known beforehand, pooling instead of strides, norm layers."""

import pytest
import torch
from torch import nn

from canter.modules.conv2d import Conv2dHeadModel, Conv2dModel
from canter.modules.mlp import MlpModel

LAYERS = {"channels": [4, 6], "kernel_sizes": [5, 3], "strides": [2, 3]}


def layers_of(model, kind):
    return [layer for layer in model.modules() if isinstance(layer, kind)]


@pytest.mark.parametrize("use_maxpool", [False, True])
@pytest.mark.parametrize("paddings", [None, [1, (0, 2)]])
@pytest.mark.parametrize(("h", "w"), [(32, 32), (33, 47)])
def test_sizes_are_known_without_a_forward_pass(use_maxpool, paddings, h, w):
    model = Conv2dModel(3, **LAYERS, paddings=paddings, use_maxpool=use_maxpool)
    out = model(torch.zeros(2, 3, h, w))
    assert model.conv_out_resolution(h, w) == tuple(out.shape[2:])
    assert model.conv_out_size(h, w) == out[0].numel()
    assert model.conv_out_size(h, w, c=1) == out[0, 0].numel()


def test_pooling_takes_the_place_of_strides():
    model = Conv2dModel(1, [2, 2], [3, 3], [2, 1], use_maxpool=True)
    assert [conv.stride for conv in layers_of(model, nn.Conv2d)] == [(1, 1), (1, 1)]
    assert [pool.kernel_size for pool in layers_of(model, nn.MaxPool2d)] == [2]
    strided = Conv2dModel(1, [2, 2], [3, 3], [2, 1])
    assert [conv.stride for conv in layers_of(strided, nn.Conv2d)] == [(2, 2), (1, 1)]
    assert not layers_of(strided, nn.MaxPool2d)
    assert model.conv_out_resolution(16, 16) == strided.conv_out_resolution(16, 16) == (5, 5)


def test_norm_sits_between_convolution_and_nonlinearity_in_both_models():
    for model in (
        Conv2dModel(3, **LAYERS, normlayer="BatchNorm2d", nonlinearity="ELU").conv,
        Conv2dHeadModel((3, 32, 32), **LAYERS, normlayer=nn.BatchNorm2d, nonlinearity="ELU").conv.conv,
    ):
        assert [type(layer).__name__ for layer in model] == ["Conv2d", "BatchNorm2d", "ELU"] * 2
        assert [layer.num_features for layer in layers_of(model, nn.BatchNorm2d)] == [4, 6]


def test_norm_may_be_a_function_of_the_channels():
    model = Conv2dModel(3, **LAYERS, normlayer=lambda n: nn.GroupNorm(2, n))
    assert len(layers_of(model, nn.GroupNorm)) == 2


def test_head_output_size_is_given_or_last_hidden_or_flat():
    given = Conv2dHeadModel((3, 32, 32), **LAYERS, hidden_sizes=[9], output_size=7)
    hidden = Conv2dHeadModel((3, 32, 32), **LAYERS, hidden_sizes=[9])
    flat = Conv2dHeadModel((3, 32, 32), **LAYERS)
    assert (given.output_size, hidden.output_size) == (7, 9)
    assert flat.output_size == flat.conv.conv_out_size(32, 32) == 6 * 4 * 4
    assert isinstance(flat.head, nn.Identity)
    assert isinstance(given.head, MlpModel)
    for model in (given, hidden, flat):
        assert model(torch.zeros(2, 5, 3, 32, 32)).shape == (2, 5, model.output_size)


def test_head_encodes_every_image_of_a_rollout_separately():
    model = Conv2dHeadModel((1, 8, 8), [2], [3], [1], [4])
    images = torch.randn(3, 2, 1, 8, 8)
    torch.testing.assert_close(model(images)[2, 1], model(images[2, 1:2])[0])


def test_lists_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="'strides': 1"):
        Conv2dModel(3, [4, 6], [5, 3], [2])


def test_an_image_too_small_for_its_kernels_is_refused():
    with pytest.raises(ValueError, match="4x4 image"):
        Conv2dHeadModel((3, 4, 4), **LAYERS)
