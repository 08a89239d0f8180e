"""Positions in a flat observation, written as text: `name`, `name[3]`, `name[1:6]`, `name[-2:]`."""

from __future__ import annotations

import re

from canter.utils.obs_layout import ObsLayout

_POSITION = re.compile(r"(?P<name>[^\[\]]+)(?:\[(?P<first>-?\d*)(?P<colon>:)?(?P<last>-?\d*)\])?")


def find_positions(layout: ObsLayout, text: str, size: int | None = None) -> slice:
    """The columns that `text` means, `size` of them if given; anything else is an error."""
    match = _POSITION.fullmatch(text)
    if match is None or (match["colon"] is None and match["first"] in ("", "-")):
        raise ValueError(f"{text!r} is no position; write 'component', 'component[9]' or 'component[1:6]'")
    whole = layout.slice(match["name"])
    width = whole.stop - whole.start
    first, last = (int(match[name]) if match[name] else None for name in ("first", "last"))
    if first is not None and match["colon"] is None:
        last = first + 1 or None  # [-1] ends where the component ends
    start, stop, _ = slice(first, last).indices(width)
    beyond = any(n is not None and not -width <= n <= width for n in (first, last))
    if beyond or stop <= start:
        raise ValueError(f"{text!r} lies outside of {match['name']!r}, which has {width} values")
    if size is not None and stop - start != size:
        raise ValueError(f"{text!r} are {stop - start} values, but there must be {size}")
    return slice(whole.start + start, whole.start + stop)
