"""Settings are dataclass fields with a range or a list of choices; an unknown name is an error with a suggestion."""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, dataclass_transform

from canter.compat.spellings import OTHER_SPELLINGS

T = TypeVar("T", bound=type)
KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    "None": (type(None),),
    "dict": (Mapping,),
}

NEAR = 0.85  # similarity of two names of which one is taken for a typo of the other

# Short forms, and names of other libraries -> settings, of which the first that exists is suggested.
SHORT_FORMS = {
    "lr": ("learning_rate", "actor_learning_rate"),
    "steps": ("total_timesteps",),
    "timesteps": ("total_timesteps",),
    "n_envs": ("num_envs",),
    "envs": ("num_envs",),
    "n_steps": ("num_steps_per_env", "n_step"),
    "rollout_length": ("num_steps_per_env",),
    "iterations": ("max_iterations", "total_timesteps"),
    "epochs": ("num_learning_epochs",),
    "n_epochs": ("num_learning_epochs",),
    "minibatches": ("num_mini_batches",),
    "num_minibatches": ("num_mini_batches",),
    "clip": ("clip_param",),
    "clip_coef": ("clip_param",),
    "entropy": ("entropy_coef", "init_alpha"),
    "ent_coef": ("entropy_coef", "init_alpha"),
    "lambda": ("lam",),
    "discount": ("gamma",),
    "grad_clip": ("max_grad_norm",),
    "kl": ("desired_kl",),
    "normalize": ("empirical_normalization",),
    "hidden": ("policy.actor_hidden_dims", "actor_hidden_dims"),
    "hidden_dims": ("policy.actor_hidden_dims", "actor_hidden_dims"),
    "hidden_sizes": ("policy.actor_hidden_dims", "actor_hidden_dims"),
    "net_arch": ("policy.actor_hidden_dims", "actor_hidden_dims"),
    "nsteps": ("num_steps_per_env", "n_step"),
    "num_env": ("num_envs",),
    "policy": ("policy.class_name",),
    "activation": ("policy.activation",),
    "logger": ("logger_backend",),
    "log_dir": ("runs_dir",),
    "output": ("runs_dir",),
    "wandb": ("logger_backend",),
    "render": ("film_interval",),
    "gpu": ("device",),
    "cuda": ("device",),
    "preset": ("config",),
    "buffer": ("buffer_size",),
    "warmup": ("learning_starts",),
    "kwargs": ("env_kwargs",),
    "alpha": ("init_alpha",),
    "batch": ("batch_size", "num_mini_batches"),
}


def plain_name(name: str) -> str:
    """A name in lower case and with underscores, as an attribute has it; `--Num-Envs` is num_envs."""
    return name.lower().lstrip("-").replace("-", "_")


def nearest(name: str, known: Iterable[str], cutoff: float = 0.7) -> str | None:
    """The known name that a misspelt one most likely stands for; None if none is similar enough."""
    names = {plain_name(other): other for other in known}
    found = difflib.get_close_matches(plain_name(name), names, n=1, cutoff=cutoff)
    return names[found[0]] if found else None


def unknown_name(kind: str, name: object, known: Iterable[str], owner: str = "", otherwise: str = "") -> str:
    """The message for a name that nothing has: `PPO has no setting 'clip'; did you mean 'clip_param'?`.

    Args:
        kind: The noun for what has names: setting, flag, task, algorithm, ...
        name: The unknown name.
        known: The names that exist. Without a similar one among them the message lists them.
        owner: What has them; left out, the message begins "there is no".
        otherwise: Said instead of the list.
    """
    names = sorted(map(str, known))
    wanted, plain = plain_name(str(name)), {plain_name(other): other for other in names}
    short = wanted.removeprefix("policy.")
    shorter = (name for name, settings in SHORT_FORMS.items() if short in settings)  # torch.optim has lr
    meant = (*SHORT_FORMS.get(short, ()), OTHER_SPELLINGS.get(short), f"policy.{wanted}", *shorter)
    near = next((plain[other] for other in meant if other in plain), None) or nearest(wanted, names)
    there = otherwise or f"{'it has' if owner else 'there are'} {', '.join(names) or 'none'}"
    hint = there if near is None else f"did you mean {near!r}?"
    return f"{f'{owner} has' if owner else 'there is'} no {kind} {name!r}; {hint}"


