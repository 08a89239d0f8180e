"""Arguments under the names that other documents give them."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def also_named(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function take arguments under other names too: `also_named(observations="obs")`.

    An argument under both names is a TypeError, as is any name that the function does not know.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            given: dict[str, Any] = kwargs
            for other, own in names.items() if given else ():
                if other in given:
                    if own in given:
                        raise TypeError(f"{function.__qualname__}() got {own!r} twice, also as {other!r}")
                    given[own] = given.pop(other)
            return function(*args, **kwargs)

        return call

    return decorate
