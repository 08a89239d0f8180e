"""Base of every algorithm: settings that stay live while it trains, saving and loading."""

import dataclasses
import inspect
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from canter.algorithms.optim import GuardedOptimizer
from canter.algorithms.user_code import attributes, has_user_code
from canter.compat.checkpoints import import_state
from canter.compat.names import AlgorithmNames
from canter.envs.vec_env import StepRecord
from canter.envs.wrap import wrap_env
from canter.execution.executor import EXECUTIONS, PRECISIONS, Executor
from canter.modules.build import build_normalizer
from canter.modules.normalizer import ReturnScaler
from canter.utils.checkpoint import check_compatible
from canter.utils.config import (
    check_settings,
    check_value,
    combined_settings,
    declared_kinds,
    refuse_near_miss,
    setting,
    settings,
)
from canter.utils.distributed import RANKS
from canter.utils.runtime import resolve_device

RANK_TIMEOUT = 60.0
# Normaliser of a policy -> the setting that leaves it out, and the one that installs it.
NORMALIZERS = {
    "obs_normalizer": ("empirical_normalization=False", "empirical_normalization=True"),
    "critic_obs_normalizer": ("critic_obs_normalization=False", "critic_obs_normalization=True"),
    "value_normalizer": ("value_normalization='off'", "value_normalization='running' or 'popart'"),
}
NOTHING_NORMALIZED = {"empirical_normalization": operator.not_, "critic_obs_normalization": operator.not_}
CRITIC_PREFIXES = ("critic.", "memory_c.", "critic_obs_normalizer.", "value_normalizer.")


@settings
class CommonRunSettings:
    """Settings of any run: logging, saving, evaluation."""

    training_dict: ClassVar[Mapping[str, Any]] = {}
    """The training dict of the run, for `cfg[name]`."""

    def __getitem__(self, name: str) -> Any:
        """A setting, or an entry of the run's training dict."""
        if name in getattr(self, "__dataclass_fields__", ()):
            return getattr(self, name)
        return self.training_dict[name]

    def get(self, name: str, default: Any = None) -> Any:
        """`self[name]`, or the default."""
        try:
            return self[name]
        except KeyError:
            return default

    seed: int | None = setting(None, low=0, high=2**32 - 1)
    """Seed of weights, exploration, minibatches and environments; None draws one."""
    device: str | None = None
    """Device to learn on; None takes a GPU if there is one."""
    keep_checkpoints: int | None = setting(None, low=2)  # one is left if the newest is damaged
    """Number of periodic checkpoints to keep; None keeps all."""
    eval_episodes: int = setting(10, low=1)
    """Episodes of a periodic evaluation."""
    extra_log_keys: tuple[str, ...] = ("episode", "log")
    """Keys of the environment's extras that are logged."""
    logger_backend: str | tuple[str, ...] = "tensorboard"
    """Logging backend, or several; metrics.jsonl is always written."""
    logger_kwargs: dict[str, Any] | None = None
    """Options of the logging backend; nested by backend name if there are several."""
    inference_mode_rollout: bool = True
    """Collect under torch.inference_mode."""
    callback_errors: str = setting("raise", choices=("raise", "warn"))
    """Handling of an exception in a callback: "raise" or "warn"."""
    trial_metric: str | None = None
    """Metric for a hyper-parameter search; None: velrmsd where the environment has it, else episode/mean_reward."""
    rank_timeout: float = setting(RANK_TIMEOUT, low=1.0)
    """Seconds after which a rank that does not answer ends a run of several processes."""
    upload_model: bool = True
    """Send every checkpoint to the logging service."""
    git_diff: bool = True
    """Keep the diff of uncommitted changes in the run directory; it is never sent to a logging service."""


@settings
class RunSettings(CommonRunSettings):
    """Settings of a run of rollouts: lengths, logging, saving, evaluation."""

    num_steps_per_env: int = setting(24, low=1)
    """Steps of each environment between two updates."""
    max_iterations: int | None = setting(None, low=0)
    """Iterations of the whole run, where `learn` is given none; linear schedules end here."""
    log_interval: int = setting(1, low=0)
    """Iterations between two log entries."""
    save_interval: int = setting(100, low=0)
    """Iterations between two checkpoints; 0 saves only at the end."""
    eval_interval: int | None = setting(None, low=0)
    """Iterations between two evaluations; 0 runs none. None is 0, or a tenth of the run in `canter train`."""


