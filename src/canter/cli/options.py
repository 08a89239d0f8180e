"""Flags made from the settings themselves: a setting declared anywhere is a flag here, with its sentence as help."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import tyro
import yaml

from canter.algorithms import REGISTRY
from canter.modules.build import POLICIES
from canter.presets import FALLBACK, load_preset, presets
from canter.runners.run_config import RunPlan, find_algorithm, parse_train_cfg
from canter.utils.config import OTHER_SPELLINGS

PRESET_KEYS = ("task", "num_envs", "total_timesteps")
# What a policy takes from the environment, not from the user.
FROM_ENV = {"num_actor_obs", "num_critic_obs", "num_actions", "obs_segments", "critic_obs_segments", "action_space"}
FROM_ENV |= {"actor", "critic"}
EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
ARGUMENT = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)
DEFAULT_SEED = 1
LOWEST = {"num_envs": 1, "total_timesteps": 1, "final_episodes": 0, "threads": 1}

Settings = TypeVar("Settings")
Policy = TypeVar("Policy")


@dataclasses.dataclass
class TrainOptions(Generic[Settings, Policy]):
    """Train a policy, evaluate it, draw its learning curve and film it.

    The defaults shown are those of the task's preset.
    """

    task: tyro.conf.Positional[str]
    """A Gymnasium id, canter/<name> or envpool/<id>; `canter tasks` lists them."""
    settings: Annotated[Settings, tyro.conf.arg(name="")]
    policy: Policy
    algorithm: Annotated[str, tyro.conf.arg(aliases=["--algo"])] = "ppo"
    """What learns: ppo and its family, or dqn, sac, td3."""
    profile: str | None = None
    """Of sac and td3, settings that belong together: "classic", or "massive" for thousands of environments."""
    num_envs: int = 8
    """Environments stepped together."""
    total_timesteps: int = 1_000_000
    """Length of the run in environment steps, rounded up to whole iterations; --max-iterations overrides it."""
    seeds: tuple[int, ...] = ()
    """Train once with each of these seeds, one after the other."""
    name: str | None = None
    """Name of the run; the time by default. The directory is <runs-dir>/<task>/<name>-seed<k>."""
    runs_dir: Path = Path("runs")
    """Where run directories are made."""
    final_episodes: int = 20
    """Episodes of the evaluation at the end."""
    video: bool = True
    """Film an episode at the end."""
    threads: int | None = None
    """Threads of torch on a CPU; None takes one where the work is small and more would only slow it down."""
    components: dict[str, Any] | None = None
    """Who sees which components, what `ObsComponents` is told: {segments: {angle: 2, speed: 1}, actor: [angle]}."""


def preset_name(task: str, algorithm: str = "ppo") -> str:
    """Whose settings a task is trained with: its own, those of Gymnasium's task of that name, or the general ones."""
    if task in presets(algorithm):
        return task
    family, _, rest = task.rpartition("/")
    if family in ("canter", "envpool"):
        for known in presets(algorithm):
            if known == rest or known.rsplit("-v", 1)[0] == rest:
                return known
    return FALLBACK


def preset_for(task: str, algorithm: str = "ppo", profile: str | None = None) -> dict[str, Any]:
    """The settings to train a task with."""
    preset = {**load_preset(preset_name(task, algorithm), algorithm), "task": task}
    if profile is not None:  # which settings made for a few environments would spoil
        preset["algorithm"] = {"class_name": preset["algorithm"]["class_name"], "profile": profile}
    return preset


def preset_plan(preset: Mapping[str, Any]) -> RunPlan:
    """A preset's settings, checked."""
    return parse_train_cfg({name: value for name, value in preset.items() if name not in PRESET_KEYS})


def parse_train(args: Sequence[str]) -> tuple[TrainOptions[Any, Any], dict[str, Any]]:
    """The options in `args`, and the training dict they mean."""
    task = args[0] if args and not args[0].startswith("-") else None
    wanted = find_algorithm(given(args, "--algorithm") or given(args, "--algo") or "ppo")
    preset = preset_for(task or FALLBACK, wanted, given(args, "--profile"))
    preset["algorithm"] = {**preset["algorithm"], "class_name": REGISTRY[wanted].agent_class.__name__}
    plan = preset_plan(preset)
    check_spellings(args, {f.name for f in dataclasses.fields(plan.cfg)})
    plan.cfg.seed = DEFAULT_SEED if plan.cfg.seed is None else plan.cfg.seed
    has_policy = "class_name" in plan.policy
    class_name = given(args, "--policy.class-name") or plan.policy.get("class_name", "")
    policy_type, policy = policy_options(class_name, plan.policy) if has_policy else (NoPolicy, NoPolicy())
    options_type: Any = TrainOptions[type(plan.cfg), policy_type]  # type: ignore[misc]
    default = TrainOptions(
        task=task or (tyro.MISSING if not {"-h", "--help"} & set(args) else "TASK"),
        settings=plan.cfg,
        policy=policy,
        algorithm=plan.algorithm.lower(),
        num_envs=preset["num_envs"],
        total_timesteps=preset["total_timesteps"],
    )
    options = parse(options_type, args, "canter train TASK", default)
    for name, lowest in LOWEST.items():
        value = getattr(options, name)
        if value is not None and value < lowest:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {lowest}, got {value}")
    plan.cfg = options.settings
    if not has_policy:
        return options, plan.to_dict()
    plan.policy = dataclasses.asdict(options.policy)
    fit_mini_batches(options, POLICIES[class_name].is_recurrent, given(args, "--num-mini-batches") is not None)
    return options, plan.to_dict()


