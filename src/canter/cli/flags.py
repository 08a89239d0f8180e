"""Parsing of flags, for every command: numbers with exponents, YAML values, and the checks that commands share."""

import functools
import importlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
import yaml

from canter.cli.errors import UserError
from canter.utils.reading import parse_yaml, read_limited

EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+$")
NUMBERS = re.compile(r"\d+(,\d+)+")  # 64,64 is as good as 64 64

TaskName = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TASK")]
RunPath = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
RunPaths = Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN...")]


class YamlLoader(yaml.SafeLoader):
    """YAML in which numbers may have an exponent and no decimal point."""


YamlLoader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("+-0123456789"))


def parse(flags: Any, args: Sequence[str], prog: str, default: Any = None, return_unknown_args: bool = False) -> Any:
    """Parse `args` into a dataclass, or call a function with them; `default` is an instance with the defaults.

    An unknown flag or bad value ends the program with exit code 2 and a suggestion; with `return_unknown_args` the
    result is a pair, and the unknown flags are its second part.
    """
    words = [part for word in args for part in (word.split(",") if NUMBERS.fullmatch(word) else [word])]
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(yaml_rule)
    registry.primitive_rule(int_rule)
    defaults = {} if default is None else {"default": default}
    with registry:
        return tyro.cli(flags, args=words, prog=prog, return_unknown_args=return_unknown_args, **defaults)


def call(function: Callable[..., int | None] | str, args: Sequence[str], prog: str) -> int | None:
    """Call a function, or "module:function", with the flags in `args`; a function of `args` gets the words."""
    command: Any = function
    if isinstance(function, str):
        module, _, name = function.partition(":")
        command = getattr(importlib.import_module(module), name)
    if list(inspect.signature(command).parameters) == ["args"]:
        return command(args)

    @functools.wraps(command)
    def bind(*values: Any, **flags: Any) -> Any:
        return functools.partial(command, *values, **flags)

    return parse(bind, args, prog)()


def at_least(lowest: int, **values: Any) -> None:
    """Refuse whole numbers, or tuples of them, below the lowest allowed."""
    for name, value in values.items():
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and number < lowest:
                raise UserError(f"--{name.replace('_', '-')} must be at least {lowest}, got {number}")


def given(args: Sequence[str], flag: str) -> str | None:
    """The value of a flag on which other flags depend, read before those are known."""
    for index, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name.replace("_", "-") == flag:
            return value if equals else next(iter(args[index + 1 :]), None)
    return None


def int_rule(info: Any) -> Any:
    """Read whole numbers as 1000000, 1_000_000 or 1e6."""
    if info.type is not int:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: whole_number(words[0]),
        is_instance=lambda value: type(value) is int,
        str_from_instance=lambda value: [str(value)],
    )


def whole_number(text: str) -> int:
    """The whole number that a text is."""
    if EXPONENT.match(text) and float(text).is_integer():
        return int(float(text))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is no whole number") from None


def yaml_rule(info: Any) -> Any:
    """Read dicts and untyped values as YAML."""
    is_union = isinstance(info.type, types.UnionType) or typing.get_origin(info.type) is typing.Union
    kinds = [kind for kind in (typing.get_args(info.type) if is_union else (info.type,)) if kind is not type(None)]
    if len(kinds) != 1 or not (kinds[0] is Any or typing.get_origin(kinds[0]) in (dict, Mapping)):
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="YAML",
        instance_from_str=lambda words: None if words[0] == "None" else parse_value(words[0]),  # as of other flags
        is_instance=lambda value: True,
        str_from_instance=lambda value: [yaml.safe_dump(value, default_flow_style=True).split("\n...")[0].strip()],
    )


def read_values(path: str | Path) -> Any:
    """The content of a YAML or JSON file, in which 1e-3 is a number; an error names the file."""
    try:
        return parse_yaml(read_limited(path).decode("utf-8"), YamlLoader)
    except (yaml.YAMLError, ValueError) as error:
        reason = str(error).replace('in "<unicode string>", ', "at ")
        raise ValueError(f"{path} is not YAML: {reason}; correct the file") from error


def parse_value(text: str) -> Any:
    """A YAML value, in which 1e-3 is a number (YAML 1.1 reads it as text)."""
    try:
        return parse_yaml(text, YamlLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{text!r} is not YAML: {error}") from error
