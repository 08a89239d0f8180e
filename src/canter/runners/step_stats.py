"""What a runner notes about every step: whether it is finite, whose episode ended, what the environment said."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from canter.envs.vec_env import StepRecord
from canter.utils.logging.extras import ScalarAverager, flatten_extras
from canter.utils.metrics import ComponentSums, EpisodeTracker, FiniteGuard, NonFiniteError
from canter.utils.tree import Obs, tree_map

COMPONENTS = "reward_components"


class StepStats:
    """Guards and counts the steps of a rollout.

    Args:
        num_envs: N.
        num_steps: T.
        device: Where the records are.
        extra_log_keys: Keys of the extras that are logged.
    """

    def __init__(self, num_envs: int, num_steps: int, device: torch.device, extra_log_keys: Iterable[str]) -> None:
        self.tracker = EpisodeTracker(num_envs, num_steps, device)
        self.guard = FiniteGuard(device)
        self.extras = ScalarAverager()
        self.components = ComponentSums()
        self.keys = tuple(extra_log_keys)
        self.has_extras = False
        """Whether the environment says anything that is logged."""

    def begin(self, obs: Any, critic_obs: Any, total_steps: int) -> None:
        """Guard the observation that the next rollout starts from, and count what an interrupted one left."""
        self.guard.check(total_steps, first_obs=obs, first_critic_obs=None if critic_obs is obs else critic_obs)
        self.tracker.read()

    def take(self, record: StepRecord, first_step: int) -> None:
        """Guard and count one step of a rollout that began after `first_step` steps."""
        step = self.tracker.step
        groups: dict[str, Any] = {"obs": record.obs, "reward": record.reward}
        if record.critic_obs is not record.obs:
            groups["critic_obs"] = record.critic_obs
        if record.final_obs is not None and self.guard.is_immediate:
            groups["final_obs"] = ended_rows(record.final_obs, record.done)
            if record.final_critic_obs is not None and record.final_critic_obs is not record.final_obs:
                groups["final_critic_obs"] = ended_rows(record.final_critic_obs, record.done)
        self.guard.check(first_step + step, **groups)
        self.tracker.step += 1
        scalars = flatten_extras(record.extras, self.keys)
        if scalars:
            self.has_extras = True
            self.extras.add(scalars)
        if COMPONENTS in self.keys and isinstance(record.extras.get(COMPONENTS), Mapping):
            self.components.add(record.extras[COMPONENTS], record.done, record.valid)

    def note(self, record: StepRecord) -> None:
        """Keep one step's rewards and ends: tensor code alone, which may be captured."""
        self.tracker.write(record.reward, record.done, record.valid)

    def rollout_metrics(self, first_step: int, rollout: Mapping[str, Tensor]) -> dict[str, float]:
        """What the rollout gave; NonFiniteError if that was not finite."""
        try:
            self.guard.read(first_step, {**rollout, "reward": self.tracker.rewards})
        except NonFiniteError:
            self.tracker.rewind()  # such a rollout does not count
            raise
        metrics = {"rollout/mean_reward": self.tracker.read()}
        if self.tracker.rewbuffer:
            metrics["episode/mean_reward"] = sum(self.tracker.rewbuffer) / len(self.tracker.rewbuffer)
            metrics["episode/mean_length"] = sum(self.tracker.lenbuffer) / len(self.tracker.lenbuffer)
        return metrics

    def take_extras(self) -> dict[str, float]:
        """Means of the extras, and of the episodes' reward components, since the last call."""
        return self.extras.take() | {f"{COMPONENTS}/{name}": value for name, value in self.components.take().items()}

    def clear_running(self) -> None:
        """Forget the episodes under way, because the environments were reset."""
        self.tracker.clear_running()
        self.components.running.clear()

    def state_dict(self) -> dict[str, Any]:
        """Everything that outlives a rollout."""
        return {"tracker": self.tracker.state_dict(), "components": dict(self.components.running)}

    def load_state_dict(self, state: Mapping[str, Any], running: bool) -> None:
        """Continue from `state_dict`; without the episodes under way unless `running`."""
        self.tracker.load_state_dict(state["tracker"], running)
        self.components.running = dict(state["components"]) if running else {}


def ended_rows(obs: Obs, done: Tensor) -> Obs:
    """Final observations with rows that did not end blanked, since those may hold anything."""

    def blank(leaf: Tensor) -> Tensor:
        return torch.where(done.view(-1, *[1] * (leaf.dim() - 1)), leaf, torch.zeros_like(leaf))

    return tree_map(blank, obs)
