"""Functions of trees: a tensor, or a nested dict of tensors, such as an observation."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Obs = Tensor | dict[str, Any]


def tree_map(fn: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply `fn` to every leaf of `tree` and the matching leaves of `others`, keeping the structure."""
    if isinstance(tree, Mapping):
        return {name: tree_map(fn, leaf, *(other[name] for other in others)) for name, leaf in tree.items()}
    return fn(tree, *others)


def tree_leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its dotted name; the name of a bare leaf is the prefix."""
    if isinstance(tree, Mapping):
        for name, leaf in tree.items():
            yield from tree_leaves(leaf, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, tree


def nested(flat: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The entries named `prefix.a.b` as a nested dict, all of them without a prefix: the inverse of `tree_leaves`."""
    start = f"{prefix}." if prefix else ""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        if name.startswith(start):
            *path, last = name.removeprefix(start).split(".")
            node = tree
            for key in path:
                node = node.setdefault(key, {})
            node[last] = value
    return tree


def tree_where(mask: Tensor, yes: Obs, no: Obs) -> Obs:
    """Rows of `yes` where `mask`, which has the leading dimensions of the leaves, is true, rows of `no` elsewhere."""
    return tree_map(lambda a, b: torch.where(mask.view(*mask.shape, *[1] * (a.dim() - mask.dim())), a, b), yes, no)
