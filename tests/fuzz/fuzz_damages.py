"""Damages of files, drawn by Hypothesis: the same ones in every run of the tests."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

SETTINGS = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}
QUICK = settings(max_examples=25, **SETTINGS)
LONG = settings(max_examples=300, **SETTINGS)


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """Other content than this one; see `changed`."""
    return changed(content).filter(lambda other: other != content)


@st.composite
def changed(draw, content: bytes) -> bytes:
    """The content with a bit flipped, a byte replaced, or a piece cut off, removed, repeated, zeroed or moved."""
    size = len(content)
    kind = draw(st.sampled_from(("bit", "byte", "truncate", "remove", "repeat", "zero", "move", "insert")))
    start = draw(st.integers(0, size - 1))
    if kind == "bit":
        return content[:start] + bytes([content[start] ^ (1 << draw(st.integers(0, 7)))]) + content[start + 1 :]
    if kind == "byte":
        return content[:start] + draw(st.binary(min_size=1, max_size=1)) + content[start + 1 :]
    if kind == "truncate":
        return content[:start]
    end = min(size, start + draw(st.integers(1, max(1, size // 4))))
    piece = content[start:end]
    if kind == "remove":
        return content[:start] + content[end:]
    if kind == "repeat":
        return content[:end] + piece + content[end:]
    if kind == "zero":
        return content[:start] + bytes(len(piece)) + content[end:]
    if kind == "move":
        rest = content[:start] + content[end:]
        place = draw(st.integers(0, len(rest)))
        return rest[:place] + piece + rest[place:]
    return content[:start] + draw(st.binary(min_size=1, max_size=16)) + content[start:]


NUMBERS = st.sampled_from((-1, 0, 1, 7, 1000, 2**70)) | st.floats()  # none for which gigabytes would be reserved
LEAVES = st.none() | st.booleans() | NUMBERS | st.text(max_size=8)
VALUES = LEAVES | st.lists(LEAVES, max_size=3) | st.dictionaries(st.text(max_size=4), LEAVES, max_size=3)


def replaced(tree, path, value, is_removed):
    """A copy of the tree with one value replaced or removed."""
    if not path:
        return value
    if isinstance(tree, dict):
        if len(path) == 1 and is_removed:
            return {name: part for name, part in tree.items() if name != path[0]}
        return {n: replaced(p, path[1:], value, is_removed) if n == path[0] else p for n, p in tree.items()}
    return [replaced(p, path[1:], value, is_removed) if i == path[0] else p for i, p in enumerate(tree)]


@st.composite
def crafted(draw, tree):
    """The tree with one value, at any depth, that is another one, or missing."""
    path, part = [], tree
    while isinstance(part, (dict, list, tuple)) and part and (not path or draw(st.integers(0, 3))):
        path.append(draw(st.sampled_from(list(part) if isinstance(part, dict) else range(len(part)))))
        part = part[path[-1]]
    return replaced(tree, path, draw(VALUES), draw(st.booleans()))
