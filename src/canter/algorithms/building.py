"""What PPO needs around its algorithm: construction, storage and normalisers, documented overrides, reports."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from canter.algorithms.algorithm import Algorithm, module_state
from canter.algorithms.extension import Extension, Offered
from canter.algorithms.optim import GuardedOptimizer
from canter.envs.records import step_record
from canter.envs.vec_env import StepRecord
from canter.modules.build import NETWORK_ARGUMENTS, build_actor_critic, build_policy, env_shapes
from canter.modules.normalizer import NoNormalization, ReturnScaler, install_value_normalizer
from canter.modules.policy import Hidden
from canter.storage.rollout_storage import MiniBatch, RolloutStorage, masked_mean
from canter.utils.distributed import RANKS
from canter.utils.metrics import MeanMeter
from canter.utils.runtime import resolve_device
from canter.utils.tree import Obs, tree_map

T = TypeVar("T")


def from_cfg(cls: Any, cfg: Any, env: Any, device: Any = None, **networks: Any) -> Any:
    """The algorithm and its policy for an environment, from a training dict, or from a config object and networks.

    The dict has the sections `policy` and `algorithm`; `networks` are the arguments of `build_policy`.
    """
    if not isinstance(cfg, Mapping):
        return cls(env=env, cfg=cfg, device=device, **networks)
    from canter.compat.training_dicts import complete  # which imports the algorithms
    from canter.runners.construction import open_env
    from canter.runners.run_config import plan_for

    plan = plan_for(cls, cfg)
    opened = open_env(env, resolve_device(device or plan.cfg.device), plan)
    complete(plan, opened)
    common = {"env": opened, "cfg": plan.cfg}
    if "class_name" not in plan.policy:
        return cls(device=device, **common, **plan.policy)
    policy = build_actor_critic(opened, plan.policy["class_name"], plan.policy)
    return cls(policy, device=device, **common)


def refuse_name(cls: type, policy: Any) -> None:
    """Raise if the policy of an algorithm is a name, as in Stable-Baselines3."""
    if isinstance(policy, str):
        way_out = f"canter.train(env, algorithm={cls.__name__.lower()!r}), or OnPolicyRunner(env).learn(...)"
        page = "the page 'Coming from elsewhere' (docs/migration.md) has the calls of other libraries"
        raise TypeError(f"{cls.__name__}({policy!r}, ...) names no policy of canter: use {way_out}; {page}")


def own_policy(alg: Any, actor_critic: Any, given: dict[str, Any]) -> Any:
    """The policy that was given, or one of the networks in `given`, which are taken out of it; on the device."""
    networks = {name: given.pop(name) for name in NETWORK_ARGUMENTS if name in given}
    policy = (actor_critic or build_policy(alg.env, **networks)).to(alg.device)
    install_value_normalizer(policy, alg.cfg.value_normalization)
    return policy


def enabled_extensions(alg: Any, given: Sequence[Extension]) -> dict[str, Extension]:
    """The extensions of the class and the given ones, by name; their settings become the algorithm's attributes."""
    declared = [cls(alg.cfg) for cls in alg.all_extension_classes()]
    enabled = [e for e in (*declared, *given) if not e.switch or getattr(e.cfg, e.switch) is not None]
    for extension in given:
        alg.add_settings(extension.cfg)
    for extension in enabled:
        setattr(alg, extension.name, extension)
        for name in extension.offered:
            if not hasattr(type(alg), name):
                setattr(type(alg), name, Offered(name))
    return {extension.name: extension for extension in enabled}


def build_optimizer(alg: Any) -> GuardedOptimizer:
    """The policy's optimizer, without the parts that an extension trains."""
    names: dict[str, list[str]] = {"separate": [], "excluded": []}
    for extension in alg.extensions.values():
        for role, parts in extension.own_parameters(alg.policy).items():
            names[role] += parts
    names["separate"] += ["critic", "memory_c"] if alg.cfg.clip_grads_separately else []
    cfg = alg.cfg
    return GuardedOptimizer(alg.policy, cfg.optimizer_class_name, cfg.learning_rate, cfg.parameter_groups, **names)


