"""Flags made from settings: every setting of a run, an algorithm and a policy is a flag with its docstring as help."""

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import re
import textwrap
import typing
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import tyro

from canter.algorithms import REGISTRY
from canter.algorithms.algorithm import AlgorithmSettings, is_run_settings
from canter.cli.errors import UserError
from canter.cli.flags import TaskName, at_least, given, parse, read_values
from canter.envs.wrap import env_options
from canter.modules.build import POLICIES
from canter.modules.utils import ALIASES
from canter.presets import FALLBACK, find_preset
from canter.runners.run_config import find_algorithm, parse_train_cfg
from canter.utils.config import defaults_of, unknown_name, unused_settings
from canter.utils.distributed import RANKS
from canter.utils.logging.backends import BACKENDS
from canter.utils.reading import refuse_imports
from canter.utils.runtime import usable_cores

# Constructor arguments of a policy that come from the environment, not from the user.
FROM_ENV = {"num_actor_obs", "num_critic_obs", "num_actions", "obs_segments", "critic_obs_segments", "action_space"}
FROM_ENV |= {"actor", "critic"}
ARGUMENT = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)

# Numbers of a run that are no settings, each with an example.
LENGTHS = {"num_envs": 8, "total_timesteps": 1_000_000}
SMALL_MINIBATCH = 32  # steps; the gradient of fewer is mostly noise
# Lengths of a run that are settings: where one is set, it ends a run in place of `total_timesteps`.
SET_LENGTHS = ("max_iterations", "max_timesteps")
# Settings -> those that replace them for a part of the policy, which a preset may set.
FOR_A_PART = {"policy.activation": ("policy.actor_activation", "policy.critic_activation")}
FOR_A_PART |= {"empirical_normalization": ("critic_obs_normalization",)}

# Choices of policy settings, which are plain arguments of constructors.
POLICY_CHOICES = {name: ",".join(ALIASES) for name in ("activation", "mu_activation")}
POLICY_CHOICES |= {"rnn_type": "lstm,gru", "noise_std_type": "scalar,log"}

AlgorithmName = Annotated[
    str, tyro.conf.arg(aliases=["--algo"], help_behavior_hint=lambda name: f"{', '.join(REGISTRY)} (default: {name})")
]
Unprefixed = tyro.conf.arg(prefix_name=False)  # the flag is --name also where its help is in a group
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
    film_interval: int | None = None
    """Iterations (off-policy: environment steps) between two films for the logging backends and <run>/films."""
    histogram_interval: int | None = None
    """Iterations (off-policy: environment steps) between two histograms of weights, actions and advantages."""
    threads: int | None = None  # Torch threads on a CPU; None uses one for small networks and batches.
    workers: int = 0  # Processes that step Gymnasium environments; 0 steps them in the training process.
    worker_timeout: float = 300.0  # Seconds after which an environment step of a worker counts as hung.
    restart_workers: bool = False  # Replace a worker that fails, instead of ending the run.


@dataclasses.dataclass(kw_only=True)
class EnvOptions:
    """The environment; the arguments are YAML."""

    env_kwargs: Annotated[dict[str, Any] | None, Unprefixed] = None
    """Arguments of the environment's constructor: {terminate_when_unhealthy: false}."""
    wrappers: Annotated[Any, Unprefixed] = None
    """Wrappers, innermost first: [ClipReward: {max_reward: 1}, ClipActions: {limit: 1}]; a name alone has no arguments.
    They are those of gymnasium.wrappers and canter.envs, or "module:Class"."""
    components: Annotated[dict[str, Any] | None, Unprefixed] = None
    """Arguments of `ObsComponents`: {segments: {angle: 2, speed: 1}, actor: [angle]}."""


