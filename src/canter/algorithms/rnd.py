"""Random network distillation: a reward for states that a predictor cannot predict yet (Burda 2018)."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from canter.algorithms.algorithm import Terms
from canter.algorithms.extension import Extension
from canter.algorithms.optim import GuardedOptimizer
from canter.envs.vec_env import StepRecord
from canter.modules.mlp import mlp
from canter.modules.normalizer import EmpiricalNormalization, NoNormalization, ReturnScaler
from canter.modules.policy import PolicyOutput
from canter.storage.rollout_storage import Field, MiniBatch, RolloutStorage, masked_mean
from canter.utils.config import check_settings, setting, settings
from canter.utils.metrics import MeanMeter
from canter.utils.tree import tree_where

WEIGHT_SCHEDULES = ("constant", "step", "linear")
SCHEDULE_ENTRIES = ("mode", "initial_step", "final_step", "final_value")


@settings
class RNDSettings:
    """The setting that switches random network distillation on."""

    rnd_cfg: dict[str, Any] | None = setting(None, fixed=True)
    """Random network distillation, the fields of `RNDConfig`; off if None."""


@settings
class RNDConfig:
    """Settings of random network distillation."""

    num_states: int = setting(dataclasses.MISSING, low=1)
    """Width of the states, the critic's observation."""
    num_envs: int = setting(1, low=1)
    """Number of environments, for the scale of the intrinsic return."""
    num_outputs: int = setting(16, low=1)
    """Width of the embedding."""
    predictor_hidden_dims: tuple[int, ...] = setting((256, 256), low=1)
    """Hidden layers of the predictor."""
    target_hidden_dims: tuple[int, ...] = setting((256, 256), low=1)
    """Hidden layers of the frozen target."""
    activation: str = "elu"
    """Activation of both."""
    state_normalization: bool = False
    """Normalise states by running statistics."""
    reward_normalization: bool = False
    """Divide the intrinsic reward by the standard deviation of its discounted return."""
    weight: float = 0.0
    """Weight of the intrinsic reward."""
    weight_schedule: dict[str, Any] | None = None
    """`{mode: constant | step | linear, initial_step, final_step, final_value}`, in env steps per environment."""
    learning_rate: float = setting(1e-3, low=0.0)
    """Learning rate of the predictor."""