def compile_passes(alg: Any) -> None:
    """Let the executor compile the policy's pass and the loss of a minibatch, on a GPU."""
    can_compile = not alg.policy.is_recurrent  # LSTM and GRU cannot be compiled
    if alg.executor.compiles and not alg.executor.records and can_compile:
        alg.forward = alg.executor.compile(alg.policy.forward)
        if all(extension.can_compile for extension in alg.extensions.values()):
            alg.minibatch_loss = alg.executor.compile(alg.minibatch_loss)


def check_can_learn(self: Any, has_labels: bool = False) -> None:
    """Raise an error if the policy has nothing to train, or takes its mean and has no actions to imitate."""
    name = type(self.policy).__name__
    if not self.optimizer.parameters:
        raise TypeError(f"{name} cannot learn: it has no parameters to train. Use get_inference_policy, eval, play")
    teacher: Any = self.extensions.get("teacher")
    has_labels = has_labels or bool(getattr(teacher, "policies", ()))
    if getattr(teacher, "cfg", None) and teacher.cfg.teacher_from_load and not has_labels:
        raise ValueError("no teacher was loaded to learn from: call load(path) with the teacher's checkpoint first")
    if self.uses_rewards and not self.policy.has_entropy and not has_labels:
        way_out = "train it with a teacher (TPPO), or train a policy that samples"
        raise TypeError(f"{name} cannot learn from rewards: it takes the mean and never explores; {way_out}")


# Storage: made for an environment before the first step.
def prepare(self: Any, env: Any, num_steps_per_env: int, **storage_cfg: Any) -> None:
    """Allocate storage for an environment, and install normalisers in a policy that has none."""
    obs_shape, critic_shape = env_shapes(env)
    present = (self.policy.obs_normalizer, self.policy.critic_obs_normalizer)
    if all(isinstance(normalizer, NoNormalization) for normalizer in present):  # others may have statistics already
        self.init_obs_norm(obs_shape, obs_shape if critic_shape is None else critic_shape)
    options = {**storage_options(self), "has_invalid_steps": env.has_invalid_steps, **storage_cfg}
    shapes = (obs_shape, critic_shape, self.policy.distribution.action_shape)
    self.init_storage(env.num_envs, num_steps_per_env, *shapes, **options)
    use_storage(self)


def init_obs_norm(self: Any, num_obs: Any, num_critic_obs: Any) -> None:
    """Install the policy's normalisers for widths or shapes; identities where normalisation is off."""
    self.executor.forget()
    actor, critic = self.cfg.empirical_normalization, self.cfg.critic_obs_normalization
    both = {"obs_normalizer": (num_obs, actor)}
    both["critic_obs_normalizer"] = (num_critic_obs, actor if critic is None else critic)
    for name, (shape, is_normalized) in both.items():
        made = self.new_normalizer(shape) if is_normalized else NoNormalization()
        setattr(self.policy, name, made.to(self.device))


def init_storage(
    self: Any,
    num_envs: int,
    num_transitions_per_env: int,
    actor_obs_shape: Any,
    critic_obs_shape: Any,
    action_shape: Any,
    **kwargs: Any,
) -> None:
    """Allocate the rollout, with the fields of the extensions."""
    classes = (RolloutStorage, *(e.storage_class for e in self.extensions.values()))
    storage_class = max(classes, key=lambda cls: len(cls.__mro__))
    shapes = (actor_obs_shape, critic_obs_shape, action_shape)
    options = {**storage_options(self), **kwargs}
    self.storage = storage_class(num_envs, num_transitions_per_env, *shapes, device=self.device, **options)
    use_storage(self)


