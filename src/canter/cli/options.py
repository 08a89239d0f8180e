"""Flags made from settings: every setting of a run, an algorithm and a policy is a flag with its docstring as help."""

import copy
import dataclasses
import functools
import importlib
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import tyro
import yaml

from canter.algorithms import REGISTRY
from canter.cli.errors import UserError
from canter.modules.build import POLICIES
from canter.presets import FALLBACK, load_preset
from canter.runners.run_config import find_algorithm, parse_train_cfg
from canter.utils.config import OTHER_SPELLINGS
from canter.utils.runtime import usable_cores

# Constructor arguments of a policy that come from the environment, not from the user.
FROM_ENV = {"num_actor_obs", "num_critic_obs", "num_actions", "obs_segments", "critic_obs_segments", "action_space"}
FROM_ENV |= {"actor", "critic"}
EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+$")
ARGUMENT = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)

AlgorithmName = Annotated[
    str, tyro.conf.arg(aliases=["--algo"], help_behavior_hint=lambda name: f"{', '.join(REGISTRY)} (default: {name})")
]


class YamlLoader(yaml.SafeLoader):
    """YAML in which numbers may have an exponent and no decimal point."""


YamlLoader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("+-0123456789"))
Settings = TypeVar("Settings")
Policy = TypeVar("Policy")


# The comment after a field is the description of its flag in the help.
@dataclasses.dataclass(kw_only=True)
class RunOptions:
    """The directory of a new run, and the steps at its end."""

    name: str | None = None  # Name in the run directory <runs-dir>/<task>/<name>-seed<k>; the time by default.
    runs_dir: Path = Path("runs")  # Directory for run directories.
    final_episodes: int = 20  # Episodes of the evaluation at the end.
    video: bool = True  # Record an episode at the end.
    threads: int | None = None  # Torch threads on a CPU; None uses one for small networks and batches.
    workers: int = 0  # Processes that step Gymnasium environments; 0 steps them in the training process.
    worker_timeout: float = 300.0  # Seconds after which an environment step of a worker counts as hung.
    restart_workers: bool = False  # Replace a worker that fails, instead of ending the run.


@dataclasses.dataclass(kw_only=True)
class TrainOptions(RunOptions, Generic[Settings, Policy]):
    """Train a policy, evaluate it, plot its learning curve and record a video; the preset has the defaults shown."""

    task: tyro.conf.Positional[str]
    """A Gymnasium id, canter/<name>, envpool/<id> or a registered name; `canter tasks` lists them."""
    settings: Annotated[Settings, tyro.conf.arg(name="")]
    policy: Policy
    algorithm: AlgorithmName = "ppo"  # Algorithm:
    profile: str | None = None
    """Group of settings for sac and td3: "classic", or "massive" for thousands of environments."""
    num_envs: int = 8  # Environments stepped together.
    total_timesteps: int = 1_000_000
    """Length of the run in environment steps, rounded up to whole iterations; --max-iterations overrides it."""
    seeds: tuple[int, ...] = ()  # Train one run with each of these seeds, one after the other.
    components: dict[str, Any] | None = None
    """Arguments of `ObsComponents`, as YAML: {segments: {angle: 2, speed: 1}, actor: [angle]}."""


def parse_train(args: Sequence[str]) -> tuple[TrainOptions[Any, Any], dict[str, Any]]:
    """The options in `args`, and the training dict that they describe."""
    task = args[0] if args and not args[0].startswith("-") else None
    name = find_algorithm(given(args, "--algorithm") or given(args, "--algo") or "ppo")
    preset = load_preset(task or FALLBACK, name)
    profile = given(args, "--profile")
    if profile is not None:  # replaces settings that were tuned for a few environments
        preset["algorithm"] = {"class_name": preset["algorithm"]["class_name"], "profile": profile}
    plan = parse_train_cfg(preset)
    plan.algorithm = preset["algorithm"]["class_name"]
    foreign = OTHER_SPELLINGS.keys() - {f.name for f in dataclasses.fields(plan.cfg)}
    for flag in (arg.partition("=")[0] for arg in args if arg.startswith("--")):
        spelling = flag.removeprefix("--").replace("-", "_")
        if spelling in foreign:
            raise ValueError(f"there is no flag {flag}; did you mean --{OTHER_SPELLINGS[spelling].replace('_', '-')}?")
    plan.cfg.seed = 1 if plan.cfg.seed is None else plan.cfg.seed
    policy_class = given(args, "--policy.class-name") or plan.policy.get("class_name", "")
    has_policy = "class_name" in plan.policy  # else the networks are part of the algorithm's own settings
    policy = policy_options(policy_class, plan.policy) if has_policy else dataclasses.make_dataclass("NoPolicy", [])()
    settings = settings_options(plan.cfg)
    task = task or (tyro.MISSING if not {"-h", "--help"} & set(args) else "TASK")
    length = {key: preset[key] for key in ("num_envs", "total_timesteps")}
    default = TrainOptions(task=task, settings=settings, policy=policy, algorithm=name, **length)
    options_type: Any = TrainOptions[type(settings), type(policy)]  # type: ignore[misc]
    options = parse(options_type, args, "canter train TASK", default)
    check_run(options)
    plan.cfg = options.settings
    if has_policy:
        plan.policy = dataclasses.asdict(options.policy)
        is_given = given(args, "--num-mini-batches") is not None
        fit_mini_batches(options.settings, options.num_envs, POLICIES[policy_class].is_recurrent, is_given)
    return options, plan.to_dict()


