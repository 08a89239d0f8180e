"""Tables of settings in the documentation, made from the classes that declare them.

`<!-- settings: package.module.Class -->` in a page becomes a table of the class's fields, or of its constructor's
arguments, with their sentences.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import textwrap
from typing import Any

from canter.cli.options import FROM_ENV, argument_sentences

MARK = re.compile(r"<!-- settings: ([\w.]+) -->")


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """MkDocs calls this with the text of every page."""
    return MARK.sub(lambda match: table(match[1]), markdown)


def table(path: str) -> str:
    """The settings of a class as a Markdown table."""
    module, _, name = path.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    rows = field_rows(cls) if dataclasses.is_dataclass(cls) else argument_rows(cls)
    lines = [f"| `{name}` | `{default}` | {text.replace('|', chr(92) + '|')} |" for name, default, text in rows]
    return "\n".join(["| setting | default | |", "|---|---|---|", *lines])


def field_rows(cls: type) -> list[tuple[str, str, str]]:
    """Name, default and sentence of every field of a dataclass that a user sets."""
    sentences = attribute_sentences(cls)
    fields = [f for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING and f.name != "num_envs"]
    return [(f.name, repr(f.default), sentences[f.name]) for f in fields]


def attribute_sentences(cls: type) -> dict[str, str]:
    """The string that follows each annotated attribute in a class's source, and in that of its parents."""
    found: dict[str, str] = {}
    for base in reversed([base for base in cls.__mro__ if dataclasses.is_dataclass(base)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        found |= {
            field.target.id: " ".join(text.value.value.split())  # type: ignore[attr-defined]
            for field, text in itertools.pairwise(body)
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        }
    return found


def argument_rows(cls: type) -> list[tuple[str, str, str]]:
    """Name, default and sentence of every constructor argument along the inheritance that a user sets."""
    rows = []
    for base in cls.__mro__:
        if base.__module__.startswith("torch.") or "__init__" not in vars(base):
            continue
        sentences = argument_sentences(base)
        for name, parameter in inspect.signature(base.__init__).parameters.items():
            if parameter.default is not parameter.empty and name not in FROM_ENV:
                rows.append((name, repr(parameter.default), sentences[name]))
    return rows