def storage_options(alg: Any) -> dict[str, Any]:
    """Keyword arguments of the storage that follow from the policy and the extensions."""
    policy, extensions = alg.policy, alg.extensions.values()
    return {
        "param_shapes": policy.distribution.param_shapes,
        "action_dtype": policy.distribution.action_dtype,
        "hidden_shapes": {name: memory.state_shape for name, memory in policy.memories.items()},
        "random_masks": policy.random_mask_probs,
        "extra_fields": {name: field for e in extensions for name, field in e.fields().items()},
        **{name: value for e in extensions for name, value in e.storage_options.items()},
    }


def use_storage(alg: Any) -> None:
    """Begin with a new `alg.storage`, which an override of `init_storage` may have made."""
    if alg.storage is alg.storage_in_use:
        return
    alg.executor.forget()  # recordings hold the tensors of the old storage
    alg.storage_in_use = alg.storage
    alg.storage.unpack_hidden = lambda given: unpack_hidden(alg.policy, given, alg.storage.num_envs)
    if alg.cfg.normalize_rewards:
        alg.return_scaler = ReturnScaler(alg.storage.num_envs, alg.live.gamma).to(alg.device)
    for extension in alg.extensions.values():
        extension.begin(alg.storage)


def unpack_hidden(policy: Any, given: Any, num_envs: int) -> dict[str, Tensor]:
    """The memories by name of the documented `get_hidden_states()`, which has None before the first step."""
    if any(state is None for state in given):
        return policy.initial_hidden(num_envs)
    return {**policy.unpack_hidden(given, "actor"), **policy.unpack_hidden(given, "critic")}


# Collecting with an environment whose step is tensor code: a rollout is one function.
@torch.no_grad()
def collect_whole(self: Any, env: Any, obs: Obs, critic_obs: Obs) -> tuple[Obs, Obs]:
    """Collect a rollout and compute its returns in one function, for an environment whose step is tensor code."""
    generator = getattr(env, "generator", None)
    if generator is not None and generator not in self.executor.generators:
        self.executor.generators.append(generator)
    self.begin_rollout()
    given, hidden = None if critic_obs is obs else critic_obs, self.policy.hidden(self.storage.num_envs)
    obs, given, hidden = self.executor.run("rollout", self.rollout_steps, env, obs, given, hidden)
    self.storage.step = self.storage.num_finished = self.storage.num_transitions_per_env
    self.policy.set_hidden(hidden)
    return obs, obs if given is None else given


def rollout_steps(self: Any, env: Any, obs: Obs, critic_obs: Obs | None, hidden: Hidden) -> tuple[Any, Any, Hidden]:
    """Act, step and store T times; then finish the rollout."""
    storage = self.storage
    for row in storage.rows:
        step = self.act_step(obs, critic_obs, hidden)
        record = env.step(step["for_env"].clone())  # it may write to what it gets
        hidden = self.store_step(row, step, self.needed(record), step["next_hidden"])
        obs, critic_obs = record.obs, None if record.critic_obs is record.obs else record.critic_obs
    storage.step, storage.num_finished = len(storage.rows), 0
    self.finish_rewards(call)
    self.returns_step(obs if critic_obs is None else critic_obs, hidden, storage.step)
    return obs, critic_obs, hidden


# Methods that a user may replace: who replaces one is called, also where canter has a faster way.
def is_replaced(owner: Any, base: type, *names: str) -> bool:
    """Whether code outside canter replaces a method of `base`, in a subclass or on the object itself."""
    for name in names:
        method = getattr(owner, name)
        function = getattr(method, "__func__", method)
        if function is not getattr(base, name) and not str(getattr(function, "__module__", "")).startswith("canter."):
            return True
    return False


def call(name: str, fn: Callable[..., T], *args: Any) -> T:
    """`fn(*args)`: stands for `Executor.run` inside a function that is itself run by it."""
    return fn(*args)