@settings
class AlgorithmSettings:
    """Settings of every algorithm."""

    gamma: float = setting(0.99, low=0.0, high=1.0)
    """Discount."""
    optimizer_class_name: str = setting("Adam", fixed=True)
    """Any optimizer of torch.optim."""
    empirical_normalization: bool = setting(False, fixed=True)
    """Normalise observations by running statistics, kept in the policy; stored observations stay raw."""
    min_obs_std: float = setting(0.0, low=0.0, fixed=True, unused_if=NOTHING_NORMALIZED)
    """Smallest standard deviation that normalised observations are divided by; 1 never enlarges one."""
    clip_obs: float | None = setting(None, above=0.0, fixed=True, unused_if=NOTHING_NORMALIZED)
    """Bound of normalised observations, both ways; None for no bound. It is saved and exported with the statistics."""
    execution: str = setting("auto", choices=EXECUTIONS, fixed=True)
    """How hot functions run: "eager", "graph" (CUDA graphs; on a CPU recordings), "compile" (compiled too), "auto"."""
    precision: str = setting("tf32", choices=PRECISIONS, fixed=True)
    """Of matrix products: "tf32", "fp32" or "bf16"; weights, log-probabilities and losses stay float32. On a CPU "tf32"
    is float32, and so is "bf16" if it has no instructions for it."""


class Terms(NamedTuple):
    """Loss terms of a minibatch: losses by name, intermediate results, and statistics to report."""

    losses: dict[str, Tensor]
    inter_vars: dict[str, Any]
    stats: dict[str, Tensor]


