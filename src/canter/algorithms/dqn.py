"""Deep Q-learning (Mnih et al. 2015): double by default; dueling networks and prioritised replay are settings."""

import functools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor

from canter.algorithms.off_policy import OffPolicyAlgorithm, OffPolicyRunSettings, OffPolicySettings, TargetNetwork
from canter.envs.vec_env import StepRecord
from canter.modules.q_networks import CNNQNetwork, MLPQNetwork, QPolicy, RepeatedExploration, explore_rows
from canter.storage.replay import PrioritizedReplayBuffer, ReplayBatch
from canter.utils.config import setting, settings
from canter.utils.tree import Obs


@settings
class DQNSettings(OffPolicySettings):
    """Hyperparameters of DQN."""

    learning_rate: float = setting(1e-3, low=0.0)
    """Step size."""
    batch_size: int = 128
    buffer_size: int = 100_000
    learning_starts: int = 1_000
    target_update_interval: int = 250
    tau: float = 1.0
    double_dqn: bool = True
    """Take the target value of the action that the trained network chooses (van Hasselt et al. 2016)."""
    action_gap_coef: float = setting(0.0, low=0.0, high=1.0)
    """Part of an action's disadvantage that its target is lowered by (advantage learning, Bellemare et al. 2016)."""
    dueling: bool = setting(False, fixed=True)
    """Split values into a state value and advantages (Wang et al. 2016)."""
    epsilon_start: float = setting(1.0, low=0.0, high=1.0)
    """Probability of a random action at the start."""
    epsilon_end: float = setting(0.05, low=0.0, high=1.0)
    """Probability of a random action after `epsilon_decay_steps`."""
    epsilon_decay_steps: int = setting(10_000, low=0, host=True)
    """Environment steps over which the probability of a random action falls linearly."""
    epsilon_spread: float = setting(0.0, low=0.0, fixed=True)
    """Environments explore less from the first to the last: with epsilon to the power of 1 to 1 + `epsilon_spread`."""
    epsilon_repeats: int = setting(1, low=1, fixed=True)
    """Most steps for which a random action is repeated; n of them have a probability proportional to 1 / n²."""
    prioritized_replay: bool = setting(False, fixed=True)
    """Sample steps by the size of their temporal-difference error (Schaul et al. 2016)."""
    priority_exponent: float = setting(0.6, low=0.0, unused_if={"prioritized_replay": operator.not_})
    """Exponent of the priorities: 0 samples uniformly."""
    importance_exponent: float = setting(0.4, low=0.0, high=1.0, unused_if={"prioritized_replay": operator.not_})
    """Exponent of the importance weights at the start; it grows to 1 over the run."""
    network_hidden_dims: tuple[int, ...] = setting((256, 256), low=1, fixed=True)
    """Widths of the hidden layers."""


@settings
class DQNConfig(DQNSettings, OffPolicyRunSettings):
    """A whole DQN run in one object."""


