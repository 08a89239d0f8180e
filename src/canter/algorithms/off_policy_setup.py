"""Making an off-policy algorithm ready: its networks, optimizers, replay and generators; and its saving."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from canter.algorithms.algorithm import Algorithm
from canter.algorithms.off_policy_settings import OffPolicySettings, check_off_policy
from canter.algorithms.optim import GuardedOptimizer
from canter.algorithms.targets import TargetNetwork
from canter.envs.vec_env import StepRecord
from canter.envs.wrap import wrap_env
from canter.modules.build import build_normalizer, env_shapes
from canter.modules.normalizer import ReturnScaler
from canter.modules.policy import Policy
from canter.storage.offline import fill_replay
from canter.storage.replay import TransitionReplayBuffer
from canter.utils.config import settings
from canter.execution.executor import Executor
from canter.utils.metrics import MeanMeter
from canter.utils.runtime import resolve_device

REPLAY = "replay_buffer"
STATISTICS = 10_000  # recorded steps that the statistics of observations begin with


@settings
class OffPolicySetup(OffPolicySettings, Algorithm):
    """What an off-policy algorithm has before it explores; a subclass builds its networks."""

    env: Any = dataclasses.field(default=None, kw_only=False)
    """Anything `wrap_env` knows."""
    cfg: Any = dataclasses.field(default=None, kw_only=False)
    device: Any = None
    """Where to learn; None takes a GPU if there is one."""
    seed: int | None = None
    """Seed of exploration and of sampling; drawn from torch's generator if None."""
    obs_space: Any = None
    action_space: Any = None
    log_dir: str | None = None

    policy: Policy = dataclasses.field(init=False)
    targets: list[TargetNetwork] = dataclasses.field(init=False)
    optimizers: dict[str, GuardedOptimizer] = dataclasses.field(init=False)
    runner_name: ClassVar[str] = "OffPolicyRunner"
    network_names: ClassVar[tuple[str, ...]] = ()
    """Constructor arguments that say which networks to build."""

    def __post_init__(self) -> None:
        if self.cfg is not None:
            self.take_settings(self.cfg)
        self.device = resolve_device(self.device)
        check_off_policy(self)
        if self.env is None:
            raise ValueError(f"{type(self).__name__} needs an environment: {type(self).__name__}(env, cfg)")
        self.env = wrap_env(self.env, self.device)
        self.num_envs = self.env.num_envs
        self.obs_space = self.obs_space or self.env.obs_space
        self.action_space = self.action_space or self.env.action_space
        self.check_actions()
        seed = int(torch.randint(2**62, ()).item()) if self.seed is None else self.seed
        purposes = ("action", "replay")
        self.generators = {
            purpose: torch.Generator(self.device).manual_seed((seed + 7919 * i) % 2**63)
            for i, purpose in enumerate(purposes)
        }
        self.executor = Executor(self.device, self.execution, self.precision)
        self.executor.generators += list(self.generators.values())
        self.optimizers, self.targets = {}, []
        self.meter, self.slow_meter = MeanMeter(), MeanMeter()
        self.return_scaler: ReturnScaler | None = None
        self.build()
        self._init_normalizers()
        self.replay: TransitionReplayBuffer | None = None
        self.acted: tuple[Any, Any, Tensor] | None = None
        self.on_record: list[Callable[[StepRecord], None]] = []
        """Tensor functions that see every record, in the captured step."""
        self.timesteps = self.num_updates = self.num_stored = self.current_learning_iteration = 0
        self.first_rates = {name: float(optimizer.lr) for name, optimizer in self.optimizers.items()}
        self.learning_rate = next(iter(self.first_rates.values()))

    # ------------------------------------------------------------------ what a subclass says
    def check_actions(self) -> None:
        """Refuse an action space that the algorithm cannot act in."""
        raise NotImplementedError

    def build(self) -> None:
        """Make the policy, the targets and the optimizers."""
        raise NotImplementedError

    # ------------------------------------------------------------------ making ready
    def _init_normalizers(self) -> None:
        if self.empirical_normalization:
            obs_shape, critic_shape = env_shapes(self.env)
            self.policy.obs_normalizer = build_normalizer(obs_shape)
            self.policy.critic_obs_normalizer = build_normalizer(obs_shape if critic_shape is None else critic_shape)
        self.policy.to(self.device)

    def make_optimizer(self, name: str, module: nn.Module, learning_rate: float) -> GuardedOptimizer:
        """An optimizer of a module, saved under `<name>_state_dict`."""
        optimizer = GuardedOptimizer(module.to(self.device), self.optimizer_class_name, learning_rate)
        if self.weight_decay:
            for group in optimizer.optimizer.param_groups:
                group["weight_decay"] = self.weight_decay
        self.optimizers[name] = optimizer
        return optimizer

    def prepare(self) -> TransitionReplayBuffer:
        """The replay buffer, allocated at the first call; MemoryError if it does not fit."""
        if self.replay is None:
            capacity = self.buffer_size
            if self.buffer_steps_per_env is not None:
                capacity = self.buffer_steps_per_env * self.num_envs
            if self.batch_size > capacity:
                raise ValueError(f"batch_size={self.batch_size} is more than the replay buffer holds: {capacity}")
            with torch.inference_mode(False):
                self.replay = self.new_replay(max(capacity, self.num_envs))
            self.executor.forget()
        return self.replay

    def new_replay(self, capacity: int) -> TransitionReplayBuffer:
        """The buffer to learn from. Extended by subclasses."""
        return TransitionReplayBuffer(**self.replay_arguments(capacity))

    def replay_arguments(self, capacity: int) -> dict[str, Any]:
        """What the environment says about its steps."""
        obs_shape, critic_shape = env_shapes(self.env)
        distribution = self.policy.distribution
        return {
            "capacity": capacity, "obs_shape": obs_shape, "action_shape": distribution.action_shape,
            "device": self.device, "action_dtype": distribution.action_dtype, "critic_obs_shape": critic_shape,
            "num_envs": self.num_envs, "has_invalid_steps": self.env.has_invalid_steps,
        }  # fmt: skip

    def fill(self, source: Any, max_steps: int | None = None) -> int:
        """Put recorded steps into the replay buffer, and into the statistics of observations; returns how many.

        `source` is a directory of trajectory files, "minari:<dataset id>", a Minari dataset, `Episode`s, or steps as
        dicts; see `canter.storage.offline`.
        """
        replay = self.prepare()
        added = fill_replay(replay, source, max_steps)
        self.num_stored += added
        if self.empirical_normalization or self.return_scaler is not None:
            batch = replay.draw(min(added, STATISTICS), 1, self.gamma, self.generators["replay"])
            if self.empirical_normalization:
                self.policy.update_normalizers(batch.obs, batch.critic_obs)
            if self.return_scaler is not None:  # as if every reward came again and again
                self.return_scaler.take(batch.rewards / max(1.0 - self.gamma, 1e-3))
        return added

    # ------------------------------------------------------------------ saving
    def checkpoint_parts(self) -> dict[str, Any]:
        """The policy with its normalisers, the targets, and the optimizers."""
        parts: dict[str, Any] = {"model_state_dict": self.policy}
        for number, target in enumerate(self.targets):
            parts[f"target_{number}_state_dict" if number else "target_state_dict"] = target.module
        if self.return_scaler is not None:
            parts["return_scaler_state_dict"] = self.return_scaler
        return parts | {f"{name}_state_dict": optimizer for name, optimizer in self.optimizers.items()}

    def state_dict(self) -> dict[str, Any]:
        """The state of every part, the counters, and the replay buffer if it is to be saved."""
        counters = {"num_updates": self.num_updates, "timesteps": self.timesteps, "num_stored": 0}
        state = super().state_dict() | counters
        if self.save_replay_buffer and self.replay is not None:
            state |= {REPLAY: self.replay.state_dict(), "num_stored": self.num_stored}
        return state

    def load_state_dict(self, state: Mapping[str, Any], load_optimizer: bool = True) -> None:
        """Take over a saved state, and the replay buffer where there is one and learning goes on."""
        has_replay = load_optimizer and REPLAY in state
        if has_replay:
            self.prepare().check_state(state[REPLAY])
        super().load_state_dict(state, load_optimizer)
        if has_replay:
            self.prepare().load_state_dict(state[REPLAY])
        self.num_updates, self.timesteps = int(state.get("num_updates", 0)), int(state.get("timesteps", 0))
        self.num_stored = int(state["num_stored"]) if has_replay else 0

    def _after_load(self, state: Mapping[str, Any], load_optimizer: bool) -> None:
        if load_optimizer:
            self.learning_rate = float(next(iter(self.optimizers.values())).lr)

    def runner(self) -> Any:
        """The off-policy runner of this algorithm and its environment."""
        from canter.runners.off_policy_runner import OffPolicyRunner  # the runner imports the algorithms

        if self._runner is None:
            self._runner = OffPolicyRunner(self.env, agent=self, cfg=self.cfg, log_dir=self.log_dir)
        return self._runner
