"""Convolutional encoders: shapes known beforehand, pooling instead of strides, norm layers, windows of the past."""

import pytest
import torch
from torch import nn

from canter.modules.conv2d import Conv2dHeadModel, Conv2dModel, HistoryEncoder
from canter.modules.encoder_actor_critic import EncoderActorCritic

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


@pytest.mark.parametrize("kind", ["conv", "attention"])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_any_window_and_any_leading_dimensions(kind, steps):
    encoder = HistoryEncoder((steps, 3), 5, kind=kind)
    window = torch.randn(4, 2, steps, 3)
    out = encoder(window)
    assert out.shape == (4, 2, 5)
    torch.testing.assert_close(out[1, 1], encoder(window[1, 1]))
    assert encoder.output_size == 5
    assert (out >= 0).all()  # a nonlinearity at the end, as every encoder has


@pytest.mark.parametrize("kind", ["conv", "attention"])
def test_every_step_and_their_order_matter(kind):
    torch.manual_seed(0)
    encoder = HistoryEncoder((4, 2), 6, kind=kind, nonlinearity="Tanh")
    window = torch.randn(1, 4, 2, requires_grad=True)
    encoder(window).sum().backward()
    assert (window.grad.abs().sum(-1) > 0).all()
    assert not torch.allclose(encoder(window), encoder(window.flip(1)))


def test_convolutions_run_along_time():
    encoder = HistoryEncoder((8, 3), None, channels=[4, 5], kernel_sizes=[3, 3], strides=[1, 2], hidden_sizes=[6])
    convolutions = [m for m in encoder.body if isinstance(m, nn.Conv1d)]
    assert [(m.in_channels, m.out_channels, m.stride) for m in convolutions] == [(3, 4, (1,)), (4, 5, (2,))]
    assert encoder.head.model[0].in_features == 4 * 5
    assert encoder.output_size == 6


def test_it_is_an_encoder_of_a_component():
    segments = {"joints": (2,), "joints_history": (5, 2)}
    for kind in ("conv", "attention"):
        policy = EncoderActorCritic(
            12,
            12,
            1,
            obs_segments=segments,
            encoder_component_names=["joints_history"],
            encoder_class_name="HistoryEncoder",
            encoder_kwargs={"kind": kind},
            encoder_output_size=7,
        )
        assert policy.actor[0].in_features == 9
        assert policy(torch.randn(3, 12)).mean.shape == (3, 1)


def test_wrong_settings_are_named():
    with pytest.raises(ValueError, match=r"a window has the shape \(steps, values\), got \(3,\)"):
        HistoryEncoder((3,))
    with pytest.raises(ValueError, match="kind must be one of conv, attention, got 'lstm'"):
        HistoryEncoder((3, 2), kind="lstm")
    with pytest.raises(ValueError, match=r"must be of one length, got \[2, 1, 2\]"):
        HistoryEncoder((3, 2), kernel_sizes=[3])
    with pytest.raises(ValueError, match="32 of attention does not split into num_heads=5"):
        HistoryEncoder((3, 2), kind="attention", num_heads=5)


def test_an_image_with_its_channels_last_is_refused():
    model = Conv2dHeadModel((3, 9, 9), [4], [3], [2])
    assert model(torch.zeros(2, 5, 3, 9, 9)).shape == (2, 5, model.output_size)
    with pytest.raises(RuntimeError, match="to have 3 channels, but got 9"):
        model(torch.zeros(2, 9, 9, 3))
