"""Snapshots of Python objects: the attributes of policies, extensions and teachers that a function may read or change.

A replay runs no Python code. Comparing snapshots shows that a function changes an attribute, or that a callback changed
one that a recording may depend on.
"""

import inspect
import re
import sys
import types
from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (int, float, str, types.NoneType, complex, bytes, torch.dtype, torch.device, Enum)
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
SKIPPED = (type, types.ModuleType, types.BuiltinFunctionType)
LIBRARIES = {
    "canter", "torch", "numpy", "gymnasium", "mujoco", "warp", "builtins", "collections", "typing", "abc", "functools",
    "logging", "threading",
}  # fmt: skip
MAX_ITEMS = 1000  # of a container; of a longer one the length is compared
MAX_VALUES = 20_000  # of a snapshot; what lies further down is left out


class Same:
    """Compares an object by identity, and keeps it alive so that no other gets its address."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    __hash__ = None  # pyright: ignore[reportAssignmentType]


class Walk:
    """A walk over the objects that are reached from `roots`; `values` by path, and the users' `classes`."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.values: dict[str, Any] = {}
        self.classes: list[type] = []
        self.seen: set[int] = set()
        self.waiting: list[tuple[str, Any, bool]] = [(name, value, True) for name, value in roots.items()]
        roots_seen = {id(value) for value in roots.values()}
        while self.waiting and len(self.values) < MAX_VALUES:
            path, value, is_deep = self.waiting.pop()
            if isinstance(value, PLAIN):
                self.values[path] = value
            elif isinstance(value, Tensor):
                address = value.data_ptr() if value.layout is torch.strided else 0
                self.values[path] = (Same(value), address, value.requires_grad)
            elif id(value) not in self.seen and not isinstance(value, SKIPPED):
                self.seen.add(id(value))
                self._visit(path, value, is_deep, id(value) in roots_seen)

    def _visit(self, path: str, value: Any, is_deep: bool, is_root: bool) -> None:
        kind = type(value)
        if isinstance(value, CONTAINERS):
            if len(value) > MAX_ITEMS or isinstance(value, set | frozenset):
                self.values[path] = len(value)
                return
            items: Iterable[Any] = value.items() if isinstance(value, dict) else enumerate(value)
            self.waiting += [(f"{path}[{key!r}]", part, is_deep) for key, part in items]
            self.values[f"len({path})"] = len(value)
            return
        self.values[path] = Same(value)
        if not is_deep:
            return
        if isinstance(value, types.FunctionType):
            self._add_closure(path, value)
        elif isinstance(value, types.MethodType):
            self.waiting.append((path, value.__self__, True))
        elif isinstance(value, nn.Module) or is_root or not is_library(kind):
            hidden = getattr(kind, "host_state", ())
            for name, part in list(getattr(value, "__dict__", {}).items()):
                if name in ("_parameters", "_buffers", "_modules"):
                    self.waiting += [(f"{path}.{key}", item, True) for key, item in part.items()]
                elif name not in hidden and not (isinstance(part, dict) and not part):  # a module has a dozen
                    self.waiting.append((f"{path}.{name}", part, True))
            for cls in kind.__mro__:
                if not is_library(cls) and cls not in self.classes:
                    self._add_class(cls)

    def _add_class(self, cls: type) -> None:
        """Class attributes, variables that methods close over, and global variables of the class's module."""
        self.classes.append(cls)
        for name, part in vars(cls).items():
            if isinstance(part, types.FunctionType):
                self._add_closure(f"{cls.__name__}.{name}", part)
            elif not name.startswith("__"):
                self.waiting.append((f"{cls.__name__}.{name}", part, False))
        module = sys.modules.get(cls.__module__)
        for name, part in list(vars(module).items()) if module is not None and id(module) not in self.seen else ():
            if isinstance(part, (*PLAIN, dict, list)) and not name.startswith("__"):
                self.waiting.append((f"{cls.__module__}.{name}", part, False))
        self.seen.add(id(module))

    def _add_closure(self, path: str, function: types.FunctionType) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                self.waiting.append((f"{path}.{name}", cell.cell_contents, False))
            except ValueError:  # a variable without a value yet
                continue


def is_library(cls: type) -> bool:
    """Whether a class is not the user's."""
    return cls.__module__.partition(".")[0] in LIBRARIES


def snapshot(roots: Mapping[str, Any]) -> dict[str, Any]:
    """Values by path: plain ones, tensors with their address, and other objects by identity."""
    return Walk(roots).values


def first_change(before: Mapping[str, Any], after: Mapping[str, Any], roots: Mapping[str, Any]) -> str:
    """The first value that differs between two snapshots, with the line that assigns it; "" if none does."""
    if before == after:
        return ""
    absent = Same(None)
    path = next(path for path in (*after, *before) if before.get(path, absent) != after.get(path, absent))
    old, new = before.get(path, absent), after.get(path, absent)
    both = f" ({old!r} to {new!r})" if isinstance(old, PLAIN) and isinstance(new, PLAIN) else ""
    name = re.findall(r"\w+", re.sub(r"\[.*", "", path))[-1]  # of the attribute; items of containers are numbered
    return path + both + find_line(roots, rf"[.]{name}\b")


def find_line(roots: Mapping[str, Any], pattern: str) -> str:
    """ " at FILE:LINE" of the first line in a method of a user's class that matches; assignments and calls first."""
    found: list[tuple[int, str]] = []
    for cls in Walk(roots).classes:
        for method in vars(cls).values():
            if not isinstance(method, types.FunctionType) or method.__name__ == "__init__":
                continue
            try:
                lines, start = inspect.getsourcelines(method)
            except OSError:  # typed at a prompt
                continue
            for number, line in enumerate(lines, start):
                if match := re.search(pattern, line):
                    is_change = re.match(r"(\[.*\])?\s*([-+*/|&@%]|//|\*\*)?=(?!=)|[.]\w+_?\(|\(", line[match.end() :])
                    found.append((0 if is_change else 1, f" at {method.__code__.co_filename}:{number}"))
    return min(found, default=(0, ""))[1]