# Steps: what overrides of the documented methods get and leave behind.
def process_env_step(
    self: Any, rewards: Tensor, dones: Tensor, infos: dict[str, Any], next_obs: Any = None, next_critic_obs: Any = None
) -> None:
    """Store the step that `act` began, with the values that an environment's step returned."""
    begun = self.transition
    obs = begun.observations if next_obs is None else next_obs  # for their shapes, if the next ones are not given
    critic_obs = begun.critic_observations if next_critic_obs is None else next_critic_obs
    record = step_record(obs, critic_obs, rewards, dones, infos)
    self.process_step(record if next_obs is not None else record._replace(obs=None, critic_obs=None))  # pyright: ignore[reportArgumentType]


def process_as_documented(alg: Any, record: StepRecord) -> StepRecord:
    """Store a step by a user's `process_env_step(rewards, dones, infos)`; the record with what it added to a log."""
    infos = {"log": {}, **record.extras, "terminated": record.terminated, "truncated": record.truncated}
    infos |= {"time_outs": record.truncated, "valid": record.valid}
    if record.final_obs is not None:
        infos |= {"final_obs": record.final_obs, "final_critic_obs": record.final_critic_obs}
    step, dones = alg.storage.step, record.terminated | record.truncated
    alg.process_env_step(record.reward, dones, infos)
    if alg.storage.step != step + 1:
        name, way_out = f"{type(alg).__name__}.process_env_step", "call super().process_env_step(...)"
        raise RuntimeError(f"{name} stored {alg.storage.step - step} steps instead of one; {way_out}")
    row = alg.storage.rows[step]  # episode statistics are of the environment's own rewards
    alg.storage.data["env_rewards"].index_copy_(0, row, record.reward.view(1, -1, 1))
    return record._replace(extras={**record.extras, "log": infos["log"]} if infos["log"] else record.extras)


def needed(self: Any, record: StepRecord) -> StepRecord:
    """The parts of a record that are stored or read by extensions."""
    extras = tensor_extras(record.extras, self.extensions.values()) if self.uses_step_hooks else {}
    has_final = self.uses_step_hooks or self.cfg.timeout_bootstrap in ("auto", "final_obs")
    final_critic_obs: Any = record.final_critic_obs if has_final else None
    reached: Any = record.critic_obs if self.uses_step_hooks else None
    return record._replace(  # pyright: ignore[reportArgumentType]
        obs=None, critic_obs=reached, final_obs=None, final_critic_obs=final_critic_obs, extras=extras
    )


def add_transition(storage: Any, values: Mapping[str, Any]) -> None:
    """Store a step by a user's `add_transitions`."""
    transition = storage.Transition()
    transition.__dict__ = dict(values)
    storage.add_transitions(transition)


def tensor_extras(extras: Mapping[str, Any], extensions: Iterable[Extension]) -> dict[str, Any]:
    """The entries of the extras that extensions read, as tensors."""
    names = [name for extension in extensions for name in extension.extras if extras.get(name) is not None]
    return {name: tensors_of(extras[name]) for name in names}


def tensors_of(value: Any) -> Any:
    """A number, an array or a tensor as a tensor, or those in a mapping."""
    if not isinstance(value, Mapping):
        return torch.as_tensor(value)
    return {n: tensors_of(v) for n, v in value.items() if isinstance(v, Mapping | Tensor) or hasattr(v, "__array__")}


