"""Steps of a rollout that wait to be evaluated and stored together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from canter.envs.vec_env import StepRecord


class WaitingSteps:
    """Steps that are not stored yet: what acting computed, and the record of what followed.

    Between two steps of an environment its code has replaced that of the kernels in the processor's caches. Whatever
    can be computed for several steps at once is done in a fraction of the time.
    """

    def __init__(self) -> None:
        self.limit = 0
        """Number of steps that are stored together; 0 stores every step by itself, as soon as it ends."""
        self.steps: list[tuple[Mapping[str, Any], StepRecord]] = []

    @property
    def is_full(self) -> bool:
        """Whether as many steps wait as are stored together."""
        return len(self.steps) == self.limit

    def stop(self) -> None:
        """Drop the steps, and store the next ones by themselves."""
        self.limit, self.steps = 0, []

    def take(self) -> tuple[dict[str, Any], StepRecord]:
        """All K steps and their records as one of each, with tensors (K, N, ...)."""
        steps, records = zip(*self.steps, strict=True)
        self.steps = []
        step = {name: stack([step[name] for step in steps]) for name in steps[0]}
        # Where no final observation is known, the value of the state before the step has to do.
        before = "observations" if step["critic_observations"] is None else "critic_observations"
        finals = [record.final_critic_obs for record in records]
        if any(final is not None for final in finals):
            pairs = zip(finals, steps, strict=True)
            finals = [step[before] if final is None else final for final, step in pairs]
        parts = {name: stack([getattr(record, name) for record in records]) for name in ENDS}
        return step, records[0]._replace(final_obs=None, final_critic_obs=stack(finals), **parts)


ENDS = ("reward", "terminated", "truncated", "valid")


def stack(trees: Sequence[Any]) -> Any:
    """Trees of tensors as one, along a new first dimension; None of Nones."""
    if isinstance(trees[0], Mapping):
        return {name: stack([tree[name] for tree in trees]) for name in trees[0]}
    return None if trees[0] is None else torch.stack(tuple(trees))
