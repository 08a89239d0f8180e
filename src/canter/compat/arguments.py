"""Arguments in the order and under the names that other documents give them, and names where those import them."""

import functools
import importlib
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


def documented(*order: str, **names: str) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Let a method take its arguments in a documented order, and under documented names: `observations="obs"`.

    An argument that is given twice is a TypeError, as is any that the method does not know.
    """

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(method)
        def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
            if len(args) > len(order) > 0:
                raise TypeError(f"{method.__qualname__}() takes at most {len(order)} positional arguments")
            given: dict[str, Any] = kwargs
            found = list(zip(order, args, strict=False))
            found += [(own, given.pop(other)) for other, own in names.items() if other in given]
            for name, value in found:
                if name in given:
                    raise TypeError(f"{method.__qualname__}() got multiple values for argument {name!r}")
                given[name] = value
            return method(self, *args[len(order) :], **given)  # pyright: ignore[reportCallIssue]

        return call

    return decorate


def also_here(**modules: str) -> Callable[[str], Any]:
    """A module's `__getattr__` for names that documents import from it and that stand in another module."""

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"there is no {name!r} here")
        return getattr(importlib.import_module(modules[name]), name)

    return find
