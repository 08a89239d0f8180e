"""Making an on-policy algorithm ready: its policy, normalisers, storage, generators and executor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from canter.algorithms.algorithm import Algorithm
from canter.algorithms.rnd import RND, RNDConfig
from canter.algorithms.settings import PPOSettings, check_ranges
from canter.algorithms.symmetry import Symmetry
from canter.envs.vec_env import StepRecord
from canter.modules.actor_critic import ActorCritic
from canter.modules.build import build_normalizer, build_pair, env_shapes
from canter.modules.normalizer import (
    VALUE_NORMALIZATIONS,
    NoNormalization,
    ReturnScaler,
    install_value_normalizer,
)
from canter.modules.policy import Policy
from canter.storage.fields import Transition
from canter.storage.rollout_storage import RolloutStorage
from canter.utils.config import settings
from canter.utils.graphs import Executor
from canter.utils.metrics import MeanMeter

BOOTSTRAPS = ("auto", "final_obs", "current_value", "none")
SCHEDULES = ("fixed", "constant", "linear", "adaptive")
# Settings whose value a captured step keeps; the learning rate and the clip range are tensors.
BAKED = (
    "gamma", "lam", "max_grad_norm", "use_clipped_value_loss", "schedule", "desired_kl", "timeout_bootstrap",
    "normalize_advantage_per_mini_batch",
)  # fmt: skip


@settings
class OnPolicySetup(PPOSettings, Algorithm):
    """What an on-policy algorithm has before it acts."""

    device: Any = "cpu"
    """Where to learn."""
    seed: int | None = None
    """Seed of exploration noise and minibatch order; drawn from torch's generator if None."""
    env: Any = None
    cfg: Any = None
    actor_class: Any = None
    critic_class: Any = None
    actor_cfg: dict[str, Any] | None = None
    critic_cfg: dict[str, Any] | None = None
    obs_space: Any = None
    action_space: Any = None
    actor: Any = None
    critic: Any = None
    log_dir: str | None = None
    lr: torch.Tensor = dataclasses.field(init=False)
    loss_weights: dict[str, Any] = dataclasses.field(init=False)

    def _check(self) -> None:
        for name, value, known in (
            ("schedule", self.schedule, SCHEDULES),
            ("clip_schedule", self.clip_schedule, ("fixed", "linear")),
            ("timeout_bootstrap", self.timeout_bootstrap, BOOTSTRAPS),
            ("value_normalization", self.value_normalization, VALUE_NORMALIZATIONS),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        check_ranges(self)

    def take_settings(self, cfg: PPOSettings) -> None:
        """The algorithm's settings in `cfg`; one given to the constructor as well is an error."""
        super().take_settings(cfg)
        if self.device == "cpu":  # the default; a runner that was told another device than cfg's gives a torch.device
            self.device = getattr(cfg, "device", None) or self.device

    def _build_pair(self) -> Policy:
        if self.actor is not None and self.critic is not None:
            return ActorCritic(actor=self.actor, critic=self.critic)
        missing = [name for name in ("actor_class", "critic_class") if getattr(self, name) is None]
        has_env = self.env is not None
        if not has_env and (self.obs_space is None or self.action_space is None):
            missing.append("env (or obs_space and action_space)")
        if missing:
            raise ValueError(f"PPO needs a policy: PPO(actor_critic, ...), or {' and '.join(missing)}")
        obs_space = self.obs_space or self.env.obs_space
        critic_space = self.env.critic_obs_space if has_env else obs_space
        action_space = self.action_space or self.env.action_space
        return build_pair(
            obs_space, critic_space, action_space, self.actor_class, self.critic_class, self.actor_cfg, self.critic_cfg
        )

    def _bound(self, bound: Any) -> Any:
        return None if bound is None else torch.as_tensor(bound, dtype=torch.float32, device=self.device)

    def init_collection(self, policy: Policy, seed: int | None) -> None:
        """Everything collecting needs besides the storage."""
        self.policy = policy
        install_value_normalizer(policy, self.value_normalization)
        self.symmetry = None if self.symmetry_cfg is None else Symmetry(self.symmetry_cfg, policy, self.device)
        seed = int(torch.randint(2**62, ()).item()) if seed is None else seed
        self.weight_seed = seed
        self.generators = {}
        for purpose in ("action", "shuffle"):
            self.new_generator(purpose)
        self.storage: RolloutStorage | None = None
        self.transition = Transition()
        self.return_scaler: ReturnScaler | None = None
        self.rnd: RND | None = None
        self.rnd_rewards = MeanMeter()
        self.meter = MeanMeter()
        self.acted: dict[str, Any] = {}
        self.on_record: list[Callable[[StepRecord], None]] = []
        """Tensor functions that see every record, in the captured step."""
        self.executor = Executor(self.device, self.execution, self.precision)
        self.executor.generators += [self.generators["action"]]
        self.current_learning_iteration = 0
        self.fell_back = torch.zeros((), dtype=torch.bool, device=self.device)

    def new_generator(self, purpose: str) -> torch.Generator:
        """A random stream of its own, derived from the seed and saved with the others."""
        made = torch.Generator(self.device).manual_seed((self.weight_seed + 7919 * len(self.generators)) % 2**63)
        self.generators[purpose] = made
        return made

    @property
    def rollout(self) -> RolloutStorage:
        """The storage, once there is one."""
        if self.storage is None:
            raise RuntimeError(f"{type(self).__name__} has no storage yet; call init_storage(...) or give it an env")
        return self.storage

    def prepare(self, env: Any, num_steps_per_env: int, **storage_cfg: Any) -> None:
        """Storage for an environment, and normalisers for a policy that has none."""
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

    def note_constants(self) -> None:
        """Tell the executor the numbers of today, so that one changed in mid-run takes effect in captured steps."""
        weights = {name: w for name, w in self.loss_weights.items() if not torch.is_tensor(w)}  # a tensor is read anew
        parts = [part for part in (self.policy, self.return_scaler, self.rnd) if part is not None]
        modes = tuple(module.training for part in parts for module in part.modules())
        tensors = tuple((p.data_ptr(), p.requires_grad) for p in self.policy.parameters())  # layers frozen or replaced
        self.executor.constants = (*(getattr(self, name) for name in BAKED), *weights.items(), modes, tensors)

    def init_obs_norm(self, num_obs: Any, num_critic_obs: Any) -> None:
        """Install the policy's normalisers; widths or shapes. Does nothing but say so where normalisation is off."""
        self.executor.forget()
        for name, shape in (("obs_normalizer", num_obs), ("critic_obs_normalizer", num_critic_obs)):
            if not self.empirical_normalization:
                normalizer: Any = NoNormalization()
            else:
                normalizer = build_normalizer(shape)
            setattr(self.policy, name, normalizer.to(self.device))

    def init_storage(
        self,
        num_envs: int,
        num_transitions_per_env: int,
        actor_obs_shape: Any,
        critic_obs_shape: Any,
        action_shape: Any,
        **kwargs: Any,
    ) -> None:
        """Allocate the rollout."""
        self.executor.forget()  # graphs hold the tensors of the storage before
        self.storage = self.new_storage(
            num_envs,
            num_transitions_per_env,
            actor_obs_shape,
            critic_obs_shape,
            action_shape,
            self.device,
            param_shapes=self.policy.distribution.param_shapes,
            action_dtype=self.policy.distribution.action_dtype,
            hidden_shapes={name: memory.state_shape for name, memory in self.policy.memories.items()},
            coins=self.policy.random_mask_probs,
            **kwargs,
        )
        if self.normalize_rewards:
            self.return_scaler = ReturnScaler(num_envs, self.gamma).to(self.device)
        if self.rnd_cfg is not None and self.rnd is None:
            self.rnd = self._build_rnd(self.rnd_cfg)

    def _build_rnd(self, rnd_cfg: Mapping[str, Any]) -> RND:
        shapes = [f.shape for f in self.rollout.fields.values() if f.batch == "critic_obs"]
        shapes = shapes or [f.shape for f in self.rollout.fields.values() if f.batch == "obs"]
        if len(shapes) != 1 or len(shapes[0]) != 1:
            raise ValueError(
                "rnd_cfg needs a critic observation that is one flat vector; flatten it, or leave rnd_cfg out"
            )
        cfg = RNDConfig(**{"num_states": shapes[0][0], "num_envs": self.rollout.num_envs, **rnd_cfg})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.weight_seed)
            return RND(cfg, self.device)

    new_storage = RolloutStorage

    @property
    def obs_normalizer(self) -> Any:
        """The policy's observation normaliser."""
        return self.policy.obs_normalizer

    @property
    def critic_obs_normalizer(self) -> Any:
        """The policy's critic observation normaliser."""
        return self.policy.critic_obs_normalizer

    def resume_state(self) -> dict[str, Any]:
        """Generators and the state of the memories."""
        hidden = {name: memory.state for name, memory in self.policy.memories.items() if memory.state is not None}
        return super().resume_state() | {"hidden": hidden}

    def load_resume_state(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `resume_state` was taken."""
        super().load_resume_state(state)
        self.policy.set_hidden({name: value.to(self.device) for name, value in state["hidden"].items()})

    def runner(self) -> Any:
        """The on-policy runner of this algorithm and its environment."""
        from canter.runners.on_policy_runner import OnPolicyRunner  # the runner imports the algorithms

        if self.env is None:
            raise ValueError("PPO.learn and PPO.eval need an environment: PPO(env=..., ...), or use OnPolicyRunner")
        if self._runner is None:
            self._runner = OnPolicyRunner(self.env, agent=self, cfg=self.cfg, log_dir=self.log_dir)
        return self._runner