# Settings, statistics and reports: once per iteration.
def sync_derived(self: Any) -> tuple[Any, ...]:
    """Update rates, bounds and loss weights; returns what else recorded functions depend on."""
    self.optimizer.take_assigned_rates()
    self.clip.fill_(self.cfg.clip_param * self.clip_fraction_left)
    for name in ("clip_min_std", "clip_max_std"):
        bound = getattr(self.cfg, name)
        if isinstance(bound, tuple):
            self.std_bounds[name] = self.bounds_by_action.setdefault(bound, torch.tensor(bound, device=self.device))
        else:
            self.std_bounds[name] = None if bound is None else getattr(self.live, name)
    known = {name.removesuffix("_coef") for name in self.setting_fields if name.endswith("_coef")}
    known |= {*self.loss_weights, "surrogate_loss", *self.weights}
    known |= {name.removeprefix("losses/") for name in self.meter.names if name.startswith("losses/")}
    known.discard("total_loss")
    weights: list[Any] = []
    for name in sorted(known):
        weight = self.loss_weights[name]
        if isinstance(weight, int | float):
            before, scalar = self.weights.get(name, (None, None))
            if scalar is None:
                scalar = self.device_scalar(weight)
            elif weight != before:
                scalar.fill_(weight)
            self.weights[name] = (weight, scalar)
            weights.append((name, weight == 0.0))
        elif torch.is_tensor(weight):
            weights.append((name, weight.data_ptr()))
    self.uses_rewards = all(extension.uses_rewards for extension in self.extensions.values())
    parts = [part for part in (self.policy, self.return_scaler) if part is not None]
    return (tuple(weights), tuple(module_state(parts)), self.uses_rewards, self.extension_keys)


def adjust_learning_rate(self: Any, progress: float) -> None:
    """Set linear schedules for the fraction of the run that is done."""
    left = max(0.0, 1.0 - progress)
    if self.cfg.schedule == "linear":
        self._learning_rate = self.cfg.learning_rate * left
        self.lr.fill_(self._learning_rate)
    if self.cfg.clip_schedule == "linear":
        self.clip_fraction_left = left
        self.clip.fill_(self.cfg.clip_param * left)


@torch.no_grad()
def adapt_learning_rate(self: Any, kl: Tensor) -> None:
    """Change the learning rate so that the KL step stays near `desired_kl`; decided on the device."""
    slower, faster = kl > 2 * self.live.desired_kl, (kl < self.live.desired_kl / 2) & (kl > 0)
    lower, higher = (self.lr / 1.5).clamp(min=1e-5), (self.lr * 1.5).clamp(max=1e-2)
    self.lr.copy_(torch.where(slower, lower, torch.where(faster, higher, self.lr)))


def get_learning_rate(self: Any) -> float:
    """The learning rate as of the last report; assign it to change it."""
    return self._learning_rate


def set_learning_rate(self: Any, rate: float) -> None:
    """Set the learning rate."""
    self.cfg.learning_rate = rate
    self._learning_rate = self.cfg.learning_rate
    self.lr.fill_(self._learning_rate)


def read_learning_rate(self: Any) -> None:
    """Read the learning rate from the device, or from `param_groups` if it was assigned there."""
    self.optimizer.take_assigned_rates()
    self._learning_rate = float(self.lr)


class LossWeights(dict[str, Any]):
    """Weights of losses by name; of a loss that is not in it, the attribute or setting `<name>_coef`, or else 1."""

    def __init__(self, alg: Any) -> None:
        super().__init__()
        self.alg = alg

    def __missing__(self, name: str) -> Any:
        return getattr(self.alg, f"{name}_coef", 1.0)


def weighted_sum(self: Any, losses: Mapping[str, Tensor]) -> Tensor:
    """The sum of the losses, each times its weight."""
    total = None
    for name, loss in losses.items():
        weight = self.loss_weights[name]
        if not torch.is_tensor(weight) and weight == 0.0:
            continue  # it is only reported: without its gradient the backward pass is shorter
        number, on_device = self.weights.get(name, (math.nan, weight))
        weight = weight if torch.is_tensor(weight) or weight != number else on_device
        total = loss * weight if total is None else total + loss * weight
    return next(iter(losses.values())) * 0.0 if total is None else total


def update_normalizers(self: Any) -> None:
    """Update the normalisers of observations and values from the newest rollout."""
    storage = self.storage
    if self.cfg.empirical_normalization or self.cfg.critic_obs_normalization:
        obs, critic_obs = self.newest_observations()
        self.policy.update_normalizers(obs, critic_obs, storage.newest_valid)
    if self.cfg.value_normalization != "off":
        self.policy.value_normalizer.update(storage.data["returns"][storage.newest], storage.newest_valid)


