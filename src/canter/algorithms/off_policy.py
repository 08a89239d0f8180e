"""Base of DQN, SAC and TD3: settings, replay, exploration, gradient steps, target networks, reports and saving."""

import copy
import math
import operator
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from gymnasium import spaces
from torch import Tensor, nn

from canter.algorithms.algorithm import Algorithm, AlgorithmSettings, CommonRunSettings, module_state
from canter.algorithms.optim import FlatParameters, GuardedOptimizer, backward
from canter.envs.vec_env import StepRecord
from canter.modules.build import env_shapes
from canter.modules.conv2d import image_shape
from canter.modules.normalizer import ReturnScaler
from canter.storage.offline import fill_replay
from canter.storage.replay import ReplayBatch, TransitionReplayBuffer
from canter.storage.rollout_storage import Field
from canter.utils.config import setting, settings
from canter.utils.distributed import RANKS
from canter.utils.metrics import MeanMeter
from canter.utils.tree import Obs, tree_map, tree_where

MAX_STEPS_PER_GRAPH = 8  # gradient steps
MAX_STALE_STEPS = 20  # gradient steps after which functions with a user's code are compared with their replays again
MOMENT_INTERVAL = 128  # gradient steps after which the optimizers drop tiny moments
REPLAY = "replay_buffer"
NUM_STATISTICS = 10_000  # offline steps from which normalisers start
NO_GRADIENT_STEPS = "nothing would be learned; give at least 1, or -1 for one gradient step per environment step"
BOOTSTRAPS = ("auto", "final_obs", "current_value", "none")


def is_fixed(schedule: str) -> bool:
    """Whether learning rates do not fall."""
    return schedule != "linear"


@settings
class OffPolicyRunSettings(CommonRunSettings):
    """Settings of an off-policy run; its intervals are environment steps."""

    max_timesteps: int | None = setting(None, low=0)
    """Environment steps of the whole run, where `learn` is given none; linear schedules end here."""
    log_interval: int = setting(1_000, low=0)
    """Environment steps between two log entries."""
    save_interval: int = setting(10_000, low=0)
    """Environment steps between two checkpoints; 0 saves only at the end."""
    eval_interval: int | None = setting(None, low=0)
    """Environment steps between two evaluations; 0 runs none. None is 0, or a tenth of the run in `canter train`."""
    offline_data: str | None = None
    """Steps that fill the replay buffer at first: a directory of trajectory files, or "minari:<dataset id>"."""
    offline_gradient_steps: int = setting(0, low=0, unused_if={"offline_data": operator.not_})
    """Gradient steps on the offline data before the first environment step."""


@settings
class OffPolicySettings(AlgorithmSettings):
    """Hyperparameters of every off-policy algorithm."""

    batch_size: int = setting(256, low=1)
    """Samples in one gradient step."""
    buffer_size: int = setting(
        1_000_000, low=1, fixed=True, unused_if={"buffer_steps_per_env": lambda steps: steps is not None}
    )
    """Capacity of the replay buffer in steps of all environments together."""
    buffer_steps_per_env: int | None = setting(None, low=1, fixed=True)
    """Capacity of the replay buffer in steps of each environment, instead of `buffer_size`."""
    learning_starts: int = setting(5_000, low=0, host=True)
    """Environment steps with random actions before learning starts."""
    train_freq: int = setting(1, low=1, host=True)
    """Vector steps between two updates."""
    gradient_steps: int = setting(1, low=-1, host=True, refused={0: NO_GRADIENT_STEPS})
    """Gradient steps per update; -1 takes one per environment step since the last update."""
    target_update_interval: int = setting(1, low=1)
    """Gradient steps between two updates of the target networks."""
    tau: float = setting(0.005, above=0.0, high=1.0)
    """Fraction by which target networks move towards the trained ones in an update; 1 copies."""
    n_step: int = setting(1, low=1)
    """Rewards summed before the bootstrapped value; a window ends with its episode."""
    timeout_bootstrap: str = setting("auto", choices=BOOTSTRAPS)
    """State whose value follows an episode that was cut off: "final_obs", "current_value" (the one before the last
    step), "none" (a cut-off is a terminal state), or "auto": the best there is."""
    max_grad_norm: float | None = setting(10.0, low=0.0, high=math.inf)
    """Gradients are scaled down to this global norm; 0 or None turns clipping off."""
    weight_decay: float = setting(0.0, low=0.0, fixed=True)
    """Weight decay of every optimizer; with AdamW it is decoupled from the gradient."""
    schedule: str = setting("fixed", choices=("fixed", "constant", "linear"), host=True)
    """Learning rates: "fixed" (or "constant"), or "linear" to `final_rate_share` of themselves."""
    final_rate_share: float = setting(0.0, low=0.0, high=1.0, host=True, unused_if={"schedule": is_fixed})
    """Share of the learning rates that is left at the end of a linear schedule."""
    normalize_rewards: bool = setting(False, fixed=True)
    """Divide sampled rewards so that returns have about unit variance, or fit the atoms of a categorical critic."""
    activation: str = setting("relu", fixed=True)
    """Nonlinearity of the networks."""
    layer_norm: bool = setting(False, fixed=True)
    """Normalise the features of every hidden layer."""
    save_replay_buffer: bool = setting(False, host=True)
    """Save the replay buffer in checkpoints, so that a resumed run continues exactly."""