@dataclasses.dataclass
class NoPolicy:
    """Algorithms whose networks are settings of their own have none of a policy."""


def check_spellings(args: Sequence[str], known: set[str]) -> None:
    """Refuse a flag that other libraries spell so, with our spelling."""
    for arg in args:
        name = arg.partition("=")[0].removeprefix("--").replace("-", "_")
        here = OTHER_SPELLINGS.get(name)
        if arg.startswith("--") and here is not None and name not in known:
            raise ValueError(f"there is no flag {arg.partition('=')[0]}; did you mean --{here.replace('_', '-')}?")


def fit_mini_batches(options: TrainOptions[Any, Any], is_recurrent: bool, is_given: bool) -> None:
    """Check the number of minibatches; those of recurrent policies are made of whole environments."""
    settings = options.settings
    if is_recurrent and not is_given:
        settings.num_mini_batches = min(settings.num_mini_batches, 4, options.num_envs)
    limit = options.num_envs * (1 if is_recurrent else settings.num_steps_per_env)
    if settings.num_mini_batches < 1:
        raise ValueError(f"num_mini_batches must be at least 1, got {settings.num_mini_batches}")
    if settings.num_mini_batches > limit:
        what = f"{limit} environments of a recurrent policy" if is_recurrent else f"a rollout of {limit} steps"
        raise ValueError(f"num_mini_batches={settings.num_mini_batches} does not fit {what}")


def given(args: Sequence[str], flag: str) -> str | None:
    """The value of a flag, looked up before the flags that depend on it are known."""
    for index, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name.replace("_", "-") == flag:
            return value if equals else next(iter(args[index + 1 :]), None)
    return None


def policy_options(class_name: str, preset: Mapping[str, Any]) -> tuple[type, Any]:
    """A dataclass of the settings that a policy class takes, and an instance with the preset's values."""
    if class_name not in POLICIES:
        raise ValueError(f"no policy class {class_name!r}; there are {', '.join(sorted(POLICIES))}")
    fields: dict[str, tuple[Any, Any]] = {}
    for base in reversed(POLICIES[class_name].__mro__):
        if base.__module__.startswith("torch.") or "__init__" not in vars(base):
            continue
        hints = typing.get_type_hints(base.__init__)
        sentences = argument_sentences(base)
        for name, parameter in inspect.signature(base.__init__).parameters.items():
            if parameter.default is not parameter.empty and name not in FROM_ENV:
                argument = tyro.conf.arg(help=sentences.get(name))
                fields[name] = (Annotated[hints.get(name, Any), argument], parameter.default)
    choices = Annotated[Literal[tuple(sorted(POLICIES))], tyro.conf.arg(help="Class of the policy.")]
    rows = [("class_name", choices, class_name)]
    rows += [(name, hint, dataclasses.field(default=default)) for name, (hint, default) in fields.items()]
    made = dataclasses.make_dataclass("PolicyOptions", rows)
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in preset.items() if name in fields}
    return made, made(class_name=class_name, **values)


def argument_sentences(cls: type) -> dict[str, str]:
    """What the `Args:` section of a class's docstring says of each argument."""
    _, _, section = inspect.cleandoc(vars(cls).get("__doc__") or "").partition("Args:\n")
    return {name: " ".join(text.split()) for name, text in ARGUMENT.findall(section)}


def parse(options_type: Any, args: Sequence[str], prog: str, default: Any = None) -> Any:
    """Parse flags; a mistake in them ends the program with exit code 2 and a suggestion."""
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(yaml_rule)
    with registry:
        if default is None:
            return tyro.cli(options_type, args=list(args), prog=prog)
        return tyro.cli(options_type, args=list(args), prog=prog, default=default)


def yaml_rule(info: Any) -> Any:
    """Dicts, and what has no type, are written as YAML on the command line."""
    is_union = isinstance(info.type, types.UnionType) or typing.get_origin(info.type) is typing.Union
    kinds = [kind for kind in (typing.get_args(info.type) if is_union else (info.type,)) if kind is not type(None)]
    if len(kinds) != 1 or not (kinds[0] is Any or typing.get_origin(kinds[0]) in (dict, Mapping)):
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="YAML",
        instance_from_str=lambda words: read_yaml(words[0]),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [yaml.safe_dump(value, default_flow_style=True).split("\n...")[0].strip()],
    )


def read_yaml(text: str) -> Any:
    """A YAML value; 1e-3 is a number here, though YAML 1.1 reads it as text."""

    def numbers(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: numbers(part) for key, part in value.items()}
        if isinstance(value, list):
            return [numbers(part) for part in value]
        return float(value) if isinstance(value, str) and EXPONENT.fullmatch(value) else value

    try:
        return numbers(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ValueError(f"{text!r} is not YAML: {error}") from error
