"""Documented methods that a user may replace: who replaces one is called, also where canter has a faster way."""

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def is_replaced(owner: Any, base: type, *names: str) -> bool:
    """Whether code outside canter replaces a method of `base`, in a subclass or on the object itself."""
    for name in names:
        method = getattr(owner, name)
        function = getattr(method, "__func__", method)
        if function is not getattr(base, name) and not str(getattr(function, "__module__", "")).startswith("canter."):
            return True
    return False


def call(name: str, fn: Callable[..., T], *args: Any) -> T:
    """`fn(*args)`: stands for `Executor.run` inside a function that is itself run by it."""
    return fn(*args)
