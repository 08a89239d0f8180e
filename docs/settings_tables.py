"""Tables of settings in the documentation, made from the classes that declare them.

`<!-- settings: package.module.Class -->` in a page becomes a table of the class's fields, or of its constructor's
arguments, with their descriptions. `beyond package.module.Base` leaves out those that another class has too.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from typing import Any

from canter.cli.options import argument_sentences, attribute_sentences, constructor_settings

MARK = re.compile(r"<!-- settings: ([\w.]+)(?: beyond ([\w.]+))? -->")


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """MkDocs calls this with the text of every page."""
    return MARK.sub(lambda match: table(match[1], match[2]), markdown)


def table(path: str, beyond: str | None = None) -> str:
    """The settings of a class as a Markdown table, without those of the class `beyond`."""
    known = {name for name, *_ in rows_of(beyond)} if beyond else set()
    rows = [row for row in rows_of(path) if row[0] not in known]
    lines = [f"| `{name}` | `{default}` | {text.replace('|', chr(92) + '|')} |" for name, default, text in rows]
    return "\n".join(["| setting | default | |", "|---|---|---|", *lines])


def rows_of(path: str) -> list[tuple[str, str, str]]:
    """Name, default and description of every setting of the class at `path`."""
    module, _, name = path.rpartition(".")
    cls: type = getattr(importlib.import_module(module), name)
    return field_rows(cls) if dataclasses.is_dataclass(cls) else argument_rows(cls)


def field_rows(cls: type) -> list[tuple[str, str, str]]:
    """Name, default and description of every field of a dataclass that a user sets."""
    sentences = attribute_sentences(cls)
    fields = [f for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING and f.name != "num_envs"]
    return [(f.name, repr(f.default), sentences[f.name]) for f in fields]


def argument_rows(cls: type) -> list[tuple[str, str, str]]:
    """Name, default and description of every constructor argument along the inheritance that a user sets."""
    rows = {
        parameter.name: (parameter.name, repr(parameter.default), argument_sentences(base)[parameter.name])
        for base, parameter in constructor_settings(cls)
    }
    return list(rows.values())
