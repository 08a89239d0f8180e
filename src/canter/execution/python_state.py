"""Snapshots of Python objects: the attributes of policies, extensions and teachers that a function may read or change.

A replay runs no Python code. Comparing snapshots shows that a function changes an attribute, or that a callback changed
one that a recording may depend on. The users' code is read for the names in it: global variables, modules, functions
and the attributes of objects that it mentions are part of a snapshot too.
"""

import functools
import inspect
import operator
import os
import random
import re
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = (int, float, str, types.NoneType, complex, bytes, torch.dtype, torch.device, Enum, np.generic)
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
SKIPPED = (types.BuiltinFunctionType,)
LIBRARIES = {
    "canter",
    "torch",
    "numpy",
    "gymnasium",
    "mujoco",
    "warp",
    "builtins",
    "collections",
    "typing",
    "abc",
    "functools",
    "logging",
    "threading",
}
STREAMS = (random.Random, np.random.Generator, np.random.RandomState)
MAX_BYTES = 1 << 20  # of a NumPy array; a larger one is compared by identity
MAX_ITEMS = 1000  # of a container; of a longer one the length is compared
MAX_VALUES = 20_000  # of a snapshot; what lies further down is left out
TORCH_FOLDER = str(Path(torch.__file__).parent)
STANDARD_FOLDER = sysconfig.get_paths()["stdlib"]
OWN_FOLDER = str(Path(__file__).parents[1])


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
        self.roots = dict(roots)  # their present values
        self.values: dict[str, Any] = {}
        self.mappings: list[Mapping[Any, Any]] = []  # attributes, classes, modules and dicts
        self.partly_read: list[tuple[Mapping[str, Any], Iterable[str]]] = []  # attributes, and the names left out
        self.lists: list[Iterable[Any]] = []
        self.sized: list[Any] = []  # containers of which the length is compared
        self.cells: list[Any] = []  # of closures
        self.chosen: list[tuple[Any, Iterable[str]]] = []  # dicts or objects with slots, and the names that are read
        self.tensors: list[Tensor] = []
        self.readings: list[tuple[Any, Any]] = []  # functions of objects that give values to compare
        self.classes: list[type] = []
        self.functions: list[types.FunctionType] = []
        self.has_iterators = False
        self.codes: set[types.CodeType] = set()  # of the users' functions that were read
        self.names: set[str] = set()  # that this code mentions
        self.namespaces: list[tuple[str, Mapping[str, Any], set[str]]] = []  # of what it mentions; names already read
        kinds = [value if isinstance(value, type) else type(value) for value in roots.values()]
        self.packages = {package(cls.__module__) for kind in kinds for cls in kind.__mro__}  # of the users' classes
        self.seen: set[int] = set()
        self.waiting: list[tuple[str, Any, bool]] = [(name, value, True) for name, value in roots.items()]
        roots_seen = {id(value) for value in roots.values()}
        while (self.waiting or self._add_mentioned()) and len(self.values) < MAX_VALUES:
            path, value, is_deep = self.waiting.pop()
            if isinstance(value, PLAIN):
                self.values[path] = value
            elif isinstance(value, Tensor):
                self.tensors.append(value)
                self.values[path] = (Same(value), address(value), value.requires_grad)
                if hooks := value._backward_hooks:
                    self.waiting.append((f"{path} hooks", list(hooks.values()), True))
            elif isinstance(value, SKIPPED):
                continue
            elif id(value) in self.seen:
                self.values.setdefault(path, Same(value))
            else:
                self.seen.add(id(value))
                self._visit(path, value, is_deep, id(value) in roots_seen)
        self.chosen += [(mapping, names) for _, mapping, names in self.namespaces]
        if not self.names.isdisjoint({"environ", "getenv"}):
            self.values["os.environ"] = dict(os.environ)
            self.readings.append((dict, os.environ))
        self.contents = self._read()

    def is_current(self, roots: Mapping[str, Any]) -> bool:
        """Whether a new walk would surely find the same values; much faster than that walk."""
        if len(roots) != len(self.roots) or not all(map(operator.is_, roots.values(), self.roots.values())):
            return False
        numbers, objects = self._read()
        return numbers == self.contents[0] and all(map(operator.is_, objects, self.contents[1]))

    def _read(self) -> tuple[list[Any], list[Any]]:
        """What the visited objects hold, one level deep: values that are compared, and objects, by identity."""
        numbers = [*map(len, chain(self.mappings, self.lists, self.sized))]  # pyright: ignore[reportArgumentType]
        numbers += [(address(part), part.requires_grad, *(part._backward_hooks or ())) for part in self.tensors]
        numbers += [read(value) for read, value in self.readings]
        objects = [*chain.from_iterable(chain(self.mappings, map(operator.methodcaller("values"), self.mappings)))]
        objects += chain.from_iterable(self.lists)
        objects += [EMPTY if cell == EMPTY else cell.cell_contents for cell in self.cells]
        objects += [value for part, names in self.partly_read for name, value in part.items() if name not in names]
        objects += [part.get(name) for part, names in self.chosen for name in names]
        return [len(objects), *numbers], objects

    def _visit(self, path: str, value: Any, is_deep: bool, is_root: bool) -> None:
        if isinstance(value, CONTAINERS):
            self._add_items(path, value, is_deep)
            return
        self.values[path] = Same(value)
        kind = type(value)
        for kinds, add in SPECIAL.items():
            if isinstance(value, kinds):
                add(self, path, value)
                return
        is_module = isinstance(value, nn.Module)
        if is_module or (is_deep and is_root) or not is_library(kind):
            hidden = getattr(kind, "host_state", ())
            if hidden is not None and (is_deep or is_module):
                self._add_attributes(path, value, hidden)
            elif hidden is not None:
                self.namespaces.append((path, Attributes(value), set()))
            if is_deep:
                self.packages |= {package(cls.__module__) for cls in kind.__mro__}
            self._add_class(path, kind)

    def _add_items(self, path: str, value: Any, is_deep: bool) -> None:
        self.values[f"len({path})"] = len(value)
        if len(value) > MAX_ITEMS:
            self.sized.append(value)
        elif isinstance(value, set | frozenset):
            self.values[path] = members(value)
            self.readings.append((members, value))
        else:
            (self.mappings if isinstance(value, dict) else self.lists).append(value)
            items: Iterable[Any] = value.items() if isinstance(value, dict) else enumerate(value)
            self.waiting += [(f"{path}[{key!r}]", part, is_deep) for key, part in items]

    def _add_attributes(self, path: str, value: Any, hidden: Iterable[str]) -> None:
        attributes = getattr(value, "__dict__", {})
        self.partly_read.append((attributes, hidden)) if hidden else self.mappings.append(attributes)
        for name, part in list(attributes.items()):
            if name in ("_parameters", "_buffers", "_modules"):
                is_dict = isinstance(part, dict)  # a scripted module has wrappers that make new lists
                self.mappings.append(part) if is_dict else self.readings.append((addresses, part))
                self.waiting += [(f"{path}.{key}", item, True) for key, item in part.items()]
            elif name not in hidden and isinstance(part, dict) and not part:  # a module has a dozen
                self.sized.append(part)
            elif name not in hidden:
                self.waiting.append((f"{path}.{name}", part, True))
        if slots := slots_of(type(value)):
            self.chosen.append((Attributes(value), slots))
            kept = {name: getattr(value, name) for name in slots if hasattr(value, name)}
            self.waiting += [(f"{path}.{name}", part, True) for name, part in kept.items()]

    def _add_class(self, path: str, kind: type) -> None:
        """Attributes of a user's class and of its bases, and what the methods mention."""
        for cls in kind.__mro__:
            # Classes of the standard library keep books of their own, such as those of all finalizers.
            if is_library(cls) or package(cls.__module__) in sys.stdlib_module_names or cls in self.classes:
                continue
            self.classes.append(cls)
            self.mappings.append(vars(cls))
            for name, part in vars(cls).items():
                functions = [f for f in functions_of(part) if isinstance(f, types.FunctionType)]
                for function in functions:
                    if name != "__init__":  # which has run already
                        self._add_code(f"{cls.__name__}.{name}", function)
                if not functions and not name.startswith("__"):
                    self.waiting.append((f"{cls.__name__}.{name}", part, False))

    def _add_code(self, path: str, function: types.FunctionType) -> None:
        """What a function closes over, its defaults, and the global variables that a user's function mentions."""
        self._add_closure(path, function)
        code, module = function.__code__, function.__globals__.get("__name__") or ""
        if code in self.codes or not self._is_followed(code.co_filename, module):
            return
        self.codes.add(code)
        self.mappings.append(vars(function))
        self.waiting += [(f"{path}.{name}", part, False) for name, part in vars(function).items()]
        names = mentioned_names(code)
        self.names |= names
        used = names & function.__globals__.keys()
        self.chosen.append((function.__globals__, used))
        self.waiting += [(f"{module}.{name}", function.__globals__[name], False) for name in used]
        defaults = {**dict(enumerate(function.__defaults__ or ())), **(function.__kwdefaults__ or {})}
        self.waiting += [(f"{path}.default[{key!r}]", part, False) for key, part in defaults.items()]

    def _is_followed(self, file: str, module: str) -> bool:
        """Whether a function or module is the user's; an installed package is, if it has a class of the user's."""
        is_installed = "site-packages" in file or "dist-packages" in file
        return is_user_file(file) and (not is_installed or package(module) in self.packages)

    def _add_module(self, path: str, module: types.ModuleType) -> None:
        if self._is_followed(getattr(module, "__file__", None) or "<frozen", module.__name__):
            self.namespaces.append((module.__name__, vars(module), set()))

    def _add_mentioned(self) -> bool:
        """Add the attributes of objects and modules whose names are mentioned; whether there are more."""
        for path, attributes, known in self.namespaces:
            found = (self.names & attributes.keys()) - known
            known |= found
            self.waiting += [(f"{path}.{name}", attributes[name], False) for name in found]
        return bool(self.waiting)

    def _add_closure(self, path: str, function: types.FunctionType) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.cells.append(cell)
            if cell != EMPTY:
                self.waiting.append((f"{path}.{name}", cell.cell_contents, False))

    def _add_function(self, path: str, value: types.FunctionType) -> None:
        self._add_code(path, value)
        if is_users(value):
            self.functions.append(inspect.unwrap(value))  # pyright: ignore[reportArgumentType]

    def _add_partial(self, path: str, value: functools.partial) -> None:
        parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
        self.waiting += [(f"{path}.{name}", part, False) for name, part in parts.items()]

    def _add_method(self, path: str, value: types.MethodType) -> None:
        self.waiting.append((f"{path}.__self__", value.__self__, True))

    def _add_generator(self, path: str, value: types.GeneratorType) -> None:
        frame = value.gi_frame
        self.values[path] = position(value)
        self.readings.append((position, value))
        self.waiting += [(f"{path}.{name}", part, False) for name, part in (frame.f_locals if frame else {}).items()]

    def _add_iterator(self, path: str, value: Any) -> None:
        self.has_iterators = True  # their position cannot be seen

    def _add_optimizer(self, path: str, value: torch.optim.Optimizer) -> None:
        self.waiting.append((f"{path}.param_groups", value.param_groups, True))
        self.chosen.append((vars(value), ("param_groups", "state")))  # loading a state replaces both
        self.mappings.append(value.state)
        self.waiting += [(f"{path}.state[{i}]", part, True) for i, part in enumerate(value.state.values())]

    def _add_stream(self, path: str, value: Any) -> None:
        self.values[path] = stream_state(value)
        self.readings.append((stream_state, value))

    def _add_array(self, path: str, value: np.ndarray) -> None:
        if value.nbytes <= MAX_BYTES:
            self.values[path] = value.tobytes()
            self.readings.append((np.ndarray.tobytes, value))