@dataclasses.dataclass(kw_only=True)
class TrainOptions(RunOptions, Generic[Settings, Policy]):
    """Train a policy, evaluate it, plot its learning curve and record a video.

    The defaults shown are those of the task's preset: canter train TASK --help.
    """

    task: TaskName
    """A Gymnasium id, canter/<name>, envpool/<id> or a registered name; `canter tasks` lists them."""
    settings: Annotated[Settings, tyro.conf.arg(name="")]
    policy: Policy
    environment: EnvOptions = dataclasses.field(default_factory=EnvOptions)
    algorithm: AlgorithmName = "ppo"  # Algorithm:
    profile: str | None = None
    """A profile of the task's preset, or for sac and td3 "classic", "strong" or "massive" (many environments)."""
    config: Path | None = None
    """YAML or JSON file with settings in the layout of a run's config.yaml; they replace the preset's, flags theirs."""
    num_envs: int = 8  # Environments stepped together.
    ranks: int = 1
    """Processes on this machine that train together, each with `num_envs`; torchrun starts them on several machines."""
    total_timesteps: int = 1_000_000
    """Length of the run in environment steps, in whole iterations; with --max-iterations too, the shorter one."""
    seeds: tuple[int, ...] = ()  # Train one run with each of these seeds, one after the other.


def parse_train(
    args: Sequence[str], prog: str = "canter train", description: str | None = None
) -> tuple[TrainOptions[Any, Any], dict[str, Any]]:
    """The options in `args`, and the training dict that they describe; the help is of `prog`."""
    file = read_config(given(args, "--config"))
    task = args[0] if args and not args[0].startswith("-") else file.get("task")
    name = given(args, "--algorithm") or given(args, "--algo") or (file.get("algorithm") or {}).get("class_name")
    preset = find_preset(task or FALLBACK, find_algorithm(name or "ppo"), given(args, "--profile"))
    preset = over_preset(preset, file)
    name = find_algorithm(preset["algorithm"]["class_name"])  # a task's profile may use another one
    run = preset.pop("run", {})
    plan = parse_train_cfg(preset)
    plan.algorithm = preset["algorithm"]["class_name"]
    plan.cfg.seed = 1 if plan.cfg.seed is None else plan.cfg.seed
    policy_class = given(args, "--policy.class-name") or plan.policy.get("class_name", "")
    has_policy = "class_name" in plan.policy  # else the networks are part of the algorithm's own settings
    policy = policy_options(policy_class, plan.policy) if has_policy else dataclasses.make_dataclass("NoPolicy", [])()
    settings = settings_options(plan.cfg)
    values = {key: preset[key] for key in LENGTHS}
    values |= {"environment": EnvOptions(**env_options(run))}
    default = TrainOptions(task=task or tyro.MISSING, settings=settings, policy=policy, algorithm=name, **values)
    options_type: Any = TrainOptions[type(settings), type(policy)]  # type: ignore[misc]
    options = parse(options_type, args, prog, default, description=description)
    check_run(options)
    for flag, value in (("env-kwargs", options.environment.env_kwargs), ("components", options.environment.components)):
        if value is not None and not isinstance(value, Mapping):
            raise UserError(f"--{flag} must be a mapping in YAML such as '{{name: value}}', got {value!r}")
    at_least(1, ranks=options.ranks)
    plan.cfg = options.settings = joined_settings(options.settings, type(plan.cfg))
    drop_unused(plan.cfg, args, file)
    prefer_flags(options, args)
    if has_policy:
        chosen = dataclasses.asdict(options.policy)
        is_preset = policy_class == plan.policy["class_name"]  # whose settings without a flag stay as they are
        plan.policy = {**(plan.policy if is_preset else {}), **chosen}
        fixed = {flag for flag in ("--num-steps-per-env", "--num-mini-batches") if given(args, flag) is not None}
        usual = preset["num_envs"] // max(options.ranks, RANKS.size)  # environments of one rank
        fit_rollout(options.settings, options.num_envs, usual, POLICIES[policy_class].is_recurrent, fixed)
    fit_length(options, args)
    return options, plan.to_dict()


def is_given(args: Sequence[str], name: str) -> bool:
    """Whether a flag of this name, such as policy.activation, is among `args`; --no-name counts too."""
    path, _, last = name.replace("_", "-").rpartition(".")
    flags = [f"--{path}.{word}" if path else f"--{word}" for word in (last, f"no-{last}")]
    return any(arg.partition("=")[0].replace("_", "-") in flags for arg in args)