def fit_mini_batches(settings: Any, num_envs: int, is_recurrent: bool, is_given: bool) -> None:
    """Check the number of minibatches; those of recurrent policies consist of whole environments."""
    if is_recurrent and not is_given:
        settings.num_mini_batches = min(settings.num_mini_batches, 4, num_envs)
    limit = num_envs * (1 if is_recurrent else settings.num_steps_per_env)
    if settings.num_mini_batches > limit:
        whole = f"{limit} environments of a recurrent policy" if is_recurrent else f"a rollout of {limit} steps"
        raise ValueError(f"num_mini_batches={settings.num_mini_batches} does not fit {whole}")


def given(args: Sequence[str], flag: str) -> str | None:
    """The value of a flag on which other flags depend, read before those are known."""
    for index, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name.replace("_", "-") == flag:
            return value if equals else next(iter(args[index + 1 :]), None)
    return None


def settings_options(cfg: Any) -> Any:
    """A copy of a config whose class shows the declared choices of its fields on the command line."""
    hints = typing.get_type_hints(type(cfg))
    rows = [
        (
            f.name,
            Annotated[hints[f.name], tyro.conf.arg(metavar=f"{{{','.join(f.metadata['choices'])}}}")],
            copy.copy(f),
        )
        for f in dataclasses.fields(cfg)
        if f.metadata.get("choices")
    ]
    made = dataclasses.make_dataclass(type(cfg).__name__, rows, bases=(type(cfg),), kw_only=True, eq=False, repr=False)
    return made(**{field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg) if field.init})


def policy_options(class_name: str, preset: Mapping[str, Any]) -> Any:
    """The settings of a policy class as an instance of a new dataclass, with the preset's values."""
    if class_name not in POLICIES:
        raise ValueError(f"no policy class {class_name!r}; there are {', '.join(sorted(POLICIES))}")
    choices = Annotated[Literal[tuple(sorted(POLICIES))], tyro.conf.arg(help="Class of the policy.")]
    fields: dict[str, Any] = {"class_name": ("class_name", choices)}
    for base, parameter in constructor_settings(POLICIES[class_name]):
        hint = typing.get_type_hints(base.__init__).get(parameter.name, Any)
        hint = Annotated[hint, tyro.conf.arg(help=argument_sentences(base).get(parameter.name))]
        fields[parameter.name] = (parameter.name, hint, dataclasses.field(default=parameter.default))
    made = dataclasses.make_dataclass("PolicyOptions", fields.values())
    values = {name: value for name, value in preset.items() if name in fields} | {"class_name": class_name}
    return made(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def constructor_settings(cls: type) -> Iterable[tuple[type, inspect.Parameter]]:
    """The constructor arguments along a policy's inheritance that a user sets, each with its class, bases first."""
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("torch.") and "__init__" in vars(base):
            for parameter in inspect.signature(base.__init__).parameters.values():
                if parameter.default is not parameter.empty and parameter.name not in FROM_ENV:
                    yield base, parameter


def argument_sentences(cls: type) -> dict[str, str]:
    """The description of each argument in the `Args:` section of a class's docstring."""
    _, _, section = inspect.cleandoc(vars(cls).get("__doc__") or "").partition("Args:\n")
    return {name: " ".join(text.split()) for name, text in ARGUMENT.findall(section)}


def parse(flags: Any, args: Sequence[str], prog: str, default: Any = None) -> Any:
    """Parse `args` into a dataclass, or call a function with them; `default` is an instance with the defaults.

    An unknown flag or bad value ends the program with exit code 2 and a suggestion.
    """
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(yaml_rule)
    defaults = {} if default is None else {"default": default}
    with registry:
        return tyro.cli(flags, args=list(args), prog=prog, **defaults)


def call(function: Callable[..., int | None] | str, args: Sequence[str], prog: str) -> int | None:
    """Call a function, or "module:function", with the flags in `args`; a function of `args` gets the words."""
    command: Any = function
    if isinstance(function, str):
        module, _, name = function.partition(":")
        command = getattr(importlib.import_module(module), name)
    if list(inspect.signature(command).parameters) == ["args"]:
        return command(args)

    @functools.wraps(command)
    def bind(*values: Any, **flags: Any) -> Any:
        return functools.partial(command, *values, **flags)

    return parse(bind, args, prog)()


def at_least(lowest: int, **values: Any) -> None:
    """Refuse whole numbers, or tuples of them, below the lowest allowed."""
    for name, value in values.items():
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and number < lowest:
                raise UserError(f"--{name.replace('_', '-')} must be at least {lowest}, got {number}")


def check_run(options: Any) -> None:
    """Refuse lengths and numbers of a new run that make no sense."""
    at_least(1, num_envs=options.num_envs, total_timesteps=options.total_timesteps, threads=options.threads)
    at_least(0, final_episodes=options.final_episodes, workers=options.workers)
    if options.num_envs is not None and options.workers > options.num_envs:
        raise UserError(f"--workers must be at most --num-envs, got {options.workers} and {options.num_envs}")
    if not 0 < options.worker_timeout < math.inf:
        raise UserError(f"--worker-timeout must be a number of seconds above 0, got {options.worker_timeout}")
    if (options.threads or 1) > (cores := usable_cores()):
        raise UserError(f"--threads must be at most {cores}, the cores of this process, got {options.threads}")


def yaml_rule(info: Any) -> Any:
    """Read dicts and untyped values as YAML."""
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
    """A YAML value, in which 1e-3 is a number (YAML 1.1 reads it as text)."""
    try:
        return yaml.load(text, YamlLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{text!r} is not YAML: {error}") from error