class Setting:
    """A setting of an algorithm as its attribute: it is read from the config, and checked when it is assigned."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, alg: Any, owner: type | None = None) -> Any:
        if alg is None:
            return self
        holder = alg.holders.get(self.name)
        if holder is not None:
            return getattr(holder, self.name)
        if self.name not in vars(alg):  # another object of the class has the extension that declares it
            raise AttributeError(f"{type(alg).__name__} has no setting {self.name!r}")
        return vars(alg)[self.name]

    def __set__(self, alg: Any, value: Any) -> None:
        holder, owner = alg.holders.get(self.name), type(alg).__name__
        if holder is None:
            vars(alg)[self.name] = value
            return
        field = alg.setting_fields[self.name]
        if field.metadata.get("fixed"):
            built = f"{self.name}={getattr(alg, self.name)!r}"
            raise AttributeError(f"{owner} was built with {built}; make a new {owner} to change it")
        setattr(holder, self.name, check_value(owner, field, value))
        alg.sync_settings(self.name)


class Algorithm(AlgorithmNames):
    """Holds its settings as `cfg`; a setting is read and assigned as an attribute, `alg.gamma = 0.98`.

    A float setting also lives on the device as `live.<name>`, a 0-dim tensor that recorded and captured functions read,
    so changing one costs nothing. Any other setting is part of the key of a recording. A setting from which something
    was built at construction cannot change.
    """

    settings_class: ClassVar[type] = AlgorithmSettings
    """Settings with their documented defaults."""
    config_class: ClassVar[type]
    """Settings of the algorithm and of a run of it."""
    extension_classes: ClassVar[tuple[Any, ...]] = ()
    """Extensions whose settings are this class's own; those of all base classes are used too."""
    learns_from_replay: ClassVar[bool] = False
    """Whether the algorithm is off-policy."""
    skipped_share: float = 0.0
    """Share of the updates in the last report that were skipped, because the gradient was not finite."""
    cfg: Any
    extensions: dict[str, Any]
    policy: Any
    learning_rate: Any
    log_dir: str | None

    def __init__(self, cfg: Any, given: Mapping[str, Any], device: Any, seed: int | None, env: Any) -> None:
        self.is_built = False  # until the constructor of the subclass is done
        self.extensions = {}
        self.cfg = self._own_config(cfg, given)
        of_run = {name for base in type(self.cfg).__mro__ if is_run_settings(base) for name in field_names(base)}
        self.setting_fields: dict[str, Any] = {}
        self.holders: dict[str, Any] = {}  # the config that has each setting
        self.float_settings: set[str] = set()
        self.live = SimpleNamespace()
        self.live_values: dict[str, Any] = {}
        self.add_settings(self.cfg, of_run)
        found = resolve_device(device if device is not None else getattr(self.cfg, "device", None))
        self.device = RANKS.start(found, getattr(self.cfg, "rank_timeout", RANK_TIMEOUT))
        self.seed = getattr(self.cfg, "seed", None) if seed is None else seed
        self.stream_seed = RANKS.seed(int(torch.randint(2**62, ()).item()) if self.seed is None else self.seed)
        self.env = None if env is None else wrap_env(env, self.device)
        can_capture = self.device.type == "cpu" or RANKS.backend != "gloo"  # gloo copies from a GPU to the host
        self.executor = Executor(self.device, self.cfg.execution if can_capture else "eager", self.cfg.precision)
        self.constants: tuple[Any, ...] = ()
        """What recorded functions depend on besides tensors, as of the last `sync_settings`."""
        self.generators: dict[str, torch.Generator] = {}
        self.sync_settings()
        self.used_current_value = torch.zeros((), dtype=torch.bool, device=self.device)
        """Whether an episode was cut off without a final observation, and valued by the state before its last step."""
        self.has_warned = False  # of that
        self.current_learning_iteration = 0
        self.executor.attributes = self.plain_attributes
        if RANKS.size > 1:
            self.executor.error_of_ranks = lambda: RANKS.error
        self.trained_by: Any = None
        """The runner that was made for this algorithm last."""
        self.untrained: dict[int, nn.Parameter] | None = None  # by id, which stays theirs while they are held
        self.on_record: list[Callable[[StepRecord], None]] = []
        """Tensor functions called with every record, inside the recorded step of an off-policy algorithm."""
        self.on_step: list[Callable[[StepRecord], None]] = []
        """Functions called with every record after the recorded step of an off-policy algorithm."""
        self.known_attributes: set[str] = set()  # those that are no misspelt settings
        self.own_attributes: frozenset[str] = frozenset()  # those of canter, at the end of construction

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.declare_settings(field_names(cls.full_settings_class()))

    @classmethod
    def declare_settings(cls, names: Iterable[str]) -> None:
        """Make settings attributes of the class, unless it has attributes of these names."""
        for name in names:
            if not hasattr(cls, name):
                setattr(cls, name, Setting(name))

    @classmethod
    def all_extension_classes(cls) -> tuple[Any, ...]:
        """Extensions named by the class and its bases, those of the bases first."""
        named = (e for base in reversed(cls.__mro__) for e in vars(base).get("extension_classes", ()))
        return tuple(dict.fromkeys(reversed([*named])))[::-1]  # of one that is named twice the last place counts

    @classmethod
    def full_settings_class(cls) -> type:
        """Settings of the algorithm and of the extensions its class names, with the documented defaults."""
        parts = [extension.settings_class for extension in reversed(cls.all_extension_classes())]
        return combined_settings(cls.__name__, *parts, cls.settings_class)

    def _own_config(self, cfg: Any, given: Mapping[str, Any]) -> Any:
        """A config of this object's own: a copy of `cfg` with the settings it lacks, or the documented defaults."""
        wanted = self.full_settings_class()
        self._refuse_foreign_config(cfg, wanted)
        given = check_settings(type(self).__name__, given, field_names(wanted))
        values = {} if cfg is None else {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}
        for name in given.keys() & values.keys():
            raise ValueError(f"give {name} in cfg, not beside it")
        full = wanted if cfg is None else combined_settings(type(cfg).__name__, type(cfg), wanted)
        own = full(**values, **given)
        for extension in self.all_extension_classes():
            extension.adjust_config(own)
        return own

    def _refuse_foreign_config(self, cfg: Any, wanted: type) -> None:
        """Raise if `cfg` is no config object, or that of an algorithm whose settings would have no effect here."""
        owner = type(self).__name__
        own_config = f"{getattr(type(self), 'config_class', self.settings_class).__name__}()"
        if cfg is not None and (isinstance(cfg, type) or not dataclasses.is_dataclass(cfg)):
            raise TypeError(f"the cfg of {owner} is a config object such as {own_config}, got {cfg!r:.80}")
        bases = [base for base in type(cfg).__mro__ if issubclass(base, AlgorithmSettings)]
        others = [base for base in bases if not issubclass(base, self.settings_class) and base not in wanted.__mro__]
        declared = {name for base in others for name in inspect.get_annotations(base)}
        if unknown := sorted(declared - field_names(wanted)):
            problem = f"{owner} does not have settings of {type(cfg).__name__}: {', '.join(unknown[:3])}"
            raise ValueError(f"{problem}{', ...' * (len(unknown) > 3)}; give it a config such as {own_config}")

    def add_settings(self, cfg: Any, left_out: set[str] | None = None) -> None:
        """Make the fields of a config live: the algorithm's own, or that of an extension given as an object."""
        fields = {f.name: f for f in dataclasses.fields(cfg) if f.name not in (left_out or ())}
        self.setting_fields |= fields
        self.holders |= dict.fromkeys(fields, cfg)
        self.float_settings |= {name for name, f in fields.items() if "float" in declared_kinds(f)}
        self.declare_settings(fields)

    def sync_settings(self, assigned: str = "") -> None:
        """Copy changed float settings to the device, and give the executor every other one as a recording's key.

        `assigned` is the setting that was assigned, if this is the reason of the call.
        A runner calls it after every callback, PPO before every rollout and update.
        """
        key: list[Any] = []
        for name, field in self.setting_fields.items():
            value = getattr(self.holders[name], name)
            if isinstance(value, float | int | NoneType) and name in self.float_settings:
                key.append(value and True)  # None and zero may decide what is computed, other numbers do not
                if value is not None and self.live_values.get(name) != value:
                    self.live_values[name] = value
                    if hasattr(self.live, name):
                        getattr(self.live, name).fill_(value)
                    else:
                        setattr(self.live, name, self.device_scalar(value))
            elif not (field.metadata.get("host") or field.metadata.get("fixed")):
                key.append(value if isinstance(value, str | int | tuple | NoneType) else repr(value))
        constants = (*key, *(self.sync_derived() if self.is_built else ()))
        if constants != self.constants:
            self.constants = constants
            self.executor.set_constants(constants)
            if self.is_built:
                self._notice_untrained()
        if self.is_built and vars(self).keys() != self.known_attributes:
            self._refuse_misspelt_settings()

    def _refuse_misspelt_settings(self) -> None:
        """Raise if an attribute was assigned whose name is a setting's but for a letter or two."""
        new, known = vars(self).keys() - self.known_attributes, bool(self.known_attributes)
        self.known_attributes = set(vars(self))
        if known and type(self).__module__.startswith("canter."):  # a user's subclass has attributes of its own
            for name in new:
                refuse_near_miss(self, name, self.setting_fields)

    def _notice_untrained(self) -> None:
        """Warn of trainable parameters that came after the optimizers were made, which therefore lack them."""
        optimizers = [part for part in self.checkpoint_parts().values() if isinstance(part, GuardedOptimizer)]
        known = {id(parameter) for optimizer in optimizers for parameter in optimizer.parameters}
        named = {n: p for n, p in self.policy.named_parameters() if p.requires_grad and id(p) not in known}
        if self.untrained is None:  # at the end of construction: those that an extension excludes
            self.untrained = {id(parameter): parameter for parameter in named.values()}
            return
        new = [name for name, parameter in named.items() if id(parameter) not in self.untrained]
        if new:
            self.untrained |= {id(parameter): parameter for parameter in named.values()}
            owner, shown = type(self).__name__, ", ".join(new[:3]) + ", ..." * (len(new) > 3)
            problem = f"{len(new)} parameters of the policy are not trained ({shown})"
            reason = f"they were frozen, replaced or not there when {owner} was made, and its optimizer lacks them"
            way_out = f"make a new {owner} with them, and freeze layers after that; load weights by load_state_dict"
            warnings.warn(f"{problem}: {reason}; {way_out}", stacklevel=2)

    def notice_changes(self) -> None:
        """Take over what a callback changed: settings, and attributes that replayed functions may read."""
        self.sync_settings()
        self.executor.notice_changes()

    def code_owners(self) -> list[Any]:
        """Objects whose code runs in the replayed functions."""
        parts = [part for part in self.checkpoint_parts().values() if not isinstance(part, GuardedOptimizer)]
        return [self, *parts, *self.extensions.values(), *([self.env] if self.executor.uses_graphs else [])]

    def has_user_code(self) -> bool:
        """Whether a user's class, method or hook takes part in training."""
        return has_user_code(self.code_owners())

    def plain_attributes(self) -> dict[tuple[str, int], Any]:
        """Attributes of the policy, of the extensions, and those that a subclass or a user added to the algorithm."""
        if not self.is_built:
            return {}
        found = attributes(self.code_owners(), {id(self): self.own_attributes})
        return found | {(f"the setting {name}", 0): value for name, value in self.live_values.items()}

    def device_scalar(self, value: float) -> torch.Tensor:
        """A 0-dim tensor that recorded functions read; `fill_` changes it."""
        with torch.inference_mode(False):
            return torch.tensor(float(value), device=self.device)

    def sync_derived(self) -> tuple[Any, ...]:
        """Update what follows from the settings; returns what else recorded functions depend on, as hashable values."""
        return ()

    def new_generator(self, purpose: str, is_recorded: bool = True) -> torch.Generator:
        """A random stream of its own, derived from the seed and saved with the others."""
        made = torch.Generator(self.device).manual_seed((self.stream_seed + 7919 * len(self.generators)) % 2**63)
        self.generators[purpose] = made
        if is_recorded:
            self.executor.generators.append(made)
        return made

    def new_normalizer(self, shape: Any) -> nn.Module:
        """A normaliser of observations of a shape, as set."""
        return build_normalizer(shape, min_std=self.cfg.min_obs_std, clip=self.cfg.clip_obs)

    def check_can_learn(self, has_labels: bool = False) -> None:
        """Raise an error with the reason if training cannot change the policy; `has_labels`: a dataset has actions."""

    def checkpoint_parts(self) -> dict[str, Any]:
        """Name in the checkpoint -> the object whose state is saved. Extended by subclasses."""
        raise NotImplementedError

    def warn_of_current_value(self) -> None:
        """Warn once that episodes were cut off without a final observation."""
        if not self.has_warned:
            self.has_warned = True
            warnings.warn(
                "episodes were cut off but the environment gave no final observation: their value is taken from the "
                "state before the last step. Let the environment put the observation before the reset in "
                "extras['final_obs']",
                stacklevel=3,
            )

    def modules(self) -> list[nn.Module]:
        """Every network that has a training mode."""
        return [part for part in self.checkpoint_parts().values() if isinstance(part, nn.Module)]

    def train_mode(self) -> None:
        """Let networks and normalisers learn."""
        for module in self.modules():
            module.train()
        self.sync_settings()

    def eval_mode(self) -> None:
        """Freeze networks and normalisers."""
        for module in self.modules():
            module.eval()
        self.sync_settings()

    def end_episodes(self) -> None:
        """Forget the episodes under way, because every environment begins a new one."""
        self.policy.reset()
        for part in (part for module in self.modules() for part in module.modules()):
            if isinstance(part, ReturnScaler):
                part.returns.zero_()
        storage: Any = getattr(self, "storage", None)
        if storage is not None:
            everywhere = torch.ones(storage.num_envs, dtype=torch.bool, device=self.device)
            for extension in self.extensions.values():
                extension.reset(everywhere)

    def state_dict(self) -> dict[str, Any]:
        """The state of every part, and the learning rate."""
        state: dict[str, Any] = {name: part.state_dict() for name, part in self.checkpoint_parts().items()}
        return state | {"learning_rate": self.learning_rate}

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        load_optimizer: bool = True,
        load_cfg: Mapping[str, bool] | None = None,
        strict: bool = True,
    ) -> None:
        """Load a saved state: all of it, or nothing and an error that names every difference.

        `load_cfg` selects "actor", "critic", "optimizer" and "rnd". Without `strict`, tensors of the policy that one
        side lacks keep their values.
        """
        parts = self.checkpoint_parts()
        state = import_state(state)
        if "model_state_dict" in state and hasattr(parts["model_state_dict"], "import_weights"):
            state["model_state_dict"] = parts["model_state_dict"].import_weights(state["model_state_dict"])
        if load_cfg is not None:
            load_optimizer = load_optimizer and bool(load_cfg.get("optimizer"))
            parts = {n: part for n, part in parts.items() if not n.startswith("rnd_") or load_cfg.get("rnd")}
        if "model_state_dict" in state and (load_cfg is not None or not strict):
            own = parts["model_state_dict"].state_dict()
            state["model_state_dict"] = chosen_weights(own, state["model_state_dict"], load_cfg, strict)
        if "lr_scheduler_state_dict" in state and "lr_scheduler_state_dict" not in parts:
            warnings.warn("ignored: the checkpoint has a learning-rate scheduler, this algorithm none", stacklevel=2)
        usable = {}
        for name, part in parts.items():
            if ("optimizer" in name or "lr_scheduler" in name) and not load_optimizer:
                continue
            if name not in state:
                if name == "model_state_dict":
                    raise ValueError(f"the checkpoint has no model_state_dict; it has {', '.join(state)}")
                warnings.warn(f"the checkpoint has no {name}: it keeps its fresh state", stacklevel=2)
                continue
            self._check_part(part, state[name])
            usable[name] = part
        for name, part in usable.items():
            part.load_state_dict(state[name])
        self.executor.forget()  # recordings hold the moments that were replaced
        self._after_load(load_optimizer)

    def _check_part(self, part: Any, state: Mapping[str, Any]) -> None:
        """Raise an error if a saved state does not fit a part; nothing is changed."""
        if isinstance(part, nn.Module):
            owner = type(part).__name__
            for normalizer, remedies in NORMALIZERS.items():
                ours = any(key.startswith(f"{normalizer}.") for key in part.state_dict())
                theirs = any(key.startswith(f"{normalizer}.") for key in state)
                if ours != theirs:
                    problem = f"the checkpoint {'has' if theirs else 'lacks'} statistics for {normalizer}"
                    raise ValueError(f"{problem}, {owner} does the opposite: set {remedies[theirs]}")
            check_compatible(part.state_dict(), state, owner)
        elif hasattr(part, "check_state"):
            part.check_state(state)

    def _after_load(self, load_optimizer: bool) -> None:
        """Update what is derived from the loaded state."""

    def resume_state(self) -> dict[str, Any]:
        """State that exact continuation needs beyond what was learned."""
        return {"generators": {name: generator.get_state() for name, generator in self.generators.items()}}

    def load_resume_state(self, state: Mapping[str, Any]) -> None:
        """Continue exactly from a `resume_state`."""
        for name in state["generators"].keys() & self.generators.keys():  # the other run may have had a teacher
            self.generators[name].set_state(state["generators"][name].cpu())

    def runner(self) -> Any:
        """The runner that trains this algorithm; at the first call one is made, unless there is one already."""
        from canter import runners  # they import the algorithms

        if self.trained_by is None:
            if self.env is None:
                owner, calls = type(self).__name__, "learn, eval, save and load"
                raise ValueError(f"{calls} of {owner} need an environment: {owner}(env=...), or use a runner")
            runner_class = runners.OffPolicyRunner if self.learns_from_replay else runners.OnPolicyRunner
            self.trained_by = runner_class(self.env, agent=self, log_dir=self.log_dir)
        return self.trained_by

    def learn(self, *args: Any, **kwargs: Any) -> Any:
        """Train; see the runner's `learn`."""
        return self.runner().learn(*args, **kwargs)

    def eval(self, num_episodes: int = 10) -> dict[str, float]:
        """Evaluate; see the runner's `eval`."""
        return self.runner().eval(num_episodes)

    def save(self, path: str | Path | None = None) -> None:
        """Write a checkpoint; see the runner's `save`."""
        self.runner().save(path)

    def load(self, path: str | Path) -> Any:
        """Read a checkpoint; see the runner's `load`."""
        return self.runner().load(path)