def prefer_flags(options: TrainOptions[Any, Any], args: Sequence[str]) -> None:
    """Reset a setting of the preset for a part of the policy where a flag sets it for the whole."""
    for name, parts in FOR_A_PART.items():
        for part in parts if is_given(args, name) else ():
            owner, field = (options.policy if "." in part else options.settings), part.rpartition(".")[2]
            if not is_given(args, part) and hasattr(owner, field):
                setattr(owner, field, None)


def fit_length(options: TrainOptions[Any, Any], args: Sequence[str]) -> None:
    """Let --total-timesteps end the run: before any length of the preset, and with a second flag, whichever is shorter.

    Of a run that trains from rollouts, `max_iterations` counts those.
    """
    cfg = options.settings
    if not is_given(args, "total_timesteps"):
        return
    for name in (name for name in SET_LENGTHS if getattr(cfg, name, None) is not None):
        steps = 1 if name == "max_timesteps" else cfg.num_steps_per_env * options.num_envs
        wanted = -(-options.total_timesteps // (steps * max(options.ranks, RANKS.size)))
        setattr(cfg, name, min(getattr(cfg, name), wanted) if is_given(args, name) else None)


def read_config(file: str | None) -> dict[str, Any]:
    """The training dict in a YAML or JSON file, with the task and the lengths of a run's config.yaml at the top."""
    if file is None:
        return {}
    if not Path(file).is_file():
        raise FileNotFoundError(f"--config {file}: there is no such file")
    content: Any = read_values(file)
    if not isinstance(content, dict):
        raise ValueError(f"--config {file}: the file is no mapping of settings; a run's config.yaml is an example")
    content = {key: value for key, value in content.items() if value is not None or key not in ("algorithm", "run")}
    check_sections(f"--config {file}", content)
    run: dict[str, Any] = content.get("run", {})
    named = {name: content[name] for name in ("task", "wrappers") if name in content}
    refuse_imports({**content, "run": {**run, **named}}, file, (), "give the setting on the command line")
    content = {key: run[key] for key in ("task", *LENGTHS) if key in run} | content
    return content | {name: length(f"--config {file}", name, content[name]) for name in LENGTHS if name in content}


def check_sections(file: str, content: Mapping[Any, Any]) -> None:
    """Refuse sections of a file that are no mappings, and names that are no text."""
    examples = {"algorithm": "{class_name: sac}", "policy": "{activation: tanh}", "run": "{num_envs: 8}"}
    examples |= {"runner": "{max_iterations: 100}", "storage": "{name: value}"}
    for key, value in content.items():
        if not isinstance(key, str):
            raise ValueError(f"{file}: the name of a setting must be text, got {key!r}; put it in quotes or remove it")
        if key in examples and not isinstance(value, Mapping | None):
            raise ValueError(f"{file}: {key} must be a mapping such as {key}: {examples[key]}, got {value!r}")
    names: dict[str, Any] = {"task": content.get("task"), "run.task": content.get("run", {}).get("task")}
    names["algorithm.class_name"] = content.get("algorithm", {}).get("class_name")
    for key, value in names.items():
        if not isinstance(value, str | None):
            example = "CartPole-v1" if "task" in key else "sac"
            raise ValueError(f"{file}: {key} must be a name such as {example}, got {value!r}")


def length(file: str, name: str, value: Any) -> int:
    """The whole number of a file's setting; YAML reads 1e6 as 1000000.0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or value < 1:
        way_out = f"write {name}: {LENGTHS[name]}, or leave it out for the preset's"
        raise ValueError(f"{file}: {name} must be a whole number of at least 1, got {value!r}; {way_out}")
    return value


def over_preset(preset: dict[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """A preset with the settings of a file in their place; a file with a `runner` section replaces it whole."""
    if "runner" in file:
        lengths = {key: preset[key] for key in ("task", *LENGTHS)}
        algorithm = {**preset["algorithm"], **(file.get("algorithm") or {})}
        return lengths | dict(file) | {"algorithm": algorithm | {"class_name": preset["algorithm"]["class_name"]}}
    lengths = dict.fromkeys(SET_LENGTHS) if "total_timesteps" in file else {}  # those of the preset end no run
    if "actor" in preset and file and not {"actor", "critic"} & set(file):  # these sections would replace `policy`
        own = {key: preset[key] for key in ("task", "run", *LENGTHS) if key in preset}
        preset = parse_train_cfg(preset).to_dict() | own
        preset["algorithm"]["class_name"] = (file.get("algorithm") or preset["algorithm"]).get("class_name", "PPO")
    merged = {**preset, **{name: None for name in lengths if name in preset}, **file}
    for section in ("algorithm", "policy"):
        if isinstance(preset.get(section), Mapping) and isinstance(file.get(section), Mapping):
            merged[section] = {**preset[section], **file[section]}
    merged["algorithm"]["class_name"] = preset["algorithm"]["class_name"]
    return merged


def drop_unused(cfg: Any, args: Sequence[str], file: Mapping[str, Any]) -> None:
    """Reset settings of the preset that other settings have left without effect: the user did not ask for them."""
    in_file = {**file, **(file.get("algorithm") or {})}
    for name in unused_settings(cfg):
        if name not in in_file and given(args, f"--{name.replace('_', '-')}") is None:
            setattr(cfg, name, defaults_of(type(cfg), name)[0])


def fit_rollout(settings: Any, num_envs: int, usual: int, is_recurrent: bool, fixed: Collection[str]) -> None:
    """Fit settings to a number of environments other than the `usual` one, unless their flags are `fixed`.

    Minibatches of recurrent policies consist of whole environments. Where a few environments would leave few steps for
    each minibatch, rollouts become longer.
    """
    if is_recurrent and "--num-mini-batches" not in fixed:
        settings.num_mini_batches = min(settings.num_mini_batches, 4, num_envs)
    fewest = SMALL_MINIBATCH * settings.num_mini_batches
    if num_envs < usual and num_envs * settings.num_steps_per_env < fewest and not fixed:
        settings.num_steps_per_env = -(-fewest // num_envs)
        reason = f"rollouts of {num_envs} instead of {usual} environments have {settings.num_steps_per_env} steps each"
        way_out = "--num-steps-per-env sets them"
        warnings.warn(f"{reason}, so that minibatches have {SMALL_MINIBATCH} steps; {way_out}", stacklevel=3)
    limit = num_envs * (1 if is_recurrent else settings.num_steps_per_env)
    if settings.num_mini_batches > limit:
        whole = f"{limit} environments of a recurrent policy" if is_recurrent else f"a rollout of {limit} steps"
        raise ValueError(f"num_mini_batches={settings.num_mini_batches} does not fit {whole}")


def settings_options(cfg: Any) -> Any:
    """The settings of a config by group, as an instance of a new dataclass: a field for each group of `group_of`."""
    hints = typing.get_type_hints(type(cfg), include_extras=True)
    groups: dict[str, list[Any]] = {"run": [], "algorithm": []}
    for f in dataclasses.fields(cfg):
        choices = BACKENDS if f.name == "logger_backend" else f.metadata.get("choices")
        metavar = f"{{{','.join(map(str, choices))}}}" if choices else None
        metavar = f"{metavar}..." if metavar and f.name == "logger_backend" else metavar
        text = tyro.conf.arg(prefix_name=False, metavar=metavar, help=attribute_sentences(type(cfg)).get(f.name))
        value = functools.partial(getattr, cfg, f.name)  # a factory: a default must not be a dict
        row = (f.name, Annotated[hints[f.name], text], dataclasses.field(default_factory=value))
        groups.setdefault(group_of(type(cfg), f.name), []).append(row)
    made = {name: dataclasses.make_dataclass(name, rows, kw_only=True) for name, rows in groups.items() if rows}
    fields = [(name, group, dataclasses.field(default_factory=group)) for name, group in made.items()]
    return dataclasses.make_dataclass(type(cfg).__name__, fields)()


def group_of(cfg_class: type, name: str) -> str:
    """The group of a setting in the help: run, algorithm, or the extension whose settings class declares it."""
    owner = next(base for base in reversed(cfg_class.__mro__) if name in inspect.get_annotations(base))
    if is_run_settings(owner):
        return "run"
    is_switch = len(inspect.get_annotations(owner)) == 1  # of an extension whose settings are a mapping
    if is_switch or issubclass(owner, AlgorithmSettings) or not owner.__name__.endswith("Settings"):
        return "algorithm"
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", owner.__name__.removesuffix("Settings")).lower()


def joined_settings(groups: Any, cfg_class: type) -> Any:
    """The config of parsed groups."""
    parts = (getattr(groups, group.name) for group in dataclasses.fields(groups))
    return cfg_class(**{f.name: getattr(part, f.name) for part in parts for f in dataclasses.fields(part)})


def policy_options(class_name: str, preset: Mapping[str, Any]) -> Any:
    """The settings of a policy class as an instance of a new dataclass, with the preset's values."""
    if class_name not in POLICIES:
        raise ValueError(unknown_name("policy class", class_name, POLICIES))
    choices = Annotated[Literal[tuple(sorted(POLICIES))], tyro.conf.arg(help="Class of the policy.")]
    fields: dict[str, Any] = {"class_name": ("class_name", choices)}
    for base, parameter in constructor_settings(POLICIES[class_name]):
        hint = typing.get_type_hints(base.__init__).get(parameter.name, Any)
        metavar = f"{{{POLICY_CHOICES[parameter.name]}}}" if parameter.name in POLICY_CHOICES else None
        hint = Annotated[hint, tyro.conf.arg(help=argument_sentences(base).get(parameter.name), metavar=metavar)]
        fields[parameter.name] = (parameter.name, hint, dataclasses.field(default=parameter.default))
    made = dataclasses.make_dataclass("PolicyOptions", fields.values())
    values = {name: value for name, value in preset.items() if name in fields} | {"class_name": class_name}
    return made(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def constructor_settings(cls: type) -> Iterable[tuple[type, inspect.Parameter]]:
    """The constructor arguments along a policy's inheritance that a user sets, each with its class, bases first."""
    left_out = {*FROM_ENV, *getattr(cls, "replaced_settings", ())}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("torch.") and "__init__" in vars(base):
            for parameter in inspect.signature(base.__init__).parameters.values():
                if parameter.default is not parameter.empty and parameter.name not in left_out:
                    yield base, parameter


@functools.cache
def attribute_sentences(cls: type) -> dict[str, str]:
    """The string after each annotated attribute in the source of a class and its bases; composed classes have none."""
    found: dict[str, str] = {}
    for base in reversed([base for base in cls.__mro__ if dataclasses.is_dataclass(base)]):
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):  # made by dataclasses.make_dataclass
            continue
        body = ast.parse(textwrap.dedent(source)).body[0].body  # type: ignore[attr-defined]
        found |= {
            field.target.id: " ".join(text.value.value.split())  # type: ignore[attr-defined]
            for field, text in itertools.pairwise(body)
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        }
    return found


def argument_sentences(cls: type) -> dict[str, str]:
    """The description of each argument in the `Args:` section of a class's docstring."""
    _, _, section = inspect.cleandoc(vars(cls).get("__doc__") or "").partition("Args:\n")
    return {name: " ".join(text.split()) for name, text in ARGUMENT.findall(section)}


def check_run(options: Any) -> None:
    """Refuse lengths and numbers of a new run that make no sense."""
    at_least(1, num_envs=options.num_envs, total_timesteps=options.total_timesteps, threads=options.threads)
    at_least(0, final_episodes=options.final_episodes, workers=options.workers)
    at_least(0, film_interval=options.film_interval, histogram_interval=options.histogram_interval)
    if options.num_envs is not None and options.workers > options.num_envs:
        raise UserError(f"--workers must be at most --num-envs, got {options.workers} and {options.num_envs}")
    if not 0 < options.worker_timeout < math.inf:
        raise UserError(f"--worker-timeout must be a number of seconds above 0, got {options.worker_timeout}")
    given_for_workers = {"--worker-timeout": options.worker_timeout != RunOptions.worker_timeout}
    given_for_workers["--restart-workers"] = options.restart_workers
    if flags := [flag for flag, is_given in given_for_workers.items() if is_given and not options.workers]:
        warnings.warn(f"{flags[0]} has no effect without workers; add --workers N", stacklevel=3)
    if (options.threads or 1) > (cores := usable_cores()):
        raise UserError(f"--threads must be at most {cores}, the cores of this process, got {options.threads}")
