"""Settings are dataclass fields, declared once; a name that nobody declared is an error that suggests the nearest."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from typing_extensions import dataclass_transform

T = TypeVar("T", bound=type)
KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,), "int": (int,), "float": (float, int), "str": (str,), "None": (type(None),),
}  # fmt: skip

# What users of ApexRL write, and its spelling here.
OTHER_SPELLINGS = {
    "num_steps": "num_steps_per_env",
    "num_epochs": "num_learning_epochs",
    "batch_size": "num_mini_batches",
    "minibatch_size": "num_mini_batches",
    "clip_range": "clip_param",
    "clip_range_vf": "use_clipped_value_loss",
    "gae_lambda": "lam",
    "vf_coef": "value_loss_coef",
    "ent_coef": "entropy_coef",
    "learning_rate_schedule": "schedule",
    "normalize_observations": "empirical_normalization",
    "optimizer": "optimizer_class_name",
    "min_log_std": "clip_min_std",
    "max_log_std": "clip_max_std",
}


def unknown_setting(owner: str, name: str, known: Iterable[str]) -> TypeError:
    """The error for a setting that `owner` does not have."""
    names = sorted(known)
    other = OTHER_SPELLINGS.get(name)
    near = [other] if other in names else difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names)}"
    return TypeError(f"{owner} has no setting {name!r}; {hint}")


def check_settings(owner: str, given: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """`given` without unknown names that are None; any other unknown name is an error."""
    known = set(known)
    for name, value in given.items():
        if name not in known and value is not None:
            raise unknown_setting(owner, name, known)
    return {name: value for name, value in given.items() if name in known}


def setting_names(cls: type) -> set[str]:
    """Every keyword that the constructors along the class's inheritance accept."""
    names: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith("torch.") or base is object:
            break
        if "__init__" in vars(base):
            parameters = inspect.signature(base.__init__).parameters.values()
            names |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return names - {"self"}


def refuse_unknown(cls: type, unknown: Iterable[str]) -> None:
    """Raise for constructor keywords that no class of the policy takes."""
    for name in unknown:
        raise unknown_setting(cls.__name__, name, setting_names(cls))


def of_kind(owner: str, field: dataclasses.Field[Any], value: Any) -> Any:
    """The value, if it is of the declared kind; numbers may come as text, since YAML reads 1e-4 as that."""
    kinds = {kind.strip() for kind in str(field.type).split("|")}
    if not kinds <= set(KINDS):
        return value
    if isinstance(value, str) and "str" not in kinds and kinds & {"int", "float"}:
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(value, float) and "float" not in kinds and "int" in kinds and value.is_integer():
        value = int(value)
    allowed = tuple(kind for name in kinds for kind in KINDS[name])
    if not isinstance(value, allowed) or (isinstance(value, bool) and "bool" not in kinds):
        raise TypeError(f"{owner}: {field.name} must be {field.type}, got {value!r}")
    return value


@dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field,))
def settings(cls: T) -> T:
    """A keyword-only dataclass whose constructor refuses unknown names with a suggestion."""
    # No repr and no eq: algorithms hold networks, and identity is what equality of two of them means.
    made = dataclasses.dataclass(kw_only=True, eq=False, repr=False)(cls)
    plain_init = made.__init__

    @functools.wraps(plain_init)
    def init(self: Any, *args: Any, **given: Any) -> None:
        owner, known = type(self).__name__, {f.name: f for f in dataclasses.fields(self) if f.init}
        checked = check_settings(owner, given, known)
        plain_init(self, *args, **{name: of_kind(owner, known[name], value) for name, value in checked.items()})

    made.__init__ = init
    return made


def build(registry: Mapping[str, type], class_name: str, given: Mapping[str, Any], *args: Any) -> Any:
    """Construct `registry[class_name]`, strictly: an unknown class or setting is an error that says what exists."""
    if class_name not in registry:
        near = difflib.get_close_matches(class_name, registry, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(registry))}"
        raise KeyError(f"no class named {class_name!r}; {hint}")
    cls = registry[class_name]
    return cls(*args, **check_settings(class_name, given, setting_names(cls)))