def module_state(modules: Iterable[nn.Module]) -> list[Any]:
    """Addresses and `requires_grad` of all parameters, and training modes: faster than `Module.parameters()`."""
    found: list[Any] = []
    waiting: list[nn.Module | None] = list(modules)
    seen: set[nn.Module] = set()
    for module in waiting:
        if module is None or module in seen:
            continue
        seen.add(module)
        found.append(module.training)
        for parameter in module._parameters.values():
            if parameter is not None:
                found += (parameter.data_ptr(), parameter.requires_grad)
        waiting.extend(module._modules.values())
    return found


def chosen_weights(
    own: Mapping[str, Any], loaded: Mapping[str, Any], load_cfg: Mapping[str, bool] | None, strict: bool
) -> dict[str, Any]:
    """The loaded weights that `load_cfg` selects, and the policy's own in place of the others."""
    if load_cfg is not None:
        sides = {name: "critic" if name.startswith(CRITIC_PREFIXES) else "actor" for name in (*own, *loaded)}
        kept = {name: value for name, value in own.items() if not load_cfg.get(sides[name])}
        loaded = {**kept, **{name: value for name, value in loaded.items() if load_cfg.get(sides[name])}}
    return dict(loaded) if strict else {**own, **{name: value for name, value in loaded.items() if name in own}}


def is_run_settings(cls: type) -> bool:
    """Whether a settings class describes a run and no algorithm."""
    return issubclass(cls, CommonRunSettings) and not issubclass(cls, AlgorithmSettings)


def field_names(cls: type) -> set[str]:
    """Names of a settings class's fields."""
    return {f.name for f in dataclasses.fields(cls)}
