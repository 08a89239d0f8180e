"""Several critics: groups of rewards with a critic each, and advantages that are normalised by group.

With r_g the sum of the reward terms of group g and V_g its critic (Mysore 2022; Zargarbashi 2024, eq. 4):

    A_g, R_g = generalised advantages and returns of r_g with V_g
    A        = sum_g w_g (A_g - mean A_g) / std A_g
    critic_groups_loss = mean sum_g (V_g - R_g)²

A group whose rewards are rare or small has its say, however large the others are. The policy's own critic goes on
learning the value of the whole reward.
"""

from typing import Any

import torch
from torch import Tensor, nn

from canter.algorithms.algorithm import Terms
from canter.algorithms.extension import Extension
from canter.algorithms.optim import GuardedOptimizer
from canter.envs.vec_env import StepRecord
from canter.modules.mlp import mlp
from canter.modules.policy import PolicyOutput
from canter.storage.rollout_storage import Field, MiniBatch, RolloutStorage, gae, normalize_advantages
from canter.utils.config import setting, settings
from canter.utils.tree import Obs


@settings
class CriticGroupSettings:
    """The setting that switches several critics on."""

    critic_groups_cfg: dict[str, Any] | None = setting(None, fixed=True)
    """A critic for each group of reward terms, the fields of `CriticGroupConfig`; off if None."""


@settings
class CriticGroupConfig:
    """Groups of reward terms, and their critics."""

    groups: dict[str, list[str]]
    """Names in `extras["reward_components"]` by group; "rest" as a name is the reward minus all named terms."""
    weights: dict[str, float] | None = None
    """Weight of each group's advantage; 1 each if None."""
    hidden_dims: tuple[int, ...] = setting((256, 128), low=1)
    """Hidden layers of each critic."""
    activation: str = "elu"
    """Activation of each critic."""
    learning_rate: float = setting(5e-4, low=0.0)
    """Learning rate of the critics."""


class CriticGroups(Extension):
    """Learns a value for each group of rewards, and replaces the advantages by the weighted sum of theirs."""

    name = "critic_groups"
    settings_class = CriticGroupSettings
    switch = "critic_groups_cfg"
    extras = ("reward_components",)
    critics: Any = None
    """One network per group; None until the width of the observations is known."""

    def attach(self, alg: Any) -> None:
        """Read groups and weights."""
        super().attach(alg)
        self.terms = CriticGroupConfig(**self.cfg.critic_groups_cfg)
        self.groups = self.terms.groups
        weights = dict.fromkeys(self.groups, 1.0) if self.terms.weights is None else self.terms.weights
        if not self.groups or set(weights) != set(self.groups):
            raise ValueError(f"critic_groups_cfg needs groups, and a weight for each; got {self.terms}")
        alg.loss_weights["critic_groups_loss"] = 1.0
        self.weights = torch.tensor([float(weights[name]) for name in self.groups], device=alg.device)

    def fields(self) -> dict[str, Field]:
        """Rewards, values and returns by group; the value of the state where an episode was cut off, if it is known."""
        width = (len(self.groups),)
        own = {"group_rewards": Field(width, batch=""), "group_values": Field(width, batch="")}
        own["group_final_values"] = Field(width, batch="", default=float("nan"))
        return own | {"group_returns": Field(width, default=0.0)}

    def begin(self, storage: RolloutStorage) -> None:
        """Build the critics for the critic's observation."""
        if self.critics is not None:
            return
        names = {f.batch: f.shape for f in storage.fields.values() if f.batch}
        shape = names.get("critic_obs", names.get("obs"))
        if shape is None or len(shape) != 1 or any(name.startswith("critic_obs.") for name in names):
            raise ValueError("critic_groups_cfg needs a critic observation of one flat vector; flatten it")
        sizes = [shape[0], *self.terms.hidden_dims, 1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.alg.stream_seed)
            made = [mlp(sizes, self.terms.activation) for _ in self.groups]
        self.critics = nn.ModuleList(made).to(self.alg.device)
        self.optimizer = GuardedOptimizer(self.critics, "Adam", self.terms.learning_rate)

    def values(self, critic_obs: Any) -> Tensor:
        """(..., G) value of each group."""
        seen = self.alg.policy.critic_obs_normalizer.normalize(critic_obs)
        return torch.cat([critic(seen) for critic in self.critics], -1)

    def after_act(self, step: dict[str, Any], obs: Obs, critic_obs: Obs) -> None:
        """Values of the groups."""
        step["group_values"] = self.values(critic_obs)

    def record(self, record: StepRecord) -> dict[str, Tensor]:
        """Rewards of the groups, and the values of final observations."""
        terms = record.extras.get("reward_components") or {}
        named = {name for names in self.groups.values() for name in names} - {"rest"}
        if missing := sorted(named - set(terms)):
            raise KeyError(f"critic_groups_cfg names {missing}; extras['reward_components'] has {sorted(terms)}")
        parts = {name: terms[name].to(record.reward) for name in named}
        parts["rest"] = record.reward - sum(parts.values())
        rewards = [torch.stack([parts[name] for name in names]).sum(0) for names in self.groups.values()]
        own = {"group_rewards": torch.stack(rewards, -1)}
        if record.final_critic_obs is not None:
            own["group_final_values"] = self.values(record.final_critic_obs)
        return own

    def returns(self, rollout: RolloutStorage, last_critic_obs: Obs, last_values: Tensor) -> None:
        """Replace the advantages by the weighted sum of the groups' normalised ones."""
        data, rows, live = rollout.data, rollout.newest, self.alg.live
        values, final, rewards = (data[f"group_{name}"][rows] for name in ("values", "final_values", "rewards"))
        if self.alg.cfg.timeout_bootstrap != "none":
            reached = torch.where(final.isnan(), values, final)
            rewards = torch.where(data["truncated"][rows], rewards + live.gamma * reached, rewards)
        last, ends = self.values(last_critic_obs), data.get("ends", data["dones"])[rows]
        valid = data["valid"][rows] if rollout.has_invalid_steps else None
        total = torch.zeros_like(ends, dtype=rewards.dtype)
        for i, weight in enumerate(self.weights.unbind()):
            one = slice(i, i + 1)
            advantages = gae(rewards[..., one], values[..., one], ends, last[..., one], live.gamma, live.lam)
            data["group_returns"][rows][..., one].copy_(advantages + values[..., one])
            total = total + weight * normalize_advantages(advantages, valid)
        data["advantages"][rows].copy_(total)

    def losses(self, terms: Terms, batch: MiniBatch, out: PolicyOutput) -> None:
        """Add the critics' loss."""
        error = self.values(batch.critic_obs) - batch.group_returns  # pyright: ignore[reportAttributeAccessIssue]
        terms.losses["critic_groups_loss"] = batch.mean(error.square().sum(-1))

    def checkpoint_parts(self) -> dict[str, Any]:
        """The critics and their optimizer."""
        if self.critics is None:
            return {}
        return {"critic_groups_state_dict": self.critics, "critic_groups_optimizer_state_dict": self.optimizer}