def newest_observations(self: Any) -> tuple[Any, Any]:
    """(T, N, ...) observations of the last rollout, the actor's and the critic's."""
    used, critic = self.rollout.newest, self.rollout.privileged_observations
    obs = tree_map(lambda leaf: leaf[used], self.rollout.observations)
    return obs, obs if critic is None else tree_map(lambda leaf: leaf[used], critic)


def mini_batches(self: Any) -> Iterator[MiniBatch]:
    """The minibatches of one pass."""
    for index, *trajectories in self.sample_minibatches()[0]:
        yield self.rollout.take_envs(index, trajectories[0]) if trajectories else self.rollout.take(index)


def epoch_kl(meter: MeanMeter, before: Mapping[str, float]) -> float:
    """Mean KL of the pass since `before`, from the running means."""
    now, name = meter.means(), "stats/approx_kl"
    added = now["count"] - before.get("count", 0.0)
    mean = (now[name] * now["count"] - before.get(name, 0.0) * before.get("count", 0.0)) / added
    return RANKS.mean_metrics({name: mean})[name]


def report(alg: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Mean losses and statistics of the update, read from the device at once."""
    storage = alg.storage
    used, valid = storage.newest, storage.newest_valid
    scalars = alg.meter.averages() | {
        "stats/learning_rate": alg.lr,
        "stats/used_current_value": alg.used_current_value,
        "stats/rollout/mean_value": masked_mean(storage.data["values"][used], valid),
    }
    if "sigma" in storage.param_shapes:
        scalars["stats/policy/mean_noise_std"] = masked_mean(storage.data["sigma"][used], valid)
    for extension in alg.extensions.values():
        scalars |= {f"stats/{name}": value for name, value in extension.metrics().items()}
    read = dict(zip(scalars, torch.stack([v.float() for v in scalars.values()]).tolist(), strict=True))
    losses: dict[str, float] = defaultdict(float)
    stats: dict[str, float] = defaultdict(float)
    count = read.pop("count", 0.0)
    for name, value in read.items():
        kind, _, rest = name.partition("/")
        (losses if kind == "losses" else stats)[rest] = value
    alg.skipped_share = stats["nonfinite_updates"]
    stats["nonfinite_updates"] *= count
    alg._learning_rate = stats["learning_rate"]
    if stats.pop("used_current_value", 0.0):
        alg.warn_of_current_value()
    return losses, stats


# Saving and continuing.
def checkpoint_parts(self: Any) -> dict[str, Any]:
    """Policy with its normalisers, optimizer, and the parts of the extensions."""
    parts: dict[str, Any] = {"model_state_dict": self.policy, "optimizer_state_dict": self.optimizer}
    if self.return_scaler is not None:
        parts["return_scaler_state_dict"] = self.return_scaler
    for extension in self.extensions.values():
        parts |= extension.checkpoint_parts()
    return parts


def resume_state(self: Any) -> dict[str, Any]:
    """Random streams, the state of the memories, and the extensions' state."""
    hidden = {name: memory.state for name, memory in self.policy.memories.items() if memory.state is not None}
    own = {name: value for e in self.extensions.values() for name, value in e.resume_state().items()}
    return Algorithm.resume_state(self) | {"hidden": hidden} | own


def after_load(self: Any, load_optimizer: bool) -> None:
    """Read the learning rate that was loaded with the optimizer."""
    if load_optimizer:
        self.read_learning_rate()


def load_resume_state(self: Any, state: Mapping[str, Any]) -> None:
    """Continue exactly from a `resume_state`."""
    Algorithm.load_resume_state(self, state)
    self.policy.set_hidden({name: value.to(self.device) for name, value in state["hidden"].items()})
    for extension in self.extensions.values():
        extension.load_resume_state(state)
