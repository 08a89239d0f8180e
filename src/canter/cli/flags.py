"""Parsing of flags, for every command: numbers with exponents, YAML values, and the checks that commands share."""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
import yaml

from canter.cli.errors import UserError
from canter.utils.config import nearest
from canter.utils.reading import parse_yaml, read_limited

EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+$")
NUMBERS = re.compile(r"\d+(,\d+)+")  # 64,64 is as good as 64 64
FLAG = re.compile(r"(?:^. |, )--([\w.-]+)", re.MULTILINE)  # in a help text
MANY = re.compile(r"\[?(\S+) \[\1 \.\.\.\]\]")  # tyro's [INT [INT ...]]

TaskName = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TASK")]
TeacherPath = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="TEACHER")]
RunPath = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
RunPaths = Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN...", help_behavior_hint="")]


def plain_list(loader: Any, node: Any) -> list[Any]:
    """The list in place of a tuple."""
    return loader.construct_sequence(node, deep=True)


class YamlLoader(yaml.SafeLoader):
    """YAML in which numbers may have an exponent and no decimal point."""


YamlLoader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("+-0123456789"))
YamlLoader.add_constructor("tag:yaml.org,2002:python/tuple", plain_list)  # mjlab and Isaac Lab write them


def parse(
    flags: Any,
    args: Sequence[str],
    prog: str,
    default: Any = None,
    return_unknown_args: bool = False,
    description: str | None = None,
) -> Any:
    """Parse `args` into a dataclass, or call a function with them; `default` is an instance with the defaults.

    An unknown flag is a `UserError` with a suggestion, a bad value ends the program with exit code 2. With
    `return_unknown_args` the result is a pair, and the unknown flags are its second part.
    """
    words = [part for word in args for part in (word.split(",") if NUMBERS.fullmatch(word) else [word])]
    registry = tyro.constructors.ConstructorRegistry()
    for rule in (yaml_rule, int_rule, ReadableRule()):
        registry.primitive_rule(rule)
    more = {} if default is None else {"default": default}
    cli = functools.partial(tyro.cli, flags, prog=prog, description=description, **more)
    with registry:
        if {"-h", "--help"}.isdisjoint(words):
            with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
                return cli(args=words, return_unknown_args=return_unknown_args)
            if return_unknown_args and words[0].startswith("-"):
                raise UserError(f"the first word is the task: {prog} TASK {words[0]} ...")
            if not return_unknown_args:
                refuse_unknown(words, cli, prog)
        return cli(args=words, return_unknown_args=return_unknown_args)  # prints the help, or the value that is wrong


def refuse_unknown(words: Sequence[str], cli: Callable[..., Any], prog: str) -> None:
    """Raise a UserError for the first flag in `words` that the help of `cli` does not have."""
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        cli(args=["--help"])
    known = ["help", *FLAG.findall(text.getvalue())]
    for flag in (word[2:].partition("=")[0].replace("_", "-") for word in words if word.startswith("--")):
        if flag and flag not in known:
            near = nearest(flag, known, cutoff=0.7)
            hint = f"did you mean --{near}?" if near else f"`{prog} --help` lists the flags"
            raise UserError(f"there is no flag --{flag}; {hint}")


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


class ReadableRule:
    """Show optional values and lists in the help as INT|None and INT..., tyro's {None}|INT and [INT [INT ...]].

    The default of an empty list is "none".
    """

    def __init__(self) -> None:
        self.inner: list[Any] = []  # types that tyro's own rules are asked about

    def __call__(self, info: Any) -> Any:
        """What tyro does with a type, with a readable name of its values."""
        if any(asked is info for asked in self.inner):
            return None
        self.inner.append(info)
        spec = tyro.constructors.ConstructorRegistry.get_primitive_spec(info)
        self.inner.pop()
        if not isinstance(spec, tyro.constructors.PrimitiveConstructorSpec):
            return None
        return dataclasses.replace(
            spec,
            metavar=readable_metavar(spec.metavar),
            str_from_instance=lambda value: spec.str_from_instance(value) or ["none"],
        )


def readable_metavar(text: str) -> str:
    """`text` without brackets within brackets, and with None last."""
    text = MANY.sub(r"\1...", text)
    kinds = text.replace("{None}|", "").split("|")
    kinds = [kind.removeprefix("{").removesuffix("}") if kind.endswith("...}") else kind for kind in kinds]
    kinds = [kind for kind in kinds if f"{kind}..." not in kinds]
    return "|".join([*kinds, "None"] if text.startswith("{None}|") else kinds)


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
