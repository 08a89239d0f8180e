"""How a tape is divided for a compiler: random draws, arithmetic, and what compilers do not know."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from canter.utils.tape_graph import Memory, Notes, is_random, is_view, targets

aten = torch.ops.aten
COMPILED_WRITES = {
    aten.copy_.default, aten.index_copy_.default, aten.add_.Tensor, aten.mul_.Tensor, aten.__ior__.Tensor,
}  # fmt: skip


def drop_unused(graph: fx.Graph) -> list[int]:
    """Take away the arguments that no operation reads; the places of those that stay."""
    given = [node for node in graph.nodes if node.op == "placeholder"]
    used = [i for i, node in enumerate(given) if node.users]
    for node in given:
        if not node.users:
            graph.erase_node(node)
    return used


def split(notes: Notes) -> tuple[dict[fx.Node, int], list[fx.Node]]:
    """Part 0, 1 or 2 (draws, arithmetic, what is left) of every operation, and the results that a later part reads."""
    memory = Memory(notes)
    names = Counter(memory.base[node] for node in notes.graph.nodes if node.op == "placeholder" and node.users)
    parts: dict[fx.Node, int] = {}
    written: set[Any] = set()  # memory from outside that has been written to so far
    last: set[Any] = set()  # memory from outside, and random streams, that the last part has to do with
    for node in notes.graph.nodes:
        if node.op != "call_function":
            continue
        least = max([parts[source] for source in node.all_input_nodes if source in parts], default=0)
        goes_out = {memory.base[target] for target in targets(node) if not isinstance(memory.base[target], fx.Node)}
        touched = {memory.base[source] for source in node.all_input_nodes}
        is_simple = node.target in COMPILED_WRITES and all(names[base] == 1 for base in goes_out)
        if least == 2 or last & touched or (goes_out and not is_simple):
            parts[node] = 2
            last |= {base for base in touched if not isinstance(base, fx.Node)}
        elif is_random(node.target):
            parts[node] = 0 if least == 0 and not written & touched else 2
        elif node.target is aten.empty.memory_format:
            parts[node] = 0  # to be filled by a draw
        else:
            parts[node] = least if node.target is operator.getitem else max(least, 1)
        written |= goes_out
        if parts[node] == 2 and is_random(node.target):  # streams are drawn from in the order of the function
            last |= {source for source in node.all_input_nodes if source in notes.held}
    # What only the last part looks at from another side is turned there: kernels that return views are slow to call.
    for node in reversed(list(parts)):
        if parts[node] == 1 and is_view(node) and not memory.is_written(node):
            parts[node] = min([parts.get(user, 2) for user in node.users], default=1)
    later = {node: [2 if user.op == "output" else parts[user] for user in node.users] for node in parts}
    return parts, [node for node, users in later.items() if users and max(users) > parts[node]]


def take_part(graph: fx.Graph, parts: dict[fx.Node, int], results: Sequence[fx.Node], part: int) -> fx.Graph:
    """One part as a graph of its own: it takes the arguments of all and the results of the parts before."""
    made = fx.Graph()
    before = [node for earlier in range(part) for node in results if parts[node] == earlier]
    given = [node for node in graph.nodes if node.op == "placeholder"] + before
    copies = {node: made.placeholder(node.name) for node in given}
    for node in graph.nodes:
        if parts.get(node) == part or (node.op == "output" and part == 2):
            copies[node] = made.node_copy(node, copies.__getitem__)
    if part < 2:
        made.output(tuple(copies[node] for node in results if parts[node] == part))
    return made
