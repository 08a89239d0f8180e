"""Positions in an observation, written as text."""

import pytest

from canter.modules.actor_critic_field_mutex import find_positions
from canter.utils.obs_layout import ObsLayout

LAYOUT = ObsLayout({"a": (4,), "b": (8,)})


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("a", slice(0, 4)),
        ("b", slice(4, 12)),
        ("b[0]", slice(4, 5)),
        ("b[-1]", slice(11, 12)),
        ("b[1:6]", slice(5, 10)),
        ("b[-2:]", slice(10, 12)),
        ("b[:3]", slice(4, 7)),
        ("b[:]", slice(4, 12)),
        ("b[2:-1]", slice(6, 11)),
        ("a[3]", slice(3, 4)),
    ],
)
def test_text_means_columns_of_the_whole_observation(text, columns):
    assert find_positions(LAYOUT, text) == columns


@pytest.mark.parametrize("text", ["b[]", "b[-]", "b[x]", "b[1", "b[1:2:3]", ""])
def test_text_that_is_not_a_position_is_refused(text):
    with pytest.raises(ValueError, match="is not a position"):
        find_positions(LAYOUT, text)


def test_a_component_that_does_not_exist_is_named():
    with pytest.raises(KeyError, match=r"no segment 'c'; it has \['a', 'b'\]"):
        find_positions(LAYOUT, "c[1]")