class Attributes(Mapping[str, Any]):
    """The attributes that an object has now, by name; none is computed."""

    def __init__(self, value: Any) -> None:
        self.own, self.value = getattr(value, "__dict__", {}), value
        self.slots = slots_of(type(value))

    def __getitem__(self, name: str) -> Any:
        return self.own[name] if name in self.own else getattr(self.value, name, None)

    def __iter__(self) -> Iterator[str]:
        return iter((*self.own, *self.slots))

    def __len__(self) -> int:
        return len(self.own) + len(self.slots)


EMPTY = types.CellType()  # of a variable without a value yet
SPECIAL: dict[Any, Any] = {
    type: Walk._add_class,
    types.ModuleType: Walk._add_module,
    functools.partial: Walk._add_partial,
    types.FunctionType: Walk._add_function,
    types.MethodType: Walk._add_method,
    types.GeneratorType: Walk._add_generator,
    torch.optim.Optimizer: Walk._add_optimizer,
    STREAMS: Walk._add_stream,
    np.ndarray: Walk._add_array,
    Iterator: Walk._add_iterator,
}


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is dense and strided, so that it has an address."""
    return tensor.layout is torch.strided and not tensor.is_nested


def address(tensor: Tensor) -> int:
    """Address of a tensor's first value; 0 if it has none."""
    return tensor.data_ptr() if is_plain(tensor) else 0


