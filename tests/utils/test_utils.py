"""Observation segments, named tuples of arrays, compressed images."""

import copy
import pickle

import numpy as np
import pytest
import torch

from canter.utils.utils import (
    compress_normalized_image,
    decompress_normalized_image,
    get_obs_slice,
    get_subobs_by_components,
    get_subobs_size,
    namedarraytuple,
    substitute_estimated_state,
)

SEGMENTS = {"a": (3,), "b": (2, 2), "c": (1,)}
State = namedarraytuple("State", ["actor", "critic"])
Cell = namedarraytuple("Cell", "hidden cell")


def test_get_obs_slice_gives_columns_and_shape():
    assert get_obs_slice(SEGMENTS, "b") == (slice(3, 7), (2, 2))
    with pytest.raises(AssertionError, match=r"\['a', 'b', 'c'\]"):
        get_obs_slice(SEGMENTS, "zz")


def test_subobs_are_concatenated_in_segment_order():
    obs = torch.arange(8.0).expand(2, 5, 8)
    assert get_subobs_by_components(obs, ["c", "a"], SEGMENTS)[1, 4].tolist() == [0, 1, 2, 7]
    assert get_subobs_size(SEGMENTS, ["c", "a"]) == 4
    with pytest.raises(KeyError):
        get_subobs_size(SEGMENTS, ["c", "d"])


def test_estimates_replace_only_their_segments():
    obs = torch.arange(8.0).expand(2, 8)
    out = substitute_estimated_state(obs, ["c", "a"], torch.full((2, 4), -1.0), SEGMENTS)
    assert out[0].tolist() == [-1, -1, -1, 3, 4, 5, 6, -1]


def nested():
    return State(Cell(torch.arange(4.0), 10 + torch.arange(4.0)), None)


def test_indexing_reaches_every_field_and_skips_none():
    part = nested()[1:3]
    assert type(part) is State
    assert type(part.actor) is Cell
    assert (part.actor.hidden.tolist(), part.actor.cell.tolist(), part.critic) == ([1, 2], [11, 12], None)


def test_assignment_reaches_every_field():
    x = nested()
    x[0] = 0
    x[1] = State(Cell(torch.tensor(7.0), torch.tensor(8.0)), None)
    assert x.actor.hidden.tolist() == [0, 7, 2, 3]
    assert x.actor.cell.tolist() == [0, 8, 12, 13]
    with pytest.raises(TypeError, match="critic is None"):
        x[0] = State(None, torch.zeros(()))
    with pytest.raises(ValueError, match="3 values"):
        x[0] = (1, 2, 3)


def test_names_items_positions_and_replace():
    x = nested()
    assert "actor" in x
    assert "hidden" not in x
    assert x.get(0) is x.actor
    assert [name for name, _ in x.items()] == ["actor", "critic"]
    assert x._replace(critic=3).critic == 3
    actor, critic = x
    assert actor is x.actor
    assert critic is None


def test_instances_pickle_and_copy():
    for twin in (pickle.loads(pickle.dumps(nested())), copy.deepcopy(nested())):  # noqa: S301, our own bytes
        assert type(twin) is State
        assert torch.equal(twin.actor.cell, nested().actor.cell)


def test_a_field_may_not_hide_a_method():
    with pytest.raises(ValueError, match="'items'"):
        namedarraytuple("Bad", ["items", "x"])


@pytest.mark.parametrize("as_array", [np.asarray, torch.tensor])
def test_compression_error_is_at_most_half_a_step(as_array):
    image = as_array([[0.0, 0.1, 0.5], [0.999, 1.0, 0.004]])
    small = compress_normalized_image(image)
    assert small.tolist() == [[0, 26, 128], [255, 255, 1]]
    back = decompress_normalized_image(small)
    assert str(small.dtype).endswith("uint8")
    assert str(back.dtype).endswith("float32")
    assert np.abs(np.asarray(back) - np.asarray(image)).max() <= 0.5 / 255 + 1e-6


def test_values_outside_the_unit_range_are_clipped():
    assert compress_normalized_image(np.array([-0.5, 1.7])).tolist() == [0, 255]
    assert compress_normalized_image(torch.tensor([-0.5, 1.7])).tolist() == [0, 255]
