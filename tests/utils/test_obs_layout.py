"""Named segments of a flat observation."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from canter.utils.obs_layout import ObsLayout, UnknownSegmentError

SEGMENTS = OrderedDict(a=(3,), b=(2, 2), c=(1,))


@pytest.fixture
def obs():
    return 100 * torch.arange(2.0).view(2, 1) + torch.arange(8.0)  # value = 100 * row + column


def test_ints_lists_and_numpy_integers_become_tuples_of_ints():
    layout = ObsLayout({"x": 3, "y": list(np.array([2, 2])), "z": np.int64(4), "s": ()})
    assert layout.shapes == {"x": (3,), "y": (2, 2), "z": (4,), "s": ()}
    assert all(type(n) is int for shape in layout.shapes.values() for n in shape)
    assert (type(layout.width), layout.width) == (int, 12)
    nn.LSTM(layout.size(["z"]), 2)  # rejects numpy integers


@pytest.mark.parametrize("error", [KeyError, AssertionError, UnknownSegmentError])
def test_unknown_names_are_errors_that_list_the_segments(error, obs):
    layout = ObsLayout(SEGMENTS)
    for call in (
        lambda: layout.slice("zz"),
        lambda: layout.size(["a", "zz"]),
        lambda: layout.take(obs, ["zz"]),
        lambda: layout.put(obs, ["zz"], obs),
    ):
        with pytest.raises(error, match=r"^observation has no segment 'zz'; it has \['a', 'b', 'c'\]$"):
            call()


def test_take_keeps_segment_order_and_takes_each_once(obs):
    layout = ObsLayout(SEGMENTS)
    assert layout.take(obs, ["c", "a", "c"])[1].tolist() == [100, 101, 102, 107]
    assert layout.take(obs, "b")[0].tolist() == [3, 4, 5, 6]
    assert layout.take(obs, []).shape == (2, 0)
    assert layout.take(obs.expand(5, 2, 8), ["a", "c"]).shape == (5, 2, 4)


def test_put_changes_the_named_columns_of_a_copy(obs):
    layout = ObsLayout(SEGMENTS)
    before = obs.clone()
    out = layout.put(obs, ["c", "a"], torch.tensor([-1.0, -2.0, -3.0, -4.0]).expand(2, 4))
    assert out[1].tolist() == [-1, -2, -3, 103, 104, 105, 106, -4]
    assert torch.equal(obs, before)
    torch.testing.assert_close(layout.put(obs, ["a", "b", "c"], obs), obs)


def test_put_passes_gradients_to_observation_and_values(obs):
    values, obs = torch.zeros(2, 1, requires_grad=True), obs.requires_grad_()
    ObsLayout(SEGMENTS).put(obs, ["c"], values).sum().backward()
    assert values.grad.tolist() == [[1.0], [1.0]]
    assert obs.grad[0].tolist() == [1, 1, 1, 1, 1, 1, 1, 0]


def test_a_wrong_width_is_an_error_with_both_widths(obs):
    layout = ObsLayout(SEGMENTS)
    for call in (lambda: layout.split(obs[:, :7]), lambda: layout.take(obs[:, :7], ["a"])):
        with pytest.raises(ValueError, match="7 wide.*sum to 8"):
            call()
    with pytest.raises(ValueError, match=r"\['a'\] are 3 wide, but got 2"):
        layout.put(obs, ["a"], obs[:, :2])


def test_a_dict_becomes_a_vector_in_the_order_of_the_segments():
    layout = ObsLayout({"eye": (1, 2, 2), "leg": 2})
    eye = torch.tensor([[[[0, 51], [102, 255]]]], dtype=torch.uint8)
    flat = layout.flat({"leg": torch.tensor([[7.0, 8.0]]), "eye": eye})
    torch.testing.assert_close(flat, torch.tensor([[0.0, 0.2, 0.4, 1.0, 7.0, 8.0]]))
    assert layout.flat(flat) is flat
    with pytest.raises(ValueError, match=r"has the parts \['leg'\], but its segments are \['eye', 'leg'\]"):
        layout.flat({"leg": flat})


@pytest.mark.parametrize("lead", [(3,), (4, 3)])
def test_an_image_is_flattened_for_any_leading_dimensions(lead):
    layout = ObsLayout({"eye": (2, 3, 5)})
    image = torch.randint(256, (*lead, 2, 3, 5), dtype=torch.uint8)
    assert layout.flat(image).shape == (*lead, 30)
    assert layout.flat(image).dtype == torch.float32
    vectors = torch.randn(*lead, 30)
    assert layout.flat(vectors) is vectors
    row = torch.randn(1, 3)
    assert ObsLayout({"window": (1, 3)}).flat(row) is row  # a flat batch of one, not a window without a batch


def test_resized_and_part_return_new_layouts():
    layout = ObsLayout({"a": 2, "b": (3, 2), "c": 1})
    assert layout.resized({"b": (4,), "d": 5}).shapes == {"a": (2,), "b": (4,), "c": (1,), "d": (5,)}
    assert layout.part(["c", "a"]).shapes == {"a": (2,), "c": (1,)}
    assert layout.shapes == {"a": (2,), "b": (3, 2), "c": (1,)}