class RNDModel(nn.Module):
    """Predictor, frozen target, their normalisers and the predictor's optimizer."""

    def __init__(self, cfg: RNDConfig, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.cfg = cfg
        given = check_settings("weight_schedule", cfg.weight_schedule or {}, SCHEDULE_ENTRIES)
        self.schedule: dict[str, Any] = {"mode": "constant", "initial_step": 0, **given}
        mode, missing = self.schedule["mode"], [name for name in SCHEDULE_ENTRIES if name not in self.schedule]
        if mode not in WEIGHT_SCHEDULES:
            raise ValueError(f"weight_schedule mode must be one of {WEIGHT_SCHEDULES}, got {mode!r}")
        if missing and mode != "constant":
            raise ValueError(f"a {mode} weight_schedule needs {' and '.join(missing)}")
        self.predictor = mlp([cfg.num_states, *cfg.predictor_hidden_dims, cfg.num_outputs], cfg.activation)
        self.target = mlp([cfg.num_states, *cfg.target_hidden_dims, cfg.num_outputs], cfg.activation)
        self.target.requires_grad_(False)
        is_normalized = cfg.state_normalization
        self.state_normalizer: Any = EmpiricalNormalization([cfg.num_states]) if is_normalized else NoNormalization()
        self.reward_scaler = ReturnScaler(cfg.num_envs, 0.99) if cfg.reward_normalization else None
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.steps: Tensor
        self.to(device)
        self.optimizer = GuardedOptimizer(self.predictor, "Adam", cfg.learning_rate)

    def weight(self) -> Tensor:
        """Weight of the intrinsic reward at this step, as a device scalar."""
        start = torch.full((), self.cfg.weight, device=self.steps.device)
        if self.schedule["mode"] == "constant":
            return start
        final = float(self.schedule["final_value"])
        first, last = int(self.schedule["initial_step"]), int(self.schedule["final_step"])
        if self.schedule["mode"] == "step":
            return torch.where(self.steps < last, start, final)
        progress = ((self.steps - first) / max(1, last - first)).clamp(0.0, 1.0)
        return start + progress * (final - start)

    @torch.no_grad()
    def intrinsic_reward(self, states: Tensor, done: Tensor, valid: Tensor | None = None) -> Tensor:
        """(N,) weighted prediction error of the states just reached; invalid rows do not enter the statistics."""
        self.state_normalizer.update(states, valid)
        seen = self.state_normalizer.normalize(states)
        reward = torch.linalg.vector_norm(self.target(seen) - self.predictor(seen), dim=-1)
        if self.reward_scaler is not None:
            reward = self.reward_scaler(reward, done, valid)
        reward = self.weight() * reward
        self.steps += 1
        return reward

    def loss(self, states: Tensor, valid: Tensor | None = None) -> Tensor:
        """Mean square distance of the predictor to the target; only the predictor has a gradient."""
        seen = self.state_normalizer.normalize(states.detach())
        return masked_mean((self.predictor(seen) - self.target(seen)).square().mean(-1), valid)


class RND(Extension):
    """Adds the prediction error of reached states to the reward; the predictor learns with the policy."""

    name = "rnd"
    settings_class = RNDSettings
    switch = "rnd_cfg"
    model: Any = None
    """The `RNDModel`; None until the width of the observations is known."""

    def attach(self, alg: Any) -> None:
        """Networks are built with the storage, which knows the observation's width."""
        super().attach(alg)
        alg.loss_weights["rnd_loss"] = 1.0
        self.rewards = MeanMeter()

    def fields(self) -> dict[str, Field]:
        """The intrinsic reward."""
        return {"intrinsic_reward": Field((1,), batch="")}

    def begin(self, storage: RolloutStorage) -> None:
        """Build predictor and target for the critic's observation."""
        if self.model is not None:
            return
        shapes = [f.shape for f in storage.fields.values() if f.batch == "critic_obs"]
        shapes = shapes or [f.shape for f in storage.fields.values() if f.batch == "obs"]
        if len(shapes) != 1 or len(shapes[0]) != 1:
            raise ValueError("rnd_cfg needs a critic observation of one flat vector; flatten it, or leave rnd_cfg out")
        cfg = RNDConfig(**{"num_states": shapes[0][0], "num_envs": storage.num_envs, **self.cfg.rnd_cfg})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.alg.stream_seed)
            self.model = RNDModel(cfg, self.alg.device)
        self.optimizer = self.model.optimizer

    def record(self, record: StepRecord) -> dict[str, Tensor]:
        """The weighted prediction error of the states reached, the final ones where an episode ended."""
        reached: Any = record.critic_obs
        if reached is None:
            raise ValueError("rnd_cfg rewards the states reached: give process_env_step next_obs and next_critic_obs")
        done = record.done
        if record.final_critic_obs is not None:
            reached = tree_where(done, record.final_critic_obs, reached)
        bonus = self.model.intrinsic_reward(reached, done, record.valid)
        rewards = {"intrinsic": bonus, "extrinsic": record.reward}
        means = {f"rnd/mean_{kind}_reward": masked_mean(value, record.valid) for kind, value in rewards.items()}
        self.rewards.add({**means, "rnd/weight": self.model.weight()})
        return {"intrinsic_reward": bonus}

    def bonus(self, rollout: RolloutStorage) -> Tensor:
        """(T, N) intrinsic rewards."""
        return rollout.column("intrinsic_reward")

    def losses(self, terms: Terms, batch: MiniBatch, out: PolicyOutput) -> None:
        """Add the predictor's loss."""
        if self.alg.uses_rewards:
            terms.losses["rnd_loss"] = self.model.loss(batch.critic_obs, batch.valid)  # pyright: ignore[reportArgumentType]

    def begin_update(self, iteration: int) -> tuple[Any, ...]:
        """Whether the normalisers learn."""
        return () if self.model is None else tuple(module.training for module in self.model.modules())

    def metrics(self) -> dict[str, Tensor]:
        """Mean rewards of the rollout and the weight."""
        return self.rewards.take()

    def checkpoint_parts(self) -> dict[str, Any]:
        """Networks with their normalisers, and the optimizer."""
        if self.model is None:
            return {}
        return {"rnd_state_dict": self.model, "rnd_optimizer_state_dict": self.model.optimizer}