def check_settings(owner: str, given: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Return `given` without unknown names whose value is None; any other unknown name is an error."""
    known = set(known)
    for name, value in given.items():
        if name not in known and value is not None:
            raise TypeError(unknown_name("setting", name, known, owner))
    return {name: value for name, value in given.items() if name in known}


def setting_names(cls: type) -> set[str]:
    """Keywords accepted by the constructors of a class and its bases, without those that the class replaces."""
    names: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith("torch.") or base is object:
            break
        if "__init__" in vars(base):
            parameters = inspect.signature(base.__init__).parameters.values()
            names |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return names - {"self", *getattr(cls, "replaced_settings", ())}


def refuse_unknown(cls: type, unknown: Iterable[str]) -> None:
    """Raise an error for constructor keywords that no base of the class accepts."""
    for name in unknown:
        raise TypeError(unknown_name("setting", name, setting_names(cls), cls.__name__))


def setting(
    default: Any,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: str | None = None,
    at_most: str | None = None,
    choices: tuple[str, ...] | None = None,
    fixed: bool = False,
    host: bool = False,
    unused_if: Mapping[str, Callable[[Any], bool]] | None = None,
    refused: Mapping[Any, str] | None = None,
) -> Any:
    """Declare a setting with its range or choices.

    Args:
        default: The default value.
        low: Lowest value of a number, or of every number in a tuple.
        above: A number that the value must exceed, instead of `low`.
        high: Highest value; None is any finite number, `math.inf` allows infinity too.
        below: Name of another setting, which must be higher.
        at_most: Name of another setting, which must not be lower.
        choices: The allowed strings.
        fixed: The value cannot change after construction, because something was built from it.
        host: Only host code reads the value, so recorded and captured functions do not depend on it.
        unused_if: Other settings and a function of the value of each; where all are true, this setting does nothing.
        refused: Values within the range that are not allowed, each with the reason and the way out.
    """
    metadata = {"low": low, "above": above, "high": high, "below": below, "at_most": at_most}
    metadata |= {"choices": choices, "fixed": fixed, "host": host, "unused_if": unused_if, "refused": refused}
    return dataclasses.field(default=default, metadata=metadata)


def declared_kinds(field: dataclasses.Field[Any]) -> list[str]:
    """Names of the types a setting may have, whether its module evaluates annotations or not."""
    declared: Any = field.type
    text = declared.__name__ if type(declared) is type else str(declared)
    return [kind.strip() for kind in text.split("|")]


def check_value(owner: str, field: dataclasses.Field[Any], value: Any) -> Any:
    """Return the value converted to the declared type, or raise an error that names the setting and its range.

    A number may be given as text, because YAML reads 1e-4 as text. No number may be NaN.
    """
    kinds = set(declared_kinds(field))
    value = _converted(f"{owner}: {field.name} must be {' | '.join(declared_kinds(field))}", kinds, value)
    choices = field.metadata.get("choices")
    if choices is not None and value is not None and value not in choices:
        raise ValueError(f"{field.name} must be one of {', '.join(choices)}, got {value!r}")
    numbers = value if isinstance(value, (tuple, list)) else (value,)
    has_range = any(field.metadata.get(name) is not None for name in ("low", "above", "high"))
    is_whole = not any("float" in kind or "Any" in kind for kind in kinds)
    if not all(is_in_range(number, field.metadata, has_range, is_whole) for number in numbers):
        kind = "whole number" if is_whole else "number"
        raise ValueError(f"{field.name} must be a {kind} {range_text(field.metadata)}, got {value!r}")
    refused = field.metadata.get("refused")
    if refused and value in refused:
        raise ValueError(f"{field.name} must not be {value!r}: {refused[value]}")
    return value


def _converted(problem: str, kinds: set[str], value: Any) -> Any:
    """The value as one of the declared kinds; a TypeError begins with `problem`."""
    parts = {kind.removeprefix("tuple[").removesuffix(", ...]") for kind in kinds if kind.startswith("tuple[")}
    plain = {"dict" if kind.startswith("dict[") else kind for kind in kinds if not kind.startswith("tuple[")}
    if parts and isinstance(value, (tuple, list)):
        names = {"float" if name == "int" else name for name in parts}  # the range of the setting says what is whole
        allowed = tuple(kind for name in names for kind in KINDS.get(name, (object,)))
        if wrong := [part for part in value if not isinstance(part, allowed) or isinstance(part, bool)]:
            raise TypeError(f"{problem}, got {wrong[0]!r} in {value!r}")
    elif plain <= set(KINDS):
        if isinstance(value, str) and "str" not in plain and plain & {"int", "float"}:
            with contextlib.suppress(ValueError):
                value = float(value)
        if isinstance(value, float) and "float" not in plain and "int" in plain and value.is_integer():
            value = int(value)
        allowed = tuple(kind for name in plain for kind in KINDS[name])
        if not isinstance(value, allowed) or (isinstance(value, bool) and "bool" not in kinds):
            raise TypeError(f"{problem}, got {value!r}")
    return value


def is_in_range(value: Any, limits: Mapping[str, Any], has_range: bool, is_whole: bool) -> bool:
    """Whether a number is within the limits, and finite unless they allow infinity; true for None and other objects."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return True
    low, above, high = (limits.get(name) for name in ("low", "above", "high"))
    if not (math.isfinite(value) or value == high) or (has_range and is_whole and value != int(value)):
        return False
    return (low is None or value >= low) and (above is None or value > above) and (high is None or value <= high)


def range_text(limits: Mapping[str, Any]) -> str:
    """The range of a setting in words."""
    low, above, high = (limits.get(name) for name in ("low", "above", "high"))
    bottom = f"of at least {low:g}" if low is not None else f"above {above:g}" if above is not None else ""
    if high is None or high == math.inf:
        return bottom or "that is finite"
    return f"from {low:g} to {high:g}" if low is not None else f"{bottom} and at most {high:g}".removeprefix(" and ")


def check_order(cfg: Any, name: str, value: Any) -> None:
    """Raise if a setting that must be below another one, or at most as high, would not be."""
    values = {**vars(cfg), name: value}
    for field in dataclasses.fields(cfg):
        for rule, is_fine in (("below", operator.lt), ("at_most", operator.le)):
            other = field.metadata.get(rule)
            pair: Any = (values.get(field.name), values.get(other))
            is_concerned = name in (field.name, other) and all(isinstance(number, (int, float)) for number in pair)
            if other and is_concerned and not is_fine(*pair):
                text = f"{field.name} must be {rule.replace('_', ' ')} {other}"
                raise ValueError(f"{text}, got {pair[0]!r} and {pair[1]!r}")


def unused_settings(cfg: Any) -> dict[str, str]:
    """Settings that were changed from their defaults and do nothing, each with the settings that are the reason."""
    found: dict[str, str] = {}
    for field in dataclasses.fields(cfg):
        declared = field.metadata.get("unused_if") or {}
        rules = {name: is_off for name, is_off in declared.items() if hasattr(cfg, name)}
        is_unused = bool(rules) and all(is_off(getattr(cfg, name)) for name, is_off in rules.items())
        if is_unused and getattr(cfg, field.name) not in defaults_of(type(cfg), field.name):
            found[field.name] = " and ".join(f"{name}={getattr(cfg, name)!r}" for name in rules)
    return found


def defaults_of(cls: type, name: str) -> list[Any]:
    """Defaults of a setting in a class and its bases, the class's own first: a training dict has those of a base."""
    declared = (base.__dict__.get("__dataclass_fields__", {}).get(name) for base in cls.__mro__)
    return [field.default for field in declared if field is not None]


def refuse_near_miss(owner: Any, name: str, known: Iterable[str]) -> None:
    """Raise an AttributeError for a new attribute whose name is a setting's but for a letter or two.

    A setting's name with a number or a word after it is taken for an attribute of the user's own.
    """
    near = None if name.startswith("_") else nearest(name, known, cutoff=NEAR)
    if near is None:
        return
    rest = name.removeprefix(near)
    if not (rest.isdigit() or rest.startswith("_")):
        raise AttributeError(unknown_name("setting", name, [near], type(owner).__name__))


def assign_checked(cfg: Any, name: str, value: Any) -> None:
    """The `__setattr__` of settings: checks and converts the value of a field, in the constructor and later."""
    field = cfg.__dataclass_fields__.get(name)
    if field is not None:
        value = check_value(type(cfg).__name__, field, value)
        check_order(cfg, name, value)
    elif name not in vars(cfg) and not hasattr(type(cfg), name):
        refuse_near_miss(cfg, name, cfg.__dataclass_fields__)
    object.__setattr__(cfg, name, value)


@dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field,))
def settings(cls: T) -> T:
    """Make a keyword-only dataclass that checks names, types, ranges and choices whenever a value is assigned.

    A subclass that changes only a default keeps the declared range, choices and flags.
    """
    made = dataclasses.dataclass(kw_only=True, eq=False, repr=False)(cls)
    for field in dataclasses.fields(made):
        if not field.metadata:
            declared = (base.__dict__.get("__dataclass_fields__", {}).get(field.name) for base in made.__mro__[1:])
            field.metadata = next((d.metadata for d in declared if d is not None and d.metadata), field.metadata)
    plain_init = made.__init__

    @functools.wraps(plain_init)
    def init(self: Any, *args: Any, **given: Any) -> None:
        owner, known = type(self).__name__, [f.name for f in dataclasses.fields(self) if f.init]
        plain_init(self, *args, **check_settings(owner, given, known))

    made.__init__ = init
    made.__setattr__ = assign_checked
    return made


@functools.cache
def combined_settings(name: str, *parts: type) -> type:
    """A settings class with the fields of several; a part that another one already contains is left out."""
    needed = [p for i, p in enumerate(parts) if not any(issubclass(q, p) for j, q in enumerate(parts) if j != i)]
    needed = list(dict.fromkeys(needed)) or [parts[0]]
    return needed[0] if len(needed) == 1 else settings(type(name, tuple(needed), {"__doc__": f"Settings of {name}."}))


def build(registry: Mapping[str, type], class_name: str, given: Mapping[str, Any], *args: Any) -> Any:
    """Construct `registry[class_name]`; an unknown class or setting is an error that lists what exists."""
    if class_name not in registry:
        raise KeyError(unknown_name("class", class_name, registry))
    cls = registry[class_name]
    return cls(*args, **check_settings(class_name, given, setting_names(cls)))
