"""Checkpoints of the libraries people come from, in our layout.

| rsl_rl    | weights                                  | normalisers                                     |
|-----------|------------------------------------------|-------------------------------------------------|
| 1.x, 2.x  | model_state_dict                         | obs_norm_state_dict, privileged_obs_norm_...    |
| 3.x       | model_state_dict                         | in it, actor_obs_normalizer and critic_...      |
| 4.x, 5.x  | actor_state_dict, critic_state_dict      | in each, obs_normalizer                         |

A checkpoint of its Distillation has a student and a teacher instead: student_state_dict and teacher_state_dict in 4.x
and 5.x, prefixes of model_state_dict before.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from canter.utils.config import setting_names

NORMALIZERS = {
    "obs_norm_state_dict": "obs_normalizer",
    "critic_obs_norm_state_dict": "critic_obs_normalizer",
    "privileged_obs_norm_state_dict": "critic_obs_normalizer",
}
# Prefixes of a model of rsl_rl 4.x and 5.x -> ours, for the actor and for the critic.
MODELS = {
    "actor_state_dict": {
        "mlp": "actor",
        "rnn": "memory_a",
        "obs_normalizer": "obs_normalizer",
        "distribution.std_param": "std",
        "distribution.log_std_param": "log_std",
        "std": "std",
        "log_std": "log_std",
    },
    "critic_state_dict": {"mlp": "critic", "rnn": "memory_c", "obs_normalizer": "critic_obs_normalizer"},
}
# Prefixes of the policy of a distillation in rsl_rl 2.x and 3.x -> ours.
DISTILLED = {
    "student": {"student": "actor", "memory_s": "memory_a", "student_obs_normalizer": "obs_normalizer"},
    "teacher": {"teacher": "actor", "memory_t": "memory_a", "teacher_obs_normalizer": "obs_normalizer"},
}
PARTS = ("actor", "critic", "student", "teacher", "optimizer", "iteration", "rnd")
# Order in which our policies, and so their optimizers, have their parameters.
ORDER = ("std", "log_std", "actor", "critic", "memory_a", "memory_c")


class LoadOptions(NamedTuple):
    """What of a checkpoint is loaded, and where to."""

    load_optimizer: bool
    map_location: Any
    load_cfg: Mapping[str, bool] | None
    strict: bool


def load_options(
    load_optimizer: Any, map_location: Any, others: Sequence[Any], load_cfg: Mapping[str, bool] | None, strict: bool
) -> LoadOptions:
    """The arguments of a runner's `load`.

    By position they come as in rsl_rl 5.x (path, load_cfg, strict, map_location) or 3.x (path, load_optimizer,
    map_location); a student counts as the actor and the critic.
    """
    if isinstance(load_optimizer, Mapping):
        load_optimizer, load_cfg = True, load_optimizer
    if isinstance(map_location, bool):
        strict, map_location, others = map_location, others[0] if others else None, others[1:]
    if others:
        raise TypeError(f"load takes path, load_cfg, strict and map_location; {others[0]!r} is one too many")
    if unknown := [name for name in load_cfg or () if name not in PARTS]:
        raise ValueError(f"load_cfg has no part {unknown[0]!r}; parts of a checkpoint are {', '.join(PARTS)}")
    if load_cfg is not None and "student" in load_cfg:
        load_cfg = {**load_cfg, "actor": load_cfg["student"], "critic": load_cfg["student"]}
    return LoadOptions(load_optimizer is not False, map_location, load_cfg, strict)


def known_settings(cls: type, settings: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The settings in an old run's config.json that a class takes; one warning names the others."""
    if path.suffix != ".json":
        return dict(settings)
    known = setting_names(cls)
    if ignored := [name for name in settings if name not in known and settings[name] is not None]:
        warnings.warn(f"{path}: ignored {', '.join(ignored)}, which {cls.__name__} does not take", stacklevel=4)
    return {name: value for name, value in settings.items() if name in known}


