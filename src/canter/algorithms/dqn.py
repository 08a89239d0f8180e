"""Deep Q-learning (Mnih et al. 2015), double by default, with the extensions that pay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor

from canter.algorithms.actor_q import network_cfg
from canter.algorithms.off_policy import OffPolicyAlgorithm
from canter.algorithms.off_policy_settings import DQNConfig, DQNSettings
from canter.algorithms.targets import TargetNetwork
from canter.modules.q_networks import CNNQNetwork, MLPQNetwork, QPolicy, explore_rows
from canter.storage.prioritized_replay import PrioritizedReplayBuffer
from canter.storage.replay import ReplayBatch, TransitionReplayBuffer
from canter.utils.config import settings
from canter.utils.tree import Obs

__all__ = ["DQN", "DQNConfig", "DQNSettings"]


@settings
class DQN(DQNSettings, OffPolicyAlgorithm):
    """DQN on Discrete actions: `DQN(env, cfg)`; the network is `q_network_class(obs_space, action_space, cfg)`."""

    q_network_class: Any = None
    q_network_cfg: Mapping[str, Any] | None = None
    network_names = ("q_network_class", "q_network_cfg")

    def check_actions(self) -> None:
        """Discrete, one choice."""
        if not isinstance(self.action_space, spaces.Discrete):
            raise ValueError(f"DQN needs Discrete actions, got {self.action_space}; use SAC or TD3 for a Box")

    def build(self) -> None:
        """The network, its target and its optimizer."""
        is_image = isinstance(self.obs_space, spaces.Box) and len(self.obs_space.shape) == 3
        q_class = self.q_network_class or (CNNQNetwork if is_image else MLPQNetwork)
        told = {"hidden_dims": self.network_hidden_dims, "activation": self.activation, "layer_norm": self.layer_norm}
        cfg = network_cfg(q_class, {**told, "dueling": self.dueling}, self.q_network_cfg, is_image)
        q_network = q_class(obs_space=self.obs_space, action_space=self.action_space, cfg=cfg)
        self.q_network = q_network.to(self.device)
        self.policy = QPolicy(self.q_network, self.action_space)
        optimizer = self.make_optimizer("optimizer", self.q_network, self.learning_rate)
        self.target = TargetNetwork(self.q_network, optimizer)
        self.targets = [self.target]
        self.epsilon = torch.tensor(self.epsilon_start, device=self.device)
        self.q_loss = self.executor.compile(self.q_loss)

    # ------------------------------------------------------------------ acting
    def get_epsilon(self, timesteps: int) -> float:
        """Probability of a random action after so many environment steps."""
        progress = min(timesteps / self.epsilon_decay_steps, 1.0) if self.epsilon_decay_steps else 1.0
        return self.epsilon_start + progress * (self.epsilon_end - self.epsilon_start)

    def random_actions(self) -> Tensor:
        """Any action, for every environment."""
        n = int(self.action_space.n)
        return torch.randint(n, (self.num_envs,), generator=self.generators["action"], device=self.device)

    sample_random_actions = random_actions

    def before_exploring(self) -> None:
        """The probability of today, where a captured step reads it."""
        self.epsilon.fill_(self.get_epsilon(self.timesteps))

    def explore_step(self, obs: Obs) -> Tensor:
        """The best action, or any; every environment tosses its own coin."""
        return explore_rows(self._values(obs), self.epsilon, self.generators["action"])

    @torch.no_grad()
    def act(self, obs: Obs, deterministic: bool = False, epsilon: float | None = None) -> Tensor:
        """Actions for raw observations; with `epsilon` instead of the schedule's if it is given."""
        chance = 0.0 if deterministic else self.get_epsilon(self.timesteps) if epsilon is None else epsilon
        return explore_rows(self._values(obs), chance, self.generators["action"])

    def _values(self, obs: Obs) -> Tensor:
        with self.executor.autocast():
            return self.q_network(self.policy.obs_normalizer.normalize(obs)).float()  # pyright: ignore[reportCallIssue]

    def exploration(self) -> dict[str, float]:
        """The probability of a random action."""
        return {"exploration/epsilon": self.get_epsilon(self.timesteps)}

    # ------------------------------------------------------------------ learning
    def new_replay(self, capacity: int) -> TransitionReplayBuffer:
        """Prioritised if asked for."""
        if not self.prioritized_replay:
            return super().new_replay(capacity)
        return PrioritizedReplayBuffer(**self.replay_arguments(capacity), exponent=self.priority_exponent)

    def batches(self, count: int) -> Iterator[ReplayBatch]:
        """Prioritised batches one by one, since each step changes the priorities."""
        if not self.prioritized_replay:
            yield from super().batches(count)
            return
        for _ in range(count):
            yield next(super().batches(1))

    @torch.no_grad()
    def td_target(self, batch: ReplayBatch) -> Tensor:
        """(B,) what the taken actions' values should be."""
        with self.executor.autocast():
            next_values = self.target.module(batch.next_obs).float()
            chooser = self.q_network(batch.next_obs).float() if self.double_dqn else next_values
        best = next_values.gather(-1, chooser.argmax(-1, keepdim=True)).squeeze(-1)
        return batch.rewards + batch.discounts * (1.0 - batch.dones) * best

    def q_loss(self, batch: ReplayBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The Huber loss on the taken actions, and what is known then."""
        target = self.td_target(batch)
        with self.executor.autocast():
            values = self.q_network(batch.obs).float()
        taken = values.gather(-1, batch.actions.long().unsqueeze(-1)).squeeze(-1)
        losses = F.smooth_l1_loss(taken, target, reduction="none")
        weighted = losses if batch.weights is None else losses * batch.weights
        known = {"mean_q": taken.detach().mean(), "td_target_mean": target.mean(), "error": (taken - target).detach()}
        return weighted.mean(), known

    def learn_step(self, batch: ReplayBatch, phase: int) -> None:
        """One step down the loss."""
        loss, known = self.q_loss(batch)
        error = known.pop("error")
        norm, skipped = self.descend("optimizer", loss)
        if isinstance(self.replay, PrioritizedReplayBuffer) and batch.places is not None:
            self.replay.set_priorities(batch.places, error)
        rate = self.optimizers["optimizer"].lr
        stats = {"q_loss": loss.detach(), **known, "grad_norm": norm, "nonfinite_updates": skipped}
        self.meter.add({**stats, "learning_rate": rate})

    def adjust_learning_rate(self, progress: float) -> None:
        """Correct more of the bias of priorities as the run goes on."""
        super().adjust_learning_rate(progress)
        if isinstance(self.replay, PrioritizedReplayBuffer):
            left = max(0.0, 1.0 - progress)
            self.replay.correction.fill_(1.0 - left * (1.0 - self.importance_exponent))