class DQN(OffPolicyAlgorithm):
    """DQN on Discrete actions: `DQN(env, cfg)`; the network is `q_network_class(obs_space, action_space, cfg)`."""

    settings_class = DQNSettings
    config_class = DQNConfig
    network_names = ("q_network_class", "q_network_cfg")

    def build(self, networks: Mapping[str, Any]) -> None:
        """Build the network, its optimizer and its target."""
        if not isinstance(self.action_space, spaces.Discrete):
            raise ValueError(f"DQN needs Discrete actions, got {self.action_space}; use SAC or TD3 for a Box")
        cfg = self.cfg
        own = {"hidden_dims": cfg.network_hidden_dims, "dueling": cfg.dueling}
        q_class, q_cfg = self.choose_network("q_network", networks, (MLPQNetwork, CNNQNetwork), **own)
        self.q_network = q_class(obs_space=self.obs_space, action_space=self.action_space, cfg=q_cfg).to(self.device)
        self.policy = QPolicy(self.q_network, self.action_space)
        self.target = TargetNetwork(self.q_network, self.make_optimizer("optimizer", self.q_network))
        self.targets = [self.target]
        self.epsilon = torch.ones(self.num_envs, device=self.device)
        self.epsilon_exponents = torch.linspace(1.0, 1.0 + cfg.epsilon_spread, self.num_envs, device=self.device)
        self.written_epsilon: float | None = None
        self.repeated: RepeatedExploration | None = None
        if cfg.epsilon_repeats > 1:
            self.repeated = RepeatedExploration(self.num_envs, cfg.epsilon_repeats, self.device)
        self.q_loss = self.executor.compile(self.q_loss)
        if cfg.prioritized_replay:
            self.replay_class = functools.partial(PrioritizedReplayBuffer, exponent=self.live.priority_exponent)
        self.used_exponent = cfg.priority_exponent  # of the priorities in the tree

    def get_epsilon(self, timesteps: int) -> float:
        """Probability of a random action after `timesteps` environment steps."""
        start, end, steps = self.cfg.epsilon_start, self.cfg.epsilon_end, self.cfg.epsilon_decay_steps
        return start + (min(timesteps / steps, 1.0) if steps else 1.0) * (end - start)

    sample_random_actions = OffPolicyAlgorithm.random_actions

    def explore(self, obs: Obs, critic_obs: Obs | None = None) -> Tensor:
        """Actions for every environment: random ones until `learning_starts`, then those of `explore_step`."""
        if self.timesteps >= self.cfg.learning_starts:
            self.before_exploring()
        return super().explore(obs, critic_obs)

    def before_exploring(self) -> None:
        """Write the current epsilon of every environment to the device."""
        epsilon = self.get_epsilon(self.timesteps)
        if epsilon != self.written_epsilon:
            self.written_epsilon = epsilon
            self.epsilon.copy_(epsilon**self.epsilon_exponents)

    def explore_step(self, obs: Obs, epsilon: float | None = None) -> Tensor:
        """The best action or, with probability epsilon in each environment, a random one."""
        with self.executor.autocast():
            values = self.q_network(self.policy.obs_normalizer.normalize(obs)).float()
        if epsilon is None and self.repeated is not None:
            return self.repeated.explore(values, self.epsilon, self.generators["action"])
        return explore_rows(values, self.epsilon if epsilon is None else epsilon, self.generators["action"])

    def process_step(self, record: StepRecord) -> None:
        """Store the step that the actions of the last `explore` led to; a random action ends with its episode."""
        super().process_step(record)
        if self.repeated is not None:
            self.repeated.end_episodes(record.done)

    def end_episodes(self) -> None:
        """Forget the episodes under way, and with them the random actions that are repeated."""
        super().end_episodes()
        if self.repeated is not None:
            self.repeated.end_episodes(torch.ones_like(self.repeated.left, dtype=torch.bool))

    @torch.no_grad()
    def act(self, obs: Obs, deterministic: bool = False, epsilon: float | None = None) -> Tensor:
        """Actions for raw observations; `epsilon` replaces that of the schedule."""
        if deterministic or epsilon is None:
            epsilon = 0.0 if deterministic else self.get_epsilon(self.timesteps)
        return self.explore_step(obs, epsilon)

    def exploration(self) -> dict[str, float]:
        """The probability of a random action."""
        return {"exploration/epsilon": self.get_epsilon(self.timesteps)}

    def batches(self, count: int) -> Iterator[ReplayBatch]:
        """Batches for `count` gradient steps; prioritised ones one by one, because each step changes the priorities."""
        at_once = 1 if self.cfg.prioritized_replay else count
        for _ in range(0, count, at_once):
            yield from super().batches(at_once)

    def q_loss(self, batch: ReplayBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The Huber loss on the taken actions' values, and statistics."""
        with torch.no_grad(), self.executor.autocast():
            next_values = self.target.module(batch.next_obs).float()
            if self.cfg.double_dqn:
                best = values_of(next_values, self.q_network(batch.next_obs).float().argmax(-1))
            else:
                best = next_values.amax(-1)
            target = batch.rewards + batch.discounts * (1.0 - batch.dones) * best
            if self.cfg.action_gap_coef:
                now = self.target.module(batch.obs).float()
                target = target - self.live.action_gap_coef * (now.amax(-1) - values_of(now, batch.actions))
        with self.executor.autocast():
            values = self.q_network(batch.obs).float()
        taken = values_of(values, batch.actions)
        losses = F.smooth_l1_loss(taken, target, reduction="none")
        weighted = losses if batch.weights is None else losses * batch.weights
        stats = {"mean_q": taken.detach().mean(), "td_target_mean": target.mean(), "error": (taken - target).detach()}
        return weighted.mean(), stats

    def train(self, gradient_steps: int) -> None:
        """Take gradient steps; the exponent of the importance weights follows the schedule."""
        if isinstance(replay := self.prepare(), PrioritizedReplayBuffer):
            if self.used_exponent != self.cfg.priority_exponent:
                self.used_exponent = self.cfg.priority_exponent
                replay.rebuild()
            replay.correction.fill_(1.0 - self.fraction_left * (1.0 - self.cfg.importance_exponent))
        super().train(gradient_steps)

    def learn_steps(self, count: int, phase: int) -> None:
        """Take gradient steps, each with new priorities of its batch."""
        for batch in self.batches(count):
            loss, stats = self.q_loss(batch)
            error = stats.pop("error")
            norm, skipped = self.optimizer_step("optimizer", loss)
            if isinstance(self.replay, PrioritizedReplayBuffer) and batch.places is not None:
                self.replay.set_priorities(batch.places, error)
            self.meter.add({**stats, "q_loss": loss.detach(), "grad_norm": norm, "nonfinite_updates": skipped})
            if self.cfg.target_update_interval == 1:
                self.update_targets()

    def resume_state(self) -> dict[str, Any]:
        """Random streams, and the random actions that are repeated."""
        repeated = {} if self.repeated is None else {"repeated_actions": self.repeated.state()}
        return super().resume_state() | repeated

    def load_resume_state(self, state: Mapping[str, Any]) -> None:
        """Continue exactly from a `resume_state`."""
        super().load_resume_state(state)
        if self.repeated is not None and "repeated_actions" in state:  # older checkpoints have none
            self.repeated.set_state(state["repeated_actions"])


def values_of(values: Tensor, actions: Tensor) -> Tensor:
    """The value (B) of one action in each row of (B, A) values."""
    return values.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)