def import_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint with separate actor, critic and normaliser entries as one `model_state_dict`; ours unchanged."""
    state = import_distilled(dict(state))
    parts: Mapping[str, Any] = NORMALIZERS if "model_state_dict" in state else {}
    if "model_state_dict" not in state and "actor_state_dict" in state and "critic_state_dict" in state:
        state["model_state_dict"] = {}
        if any(name.startswith(("mlp.", "cnns.")) for name in state["actor_state_dict"]):
            named = {}
            for part, prefixes in MODELS.items():
                # What is no part of an MLP or a memory, such as the encoders of images, is the model's own.
                known = prefixes | {"": f"{part.removesuffix('_state_dict')}.model."}
                named |= {renamed(name, known): value for name, value in state.pop(part).items()}
            state["model_state_dict"] = named
        else:
            parts = {"actor_state_dict": "actor", "critic_state_dict": "critic", **NORMALIZERS}
    for foreign in [name for name in parts if name in state]:
        named = {f"{parts[foreign]}.{name}": value for name, value in state.pop(foreign).items()}
        state["model_state_dict"] = {**state["model_state_dict"], **named}
    if "steps" not in state.get("rnd_state_dict", {"steps": 0}):
        state["rnd_state_dict"] = import_rnd(state["rnd_state_dict"])
    if "iteration" in state and "iter" not in state:
        state["iter"] = state.pop("iteration")
    if "model_state_dict" in state:
        rename = {"actor_obs_normalizer": "obs_normalizer"}
        state["model_state_dict"] = {renamed(n, rename): value for n, value in state["model_state_dict"].items()}
        if "optimizer_state_dict" in state:
            state |= in_our_order(state["model_state_dict"], state["optimizer_state_dict"])
    return state


def import_distilled(state: dict[str, Any]) -> dict[str, Any]:
    """A student as `model_state_dict` and its teacher as `teacher_state_dict`, without optimizer; others unchanged."""
    weights = state.get("model_state_dict", {})
    if "student_state_dict" in state:
        prefixes = MODELS["actor_state_dict"]
        both = {
            owner: {renamed(name, prefixes): value for name, value in state.pop(f"{owner}_state_dict").items()}
            for owner in DISTILLED
        }
    elif any(name.startswith("student.") for name in weights):
        both = {"teacher": {}, "student": {name: weights[name] for name in ("std", "log_std") if name in weights}}
        for owner, prefixes in DISTILLED.items():
            own = {name: value for name, value in weights.items() if name.split(".")[0] in prefixes}
            both[owner] |= {renamed(name, prefixes): value for name, value in own.items()}
        for owner, key in (("student", "obs_norm_state_dict"), ("teacher", "privileged_obs_norm_state_dict")):
            both[owner] |= {f"obs_normalizer.{name}": value for name, value in state.pop(key, {}).items()}
    else:
        return state
    state.pop("optimizer_state_dict", None)  # its moments are of other parameters
    return state | {"model_state_dict": both["student"], "teacher_state_dict": both["teacher"]}


def import_rnd(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The state of rsl_rl's random network distillation; its schedule starts anew, since it does not save the step."""
    rewards = "reward_normalizer.emp_norm."
    named = {name: value for name, value in weights.items() if not name.startswith(rewards)}
    scales = {name.removeprefix(rewards).lstrip("_"): value for name, value in weights.items() if name not in named}
    if scales:
        named |= {f"reward_scaler.{name}": scales[name].reshape(()) for name in ("mean", "var", "count")}
        named["reward_scaler.returns"] = torch.zeros(0)  # of unfinished episodes, which it does not save
    return named | {"steps": torch.zeros((), dtype=torch.long)}


def renamed(name: str, prefixes: Mapping[str, str]) -> str:
    """The name with its prefix replaced; if none of the prefixes is its, with that for "" before it."""
    for theirs, ours in prefixes.items():
        if name == theirs or name.startswith(f"{theirs}."):
            return ours + name[len(theirs) :]
    return prefixes.get("", "") + name


def in_our_order(weights: Mapping[str, Any], optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Weights, and the state of the optimizer that follows them, in the order of our policies; others unchanged."""
    names = [name for name in weights if "normalizer" not in name.split(".")[0]]
    ranks = [ORDER.index(name.split(".")[0]) if name.split(".")[0] in ORDER else None for name in names]
    groups = optimizer.get("param_groups", ())
    numbers = list(groups[0]["params"]) if len(groups) == 1 else []
    if None in ranks or len(numbers) != len(names):
        return {}
    once = [i for i, number in enumerate(numbers) if number not in numbers[:i]]  # encoders of both networks come twice
    order = sorted(once, key=lambda i: (ranks[i], i))
    moments = {new: optimizer["state"][numbers[i]] for new, i in enumerate(order) if numbers[i] in optimizer["state"]}
    ordered = {**{names[i]: weights[names[i]] for i in order}, **weights}
    group = {**groups[0], "params": list(range(len(order)))}
    state = {**optimizer, "state": moments, "param_groups": [group]}
    return {"model_state_dict": ordered, "optimizer_state_dict": state}
