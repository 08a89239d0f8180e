"""Search spaces of `canter sweep`: ranges and choices of settings, from flags or YAML files."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from canter.cli.flags import parse_value, read_values
from canter.cli.options import TrainOptions
from canter.utils.config import unknown_name

# Settings by which a sweep knows its runs, and groups of settings.
NOT_SEARCHED = ("seed", "seeds", "name", "runs_dir", "task", "settings", "policy", "environment")
FORMS = "NAME=LOW..HIGH, NAME=LOW..HIGH/STEP, NAME=log:LOW..HIGH or NAME=A,B,C"


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`: whole ones if `whole`, on a logarithmic scale if `log`."""

    low: float
    high: float
    log: bool = False
    step: float | None = None
    whole: bool = False

    @property
    def ends(self) -> tuple[float, ...]:
        """The values that are most likely to be refused."""
        return self.low, self.high

    def suggest(self, trial: Any, name: str) -> Any:
        """The value of an Optuna trial."""
        if self.whole:
            return trial.suggest_int(name, int(self.low), int(self.high), log=self.log, step=int(self.step or 1))
        return trial.suggest_float(name, self.low, self.high, log=self.log, step=self.step)

    def key(self, value: Any) -> Any:
        """The Optuna parameter that stands for a value of the setting; None if it lies outside."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not self.low <= value <= self.high:
            return None
        steps = (value - self.low) / (self.step or 1)
        return None if self.step is not None and abs(steps - round(steps)) > 1e-9 else value

    def __str__(self) -> str:
        step = "" if self.step is None else f"/{self.step:g}"
        return f"{'log:' if self.log else ''}{self.low:g}..{self.high:g}{step}"


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of some values; Optuna sees a value that is not a number or text as its JSON."""

    values: tuple[Any, ...]

    @property
    def ends(self) -> tuple[Any, ...]:
        """All values, each of which may be refused."""
        return self.values

    def suggest(self, trial: Any, name: str) -> Any:
        """The value of an Optuna trial."""
        return self.value(trial.suggest_categorical(name, self.keys()))

    def keys(self) -> list[Any]:
        """The values as Optuna's parameters."""
        return [value if isinstance(value, bool | int | float | str) else json.dumps(value) for value in self.values]

    def value(self, key: Any) -> Any:
        """The setting that an Optuna parameter stands for."""
        return self.values[self.keys().index(key)]

    def key(self, value: Any) -> Any:
        """The Optuna parameter that stands for a value of the setting; None if it is not a choice."""
        value = list(value) if isinstance(value, tuple) else value
        return self.keys()[self.values.index(value)] if value in self.values else None

    def __str__(self) -> str:
        return ",".join(map(str, self.keys()))


Space = dict[str, Range | Choice]


def parse_space(words: Sequence[str], options: TrainOptions[Any, Any]) -> Space:
    """The search space in `words`: NAME=RANGE, NAME=CHOICES, or YAML files of them."""
    entries: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if equals:
            entries[name] = text
            continue
        if not Path(word).is_file():
            raise ValueError(f"{word!r} is neither a file nor a range of a setting; write {FORMS}")
        content = read_values(word)
        if not isinstance(content, Mapping):
            raise ValueError(f"{word} must be a YAML dict of settings and their ranges or choices")
        entries |= content
    if not entries:
        raise ValueError(f"name the settings to search, such as --space learning_rate=log:1e-4..1e-2; write {FORMS}")
    named = {str(name).replace("-", "_").removeprefix("algorithm."): entry for name, entry in entries.items()}
    if own := [name for name in named if name in NOT_SEARCHED]:
        raise ValueError(f"{own[0]!r} is no setting to search: a sweep names its runs and counts their seeds itself")
    return {name: parse_entry(name, entry, current_value(options, name)) for name, entry in named.items()}


def parse_entry(name: str, entry: Any, current: Any) -> Range | Choice:
    """The range or the choices of one setting, which is `current` without a search."""
    if isinstance(entry, str) and ".." in entry:
        scale, colon, rest = entry.rpartition(":")
        bounds, _, step = rest.partition("/")
        low, _, high = bounds.partition("..")
        entry = {"low": low, "high": high, "log": scale == "log", "step": step or None}
        if colon and scale != "log":
            raise ValueError(f"the scale of {name} must be log, not {scale!r}; write {FORMS}")
    elif isinstance(entry, str):
        entry = parse_value(f"[{entry}]")
    if isinstance(entry, Mapping):
        return parse_range(name, entry, current)
    if not isinstance(entry, list) or len(entry) < 2:
        raise ValueError(f"the search space of {name} needs a range or two choices, not {entry!r}; write {FORMS}")
    return Choice(tuple(entry))


