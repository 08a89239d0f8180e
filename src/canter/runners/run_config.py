"""Turns a training dict of either documented layout, or a config object, into one plan of a run."""

import dataclasses
import functools
import types
import warnings
from collections.abc import Mapping
from typing import Any

from canter.algorithms import REGISTRY, Entry
from canter.algorithms.algorithm import CommonRunSettings, field_names, is_run_settings
from canter.compat.training_dicts import as_sections, translated
from canter.modules.build import NETWORKS
from canter.runners.run_log import check_trial_metric
from canter.utils.config import check_settings, combined_settings, unknown_name

# Keys of launch scripts, which a training dict may contain.
LAUNCHER_KEYS = {"run", "task", "num_envs", "total_timesteps"}
warn_once = functools.cache(warnings.warn)


@dataclasses.dataclass
class RunPlan:
    """The complete description of a run, as `config.yaml` holds it."""

    algorithm: str
    cfg: Any
    policy: dict[str, Any] = dataclasses.field(default_factory=lambda: {"class_name": "ActorCritic"})
    storage: dict[str, Any] = dataclasses.field(default_factory=dict)
    obs_groups: dict[str, Any] | None = None
    ckpt_manipulator: Any = None
    clip_actions: float | None = None
    """Actions are clamped to plus and minus this before the environment gets them."""
    resume: bool = False
    """Whether a checkpoint must be loaded before `learn`."""

    def override(self, settings: Mapping[str, Any], training_dict: Any) -> Any:
        """Replace the config by a copy with the settings that are not None; returns it."""
        given = {name: value for name, value in settings.items() if value is not None}
        self.cfg = dataclasses.replace(self.cfg, **given)  # the user's object stays unchanged
        check_trial_metric(self.cfg.trial_metric)
        self.cfg.training_dict = training_dict if isinstance(training_dict, Mapping) else {}
        return self.cfg

    def to_dict(self) -> dict[str, Any]:
        """The flat documented layout, complete, in plain containers; `parse_train_cfg` reads it back."""
        values = {f.name: plain(getattr(self.cfg, f.name)) for f in dataclasses.fields(self.cfg)}
        algorithm_names = values.keys() - run_fields(type(self.cfg))
        return {
            "algorithm": {"class_name": self.algorithm} | {k: v for k, v in values.items() if k in algorithm_names},
            "policy": plain(self.policy),
            "storage": plain(self.storage),
            **({"obs_groups": plain(self.obs_groups)} if self.obs_groups else {}),
            **({} if self.clip_actions is None else {"clip_actions": self.clip_actions}),
            **{k: v for k, v in values.items() if k not in algorithm_names},
        }


