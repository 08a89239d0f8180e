"""Nested dicts of tensors treated like one."""

import torch

from canter.utils.tree import tree_leaves, tree_map, tree_where

TREE = {"a": torch.tensor([1.0, 2.0]), "b": {"c": torch.tensor([[3.0, 4.0], [5.0, 6.0]])}}


def test_a_map_keeps_the_structure_and_meets_matching_leaves():
    total = tree_map(lambda x, y: x + y, TREE, {"b": {"c": 10.0}, "a": 1.0})
    assert total["a"].tolist() == [2, 3]
    assert total["b"]["c"].tolist() == [[13, 14], [15, 16]]
    assert tree_map(lambda x: 2 * x, torch.tensor(4.0)) == 8


def test_leaves_have_dotted_names():
    assert [name for name, _ in tree_leaves(TREE)] == ["a", "b.c"]
    assert [name for name, _ in tree_leaves(TREE, "obs")] == ["obs.a", "obs.b.c"]
    assert [name for name, _ in tree_leaves(torch.zeros(1), "obs")] == ["obs"]
    assert dict(tree_leaves({"x": None})) == {"x": None}


def test_where_picks_rows_of_every_leaf():
    other = tree_map(torch.zeros_like, TREE)
    picked = tree_where(torch.tensor([False, True]), TREE, other)
    assert picked["a"].tolist() == [0, 2]
    assert picked["b"]["c"].tolist() == [[0, 0], [5, 6]]
    images = tree_where(torch.tensor([True, False]), torch.ones(2, 1, 3, 3), torch.zeros(2, 1, 3, 3))
    assert images.sum() == 9
