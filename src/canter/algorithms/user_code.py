"""What can be seen of a user's code: whether it takes part in training, and the attributes that it may change."""

import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import nn

LIBRARIES = {"canter", "torch", "numpy", "gymnasium", *sys.stdlib_module_names} - {"__main__"}
NUMBERS = (int, float, complex, bool, str, bytes, type(None))
MAX_ITEMS = 32  # of a container that are compared one by one


def package(thing: Any) -> str:
    """The name of the package that a class or function comes from."""
    return (getattr(thing, "__module__", None) or "").partition(".")[0]


def is_users(thing: Any) -> bool:
    """Whether a function, or the class of an object, comes from outside canter and torch."""
    owner = thing if isinstance(thing, (type, types.FunctionType, types.MethodType)) else type(thing)
    return package(owner) not in LIBRARIES


def inner_modules(owners: Iterable[Any]) -> Iterator[Any]:
    """Objects, the modules inside them, and the modules in their attributes and in lists of these, each once."""
    seen: set[int] = set()
    waiting = list(owners)
    for owner in waiting:
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        yield owner
        if isinstance(owner, nn.Module):
            waiting.extend(owner.children())
            continue
        for value in vars(owner).values():
            parts = (
                value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else [value]
            )
            waiting.extend(part for part in parts if isinstance(part, nn.Module))


def has_user_code(owners: Iterable[Any]) -> bool:
    """Whether a class, an assigned or replaced method, a hook or an attribute's class is a user's."""
    classes: set[type] = set()
    for owner in inner_modules(owners):
        classes.update(type(owner).__mro__)
        if is_users(owner) or any(map(has_users_value, vars(owner).values())):
            return True
        if isinstance(owner, nn.Module) and any(p._backward_hooks for p in owner.parameters(recurse=False)):
            return True
    return any(isinstance(f, types.FunctionType) and is_users(f) for cls in classes for f in vars(cls).values())


def has_users_value(value: Any) -> bool:
    """Whether the value of an attribute is a user's, or a table of hooks with one."""
    return is_users(value) or (isinstance(value, dict) and any(map(is_users, value.values())))


def attributes(owners: Iterable[Any], left_out: Mapping[int, Iterable[str]]) -> dict[tuple[str, int], Any]:
    """Public attributes of objects and of the modules inside them, by name and number of the object.

    Of canter's objects these are numbers and strings, of users' objects all. `left_out` has the names of attributes
    that are not looked at, by the id of their owner.
    """
    found: dict[tuple[str, int], Any] = {}
    for number, owner in enumerate(inner_modules(owners)):
        kind, is_whole, ignored = type(owner).__name__, is_users(owner), left_out.get(id(owner), ())
        for name, value in vars(owner).items():
            if name[0] != "_" and name not in ignored and (is_whole or isinstance(value, NUMBERS)):
                found[f"{kind}.{name}", number] = comparable(value)
        if is_whole and isinstance(owner, nn.Module):
            found |= {(f"{kind}.{name}", number): id(value) for name, value in owner._buffers.items()}
    return found


def comparable(value: Any) -> Any:
    """A number or string itself, the items of a short container, a user's object's attributes, or a stream's state.

    Anything else is told from another object by its id.
    """
    if isinstance(value, dict) and len(value) <= MAX_ITEMS:
        return [(name, plain(item)) for name, item in value.items()]
    if isinstance(value, (list, tuple, deque, set)) and len(value) <= MAX_ITEMS:
        return [plain(item) for item in value]
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    own = getattr(value, "__dict__", {})
    if is_users(value) and not isinstance(value, (nn.Module, type)) and len(own) <= MAX_ITEMS:
        return id(value), [(name, plain(item)) for name, item in own.items()]
    return plain(value)


def plain(value: Any) -> Any:
    """A number or string itself, or what tells another object from this one."""
    if isinstance(value, NUMBERS):
        return value
    return id(value), len(value) if isinstance(value, (list, tuple, deque, set, dict)) else 0
