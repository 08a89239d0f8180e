"""Features of a window of the past."""

import pytest
import torch
from torch import nn

from canter.modules.encoder_actor_critic import EncoderActorCritic
from canter.modules.history_encoder import HistoryEncoder


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
            12, 12, 1, obs_segments=segments, encoder_component_names=["joints_history"],
            encoder_class_name="HistoryEncoder", encoder_kwargs={"kind": kind}, encoder_output_size=7,
        )  # fmt: skip
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
