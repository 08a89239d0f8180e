"""Proximal policy optimisation (Schulman 2017): acting, recording, returns, minibatches, losses and update."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from canter.algorithms.algorithm import Algorithm, AlgorithmSettings, CommonRunSettings, Terms, module_state
from canter.algorithms.extension import Extension, overrides
from canter.algorithms.optim import GuardedOptimizer, backward
from canter.algorithms.rnd import RND, RNDSettings
from canter.algorithms.symmetry import Symmetry, SymmetrySettings
from canter.compat.arguments import documented
from canter.envs.records import step_record
from canter.envs.vec_env import StepRecord
from canter.execution import ACTIVE_TRACERS, note_host_read
from canter.modules.build import NETWORK_ARGUMENTS, build_actor_critic, build_policy, env_shapes
from canter.modules.normalizer import VALUE_NORMALIZATIONS, NoNormalization, ReturnScaler, install_value_normalizer
from canter.modules.policy import Hidden, Policy, PolicyOutput
from canter.storage.rollout_storage import MiniBatch, RolloutStorage, Transition, masked_mean, normalize_advantages
from canter.utils.config import check_value, setting, settings
from canter.utils.distributed import RANKS
from canter.utils.metrics import MeanMeter
from canter.utils.runtime import resolve_device
from canter.utils.tree import Obs, tree_map

SCHEDULES = ("fixed", "constant", "linear", "adaptive")
BOOTSTRAPS = ("auto", "final_obs", "current_value", "none")


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
class PPOSettings(RNDSettings, SymmetrySettings, AlgorithmSettings):
    """Hyperparameters of PPO, with the documented defaults."""

    num_learning_epochs: int = setting(1, low=1, host=True)
    """Passes over each rollout."""
    num_mini_batches: int = setting(1, low=1, host=True)
    """Minibatches per pass."""
    clip_param: float = setting(0.2, above=0.0)
    """Clip range of the probability ratio and of the value step."""
    gamma: float = 0.998
    """Discount."""
    lam: float = setting(0.95, low=0.0, high=1.0)
    """Decay of the advantage estimate."""
    value_loss_coef: float = setting(1.0, low=0.0)
    """Weight of the value loss, a mean square."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    learning_rate: float = setting(1e-3, low=0.0)
    """Step size; the first one, if a schedule changes it."""
    max_grad_norm: float = setting(1.0, low=0.0, high=math.inf)
    """Gradients are scaled down to this global norm."""
    use_clipped_value_loss: bool = True
    """Clip the value step by `clip_param` too."""
    clip_min_std: float | tuple[float, ...] = setting(1e-15, low=0.0, at_most="clip_max_std")
    """Lower bound of the exploration noise, one number or one per action."""
    clip_max_std: float | tuple[float, ...] | None = setting(None, above=0.0, high=math.inf)
    """Upper bound of the exploration noise."""
    schedule: str = setting("fixed", choices=SCHEDULES)
    """Learning rate: "fixed" (or "constant"), "linear" to 0, or "adaptive" by the KL step."""
    desired_kl: float = setting(0.01, above=0.0, unused_if={"schedule": lambda kind: kind != "adaptive"})
    """KL step that the adaptive schedule aims at."""
    clip_schedule: str = setting("fixed", choices=("fixed", "linear"), host=True)
    """Clip range: "fixed" or "linear" to 0."""
    target_kl: float | None = setting(None, above=0.0, host=True)
    """Stop the passes over a rollout once the mean KL of one exceeds this."""
    normalize_advantage_per_mini_batch: bool = False
    """Normalise advantages in each minibatch instead of over the rollout."""
    critic_obs_normalization: bool | None = setting(None, fixed=True)
    """Normalise the critic's observations; None does as `empirical_normalization`, which then is the actor's alone."""
    clip_grads_separately: bool = setting(False, fixed=True)
    """Scale the gradients of actor and critic down to `max_grad_norm` each, instead of together."""
    normalize_rewards: bool = setting(False, fixed=True)
    """Divide rewards by the running standard deviation of the discounted return."""
    value_normalization: str = setting("off", choices=VALUE_NORMALIZATIONS, fixed=True)
    """Learn returns of mean 0 and std 1: "off", "running", or "popart", which keeps every value as statistics move."""
    timeout_bootstrap: str = setting("auto", choices=BOOTSTRAPS)
    """Value added where an episode was cut off: "final_obs", "current_value", "none", or "auto": the best there is."""
    parameter_groups: dict[str, dict[str, Any]] | None = setting(None, fixed=True)
    """Optimizer options by parameter name prefix, e.g. {"critic": {"lr": 1e-3, "weight_decay": 1e-4}}."""


@settings
class PPOConfig(PPOSettings, RunSettings):
    """A whole PPO run in one object; defaults that suit most tasks."""

    num_learning_epochs: int = 5
    num_mini_batches: int = 4
    gamma: float = 0.99
    learning_rate: float = 3e-4
    schedule: str = "adaptive"
    log_interval: int = 10


