"""Rollout storage with what a teacher would have done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from canter.storage.fields import Field
from canter.storage.queue_rollout_storage import QueueRolloutStorage


class ActionLabelRollout(QueueRolloutStorage):
    """Keeps an action label for every step, and whether it was the action taken."""

    def declare_fields(self) -> dict[str, Field]:
        """What every rollout keeps, and the labels."""
        return super().declare_fields() | {
            "action_labels": Field(self.actions_shape, "action_labels", "action_labels", self.action_dtype),
            "teacher_acted": Field((1,), "teacher_acted", "teacher_acted", torch.bool),
        }

    def row(self, transition: Mapping[str, Any]) -> dict[str, Tensor]:
        """What a transition has for every field; no teacher acted unless it says so."""
        unset = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        return super().row({"teacher_acted": unset, **transition})
