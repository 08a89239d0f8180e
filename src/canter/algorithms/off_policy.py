"""What every off-policy algorithm does: explore, keep steps in replay, and take gradient steps on samples of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from canter.algorithms.off_policy_setup import OffPolicySetup
from canter.algorithms.optim import backward
from canter.envs.vec_env import StepRecord
from canter.storage.replay import ReplayBatch
from canter.utils.config import settings
from canter.utils.tree import Obs, tree_where

LONGEST = 8  # gradient steps in one graph


@settings
class OffPolicyAlgorithm(OffPolicySetup):
    """Explores and learns from replay; a subclass says how, and what a gradient step is."""

    phases = 1
    """After how many gradient steps their pattern repeats."""

    # ------------------------------------------------------------------ what a subclass says
    def random_actions(self) -> Tensor:
        """Uniform actions for every environment, as it wants them."""
        raise NotImplementedError

    def explore_step(self, obs: Obs) -> Tensor:
        """Actions with exploration, as the environment wants them."""
        raise NotImplementedError

    def learn_step(self, batch: ReplayBatch, phase: int) -> None:
        """One gradient step: tensor code alone. `phase` is the number of the step modulo `phases`."""
        raise NotImplementedError

    # ------------------------------------------------------------------ collecting
    @torch.no_grad()
    def explore(self, obs: Obs, critic_obs: Obs | None = None) -> Tensor:
        """Actions for every environment: random ones until `learning_starts`, then the algorithm's own exploration."""
        self.prepare()
        if self.timesteps < self.learning_starts:
            actions = self.random_actions()
        else:
            self.before_exploring()
            actions = self.executor.run("explore", self.explore_step, obs).clone()
        self.acted = (obs, None if critic_obs is obs else critic_obs, actions)
        return actions.clone()  # the environment may keep it, or write to it

    def before_exploring(self) -> None:
        """Set what exploration depends on."""

    @torch.no_grad()
    def process_step(self, record: StepRecord) -> None:
        """Keep the step that the last `explore` led to."""
        if self.acted is None:
            raise RuntimeError("process_step follows explore: nothing was done that could have led to this step")
        obs, critic_obs, actions = self.acted
        needed = record._replace(extras={})
        if record.critic_obs is record.obs:
            needed = needed._replace(critic_obs=None, final_critic_obs=None)  # pyright: ignore[reportArgumentType]
        self.executor.run("insert", self.insert_step, obs, critic_obs, actions, needed)
        self.acted = None
        self.timesteps += self.num_envs
        self.num_stored += self.num_envs

    def insert_step(self, obs: Obs, critic_obs: Obs | None, actions: Tensor, record: StepRecord) -> None:
        """Write one step of every environment, with what truly followed it (behaviour 1.5)."""
        assert self.replay is not None
        done, after, critic_after = record.terminated, record.obs, record.critic_obs
        if record.final_obs is None:
            done = record.done  # what followed is not known: bootstrapping from the reset state would be wrong
        else:
            after = tree_where(record.done, record.final_obs, after)
            if critic_obs is not None and record.final_critic_obs is not None:
                critic_after = tree_where(record.done, record.final_critic_obs, critic_after)
            elif critic_obs is not None:
                done = record.done
        self.replay.add(
            obs, actions, record.reward, after, done, truncated=record.truncated, critic_obs=critic_obs,
            next_critic_obs=critic_after, valid=record.valid,
        )  # fmt: skip
        if self.empirical_normalization:
            valid = record.valid if self.env.has_invalid_steps else None
            self.policy.update_normalizers(obs, obs if critic_obs is None else critic_obs, valid)
        if self.return_scaler is not None:
            self.return_scaler.learn(record.reward, record.done, record.valid if self.env.has_invalid_steps else None)
        for note in self.on_record:
            note(record)

    # ------------------------------------------------------------------ learning
    @property
    def can_learn(self) -> bool:
        """Whether enough steps are stored; counted by the host, so that the device need not be asked."""
        return self.num_stored >= max(self.batch_size, self.learning_starts)

    def update(self, gradient_steps: int | None = None) -> dict[str, float]:
        """Gradient steps on samples of the replay, and their metrics; nothing, and {}, while too little is stored."""
        if not self.can_learn:
            return {}
        self.train(self.gradient_steps if gradient_steps is None else gradient_steps)
        return self.report()

    def train(self, gradient_steps: int) -> None:
        """Take gradient steps; nothing is read from the device."""
        self.prepare()
        while gradient_steps > 0:
            count = min(gradient_steps, LONGEST)
            if self.target_update_interval > 1:
                count = min(count, self.target_update_interval - self.num_updates % self.target_update_interval)
            self.executor.run("learn", self.learn_steps, count, self.num_updates % self.phases)
            self.num_updates += count
            gradient_steps -= count
            if self.target_update_interval > 1 and self.num_updates % self.target_update_interval == 0:
                self.follow()

    def learn_steps(self, count: int, phase: int) -> None:
        """`count` gradient steps in a row: tensor code alone, one graph."""
        for number, batch in enumerate(self.batches(count)):
            self.learn_step(batch, (phase + number) % self.phases)
            if self.target_update_interval == 1:
                self.follow()

    def batches(self, count: int) -> Iterator[ReplayBatch]:
        """Batches for `count` gradient steps, gathered at once."""
        assert self.replay is not None
        whole = self.replay.draw(count * self.batch_size, self.n_step, self.gamma, self.generators["replay"])
        if self.empirical_normalization:
            whole = self.normalized(whole)
        if count == 1:
            yield whole
            return
        for number in range(count):
            rows = slice(number * self.batch_size, (number + 1) * self.batch_size)
            yield ReplayBatch(*(_rows(part, rows) for part in whole))

    def normalized(self, batch: ReplayBatch) -> ReplayBatch:
        """The batch as the networks see it."""
        actor: Any = self.policy.obs_normalizer
        critic: Any = self.policy.critic_obs_normalizer
        obs, next_obs = actor.normalize(batch.obs), actor.normalize(batch.next_obs)
        is_shared = batch.critic_obs is batch.obs
        critic_obs, next_critic_obs = (
            (obs, next_obs) if is_shared else map(critic.normalize, (batch.critic_obs, batch.next_critic_obs))
        )
        return batch._replace(
            obs=obs, next_obs=next_obs, critic_obs=critic_obs, next_critic_obs=next_critic_obs
        )  # fmt: skip

    def follow(self) -> None:
        """Move the target networks."""
        for target in self.targets:
            target.follow(self.tau)

    def descend(self, name: str, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Step down a loss with one of the optimizers; the gradient's norm, and whether the step was skipped."""
        optimizer = self.optimizers[name]
        backward(loss, optimizer)
        norm, skipped = optimizer.clip(self.max_grad_norm or math.inf)
        optimizer.apply(skipped)
        return norm, skipped

    def adjust_learning_rate(self, progress: float) -> None:
        """Move what is scheduled by the fraction of the run that is done."""
        if self.schedule == "linear":
            left = max(0.0, 1.0 - progress)
            for name, optimizer in self.optimizers.items():
                optimizer.lr.fill_(self.first_rates[name] * left)
            self.learning_rate = next(iter(self.first_rates.values())) * left

    def report(self) -> dict[str, float]:
        """Means over the gradient steps since the last report, by their documented names; one read."""
        found: dict[str, float] = {}
        for meter in (self.meter, self.slow_meter):
            means = meter.means()
            count = means.pop("count", 0.0)
            found |= {name: value for name, value in means.items() if count}
            meter.reset()
            if "nonfinite_updates" in means and count:
                found["nonfinite_updates"] *= count
        return {f"train/{name}": value for name, value in found.items()}

    def exploration(self) -> dict[str, float]:
        """How much is left to chance, for reports."""
        return {}


def _rows(part: Any, rows: slice) -> Any:
    if isinstance(part, dict):
        return {name: _rows(leaf, rows) for name, leaf in part.items()}
    return None if part is None else part[rows]
