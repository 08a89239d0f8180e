"""Draws docs/assets/pipeline.svg: the stages between an observation and an action, and what each of them learns from.

python docs/make_pipeline.py
"""

from __future__ import annotations

import itertools
from pathlib import Path

OUT = Path(__file__).parent / "assets" / "pipeline.svg"
HEIGHT, WIDTH, GAP, BOX = 300, 1010, 22, 112
ROWS = {"actor": 40, "critic": 218}
# row, column, two lines of text, colour
BOXES = [
    ("actor", 0, "observation", "named parts", "#E8EAED"),
    ("actor", 1, "adaptor", "memory_p", "#FCE2C4"),
    ("actor", 2, "estimator", "memory_s", "#FCE2C4"),
    ("actor", 3, "image encoder", "visual_encoder", "#CFE5F7"),
    ("actor", 4, "encoders", "encoders", "#CFE5F7"),
    ("actor", 5, "memory", "memory_a", "#D8EFD3"),
    ("actor", 6, "MLP", "actor, std", "#D8EFD3"),
    ("critic", 0, "critic's obs", "privileged", "#E8EAED"),
    ("critic", 3, "image encoder", "shared", "#CFE5F7"),
    ("critic", 4, "encoders", "shared or own", "#CFE5F7"),
    ("critic", 5, "memory", "memory_c", "#D8EFD3"),
    ("critic", 6, "MLP", "critic", "#D8EFD3"),
]


def left(column: int) -> int:
    """Where a column of boxes begins."""
    return 8 + column * (BOX + GAP)


def box(row: str, column: int, title: str, name: str, colour: str) -> str:
    """One stage: what it is, and what its weights are called."""
    x, y = left(column), ROWS[row]
    middle = x + BOX / 2
    return (
        f'<rect x="{x}" y="{y}" width="{BOX}" height="52" rx="7" fill="{colour}" stroke="#8A8F98"/>'
        f'<text x="{middle}" y="{y + 22}" font-size="14" font-weight="600">{title}</text>'
        f'<text x="{middle}" y="{y + 40}" font-size="11" font-family="monospace">{name}</text>'
    )


def arrow(x1: float, y1: float, x2: float, y2: float, dash: str = "") -> str:
    """A line with a head; dashed where no gradient flows to what follows."""
    return f'<path d="M{x1} {y1} L{x2} {y2}" stroke="#8A8F98" stroke-width="1.6" marker-end="url(#head)" {dash}/>'


def note(x: float, y: float, text: str, anchor: str = "middle") -> str:
    """A word beside an arrow."""
    return f'<text x="{x}" y="{y}" font-size="12" fill="#7A808A" style="text-anchor:{anchor}">{text}</text>'


def main() -> None:
    """Draw."""
    parts = [box(*row) for row in BOXES]
    for row, y in ROWS.items():
        columns = [column for name, column, *_ in BOXES if name == row]
        parts += [arrow(left(a) + BOX, y + 26, left(b) - 3, y + 26) for a, b in itertools.pairwise(columns)]
        parts.append(arrow(left(6) + BOX, y + 26, left(7) - 3, y + 26))
    parts += [
        note(left(7) + 2, ROWS["actor"] + 30, "action", "start"),
        note(left(7) + 2, ROWS["critic"] + 30, "value", "start"),
    ]
    for column, loss in ((1, "adaptor_loss"), (2, "estimator_loss")):
        x = left(column) + BOX / 2
        parts += [arrow(x, 92, x, 138, 'stroke-dasharray="5 4"'), note(x, 156, loss)]
        parts.append(arrow(left(0) + BOX - 20 + 12 * column, 218, x - 14, 164, 'stroke-dasharray="5 4"'))
    parts.append(note(345, 206, "targets of these losses"))
    parts.append(
        note(left(3) + BOX + GAP / 2, 26, "read from left to right: the class statement says which stages there are")
    )
    head = '<marker id="head" markerWidth="9" markerHeight="8" refX="7" refY="4" orient="auto">'
    head += '<path d="M0 0 L8 4 L0 8 z" fill="#8A8F98"/></marker>'
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
        "<style>text{text-anchor:middle;fill:#24292F}</style>"
        f"<defs>{head}</defs>{''.join(parts)}</svg>\n"
    )
    OUT.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
