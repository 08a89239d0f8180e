"""A table that is redrawn in place on a terminal; elsewhere only its messages are printed."""

import contextlib
from collections.abc import Sequence
from typing import Any


class LiveTable(contextlib.AbstractContextManager["LiveTable"]):
    """Shows the rows of the newest `show` below the messages."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self.console = Console(highlight=False)
        self.live: Any = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None

    def __enter__(self) -> "LiveTable":
        if self.live is not None:
            self.live.start()
        return self

    def show(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Redraw the table, on a terminal."""
        if self.live is not None:
            self.live.update(make_table(title, head, rows), refresh=True)

    def message(self, text: str) -> None:
        """Print a line above the table."""
        self.console.print(text, markup=False, soft_wrap=True)

    def __exit__(self, *exc: object) -> None:
        if self.live is not None:
            self.live.stop()


def make_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    """A table for `rich`, with numbers to the right."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table