class OffPolicyAlgorithm(Algorithm):
    """Base of algorithms that explore, store steps in a replay buffer and take gradient steps on samples of it.

    A subclass implements, in tensor code except for `build`:
        build(networks): check the action space, and build policy, optimizers and target networks from the arguments
            `network_names`.
        explore_step(obs): actions with exploration, in the form that the environment takes.
        learn_steps(count, phase): `count` gradient steps on `batches(count)`, in one graph; the number of the first
            is `phase`, counted modulo `policy_delay`.
    It may extend:
        declare_fields(): more to store of every step; `ReplayBatch.fields` has it.
        record_fields(record): the values of these fields in a step.

    Args:
        env: Anything `wrap_env` accepts.
        cfg: A config object instead of settings as keywords.
        seed: Seed of exploration and of sampling; drawn from torch's generator if None.
        obs_space, action_space: Spaces, if not the environment's.
        **given: Settings, the fields of `settings_class`, and the arguments `network_names`.
    """

    settings_class = OffPolicySettings
    learns_from_replay = True
    network_names: ClassVar[tuple[str, ...]] = ()  # constructor arguments that choose the networks
    replay_class: Any = TransitionReplayBuffer
    action_bounds: tuple[Tensor, Tensor, Tensor]  # of a Box: lowest and highest actions and half the range, (A,) each
    return_bound = 4.0  # largest normalised return: about four standard deviations
    env: Any
    action_space: Any

    def __init__(
        self,
        env: Any = None,
        cfg: Any = None,
        *,
        device: Any = None,
        seed: int | None = None,
        obs_space: Any = None,
        action_space: Any = None,
        log_dir: str | None = None,
        **given: Any,
    ) -> None:
        networks = {name: given.pop(name, None) for name in self.network_names}
        self.optimizers: dict[str, GuardedOptimizer] = {}
        self.targets: list[TargetNetwork] = []
        self.rates: dict[str, float | None] = {}  # learning rate settings and the values that the optimizers got
        self.trainable: list[bool] = []  # which of the optimizers' parameters were not frozen in the last `train`
        super().__init__(cfg, given, device, seed, env)
        if self.env is None:
            raise ValueError(f"{type(self).__name__} needs an environment: {type(self).__name__}(env, cfg)")
        self.log_dir, self.num_envs = log_dir, self.env.num_envs
        self.obs_space, self.action_space = obs_space or self.env.obs_space, action_space or self.env.action_space
        self.new_generator("action")
        self.new_generator("replay")
        self.meter, self.slow_meter = MeanMeter(), MeanMeter()
        self.return_scaler: ReturnScaler | None = None
        if self.cfg.normalize_rewards:
            self.return_scaler = ReturnScaler(self.num_envs, self.live.gamma).to(self.device)
        self.build(networks)
        if self.cfg.empirical_normalization:
            obs_shape, critic_shape = env_shapes(self.env)
            critic_shape = obs_shape if critic_shape is None else critic_shape
            for name, shape in (("obs_normalizer", obs_shape), ("critic_obs_normalizer", critic_shape)):
                setattr(self.policy, name, self.new_normalizer(shape))
        self.policy.to(self.device)
        self.replay: Any = None
        self.acted: tuple[Any, Any, Tensor] | None = None  # observations and actions of the step that was begun
        self.timesteps = self.num_updates = self.num_stored = 0
        self.fraction_left = 1.0  # of the run, for schedules
        self.own_attributes = frozenset(vars(self))
        self.is_built = True
        self.sync_settings()

    def choose_network(self, kind: str, networks: Mapping[str, Any], defaults: Any, **own: Any) -> tuple[Any, Any]:
        """The class of a network, the user's or the default for vectors or for one image, and its `cfg`.

        The `cfg` has the settings `own` that the class accepts (images: without `hidden_dims`), and the user's.
        """
        has_image = isinstance(self.obs_space, spaces.Box) and image_shape(self.obs_space.shape) is not None
        cls = networks[f"{kind}_class"] or defaults[has_image]
        own = {"activation": self.cfg.activation, "layer_norm": self.cfg.layer_norm, **own}
        known = getattr(cls, "defaults", None) or ("use_tanh_squash",)
        accepted = {name: own[name] for name in own if name in known and not (has_image and name == "hidden_dims")}
        return cls, accepted | dict(networks[f"{kind}_cfg"] or {})

    def make_optimizer(self, name: str, module: nn.Module) -> GuardedOptimizer:
        """Build the optimizer of a module: "x_optimizer" takes the setting x_learning_rate."""
        rate_name = name.replace("optimizer", "learning_rate")
        self.rates[rate_name] = rate = getattr(self.cfg, rate_name)
        optimizer = GuardedOptimizer(module.to(self.device), self.cfg.optimizer_class_name, rate)
        for group in optimizer.param_groups if self.cfg.weight_decay else ():
            group["weight_decay"] = self.cfg.weight_decay
        self.optimizers[name] = optimizer
        return optimizer

    def sync_settings(self, assigned: str = "") -> None:
        """Copy changed settings and learning rates to the device, and update the key of recordings.

        A learning rate that was `assigned` reaches its optimizer even if the config had the same value.
        """
        if assigned in self.rates:
            self.rates[assigned] = None
        for (name, known), optimizer in zip(self.rates.items(), self.optimizers.values(), strict=True):
            optimizer.take_assigned_rates()
            rate = getattr(self.cfg, name)
            if rate != known:
                self.rates[name] = rate
                optimizer.lr.fill_(rate * self.rate_share)
        super().sync_settings()

    def sync_derived(self) -> tuple[Any, ...]:
        """Frozen and replaced parameters, and training modes."""
        return tuple(module_state(self.modules()))

    def adjust_learning_rate(self, progress: float) -> None:
        """Set linear schedules for the fraction of the run that is done."""
        self.fraction_left = max(0.0, 1.0 - progress)
        if self.cfg.schedule == "linear":
            for name, optimizer in zip(self.rates, self.optimizers.values(), strict=True):
                optimizer.lr.fill_(getattr(self.cfg, name) * self.rate_share)

    @property
    def rate_share(self) -> float:
        """Share of the learning rates that the schedule leaves."""
        if is_fixed(self.cfg.schedule):
            return 1.0
        return self.cfg.final_rate_share + self.fraction_left * (1.0 - self.cfg.final_rate_share)

    def prepare(self) -> TransitionReplayBuffer:
        """The replay buffer, allocated at the first call; MemoryError if it does not fit."""
        if self.replay is None:
            steps = self.cfg.buffer_steps_per_env
            capacity = self.cfg.buffer_size if steps is None else steps * self.num_envs
            if self.cfg.batch_size > capacity:
                raise ValueError(f"batch_size={self.cfg.batch_size} is more than the replay buffer holds: {capacity}")
            (obs_shape, critic_shape), distribution = env_shapes(self.env), self.policy.distribution
            with torch.inference_mode(False):
                self.replay = self.replay_class(
                    capacity=max(capacity, self.num_envs),
                    num_envs=self.num_envs,
                    device=self.device,
                    obs_shape=obs_shape,
                    critic_obs_shape=critic_shape,
                    action_shape=distribution.action_shape,
                    action_dtype=distribution.action_dtype,
                    has_invalid_steps=self.env.has_invalid_steps,
                    extra_fields=self.declare_fields(),
                )
            self.executor.forget()
            self.sync_settings()
        return self.replay

    def fill(self, source: Any, max_steps: int | None = None) -> int:
        """Put offline steps into the replay buffer and start the normalisers from them; returns their number.

        `canter.storage.offline` describes the kinds of `source`.
        """
        replay = self.prepare()
        added = fill_replay(replay, source, max_steps, self.env.action_bounds)
        self.num_stored += added
        if self.cfg.empirical_normalization or self.return_scaler is not None:
            batch = replay.draw(min(added, NUM_STATISTICS), 1, self.live.gamma, self.generators["replay"])
            self.policy.update_normalizers(batch.obs, batch.critic_obs)
            if self.return_scaler is not None:  # the return of a reward that repeats forever
                self.return_scaler.take(batch.rewards / max(1.0 - self.cfg.gamma, 1e-3))
        return added

    def declare_fields(self) -> dict[str, Field]:
        """More fields of the replay buffer, by name."""
        return {}

    def record_fields(self, record: StepRecord) -> Mapping[str, Tensor]:
        """Values (N, ...) of the declared fields."""
        return {}

    def random_actions(self) -> Tensor:
        """Uniform actions for every environment; standard normal ones for a Box without bounds."""
        generator, device = self.generators["action"], self.device
        if isinstance(self.action_space, spaces.Discrete):
            return torch.randint(int(self.action_space.n), (self.num_envs,), generator=generator, device=device)
        low, high, half = self.action_bounds
        if not self.action_space.is_bounded():
            return torch.randn(self.num_envs, len(low), generator=generator, device=device)
        drawn = torch.rand(self.num_envs, len(low), generator=generator, device=device)
        return torch.addcmul(low, drawn, 2 * half).clamp(low, high)

    @torch.no_grad()
    def act(self, obs: Obs, deterministic: bool = False) -> Tensor:
        """Actions for raw observations, in the form that the environment takes."""
        return self.policy.infer(obs)[0] if deterministic else self.explore_step(obs)

    def build(self, networks: Mapping[str, Any]) -> None:
        """Check the action space, and build policy, optimizers and target networks."""
        raise NotImplementedError

    def explore_step(self, obs: Obs) -> Tensor:
        """Actions with exploration, in the form that the environment takes."""
        raise NotImplementedError

    def explore(self, obs: Obs, critic_obs: Obs | None = None) -> Tensor:
        """Actions for every environment: random ones until `learning_starts`, then the algorithm's own exploration."""
        if self.replay is None:
            self.prepare()
        with no_grad():
            if self.timesteps < self.cfg.learning_starts:
                actions = self.random_actions()
            else:
                actions = self.executor.run("explore", self.explore_step, obs)
                if self.executor.uses_graphs:  # the next replay overwrites it
                    actions = actions.clone()
        self.acted = (obs, None if critic_obs is obs else critic_obs, actions)
        return actions.clone()  # the environment may keep it, or write to it

    def process_step(self, record: StepRecord) -> None:
        """Store the step that the actions of the last `explore` led to."""
        if self.acted is None:
            raise RuntimeError("call explore before process_step: it keeps the actions that led to the step")
        obs, critic_obs, actions = self.acted
        fields = self.record_fields(record) if self.replay.extra_fields else {}
        with no_grad():
            if self.replay.is_numpy:  # only the statistics are tensor code
                self.store_step(obs, critic_obs, actions, record, fields)
                if self.cfg.empirical_normalization or self.return_scaler is not None:
                    self.executor.run("statistics", self.learn_statistics, obs, critic_obs, needed_parts(record))
            else:
                self.executor.run("insert", self.insert_step, obs, critic_obs, actions, needed_parts(record), fields)
            for note in self.on_step:
                note(record)
        self.acted = None
        self.timesteps += self.num_envs * RANKS.size
        self.num_stored += self.num_envs

    def insert_step(
        self, obs: Obs, critic_obs: Obs | None, actions: Tensor, record: StepRecord, fields: Mapping[str, Tensor]
    ) -> None:
        """Store one step of every environment, and learn statistics from it."""
        self.store_step(obs, critic_obs, actions, record, fields)
        self.learn_statistics(obs, critic_obs, record)

    def store_step(
        self, obs: Obs, critic_obs: Obs | None, actions: Tensor, record: StepRecord, fields: Mapping[str, Tensor]
    ) -> None:
        """Write one step of every environment to the replay buffer."""
        after, critic_after, terminal = record.obs, record.critic_obs, record.terminated
        if not self.replay.is_numpy or terminal.item() or record.truncated.item():
            after, critic_after, terminal = self.outcome(obs, critic_obs, record)
        self.replay.add(
            obs,
            actions,
            record.reward,
            after,
            terminal,
            truncated=record.truncated,
            critic_obs=critic_obs,
            next_critic_obs=critic_after,
            valid=record.valid,
            fields=fields,
        )
        for note in self.on_record:
            note(record)

    def outcome(self, obs: Obs, critic_obs: Obs | None, record: StepRecord) -> tuple[Obs, Obs, Tensor]:
        """The observations whose values follow a step, and whether there is none after it: (N,), true if terminal.

        Time limits are decided here. Where a cut-off episode has no final observation, the value of the state before
        the step is bootstrapped, as PPO does: the value after the reset would be wrong, and none at all would make a
        time limit a terminal state.
        """
        mode = self.cfg.timeout_bootstrap
        final, critic_final, ended = record.final_obs, record.final_critic_obs, record.done
        terminal = ended if mode == "none" else record.terminated
        if final is None or (critic_obs is not None and critic_final is None) or mode == "current_value":
            final, critic_final, ended = obs, critic_obs, record.truncated
            if mode in ("auto", "final_obs"):
                self.used_current_value.logical_or_(ended.any())
        after = tree_where(ended, final, record.obs)
        if critic_obs is None or critic_final is None:
            return after, record.critic_obs, terminal
        return after, tree_where(ended, critic_final, record.critic_obs), terminal

    def learn_statistics(self, obs: Obs, critic_obs: Obs | None, record: StepRecord) -> None:
        """Update the normalisers of observations and returns."""
        valid = record.valid if self.env.has_invalid_steps else None
        if self.cfg.empirical_normalization:
            self.policy.update_normalizers(obs, obs if critic_obs is None else critic_obs, valid)
        if self.return_scaler is not None:
            self.return_scaler.learn(record.reward, record.done, valid)

    def get_epsilon(self, timesteps: int) -> float:
        """Probability of a random action after `timesteps` environment steps; 0 without epsilon-greedy exploration."""
        return 0.0

    def exploration(self) -> dict[str, float]:
        """Metrics of the exploration."""
        return {}

    @property
    def steps_before_learning(self) -> float:
        """Steps that must be stored, on each rank, before the first gradient step."""
        return max(self.cfg.batch_size, self.cfg.learning_starts / RANKS.size)

    @property
    def can_learn(self) -> bool:
        """Whether enough steps are stored; counted on the host, so that nothing is read from the device."""
        starts = self.cfg.learning_starts / RANKS.size
        return self.num_stored >= starts and self.num_stored >= self.cfg.batch_size

    def update(self, gradient_steps: int | None = None) -> dict[str, float]:
        """Take gradient steps and return their metrics; {} while too few steps are stored."""
        self.sync_settings()
        if not self.can_learn:
            return {}
        self.train(self.cfg.gradient_steps if gradient_steps is None else gradient_steps)
        return self.report()

    def train(self, gradient_steps: int) -> None:
        """Take gradient steps; nothing is read from the device."""
        if self.replay is None:
            self.prepare()
        self.executor.period_length = max(1, MAX_STALE_STEPS // max(1, gradient_steps))
        self.executor.begin_iteration()
        for optimizer in self.optimizers.values():
            optimizer.take_assigned_rates()
        trainable = [p.requires_grad for optimizer in self.optimizers.values() for p in optimizer.parameters]
        if trainable != self.trainable:
            self.trainable = trainable
            self.sync_settings()
        interval, period = self.cfg.target_update_interval, getattr(self.cfg, "policy_delay", 1)
        first = self.num_updates
        while gradient_steps > 0:
            until_target_update = interval - self.num_updates % interval if interval > 1 else gradient_steps
            count = min(gradient_steps, MAX_STEPS_PER_GRAPH, until_target_update)
            self.executor.run("learn", self.learn_steps, count, self.num_updates % period)
            self.num_updates += count
            gradient_steps -= count
            if interval > 1 and self.num_updates % interval == 0:
                self.update_targets()
        if self.num_updates // MOMENT_INTERVAL > first // MOMENT_INTERVAL:
            for optimizer in self.optimizers.values():
                optimizer.drop_tiny_moments()
        reset_interval = getattr(self.cfg, "reset_interval", 0)
        if reset_interval and self.num_updates // reset_interval > first // reset_interval:
            self.reset_networks()

    def reset_networks(self) -> None:
        """Start networks anew; called every `reset_interval` gradient steps, if the algorithm has that setting."""
        raise NotImplementedError(f"{type(self).__name__} has a reset_interval and must implement reset_networks()")

    def learn_steps(self, count: int, phase: int) -> None:
        """Take `count` gradient steps in a row, in tensor code: one graph."""
        raise NotImplementedError(f"{type(self).__name__} must implement learn_steps(count, phase)")

    def batches(self, count: int) -> Iterator[ReplayBatch]:
        """Batches for `count` gradient steps, gathered at once, with normalised observations and scaled rewards."""
        size = self.cfg.batch_size
        whole = self.replay.draw(count * size, self.cfg.n_step, self.live.gamma, self.generators["replay"])
        if self.cfg.empirical_normalization:
            actor, critic = self.policy.obs_normalizer.normalize, self.policy.critic_obs_normalizer.normalize
            obs, next_obs = critic_obs, next_critic_obs = actor(whole.obs), actor(whole.next_obs)
            if whole.critic_obs is not whole.obs:
                critic_obs, next_critic_obs = critic(whole.critic_obs), critic(whole.next_critic_obs)
            whole = whole._replace(obs=obs, next_obs=next_obs, critic_obs=critic_obs, next_critic_obs=next_critic_obs)
        if self.return_scaler is not None:
            whole = whole._replace(rewards=whole.rewards * (self.return_bound / self.return_scaler.reach()))
        if count == 1:
            yield whole
            return
        for number in range(count):
            rows = slice(number * size, (number + 1) * size)
            parts: Any = [part if part is None else tree_map(operator.itemgetter(rows), part) for part in whole]
            yield ReplayBatch(*parts)

    def update_targets(self) -> None:
        """Move the target networks towards the trained ones."""
        for target in self.targets:
            target.update(self.live.tau)

    def optimizer_step(self, name: str, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Minimise a loss by one step of an optimizer; returns the gradient's norm, and 1 if the step was skipped."""
        optimizer = self.optimizers[name]
        if not any(p.requires_grad for p in optimizer.parameters):  # all are frozen
            return torch.zeros_like(optimizer.lr), torch.zeros_like(optimizer.lr)
        backward(loss, optimizer)
        return optimizer.step(self.live.max_grad_norm if self.cfg.max_grad_norm else math.inf)

    def report(self) -> dict[str, float]:
        """Mean metrics of the gradient steps since the last report, and the learning rates."""
        self.sync_settings()
        if not self.has_warned and self.used_current_value:  # a host read, until it was true
            self.warn_of_current_value()
        found: dict[str, float] = {}
        for meter in (self.meter, self.slow_meter):
            means = meter.means()
            count = means.pop("count", 0.0)
            found |= means if count else {}
            meter.reset()
            if "nonfinite_updates" in means and count:
                self.skipped_share = means["nonfinite_updates"]
                found["nonfinite_updates"] *= count
        if found:
            found |= {name: float(o.lr) for name, o in zip(self.rates, self.optimizers.values(), strict=True)}
        return {f"train/{name}": value for name, value in found.items()}

    def checkpoint_parts(self) -> dict[str, Any]:
        """The policy with its normalisers, the target networks and the optimizers."""
        parts: dict[str, Any] = {"model_state_dict": self.policy}
        for number, target in enumerate(self.targets):
            parts[f"target_{number}_state_dict" if number else "target_state_dict"] = target.module
        if self.return_scaler is not None:
            parts["return_scaler_state_dict"] = self.return_scaler
        return parts | {f"{name}_state_dict": optimizer for name, optimizer in self.optimizers.items()}

    def state_dict(self) -> dict[str, Any]:
        """The state of every part, the counters, and the replay buffer if `save_replay_buffer` is set."""
        state = super().state_dict() | {"learning_rate": float(next(iter(self.optimizers.values())).lr)}
        state |= {"num_updates": self.num_updates, "timesteps": self.timesteps, "num_stored": 0}
        if self.cfg.save_replay_buffer and self.replay is not None:
            state |= {REPLAY: self.replay.state_dict(), "num_stored": self.num_stored}
        return state

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        load_optimizer: bool = True,
        load_cfg: Mapping[str, bool] | None = None,
        strict: bool = True,
    ) -> None:
        """Load a saved state, and the replay buffer if there is one and the optimizers are loaded too."""
        if load_cfg is not None or not strict:
            owner = type(self).__name__
            raise ValueError(f"load_cfg and strict=False are for PPO; {owner} loads whole checkpoints: leave them out")
        has_replay = load_optimizer and REPLAY in state
        if has_replay:
            self.prepare().check_state(state[REPLAY])
        super().load_state_dict(state, load_optimizer)
        if has_replay:
            self.prepare().load_state_dict(state[REPLAY])
        elif self.replay is not None:  # its steps came after the checkpoint, or from another run
            self.replay.clear()
        self.num_updates, self.timesteps = int(state.get("num_updates", 0)), int(state.get("timesteps", 0))
        self.num_stored = int(state["num_stored"]) if has_replay else 0


def no_grad() -> AbstractContextManager[Any]:
    """`torch.no_grad()`; where gradients are off already, as in a runner's rollout, a context that costs less."""
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


def needed_parts(record: StepRecord) -> StepRecord:
    """The parts of a record that recorded functions read."""
    unneeded = ("critic_obs", "final_critic_obs") if record.critic_obs is record.obs else ()
    return record._replace(extras={}, **dict.fromkeys(unneeded))


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Compute no gradients of the module's parameters, only through it; parameters frozen before stay frozen."""
    trained = [p for p in module.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


class TargetNetwork:
    """A slowly updated copy of a module that `optimizer` trains; one operation where parameters share a vector."""

    def __init__(self, source: nn.Module, optimizer: GuardedOptimizer) -> None:
        self.source, self.module = source, copy.deepcopy(source).requires_grad_(False)
        self.pairs: list[Any] = list(zip(self.module.parameters(), source.parameters(), strict=True))
        flats = optimizer.flats
        if len(flats) == 1 and flats[0].vector.numel() == sum(p.numel() for p in source.parameters()):
            own = FlatParameters(list(self.module.parameters())).vector.detach()
            self.pairs = [(own, flats[0].vector)]

    @torch.no_grad()
    def update(self, tau: Tensor) -> None:
        """Move parameters by the fraction `tau` towards the trained ones (1 copies), and copy buffers."""
        for own, trained in self.pairs:
            own.lerp_(trained, tau.to(own.dtype))
        for own, trained in zip(self.module.buffers(), self.source.buffers(), strict=True):
            own.copy_(trained)