def parse_range(name: str, entry: Mapping[str, Any], current: Any) -> Range:
    """The range in a dict with low and high, and perhaps log and step."""
    if unknown := entry.keys() - {"low", "high", "log", "step"}:
        raise ValueError(f"the range of {name} has low, high, log and step, not {sorted(unknown)[0]!r}")
    numbers = {key: parse_value(str(entry[key])) for key in ("low", "high", "step") if entry.get(key) is not None}
    wrong = [key for key in ("low", "high") if not isinstance(numbers.get(key), int | float)]
    if wrong or not isinstance(numbers.get("step", 1), int | float):
        raise ValueError(f"the range of {name} needs numbers, not {dict(entry)}; write {FORMS}")
    # A setting that is a whole number stays one; 0..1 of any other setting has fractions.
    whole = type(current) is int and all(isinstance(number, int) for number in numbers.values())
    found = Range(numbers["low"], numbers["high"], bool(entry.get("log", False)), numbers.get("step"), whole)
    if found.low >= found.high or (found.log and (found.low <= 0 or found.step)):
        raise ValueError(f"the range {found} of {name} is empty, or logarithmic with a step or numbers not above 0")
    return found


def current_value(options: TrainOptions[Any, Any], name: str) -> Any:
    """The value of a setting without a search."""
    holder, _, field = name.rpartition(".")
    owners = [options.policy] if holder == "policy" else [] if holder else [options.settings, options]
    for owner in owners:
        if hasattr(owner, field) and field in {f.name for f in dataclasses.fields(owner)}:
            return getattr(owner, field)
    known = [f.name for f in dataclasses.fields(options.settings)]
    known += [f"policy.{f.name}" for f in dataclasses.fields(options.policy)]
    raise ValueError(unknown_name("setting", name, known))


def suggest(trial: Any, space: Space) -> dict[str, Any]:
    """The settings that an Optuna trial, or anything with its `suggest_*` functions, tries."""
    return {name: entry.suggest(trial, name) for name, entry in space.items()}


def starting_point(space: Space, options: TrainOptions[Any, Any]) -> dict[str, Any] | None:
    """Optuna's parameters for the settings without a search; None if one lies outside the space."""
    keys = {name: entry.key(current_value(options, name)) for name, entry in space.items()}
    return None if any(key is None for key in keys.values()) else keys


def grid(space: Space) -> dict[str, list[Any]]:
    """Every value of every setting, for samplers that try all combinations."""
    values: dict[str, list[Any]] = {}
    for name, entry in space.items():
        if isinstance(entry, Choice):
            values[name] = entry.keys()
        elif entry.whole or entry.step:
            step = entry.step or 1
            count = int((entry.high - entry.low) / step + 1e-9) + 1
            values[name] = [entry.low + step * index for index in range(count)]
        else:
            raise ValueError(f"a grid needs choices or steps; {name}={entry} has neither: write {name}={entry}/STEP")
    return values


def settings_of(params: Mapping[str, Any], space: Space) -> dict[str, Any]:
    """The settings that Optuna's parameters stand for."""
    entries = {name: space[name] for name in params if name in space}
    return {name: e.value(params[name]) if isinstance(e, Choice) else params[name] for name, e in entries.items()}


def to_flags(settings: Mapping[str, Any]) -> list[str]:
    """The flags of `canter train` that make these settings."""
    flags: list[str] = []
    for name, value in settings.items():
        holder, dot, field = name.replace("_", "-").rpartition(".")
        if isinstance(value, bool):
            flags.append(f"--{holder}{dot}{'' if value else 'no-'}{field}")
        elif isinstance(value, list | tuple):
            flags += [f"--{holder}{dot}{field}", *map(str, value)]
        else:
            text = json.dumps(value) if isinstance(value, Mapping) else value
            flags.append(f"--{holder}{dot}{field}={text}")
    return flags
