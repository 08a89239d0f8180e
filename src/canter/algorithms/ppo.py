"""Proximal policy optimisation (Schulman 2017): collect, act, finish, losses, learn, update."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from canter.algorithms import building
from canter.algorithms.algorithm import Algorithm, AlgorithmSettings, RunSettings, Terms
from canter.algorithms.constraints import Constraints, ConstraintSettings
from canter.algorithms.critic_groups import CriticGroups, CriticGroupSettings
from canter.algorithms.extension import Extension, overrides
from canter.algorithms.gradient_penalty import GradientPenalty, GradientPenaltySettings
from canter.algorithms.optim import backward
from canter.algorithms.rnd import RND, RNDSettings
from canter.algorithms.smoothness import Smoothness, SmoothnessSettings
from canter.algorithms.symmetry import Symmetry, SymmetrySettings
from canter.compat.arguments import documented
from canter.envs.vec_env import StepRecord
from canter.modules.build import NETWORK_ARGUMENTS
from canter.modules.normalizer import VALUE_NORMALIZATIONS, ReturnScaler
from canter.modules.policy import Hidden, Policy, PolicyOutput
from canter.storage.rollout_storage import MiniBatch, RolloutStorage, Transition, normalize_advantages
from canter.utils.config import setting, settings
from canter.utils.metrics import MeanMeter
from canter.utils.tree import Obs

SCHEDULES = ("fixed", "constant", "linear", "adaptive")
BOOTSTRAPS = ("auto", "final_obs", "current_value", "none")


@settings
class PPOSettings(
    RNDSettings,
    SymmetrySettings,
    SmoothnessSettings,
    GradientPenaltySettings,
    ConstraintSettings,
    CriticGroupSettings,
    AlgorithmSettings,
):
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
    extension_classes = (RND, Symmetry, Smoothness, GradientPenalty, Constraints, CriticGroups)
    from_cfg = classmethod(building.from_cfg)
    prepare = building.prepare
    init_obs_norm = building.init_obs_norm
    init_storage = building.init_storage
    check_can_learn = building.check_can_learn
    checkpoint_parts = building.checkpoint_parts
    resume_state = building.resume_state
    load_resume_state = building.load_resume_state
    _after_load = building.after_load
    sync_derived = building.sync_derived
    adjust_learning_rate = building.adjust_learning_rate
    read_learning_rate = building.read_learning_rate
    learning_rate = property(building.get_learning_rate, building.set_learning_rate)
    obs_normalizer = property(lambda self: self.policy.obs_normalizer)
    critic_obs_normalizer = property(lambda self: self.policy.critic_obs_normalizer)
    newest_observations = building.newest_observations
    _update_normalizers = building.update_normalizers
    mini_batches = building.mini_batches
    collect_whole = building.collect_whole
    rollout_steps = building.rollout_steps
    needed = building.needed
    process_env_step = building.process_env_step
    adapt_learning_rate = building.adapt_learning_rate
    weighted_sum = building.weighted_sum

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
        building.refuse_name(type(self), actor_critic)
        networks = {name: given.pop(name) for name in NETWORK_ARGUMENTS if name in given}
        super().__init__(cfg, given, device or getattr(cfg, "device", None) or "cpu", seed, env)
        self.log_dir = log_dir
        self.policy: Any = building.own_policy(self, actor_critic, networks)
        self.new_generator("action")
        self.new_generator("shuffle", is_recorded=False)
        self.loss_weights = building.LossWeights(self)
        """Weight of each loss by name: a number, or a tensor on the device."""
        self.storage: Any = None
        """The rollout, once `prepare` or `init_storage` allocated it."""
        self.storage_in_use: Any = None
        self.extensions = building.enabled_extensions(self, extensions)
        self.optimizer = building.build_optimizer(self)
        self.lr = self.optimizer.lr  # on the device
        self._learning_rate = self.cfg.learning_rate  # as it was last read from there
        self.clip = self.device_scalar(self.cfg.clip_param)  # the clip range
        self.clip_fraction_left = 1.0  # of a linear schedule
        self.weights: dict[str, tuple[float, Tensor]] = {}  # by loss, as a number and on the device
        self.bounds_by_action: dict[tuple[float, ...], Tensor] = {}  # of settings with one bound per action
        self.std_bounds: dict[str, Tensor | None] = {}  # by setting, on the device
        self.transition = Transition()
        self.has_begun = False  # whether `begin_rollout` was called for the first step
        self.adds_transitions = False  # whether `storage.add_transitions` is a user's
        self.return_scaler: ReturnScaler | None = None
        self.meters: dict[Any, MeanMeter] = {}  # by the key of recordings: other settings, other names
        self.meter = MeanMeter()
        self.extension_keys: tuple[Any, ...] = ()
        self.uses_rewards = True
        """Whether returns and PPO's own losses are needed, as of the last `sync_settings`."""
        for extension in self.extensions.values():
            extension.attach(self)
        self.uses_step_hooks = any(overrides(e, hook) for e in self.extensions.values() for hook in ("record", "reset"))
        self.forward: Any = self.policy
        """The policy's pass while acting, compiled on a GPU."""
        self.shows_pass = building.is_replaced(self, PPO, "compute_losses", "loss_terms")
        building.compile_passes(self)
        self.own_attributes = frozenset(vars(self))
        self.is_built = True
        self.sync_settings()
        if self.env is not None:
            self.prepare(self.env, getattr(self.cfg, "num_steps_per_env", 24))

    @property
    def rollout(self) -> RolloutStorage:
        """The storage, once it is allocated."""
        if self.storage is None:
            raise RuntimeError(f"{type(self).__name__} has no storage yet; call init_storage(...) or give it an env")
        return self.storage

    # Collect: T times act, step and store; then finish.
    @torch.no_grad()
    def collect(
        self, env: Any, obs: Obs, critic_obs: Obs, on_step: Callable[[StepRecord], None] | None = None
    ) -> tuple[Obs, Obs]:
        """Fill the rollout and compute its returns; the observations to continue from.

        `on_step(record)` is called after every step. Without it, an environment whose step is tensor code is captured
        on a GPU together with the policy: a rollout is one graph.
        """
        storage = self.rollout
        is_replaced_step = building.is_replaced(self, PPO, "act", "process_env_step", "process_step", "compute_returns")
        is_whole = on_step is None and env.capturable and self.executor.uses_graphs
        if is_whole and not is_replaced_step and "rollout" not in self.executor.eager_only:
            return self.collect_whole(env, obs, critic_obs)
        self.begin_rollout()
        gives_infos = building.is_replaced(self, PPO, "process_env_step")
        while storage.step < storage.num_transitions_per_env:
            record = env.step(self.act(obs, critic_obs))
            if gives_infos:
                record = building.process_as_documented(self, record)
            if on_step is not None:
                on_step(record)  # it may refuse the record
            if not gives_infos:
                self.process_step(record)
            obs, critic_obs = record.obs, record.critic_obs
        self.finish(critic_obs)
        return obs, critic_obs

    def begin_rollout(self) -> None:
        """Take over changed settings before the first step of a rollout."""
        self.has_begun = True
        self.sync_settings()
        self.executor.begin_iteration()
        self.adds_transitions = building.is_replaced(self.rollout, RolloutStorage, "add_transitions")

    # Act: `act_step` is the tensor function that is recorded or captured.
    @torch.no_grad()  # a stored tensor with a graph would keep every rollout alive
    def act(self, obs: Obs, critic_obs: Obs | None = None) -> Tensor:
        """Sample actions for N environments and begin their transition."""
        if hasattr(obs, "normalized_by"):
            raise ValueError("the observation was normalised already; give the raw one, which the policy normalises")
        storage = self.rollout
        if storage.step == 0 and not self.has_begun:
            self.begin_rollout()
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

    @torch.no_grad()
    def process_step(self, record: StepRecord) -> None:
        """Store the step that `act` began, with the record of what it led to."""
        storage, step = self.storage, vars(self.transition)
        storage.check_space()
        self.has_begun = False  # another rollout begins with the next first step
        number, hidden = storage.step, self.policy.hidden(storage.num_envs) if storage.hidden_shapes else {}
        if step.get("hidden_states") is not None:  # from an `act` as documented
            step = {**step, "hidden": storage.unpack_hidden(step["hidden_states"])}
        needed = self.needed(record)
        computes = bool(hidden) or self.uses_step_hooks or needed.final_critic_obs is not None
        if (computes or self.executor.uses_graphs) and not self.adds_transitions:
            hidden = self.executor.run("store", self.store_step, storage.rows[number], step, needed, hidden)
        else:  # copies alone need no recording
            hidden = self.store_step(storage.next_row, step, needed, hidden)
        storage.step = number + 1
        if hidden:
            self.policy.set_hidden(hidden)
        self.transition.__dict__ = {}

    def store_step(self, row: Any, step: Mapping[str, Any], record: StepRecord, hidden: Hidden) -> Hidden:
        """Copy a step into a row of the storage; returns the state of the memories for the next step."""
        storage, extensions = self.storage, self.extensions.values()
        values = {**step, "rewards": record.reward, "env_rewards": record.reward, "truncated": record.truncated}
        if record.final_critic_obs is not None and self.cfg.timeout_bootstrap in ("auto", "final_obs"):
            with self.executor.autocast():  # here, because it needs the memory of the episode that ended
                final = self.policy.value(record.final_critic_obs, hidden)[0]
            # NaN stands for no final observation; the value of a damaged one must stay noticeable.
            values["final_values"] = final.nan_to_num(math.inf, math.inf, -math.inf)
        for extension in extensions:
            values.update(extension.record(record))
        values["valid"], ends = record.valid, record.terminated | record.truncated
        if storage.has_invalid_steps:  # a step that only resets begins and ends a trajectory of its own
            ends = ends | ~record.valid
        values["dones"] = ends
        if self.adds_transitions:
            building.add_transition(storage, values)
        else:
            storage.put(row, values)
        for extension in extensions:
            extension.reset(ends)
        return {name: state.masked_fill(ends.view(-1, 1, 1, 1), 0.0) for name, state in hidden.items()}

    # Finish: rewards to learn from, returns and advantages of the (T, N) steps.
    def finish(self, last_critic_obs: Obs) -> None:
        """Compute the rewards to learn from, and the returns; by a user's `compute_returns` where there is one."""
        if building.is_replaced(self, PPO, "compute_returns"):
            self.finish_rewards(self.executor.run)
        self.compute_returns(last_critic_obs)

    @torch.no_grad()
    def compute_returns(self, last_critic_obs: Obs) -> None:
        """Finish the rollout: rewards to learn from, returns and advantages; no memory advances."""
        storage = self.rollout
        self.finish_rewards(self.executor.run)
        hidden = self.policy.hidden(storage.num_envs) if storage.hidden_shapes else {}
        self.executor.run("returns", self.returns_step, last_critic_obs, hidden, storage.step)

    def finish_rewards(self, run: Callable[..., Any]) -> None:
        """Turn the environment's rewards into those to learn from; `run` is the executor's, or calls."""
        storage = self.storage
        storage.untie_buffer_loop()
        first, last = storage.num_finished, storage.step
        if first == last:
            return
        if any(overrides(extension, "reward") for extension in self.extensions.values()):
            run("rewards", self.change_rewards, first, last)
        if self.return_scaler is not None:  # its statistics move with every step
            rewards, ends = storage.column("rewards"), storage.column("dones")
            valid = storage.column("valid") if storage.has_invalid_steps else [None] * last
            for step in range(first, last):
                rewards[step].copy_(run("scale", self.return_scaler, rewards[step], ends[step], valid[step]))
        run("finish", self.add_final_values, first, last)
        storage.num_finished = last

    def change_rewards(self, first: int, last: int) -> None:
        """Let the extensions change the rewards of the steps from `first` on."""
        stored = self.storage.column("rewards")
        rewards = stored
        for extension in self.extensions.values():
            rewards = extension.reward(rewards, self.storage)
        stored[first:].copy_(rewards[first:])

    def add_final_values(self, first: int, last: int) -> None:
        """Add the bonuses and, where an episode was cut off, the value of the state that it had reached."""
        storage, mode = self.storage, self.cfg.timeout_bootstrap
        stored = storage.column("rewards")
        rewards = stored
        for extension in self.extensions.values():
            bonus = extension.bonus(storage)
            rewards = rewards if bonus is None else rewards + bonus
        truncated, final, before = (storage.column(name) for name in ("truncated", "final_values", "values"))
        if mode in ("auto", "final_obs"):
            self.used_current_value.logical_or_((truncated & final.isnan()).any())
        if mode != "none":
            final = torch.where(final.isnan(), before, final)
            rewards = torch.where(truncated, rewards + self.live.gamma * final, rewards)
        if rewards is not stored:
            stored[first:].copy_(rewards[first:])

    def returns_step(self, last_critic_obs: Obs, hidden: Hidden, num_steps: int) -> None:
        """Fill returns and advantages of the `num_steps` steps that were stored."""
        if not self.uses_rewards:
            return
        with self.executor.autocast():
            last_values = self.policy.value(last_critic_obs, hidden)[0]
        per_rollout = not self.cfg.normalize_advantage_per_mini_batch
        self.storage.compute_returns(last_values, self.live.gamma, self.live.lam, normalize=per_rollout)
        for extension in self.extensions.values():
            extension.returns(self.storage, last_critic_obs, last_values)

    # Losses of a minibatch.
    def compute_losses(self, minibatch: MiniBatch) -> Terms:
        """Losses, intermediate results and statistics of a minibatch, from one pass of the policy.

        Afterwards the policy's stateful properties (`action_mean`, `entropy`, ...) refer to this pass.
        """
        for extension in self.extensions.values():
            extension.before_forward(minibatch)
        with self.executor.autocast():
            out: PolicyOutput = self.policy(
                minibatch.obs, minibatch.critic_obs, minibatch.hidden, minibatch.trajectories, minibatch.random_masks
            )
        if self.shows_pass:
            self.policy.last_pass = (out.params, out.aux)
        return self.loss_terms(minibatch, out)

    def loss_terms(self, batch: MiniBatch, out: PolicyOutput) -> Terms:
        """Every loss term, of PPO and of the extensions. A subclass adds to it through super()."""
        # Without rewards, a KL of 0 leaves an adaptive rate unchanged.
        terms = self.ppo_terms(batch, out) if self.uses_rewards else Terms({}, {}, {"kl": torch.zeros_like(self.lr)})
        for extension in self.extensions.values():
            extension.losses(terms, batch, out)
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

    # Learn: `learn_step` is the tensor function.
    def learn_step(self, index: Tensor, total: int | None = None, num_steps: int | None = None) -> None:
        """Take one gradient step on flat steps `index`, or on the `total` trajectories of environments `index`."""
        self.meter.add(self.optimizer_step(*self.minibatch_loss(index, total)))

    def minibatch_loss(self, index: Any, total: int | None = None) -> tuple[Terms, Tensor]:
        """Loss terms of a minibatch and their weighted sum, compiled as a whole on a GPU."""
        if isinstance(index, Tensor):
            index = self.storage.take(index) if total is None else self.storage.take_envs(index, total)
        kept = self.policy.last_pass if self.shows_pass else None
        terms = Terms(*self.compute_losses(index))
        if kept is not None:
            self.policy.last_pass = kept
        apart = {name for extension in self.extensions.values() for name in extension.own_losses}
        return terms, self.weighted_sum({name: loss for name, loss in terms.losses.items() if name not in apart})

    def optimizer_step(self, terms: Terms, total: Tensor) -> dict[str, Tensor]:
        """Minimise the total loss by one step of every optimizer; returns the losses and statistics."""
        extensions = self.extensions.values()
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
        losses = {**terms.losses, "total_loss": total}
        stats = {**terms.stats, "grad_norm": norm, "nonfinite_updates": skipped}
        for extension in extensions:
            own = extension.learn(terms)
            if own is not None:
                losses, stats = losses | own.losses, stats | own.stats
        report = {f"losses/{name}": loss for name, loss in losses.items()}
        return report | {f"stats/{name}": value for name, value in stats.items()}

    # Update: passes over the rollout in minibatches.
    def update(self, current_learning_iteration: int | None = None) -> tuple[dict[str, float], dict[str, float]]:
        """Learn from the rollout; returns mean losses and mean statistics."""
        if current_learning_iteration is not None:
            self.current_learning_iteration = current_learning_iteration
        extensions, storage, cfg = self.extensions.values(), self.rollout, self.cfg
        self.shows_pass = building.is_replaced(self, PPO, "compute_losses", "loss_terms")
        self.extension_keys = tuple(e.begin_update(self.current_learning_iteration) for e in extensions)
        if extensions:  # which may have set numbers in `begin_update`; after callbacks the runner looks itself
            self.notice_changes()
        else:
            self.sync_settings()
        if self.constants not in self.meters:
            self.meters[self.constants] = MeanMeter()
        self.meter = self.meters[self.constants]
        self.meter.reset()
        target_kl = cfg.target_kl if self.uses_rewards else None
        for minibatches in self.sample_minibatches(cfg.num_learning_epochs):
            before = {} if target_kl is None else self.meter.means()
            for minibatch in minibatches:
                if isinstance(minibatch, MiniBatch):  # from a generator that a user replaced
                    self.meter.add(self.optimizer_step(*self.minibatch_loss(minibatch)))
                else:
                    self.executor.run("learn", self.learn_step, *minibatch)
            if target_kl is not None and building.epoch_kl(self.meter, before) > target_kl:
                break
        report = building.report(self)
        self._update_normalizers()
        for extension in extensions:
            extension.end_update(storage)
        size = len(storage.data["rewards"])
        storage.clear()
        if len(storage.data["rewards"]) != size:
            self.executor.forget()  # recordings hold the tensors of the smaller ring
        self.sync_settings()  # losses of new names get their weights
        return report

    def sample_minibatches(self, num_epochs: int = 1) -> list[Any]:
        """Arguments of `learn_step` for every minibatch of every pass: steps; or environments, trajectories and T."""
        shuffle, count, storage = self.generators["shuffle"], self.cfg.num_mini_batches, self.storage
        name = "recurrent_mini_batch_generator" if self.policy.is_recurrent else "mini_batch_generator"
        if building.is_replaced(storage, RolloutStorage, name):
            return [getattr(storage, name)(count, 1) for _ in range(num_epochs)]
        if not self.policy.is_recurrent:
            return [[(index,) for index in storage.step_minibatches(count, shuffle)] for _ in range(num_epochs)]
        sampled = storage.env_minibatches(count, num_epochs, shuffle)
        args = [(envs, self.executor.bucket(total, len(envs)), storage.filled) for envs, total in sampled]
        return [args[i : i + count] for i in range(0, len(args), count)]