def addresses(tensors: Mapping[str, Any]) -> list[int]:
    """Addresses of the tensors among the values."""
    return [address(value) for value in tensors.values() if isinstance(value, Tensor)]


def members(items: Iterable[Any]) -> set[Any]:
    """Items of a set, objects by their id."""
    return {item if isinstance(item, PLAIN) else id(item) for item in items}


def position(generator: types.GeneratorType) -> int | None:
    """Number of the instruction at which a generator waits; None if it has ended."""
    return generator.gi_frame and generator.gi_frame.f_lasti


def package(module: str) -> str:
    """The first part of a module's name."""
    return module.partition(".")[0]


def is_library(cls: type) -> bool:
    """Whether a class is not the user's."""
    return package(cls.__module__) in LIBRARIES


def is_users(fn: Any) -> bool:
    """Whether a function is the user's."""
    return isinstance(fn, types.FunctionType) and package(fn.__module__ or "") not in LIBRARIES


def is_user_file(name: str) -> bool:
    """Whether a file belongs neither to canter, nor to torch, nor to Python's standard library."""
    is_standard = name.startswith(STANDARD_FOLDER) and "site-packages" not in name
    return not is_standard and not name.startswith((OWN_FOLDER, TORCH_FOLDER, "<frozen"))


@functools.cache
def mentioned_names(code: types.CodeType) -> frozenset[str]:
    """The names of global variables and attributes in a function, and in the functions inside it."""
    inner = (mentioned_names(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return frozenset(code.co_names).union(*inner)


@functools.cache
def slots_of(cls: type) -> tuple[str, ...]:
    """The attributes that objects of a user's class keep outside their `__dict__`."""
    declared = [vars(base).get("__slots__", ()) for base in cls.__mro__ if not is_library(base)]
    names = chain.from_iterable((part,) if isinstance(part, str) else part for part in declared)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def functions_of(part: Any) -> Iterable[Any]:
    """The functions behind an entry of a class: a method, or those of a property or a decorator."""
    if isinstance(part, property):
        return (part.fget, part.fset)
    return (getattr(part, "__func__", None) or getattr(part, "func", None) or part,)


def stream_state(stream: Any) -> str:
    """State of a random stream of Python or NumPy."""
    if isinstance(stream, random.Random):
        return repr(stream.getstate())
    if isinstance(stream, np.random.Generator):
        return repr(stream.bit_generator.state)
    kind, keys, *rest = stream.get_state(legacy=True)
    return repr((kind, np.asarray(keys).tobytes(), *rest))


def first_change(before: Mapping[str, Any], after: Mapping[str, Any], roots: Mapping[str, Any]) -> str:
    """The first value that differs between two snapshots, with the line that assigns it; "" if none does."""
    if before == after:
        return ""
    absent = Same(None)
    path = next(path for path in (*after, *before) if before.get(path, absent) != after.get(path, absent))
    old, new = before.get(path, absent), after.get(path, absent)
    is_short = all(isinstance(value, PLAIN) and len(repr(value)) < 40 for value in (old, new))
    both = f" ({old!r} to {new!r})" if is_short else ""
    names = re.findall(r"[A-Za-z_]\w*", re.sub(r"\[.*?\]", "", path))  # items of containers have no names
    return path + both + find_line(roots, names[::-1])


def find_line(roots: Mapping[str, Any], names: Iterable[str]) -> str:
    """The place of the line in user code that changes, or at least mentions, the first name found: " at FILE:LINE"."""
    walk = Walk(roots)
    methods = [m for cls in walk.classes for m in vars(cls).values() if isinstance(m, types.FunctionType)]
    places: list[tuple[Any, ...]] = []
    for function in (*methods, *walk.functions):
        try:
            lines, start = inspect.getsourcelines(function)
        except OSError:  # typed at a prompt
            continue
        file = function.__code__.co_filename
        places.append((2, len(places), f" at {file}:{function.__code__.co_firstlineno}"))
        for number, line in enumerate(lines, start):
            for rank, name in enumerate(names):
                if match := re.search(rf"\b{name}\b", line):
                    is_change = re.match(r"(\[.*\])?\s*([-+*/|&@%]|//|\*\*)?=(?!=)|[.]\w+\(|\(", line[match.end() :])
                    is_late = function.__name__ == "__init__" or not is_change
                    places.append((int(is_late), rank, f" at {file}:{number}"))
    return min(places, default=(0, 0, ""))[2]