def plain(value: Any) -> Any:
    """The value in containers and types of JSON and YAML; any other object by its name."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, types.FunctionType):
        return f"{value.__module__}:{value.__qualname__}"
    return getattr(value, "__name__", str(value))


# Algorithms of other libraries -> where to find them, or what does the same here.
NOT_INCLUDED = {
    "a2c": 'the page "Change the algorithm" makes it from PPO in twenty lines, and Stable-Baselines3 has it',
    "ddpg": "TD3 is its successor",
    "her": "Stable-Baselines3 has it",
    "recurrentppo": "PPO with --policy.class-name ActorCriticRecurrent is the same",
    **dict.fromkeys(("ars", "crossq", "maskableppo", "qrdqn", "qr-dqn", "tqc", "trpo"), "sb3-contrib has it"),
}


def find_algorithm(name: str) -> str:
    """The registered name, in lower case; an unknown one is an error with the nearest, or with where to find it."""
    if name.lower() not in REGISTRY:
        way_out = NOT_INCLUDED.get(name.lower(), "")
        if "." in name or ":" in name:
            way_out = "derive your class from one of canter's and name it by canter.algorithms.register_algorithm"
        raise ValueError(unknown_name("algorithm", name, () if way_out else REGISTRY, otherwise=way_out))
    return name.lower()


def display_name(name: str) -> str:
    """The class name of a registered algorithm where that is the same word, else the registered name."""
    class_name = REGISTRY[name].agent_class.__name__
    return class_name if class_name.lower() == name else name


def parse_train_cfg(
    train_cfg: Mapping[str, Any],
    networks: Mapping[str, Any] | None = None,
    algorithm_name: str | None = None,
    default: str = "PPO",
) -> RunPlan:
    """A plan from a training dict, flat or with a `runner` section; an unknown key is an error at every level.

    Network classes and their settings, and the algorithm's name, may be given beside the dict; they must not contradict
    it. `default` is the algorithm where neither names one.
    """
    top = translated(train_cfg)
    algorithm, policy = top.pop("algorithm"), top.pop("policy")
    names = (top.pop("algorithm_class_name", None), top.pop("policy_class_name", None))
    given_name, policy_name = algorithm.pop("class_name", names[0]), policy.pop("class_name", None) or names[1]
    name = find_algorithm(next(name for name in (given_name, algorithm_name, default) if name is not None))
    if algorithm_name is not None and find_algorithm(algorithm_name) != name:
        raise ValueError(f"the training dict is of {given_name!r}, the argument algorithm is {algorithm_name!r}")
    is_off_policy = REGISTRY[name].agent_class.learns_from_replay
    if networks and policy_name and not is_off_policy:
        both = f"policy class {policy_name!r} in the training dict and {next(iter(networks))} as an argument"
        raise ValueError(f"{both} are two policies; leave one out")
    if networks or "actor_class" in policy or is_off_policy:
        policy = {key: named_network(value) if key.endswith("_class") else value for key, value in policy.items()}
        for key, value in (networks or {}).items():
            if policy.setdefault(key, value) != value:
                raise ValueError(f"{key} is {policy[key]} in the training dict and {value} as an argument; give one")
        require_networks(name, policy)
    else:
        policy = {"class_name": policy_name or "ActorCritic", **policy}
    rest = (dict(top.pop("storage", None) or {}), top.pop("obs_groups", None), top.pop("ckpt_manipulator", None))
    rest += (top.pop("clip_actions", None), bool(top.pop("resume", None)))
    return RunPlan(display_name(name), config_from(name, algorithm, top), policy, *rest)


def plan_for(agent_class: type, train_cfg: Mapping[str, Any]) -> RunPlan:
    """A plan from a training dict for this algorithm, or for the base of it that is registered."""
    names = {entry.agent_class: name for name, entry in REGISTRY.items()}
    name = next(names[base] for base in agent_class.__mro__ if base in names)
    return parse_train_cfg({**train_cfg, "algorithm": {**(train_cfg.get("algorithm") or {}), "class_name": name}})


def make_plan(
    train_cfg: Any,
    cfg: Any,
    algorithm: str | None,
    agent: Any,
    networks: Mapping[str, Any],
    default: str = "ppo",
    uses_replay: bool | None = None,
) -> RunPlan:
    """The plan of a run from a training dict, a config object, an algorithm's name or a ready algorithm.

    With `uses_replay`, an algorithm that needs the other kind of runner is refused.
    """
    if hasattr(train_cfg, "algorithm"):  # a training dict written as a dataclass
        train_cfg = as_sections(train_cfg)
    if dataclasses.is_dataclass(train_cfg) or isinstance(cfg, Mapping):
        train_cfg, cfg = cfg, train_cfg
    for given in (train_cfg, cfg):
        if given is not None and not isinstance(given, Mapping) and not is_config_object(given):
            ways = "a training dict such as {'algorithm': {'class_name': 'PPO'}} or a config object such as PPOConfig()"
            raise TypeError(f"a runner needs {ways}, got {given!r}")
    known = {key: value for key, value in networks.items() if value is not None}
    if agent is not None and known:
        raise ValueError(f"the agent has its networks; leave out {', '.join(known)}")
    if train_cfg is not None:
        plan = parse_train_cfg(train_cfg, known, algorithm, default)
        check_runner(REGISTRY[find_algorithm(plan.algorithm)].agent_class, uses_replay)
        return plan
    if algorithm is None and cfg is not None:
        default = next((key for key, entry in REGISTRY.items() if type(cfg) is entry.config_class), default)
    name = find_algorithm(default if algorithm is None else algorithm)
    if agent is not None:
        check_runner(type(agent), uses_replay)
        name = next((key for key, entry in REGISTRY.items() if entry.agent_class is type(agent)), None)
        return RunPlan(display_name(name) if name else type(agent).__name__, cfg or config_of(agent), {})
    check_runner(REGISTRY[name].agent_class, uses_replay)
    require_networks(name, known)
    return RunPlan(display_name(name), cfg or REGISTRY[name].config_class(), known)


def is_config_object(value: Any) -> bool:
    """Whether a value is an instance of a dataclass, not the class."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def check_runner(agent_class: type, uses_replay: bool | None) -> None:
    """Raise if an algorithm learns from a replay buffer and the runner from rollouts, or the other way round."""
    learns_from_replay = getattr(agent_class, "learns_from_replay", uses_replay)
    if uses_replay is not None and learns_from_replay != uses_replay:
        kinds = {True: ("a replay buffer", "OffPolicyRunner"), False: ("rollouts", "OnPolicyRunner")}
        source, runner = kinds[bool(learns_from_replay)]
        raise ValueError(
            f"{agent_class.__name__} learns from {source}; use {runner} instead of {kinds[uses_replay][1]}"
        )