class PPO(Algorithm):
    """PPO on a policy, `PPO(actor_critic, clip_param=0.1)`, or on an environment, `PPO(env=env, actor_class=...)`.

    Args:
        actor_critic: The policy to train; without one it is built from `actor` and `critic`, or from their classes.
        cfg: A config object instead of settings as keywords.
        env: Anything `wrap_env` accepts; needed for `learn` and `eval`.
        device: Device to learn on.
        seed: Seed of exploration noise and minibatch order; drawn from torch's generator if None.
        extensions: `Extension` objects, in the order in which their hooks run.
        log_dir: Run directory of `learn`.
        **given: Settings, the fields of `PPOSettings` and of the extensions; and the arguments of `build_policy`.
    """

    settings_class = PPOSettings
    config_class = PPOConfig
    extension_classes = (RND, Symmetry)

    @documented(
        *("actor_critic", "num_learning_epochs", "num_mini_batches", "clip_param", "gamma", "lam", "value_loss_coef"),
        *("entropy_coef", "learning_rate", "max_grad_norm", "use_clipped_value_loss", "clip_min_std"),
        *("optimizer_class_name", "schedule", "desired_kl", "device", "empirical_normalization"),
    )
    def __init__(
        self,
        actor_critic: Policy | None = None,
        *,
        cfg: Any = None,
        env: Any = None,
        device: Any = None,
        seed: int | None = None,
        extensions: Sequence[Extension] = (),
        log_dir: str | None = None,
        **given: Any,
    ) -> None:
        networks = {name: given.pop(name) for name in NETWORK_ARGUMENTS if name in given}
        super().__init__(cfg, given, device or getattr(cfg, "device", None) or "cpu", seed, env)
        self.log_dir = log_dir
        self.policy = (actor_critic or build_policy(self.env, **networks)).to(self.device)
        install_value_normalizer(self.policy, self.cfg.value_normalization)
        declared = [cls(self.cfg) for cls in self.all_extension_classes()]
        self.extensions = {e.name: e for e in (*declared, *extensions) if e.is_enabled()}
        for extension in extensions:
            self.add_settings(extension.cfg)
        self.needs_next_obs = any(e.needs_next_obs for e in self.extensions.values())
        self.defers_late_terms = False
        """Whether `compute_losses` leaves the late terms to `optimizer_step`, because they cannot be compiled."""
        self.new_generator("action")
        self.new_generator("shuffle", is_recorded=False)
        self.optimizer = GuardedOptimizer(
            self.policy,
            self.cfg.optimizer_class_name,
            self.cfg.learning_rate,
            self.cfg.parameter_groups,
            separate=[name for e in self.extensions.values() for name in e.separately_clipped(self.policy)]
            + (["critic", "memory_c"] if self.cfg.clip_grads_separately else []),
            excluded=[name for e in self.extensions.values() for name in e.excluded_parameters(self.policy)],
        )
        self.lr = self.optimizer.lr  # on the device
        self._learning_rate = self.cfg.learning_rate  # as it was last read from there
        self.clip = self.device_scalar(self.cfg.clip_param)  # the clip range
        self.clip_fraction_left = 1.0  # of a linear schedule
        self.loss_weights: dict[str, Any] = {
            "surrogate_loss": 1.0,
            "value_loss": self.live.value_loss_coef,
            "entropy": self.live.entropy_coef,
        }
        """Weight of each loss by name: a number, or a device scalar such as `live.entropy_coef`."""
        self.first_weights: dict[str, float] = {}  # numbers among them, as they were first seen
        self.changed_weights: dict[str, Tensor] = {}  # device scalars of the numbers that have changed since
        self.zero_weights: frozenset[str] = frozenset()  # losses whose device scalar is 0
        self.std_bounds: dict[str, Tensor | None] = {}  # by setting, on the device
        self.bounds_by_action: dict[tuple[float, ...], Tensor] = {}  # of settings with one bound per action
        self.storage: Any = None
        """The rollout, once `prepare` or `init_storage` allocated it."""
        self.transition = Transition()
        self.waiting_steps: list[tuple[dict[str, Any], StepRecord]] = []
        """Steps that are not stored yet: at most `max_waiting_steps`, which a runner raises where `steps_can_wait`."""
        self.max_waiting_steps = 0
        self.return_scaler: ReturnScaler | None = None
        self.meters: dict[int, MeanMeter] = defaultdict(MeanMeter)  # by the executor's number of the settings
        self.meter = MeanMeter()
        self.uses_rewards = True
        """Whether PPO's own losses are part of the total."""
        self.forward: Any = self.policy
        """The policy's pass while acting, compiled on a GPU."""
        for extension in self.extensions.values():
            extension.attach(self)
        can_compile = not self.policy.is_recurrent  # LSTM and GRU cannot be compiled
        if self.executor.compiles and not self.executor.records and can_compile:
            self.forward = self.executor.compile(self.policy.forward)
            self.minibatch_loss = self.executor.compile(self.minibatch_loss)
        self.is_built = True
        self.sync_settings()
        if self.env is not None:
            self.prepare(self.env, getattr(self.cfg, "num_steps_per_env", 24))

    @classmethod
    def from_cfg(cls, cfg: Any, env: Any, device: Any = None, **networks: Any) -> Any:
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

    def check_can_learn(self, has_labels: bool = False) -> None:
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
    def prepare(self, env: Any, num_steps_per_env: int, **storage_cfg: Any) -> None:
        """Allocate storage for an environment, and install normalisers in a policy that has none."""
        obs_shape, critic_shape = env_shapes(env)
        present = (self.policy.obs_normalizer, self.policy.critic_obs_normalizer)
        if all(isinstance(normalizer, NoNormalization) for normalizer in present):  # others may have statistics already
            self.init_obs_norm(obs_shape, obs_shape if critic_shape is None else critic_shape)
        self.init_storage(
            env.num_envs,
            num_steps_per_env,
            obs_shape,
            critic_shape,
            self.policy.distribution.action_shape,
            has_invalid_steps=env.has_invalid_steps,
            **storage_cfg,
        )

    def init_obs_norm(self, num_obs: Any, num_critic_obs: Any) -> None:
        """Install the policy's normalisers for widths or shapes; identities where normalisation is off."""
        self.executor.forget()
        actor, critic = self.cfg.empirical_normalization, self.cfg.critic_obs_normalization
        both = {"obs_normalizer": (num_obs, actor)}
        both["critic_obs_normalizer"] = (num_critic_obs, actor if critic is None else critic)
        for name, (shape, is_normalized) in both.items():
            made = self.new_normalizer(shape) if is_normalized else NoNormalization()
            setattr(self.policy, name, made.to(self.device))

    def init_storage(
        self,
        num_envs: int,
        num_transitions_per_env: int,
        actor_obs_shape: Any,
        critic_obs_shape: Any,
        action_shape: Any,
        **kwargs: Any,
    ) -> None:
        """Allocate the rollout, with the fields of the extensions."""
        self.executor.forget()  # recordings hold the tensors of the old storage
        extensions = self.extensions.values()
        storage_class = max((RolloutStorage, *(e.storage_class for e in extensions)), key=lambda cls: len(cls.__mro__))
        arguments = {name: value for e in extensions for name, value in e.storage_arguments().items()}
        self.storage = storage_class(
            num_envs,
            num_transitions_per_env,
            actor_obs_shape,
            critic_obs_shape,
            action_shape,
            self.device,
            param_shapes=self.policy.distribution.param_shapes,
            action_dtype=self.policy.distribution.action_dtype,
            hidden_shapes={name: memory.state_shape for name, memory in self.policy.memories.items()},
            random_masks=self.policy.random_mask_probs,
            extra_fields={name: field for e in extensions for name, field in e.declare_fields().items()},
            **{**arguments, **kwargs},
        )
        if self.cfg.normalize_rewards:
            self.return_scaler = ReturnScaler(num_envs, self.live.gamma).to(self.device)
        self.executor.counters["storage"] = (self.storage, ("step",))
        for extension in extensions:
            extension.begin(self.storage)

    @property
    def rollout(self) -> RolloutStorage:
        """The storage, once it is allocated."""
        if self.storage is None:
            raise RuntimeError(f"{type(self).__name__} has no storage yet; call init_storage(...) or give it an env")
        return self.storage

    # Acting: `act` is called by the runner; `act_step` is the tensor function that is recorded or captured.
    @torch.no_grad()  # a stored tensor with a graph would keep every rollout alive
    def act(self, obs: Obs, critic_obs: Obs | None = None) -> Tensor:
        """Sample actions for N environments and begin their transition."""
        if hasattr(obs, "normalized_by"):
            raise ValueError("the observation was normalised already; give the raw one, which the policy normalises")
        storage = self.rollout if self.storage is None else self.storage
        if storage.step == 0 and not self.waiting_steps:
            if self.executor.replays:
                self.executor.begin_iteration()
                self.notice_changes()
            else:
                self.sync_settings()
        hidden = self.policy.hidden(storage.num_envs) if storage.hidden_shapes else {}
        step = self.executor.run("act", self.act_step, obs, None if critic_obs is obs else critic_obs, hidden)
        self.transition.__dict__ = step
        if hidden:
            self.policy.set_hidden(step["next_hidden"])
        return step["for_env"].clone()  # the environment may keep it, or write to it

    def act_step(self, obs: Obs, critic_obs: Obs | None, hidden: Hidden) -> dict[str, Any]:
        """The first half of a transition, and the actions in the form that the environment takes."""
        policy, noise = self.policy, self.generators["action"]
        masks = policy.draw_random_masks(obs, noise) if policy.random_mask_probs else {}
        with self.executor.autocast():
            out: PolicyOutput = self.forward(obs, critic_obs, hidden, None, masks)
        actions = policy.sample_action(out.params, noise)
        step = {
            "observations": obs,
            "critic_observations": obs if critic_obs is None else critic_obs,
            "params": out.params,
            "values": out.value,
            "actions": actions,
            "actions_log_prob": policy.distribution.log_prob(out.params, actions),
            "hidden": hidden,
            "random_masks": masks,
            "next_hidden": out.hidden,
            "for_env": policy.distribution.to_env(actions),
        }
        for extension in self.extensions.values():
            extension.after_act(step, obs, step["critic_observations"])
        return step

    # Recording: `process_step` finishes what `act` began; `record_step` is its tensor function.
    def process_env_step(
        self, rewards: Tensor, dones: Tensor, infos: dict[str, Any], next_obs: Any = None, next_critic_obs: Any = None
    ) -> None:
        """Finish the transition with the values that an environment's step returned."""
        begun = self.transition
        obs = begun.observations if next_obs is None else next_obs  # for their shapes, if the next ones are not given
        critic_obs = begun.critic_observations if next_critic_obs is None else next_critic_obs
        record = step_record(obs, critic_obs, rewards, dones, infos)
        self.process_step(record if next_obs is not None else record._replace(obs=None, critic_obs=None))  # pyright: ignore[reportArgumentType]
        for extension in self.extensions.values():
            metrics = extension.step_metrics()
            if metrics:
                infos.setdefault("log", {}).update(metrics)

    @torch.no_grad()
    def process_step(self, record: StepRecord) -> None:
        """Finish the transition with the record of the step it led to, and store it, at once or as a waiting step."""
        self.storage.check_space(len(self.waiting_steps))
        extras = {name: value for e in self.extensions.values() for name, value in e.record_fields(record).items()}
        reached: Any = record.critic_obs if self.needs_next_obs else None
        needed = record._replace(obs=None, critic_obs=reached, extras=extras)  # pyright: ignore[reportArgumentType]
        self.waiting_steps.append((vars(self.transition), needed))
        for note in self.on_step:
            note(record)
        # What extensions took from the environment may share its memory: such a step does not wait.
        if extras or len(self.waiting_steps) > self.max_waiting_steps:
            self.store_waiting_steps()
        self.transition.__dict__ = {}

    @torch.no_grad()
    def store_waiting_steps(self) -> None:
        """Store the waiting steps, in their order."""
        waiting_steps, self.waiting_steps = self.waiting_steps, []
        for step, record in waiting_steps:
            hidden = self.executor.run("process", self.record_step, step, record)
            self.storage.step += 1
            if hidden:
                self.policy.set_hidden(hidden)

    def record_step(self, step: Mapping[str, Any], record: StepRecord) -> Hidden:
        """Write one row of the storage; returns the state of the memories for the next step."""
        storage, extensions = self.storage, self.extensions.values()
        ends, rewards, valid = record.terminated | record.truncated, record.reward, None
        for extension in extensions:
            rewards = extension.reward(rewards, record)
        if storage.has_invalid_steps:  # a step that only resets begins and ends a trajectory of its own
            valid = record.valid
        if self.return_scaler is not None:
            rewards = self.return_scaler(rewards, ends, valid)
        for extension in extensions:
            bonus = extension.bonus(record)
            rewards = rewards if bonus is None else rewards + bonus
        mode, values = self.cfg.timeout_bootstrap, step["values"]
        if record.final_critic_obs is not None and mode in ("auto", "final_obs"):
            with self.executor.autocast():
                values = self.policy.value(record.final_critic_obs, step["next_hidden"])[0]
        elif mode in ("auto", "final_obs"):
            self.used_current_value.logical_or_(record.truncated.any())
        if mode != "none":  # the value of the state in which a time limit stopped an episode
            rewards = torch.where(record.truncated, rewards + self.live.gamma * values.squeeze(-1), rewards)
        ends = ends if valid is None else ends | ~valid
        storage.write({**step, **record.extras, "rewards": rewards, "dones": ends, "valid": record.valid})
        for note in self.on_record:
            note(record)
        for extension in extensions:
            extension.after_record(record)
        return {name: state.masked_fill(ends.view(-1, 1, 1, 1), 0.0) for name, state in step["next_hidden"].items()}

    @property
    def steps_can_wait(self) -> bool:
        """Whether the next actions do not depend on what storing a step writes, so that it can be stored later."""
        if self.storage.hidden_shapes or self.executor.uses_graphs or type(self).record_step is not PPO.record_step:
            return False
        hooks = ("after_act", "reward", "after_record")  # between which an extension may carry something over
        return not any(overrides(extension, hook) for extension in self.extensions.values() for hook in hooks)

    # Returns: once per rollout.
    @torch.no_grad()
    def compute_returns(self, last_critic_obs: Obs) -> None:
        """Compute returns and advantages of the rollout; no memory advances."""
        storage = self.rollout if self.storage is None else self.storage
        hidden = self.policy.hidden(storage.num_envs) if storage.hidden_shapes else {}
        self.executor.run("returns", self.returns_step, last_critic_obs, hidden, storage.step)

    def returns_step(self, last_critic_obs: Obs, hidden: Hidden, num_steps: int) -> None:
        """Fill returns and advantages of the `num_steps` steps that were written."""
        if not self.uses_rewards:
            return
        with self.executor.autocast():
            last_values = self.policy.value(last_critic_obs, hidden)[0]
        per_rollout = not self.cfg.normalize_advantage_per_mini_batch
        self.storage.compute_returns(last_values, self.live.gamma, self.live.lam, normalize=per_rollout)

    @torch.no_grad()
    def collect(self, env: Any, obs: Obs, critic_obs: Obs) -> tuple[Obs, Obs]:
        """Collect a rollout and compute its returns in one function, for an environment whose step is tensor code."""
        generator = getattr(env, "generator", None)
        if generator is not None and generator not in self.executor.generators:
            self.executor.generators.append(generator)
        self.executor.begin_iteration()
        self.notice_changes()
        storage, given = self.rollout, None if critic_obs is obs else critic_obs
        storage.step = storage.num_transitions_per_env
        hidden = self.policy.hidden(storage.num_envs)
        obs, given, hidden = self.executor.run("rollout", self.rollout_steps, env, obs, given, hidden)
        self.policy.set_hidden(hidden)
        return obs, obs if given is None else given

    def rollout_steps(self, env: Any, obs: Obs, critic_obs: Obs | None, hidden: Hidden) -> tuple[Any, Any, Hidden]:
        """Act, step and record T times; then compute the returns."""
        storage = self.rollout
        for number in range(storage.num_transitions_per_env):
            storage.step = number
            step = self.act_step(obs, critic_obs, hidden)
            record = env.step(step["for_env"].clone())  # it may write to what it gets
            extras = {name: value for e in self.extensions.values() for name, value in e.record_fields(record).items()}
            hidden = self.record_step(step, record._replace(extras=extras))
            obs, critic_obs = record.obs, None if record.critic_obs is record.obs else record.critic_obs
        storage.step = storage.num_transitions_per_env
        self.returns_step(obs if critic_obs is None else critic_obs, hidden, storage.step)
        return obs, critic_obs, hidden

    # Update: passes over the rollout in minibatches; `learn_step` is the tensor function.
    def update(self, current_learning_iteration: int | None = None) -> tuple[dict[str, float], dict[str, float]]:
        """Learn from the rollout; returns mean losses and mean statistics."""
        if current_learning_iteration is not None:
            self.current_learning_iteration = current_learning_iteration
        extensions, storage = self.extensions.values(), self.storage
        for extension in extensions:
            extension.begin_update(self.current_learning_iteration)
        if extensions and self.executor.replays:
            self.notice_changes()
        else:
            self.sync_settings()
        self.meter = self.meters[self.executor.constants_number]  # other settings, other names
        self.meter.reset()
        target_kl = self.cfg.target_kl if self.uses_rewards else None
        for minibatches in self.sample_minibatches(self.cfg.num_learning_epochs):
            before = {} if target_kl is None else self.meter.means()
            for minibatch in minibatches:
                self.executor.run("learn", self.learn_step, *minibatch)
            if target_kl is not None and self._epoch_kl(before) > target_kl:
                break
        report = self._report()
        self._update_normalizers()
        for extension in extensions:
            extension.end_update(storage)
        size = len(storage.data["rewards"])
        storage.clear()
        if len(storage.data["rewards"]) != size:
            self.executor.forget()  # recordings hold the tensors of the smaller ring
        return report

    def sample_minibatches(self, num_epochs: int = 1) -> list[list[tuple[Any, ...]]]:
        """Arguments of `learn_step` for every minibatch of every pass: steps; or environments, trajectories and T."""
        shuffle, count, storage = self.generators["shuffle"], self.cfg.num_mini_batches, self.storage
        if not self.policy.is_recurrent:
            return [[(index,) for index in storage.step_minibatches(count, shuffle)] for _ in range(num_epochs)]
        sampled = storage.env_minibatches(count, num_epochs, shuffle)
        args = [(envs, self.executor.bucket(total, len(envs)), storage.filled) for envs, total in sampled]
        return [args[i : i + count] for i in range(0, len(args), count)]

    def mini_batches(self) -> Iterator[MiniBatch]:
        """The minibatches of one pass."""
        for index, *trajectories in self.sample_minibatches()[0]:
            yield self.rollout.take_envs(index, trajectories[0]) if trajectories else self.rollout.take(index)

    def learn_step(self, index: Tensor, total: int | None = None, num_steps: int | None = None) -> None:
        """Take one gradient step on flat steps `index`, or on the `total` trajectories of environments `index`."""
        self.defers_late_terms = True
        try:
            terms, loss = self.minibatch_loss(index, total)
        finally:
            self.defers_late_terms = False
        self.meter.add(self.optimizer_step(terms, loss))

    def minibatch_loss(self, index: Tensor, total: int | None = None) -> tuple[Terms, Tensor]:
        """Loss terms of a minibatch and their weighted sum, compiled as a whole on a GPU."""
        batch = self.storage.take(index) if total is None else self.storage.take_envs(index, total)
        terms = Terms(*self.compute_losses(batch))
        return terms, self.weighted_sum(terms.losses)

    def compute_losses(self, minibatch: MiniBatch) -> Terms:
        """Losses, intermediate results and statistics of a minibatch, from one pass of the policy."""
        for extension in self.extensions.values():
            extension.before_forward(minibatch)
        with self.executor.autocast():
            out: PolicyOutput = self.policy(
                minibatch.obs, minibatch.critic_obs, minibatch.hidden, minibatch.trajectories, minibatch.random_masks
            )
        terms = self.loss_terms(minibatch, out)
        if not self.defers_late_terms:
            for extension in self.extensions.values():
                extension.late_terms(terms)
        return terms

    def loss_terms(self, batch: MiniBatch, out: PolicyOutput) -> Terms:
        """Every loss term, of PPO and of the extensions. A subclass adds to it through super()."""
        # Without rewards, a KL of 0 leaves an adaptive rate unchanged.
        terms = self.ppo_terms(batch, out) if self.uses_rewards else Terms({}, {}, {"kl": torch.zeros_like(self.lr)})
        for extension in self.extensions.values():
            extension.loss_terms(terms, batch, out)
        return terms

    def ppo_terms(self, batch: MiniBatch, out: PolicyOutput) -> Terms:
        """Surrogate loss, value loss and entropy of a minibatch."""
        distribution, clip, cfg = self.policy.distribution, self.clip, self.cfg
        advantages, learned = batch.advantages.squeeze(-1), batch.valid if batch.learned is None else batch.learned
        if cfg.normalize_advantage_per_mini_batch:
            advantages = normalize_advantages(advantages, learned)
        log_ratio = distribution.log_prob(out.params, batch.actions) - batch.old_actions_log_prob.squeeze(-1)
        if learned is not None:  # the mean leaves these out, but not the NaN gradient of a ratio that overflows
            log_ratio = log_ratio.masked_fill(~learned, 0.0)
            advantages = advantages.masked_fill(~learned, 0.0)
        ratio = log_ratio.exp()
        surrogate = -advantages * ratio
        # The larger of this and the clipped one: only the bound on the advantage's side can be reached (eq. 7).
        bound = -advantages * (1 + clip * advantages.sign())
        value, old_value, returns = out.value.squeeze(-1), batch.values.squeeze(-1), batch.returns.squeeze(-1)
        if cfg.value_normalization != "off":
            normalize: Any = self.policy.value_normalizer.normalize
            value, old_value, returns = (normalize(x.unsqueeze(-1)).squeeze(-1) for x in (value, old_value, returns))
        value_error = (value - returns).square()
        clipped = -advantages * torch.clamp(ratio.detach(), 1 - clip, 1 + clip)
        inter_vars = {"ratio": ratio, "surrogate": surrogate, "surrogate_clipped": clipped}
        if cfg.use_clipped_value_loss:
            value_clipped = old_value + torch.clamp(value - old_value, -clip, clip)
            value_error = torch.maximum(value_error, (value_clipped - returns).square())
            inter_vars["value_clipped"] = value_clipped
        losses = {
            "surrogate_loss": batch.mean(surrogate.clamp_min(bound)),  # its gradient is cheaper than that of `maximum`
            "value_loss": batch.mean(value_error),
        }
        if self.policy.has_entropy:
            losses["entropy"] = -batch.mean(distribution.entropy(out.params))
        with torch.no_grad():
            stats = {
                "approx_kl": batch.mean(ratio - 1 - log_ratio),
                "clip_fraction": batch.mean(((ratio - 1).abs() > clip).float()),
            }
            if cfg.schedule == "adaptive":
                kl = distribution.kl(batch.old_params, out.params)
                inter_vars["kl"], stats["kl"] = kl, batch.mean(kl)
        return Terms(losses, inter_vars, stats)

    def weighted_sum(self, losses: Mapping[str, Tensor]) -> Tensor:
        """The sum of the losses, each times its weight: an entry of `loss_weights`, or the setting `<name>_coef`."""
        total = None
        for name, loss in losses.items():
            if name not in self.loss_weights:
                if f"{name}_coef" not in self.setting_fields:
                    raise KeyError(f"loss {name!r} has no weight: set loss_weights[{name!r}] or declare {name}_coef")
                self.loss_weights[name] = getattr(self.live, f"{name}_coef")
            weight = self.loss_weights[name]
            # A loss of weight zero is only reported: without its gradient the backward pass is shorter.
            if not (name in self.zero_weights if torch.is_tensor(weight) else weight == 0.0):
                total = loss * weight if total is None else total + loss * weight
        return next(iter(losses.values())) * 0.0 if total is None else total

    def optimizer_step(self, terms: Terms, total: Tensor) -> dict[str, Tensor]:
        """Minimise the total loss by one step of every optimizer; returns the losses and statistics."""
        extensions = self.extensions.values()
        late = Terms({}, terms.inter_vars, {})
        for extension in extensions:
            if not extension.learns_separately:
                extension.late_terms(late)
        if late.losses:
            total = total + self.weighted_sum(late.losses)
        others = [extension.optimizer for extension in extensions if extension.optimizer is not None]
        is_adaptive = self.cfg.schedule == "adaptive"
        backward(total, self.optimizer, *others, scalars=[terms.stats["kl"]] if is_adaptive else ())
        if is_adaptive:
            self.adapt_learning_rate(terms.stats["kl"])
        norm, skipped = self.optimizer.step(self.live.max_grad_norm)
        for optimizer in others:
            optimizer.step(math.inf)
        if "sigma" in self.policy.distribution.param_shapes:
            self.policy.clip_std(min=self.std_bounds["clip_min_std"], max=self.std_bounds["clip_max_std"])
        losses = {**terms.losses, **late.losses, "total_loss": total}
        stats = {**terms.stats, **late.stats, "grad_norm": norm, "nonfinite_updates": skipped}
        for extension in extensions:
            own = extension.learn(terms)
            if own is not None:
                losses, stats = losses | own.losses, stats | own.stats
        report = {f"losses/{name}": loss for name, loss in losses.items()}
        return report | {f"stats/{name}": value for name, value in stats.items()}

    # Schedules, and values that follow from the settings.
    @torch.no_grad()
    def adapt_learning_rate(self, kl: Tensor) -> None:
        """Change the learning rate so that the KL step stays near `desired_kl`; decided on the device."""
        slower, faster = kl > 2 * self.live.desired_kl, (kl < self.live.desired_kl / 2) & (kl > 0)
        lower, higher = (self.lr / 1.5).clamp(min=1e-5), (self.lr * 1.5).clamp(max=1e-2)
        self.lr.copy_(torch.where(slower, lower, torch.where(faster, higher, self.lr)))

    def adjust_learning_rate(self, progress: float) -> None:
        """Set linear schedules for the fraction of the run that is done."""
        left = max(0.0, 1.0 - progress)
        if self.cfg.schedule == "linear":
            self._learning_rate = self.cfg.learning_rate * left
            self.lr.fill_(self._learning_rate)
        if self.cfg.clip_schedule == "linear":
            self.clip_fraction_left = left
            self.clip.fill_(self.cfg.clip_param * left)

    @property
    def learning_rate(self) -> float:
        """The learning rate as of the last report; assign it to change it."""
        if ACTIVE_TRACERS:
            note_host_read("learning_rate")  # recorded functions read `lr`
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        rate = check_value(type(self).__name__, self.setting_fields["learning_rate"], rate)
        self._learning_rate = self.cfg.learning_rate = rate
        self.lr.fill_(rate)

    def read_learning_rate(self) -> None:
        """Read the learning rate from the device, or from `param_groups` if it was assigned there."""
        self.optimizer.take_assigned_rates()
        self._learning_rate = float(self.lr)

    def sync_derived(self) -> tuple[Any, ...]:
        """Update rates, bounds and loss weights; returns the weights and modes that recorded functions depend on."""
        self.optimizer.take_assigned_rates()
        self.clip.fill_(self.cfg.clip_param * self.clip_fraction_left)
        self.uses_rewards = all(extension.uses_rewards for extension in self.extensions.values())
        for name in ("clip_min_std", "clip_max_std"):
            bound = getattr(self.cfg, name)
            if isinstance(bound, tuple):
                self.std_bounds[name] = self.bounds_by_action.setdefault(bound, torch.tensor(bound, device=self.device))
            else:
                self.std_bounds[name] = None if bound is None else getattr(self.live, name)
        weights = self.loss_weights
        for name, weight in weights.items():
            if not torch.is_tensor(weight) and self.first_weights.setdefault(name, weight) != weight:
                # A number that changes is kept on the device, so that annealing it needs no new recording.
                weights[name] = self.changed_weights.setdefault(name, self.device_scalar(weight)).fill_(weight)
        zeros = [getattr(self.live, name) for name, value in self.live_values.items() if value == 0.0]
        self.zero_weights = frozenset(name for name, w in weights.items() if any(w is zero for zero in zeros))
        used = tuple((name, w.data_ptr() if torch.is_tensor(w) else w) for name, w in weights.items())
        parts = [part for part in (self.policy, self.return_scaler) if part is not None]
        own = tuple(extension.recording_key() for extension in self.extensions.values())
        return (used, self.zero_weights, tuple(module_state(parts)), own)

    # Reports and statistics: once per iteration.
    def _epoch_kl(self, before: Mapping[str, float]) -> float:
        """Mean KL of the pass since `before`, from the running means."""
        now, name = self.meter.means(), "stats/approx_kl"
        added = now["count"] - before.get("count", 0.0)
        mean = (now[name] * now["count"] - before.get(name, 0.0) * before.get("count", 0.0)) / added
        return RANKS.mean_metrics({name: mean})[name]

    def _report(self) -> tuple[dict[str, float], dict[str, float]]:
        """Mean losses and statistics of the update, read from the device at once."""
        storage = self.storage
        used = slice(storage.older, storage.older + storage.step)  # the newest rollout
        valid = storage.data["valid"][used].squeeze(-1) if storage.has_invalid_steps else None
        scalars = self.meter.averages() | {
            "stats/learning_rate": self.lr,
            "stats/used_current_value": self.used_current_value,
            "stats/rollout/mean_value": masked_mean(storage.data["values"][used], valid),
        }
        if "sigma" in storage.param_shapes:
            scalars["stats/policy/mean_noise_std"] = masked_mean(storage.data["sigma"][used], valid)
        for extension in self.extensions.values():
            scalars |= {f"stats/{name}": value for name, value in extension.metrics().items()}
        read = dict(zip(scalars, torch.stack([v.float() for v in scalars.values()]).tolist(), strict=True))
        losses: dict[str, float] = defaultdict(float)
        stats: dict[str, float] = defaultdict(float)
        count = read.pop("count")
        for name, value in read.items():
            kind, _, rest = name.partition("/")
            (losses if kind == "losses" else stats)[rest] = value
        self.skipped_share = stats["nonfinite_updates"]
        stats["nonfinite_updates"] *= count
        self._learning_rate = stats["learning_rate"]
        if stats.pop("used_current_value", 0.0):
            self.warn_of_current_value()
        return losses, stats

    def _update_normalizers(self) -> None:
        """Update the normalisers of observations and values from the newest rollout."""
        storage = self.storage
        if self.cfg.empirical_normalization or self.cfg.critic_obs_normalization:
            obs, critic_obs = self.newest_observations()
            self.policy.update_normalizers(obs, critic_obs, storage.newest_valid)
        if self.cfg.value_normalization != "off":
            returns = storage.data["returns"][storage.newest]
            self.policy.value_normalizer.update(returns, storage.newest_valid)  # pyright: ignore[reportCallIssue]

    def newest_observations(self) -> tuple[Any, Any]:
        """(T, N, ...) observations of the last rollout, the actor's and the critic's."""
        used, critic = self.rollout.newest, self.rollout.privileged_observations
        obs = tree_map(lambda leaf: leaf[used], self.rollout.observations)
        return obs, obs if critic is None else tree_map(lambda leaf: leaf[used], critic)

    @property
    def obs_normalizer(self) -> Any:
        """The policy's observation normaliser."""
        return self.policy.obs_normalizer

    @property
    def critic_obs_normalizer(self) -> Any:
        """The policy's critic observation normaliser."""
        return self.policy.critic_obs_normalizer

    # Saving and continuing.
    def checkpoint_parts(self) -> dict[str, Any]:
        """Policy with its normalisers, optimizer, and the parts of the extensions."""
        parts: dict[str, Any] = {"model_state_dict": self.policy, "optimizer_state_dict": self.optimizer}
        if self.return_scaler is not None:
            parts["return_scaler_state_dict"] = self.return_scaler
        for extension in self.extensions.values():
            parts |= extension.checkpoint_parts()
        return parts

    def _after_load(self, load_optimizer: bool) -> None:
        if load_optimizer:
            self.read_learning_rate()

    def resume_state(self) -> dict[str, Any]:
        """Random streams, the state of the memories, and the extensions' state."""
        hidden = {name: memory.state for name, memory in self.policy.memories.items() if memory.state is not None}
        own = {name: value for e in self.extensions.values() for name, value in e.resume_state().items()}
        return super().resume_state() | {"hidden": hidden} | own

    def load_resume_state(self, state: Mapping[str, Any]) -> None:
        """Continue exactly from a `resume_state`."""
        super().load_resume_state(state)
        self.policy.set_hidden({name: value.to(self.device) for name, value in state["hidden"].items()})
        for extension in self.extensions.values():
            extension.load_resume_state(state)