def require_networks(algorithm: str, networks: Mapping[str, Any]) -> None:
    """Raise if an on-policy algorithm has no actor or no critic class; off-policy ones have defaults."""
    for argument in ("actor_class", "critic_class"):
        if argument not in networks and not REGISTRY[algorithm].agent_class.learns_from_replay:
            example = "MLPActor" if argument == "actor_class" else "MLPCritic"
            way_out = "a training dict needs none: load_preset(task), or {'algorithm': {'learning_rate': 3e-4}}"
            raise ValueError(f"OnPolicyRunner needs {argument} (such as canter.modules.{example}) or agent; {way_out}")


def config_of(agent: Any) -> Any:
    """The agent's config; one that was built from settings alone gets the run settings of its config class."""
    if isinstance(agent.cfg, CommonRunSettings):
        return agent.cfg
    values = {f.name: getattr(agent.cfg, f.name) for f in dataclasses.fields(agent.cfg)}
    return combined_settings(agent.config_class.__name__, agent.config_class, type(agent.cfg))(**values)


def named_network(value: Any) -> Any:
    """A network class, given as a class or by the name of one of ours."""
    if not isinstance(value, str):
        return value
    if value not in NETWORKS:
        way_out = "one of your own is given as a class to a runner, or in canter.load(path, policy=<policy>)"
        raise ValueError(unknown_name("network class", value, NETWORKS, otherwise=way_out))
    return NETWORKS[value]


def config_from(name: str, algorithm: Mapping[str, Any], top: dict[str, Any]) -> Any:
    """The config object of a training dict; settings that the dict leaves out get their documented defaults."""
    from canter.presets import profile_settings  # presets are made of configs

    entry = REGISTRY[name]
    run_names, defaults = run_fields(entry.config_class), documented_defaults(entry)
    given = {key: value for key, value in top.items() if key not in LAUNCHER_KEYS}
    shared = {key: given.pop(key) for key in list(given) if key in defaults}  # e.g. empirical_normalization at the top
    for key, value in given.items():
        if key not in run_names and value is not None:
            known = run_names | set(defaults) | LAUNCHER_KEYS
            raise TypeError(unknown_name("setting", key, known, "the training configuration"))
    algorithm = dict(algorithm)
    profile = profile_settings(name, algorithm.pop("profile", None))
    own = check_settings(entry.agent_class.__name__, algorithm, defaults)
    report_defaults(entry, defaults, {**profile, **shared, **own})
    settings = {**defaults, **profile, **shared, **own, **{k: v for k, v in given.items() if k in run_names}}
    if "num_steps_per_env" in run_names:
        settings.setdefault("log_interval", 1)  # the documented default of a training dict
    # Lists, as YAML and JSON have them, become tuples.
    return entry.config_class(**{k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()})


def run_fields(config_class: type) -> set[str]:
    """Names of the settings in a config that belong to the run, not to the algorithm."""
    return {name for base in config_class.__mro__ if is_run_settings(base) for name in field_names(base)}


def documented_defaults(entry: Entry) -> dict[str, Any]:
    """Defaults of an algorithm's settings in a training dict: the documented ones of ours, its config's for others."""
    fields = [*dataclasses.fields(entry.config_class)]
    if entry.config_class is entry.agent_class.config_class:
        fields += dataclasses.fields(entry.agent_class.full_settings_class())
    run_names = run_fields(entry.config_class)
    return {f.name: f.default for f in fields if f.name not in run_names}


def report_defaults(entry: Entry, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Warn once which documented defaults a training dict gets for epochs, minibatches and schedule."""
    names = ("num_learning_epochs", "num_mini_batches", "schedule")
    missing = {name: defaults[name] for name in names if name in defaults and name not in given}
    if missing and set(names) <= defaults.keys() and entry.config_class is entry.agent_class.config_class:
        values = ", ".join(f"{name}={value!r}" for name, value in missing.items())
        warn_once(f"the training dict leaves out settings of {entry.agent_class.__name__}: using {values}", None, 6)
