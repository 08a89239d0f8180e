"""Frozen policies that say what they would have done."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from canter.algorithms.foreign import import_state
from canter.modules.build import POLICIES, install_normalizers
from canter.modules.policy import Policy
from canter.utils.checkpoint import load_checkpoint, newest_valid_checkpoint
from canter.utils.config import build
from canter.utils.tree import Obs


class Teacher:
    """One frozen policy, or several of which the observation says who is asked; tensor code that can be captured.

    Args:
        policies: The teachers.
        samples: Labels are drawn from the teacher's distribution instead of its mode.
        ids: Columns of the observation that say which teacher it is: one number, or one column per teacher.
    """

    def __init__(self, policies: Sequence[Policy], samples: bool = False, ids: slice | None = None) -> None:
        if len(policies) > 1 and ids is None:
            raise ValueError(f"{len(policies)} teachers need teacher_id_component, the segment that says who is asked")
        self.policies, self.samples, self.ids = list(policies), samples, ids
        self.hidden: list[dict[str, Tensor]] = []

    def begin(self, num_envs: int) -> None:
        """Room for the memories of N environments."""
        self.hidden = [policy.initial_hidden(num_envs) for policy in self.policies]

    def label(self, obs: Obs, generator: torch.Generator) -> Tensor:
        """(N, ...) the action that the teacher would take; its memory moves on."""
        labels = []
        for policy, hidden in zip(self.policies, self.hidden, strict=True):
            params, after = policy.act_params(obs, hidden)
            for name, state in hidden.items():
                state.copy_(after[name])
            distribution = policy.distribution
            labels.append(distribution.sample(params, generator) if self.samples else distribution.mode(params))
        if len(labels) == 1:
            return labels[0]
        return torch.stack(labels, 1)[torch.arange(len(labels[0]), device=labels[0].device), self.chosen(obs)]

    def chosen(self, obs: Any) -> Tensor:
        """(N,) which teacher each environment asks."""
        columns = obs[:, self.ids]
        number = columns.argmax(1) if columns.shape[1] > 1 else columns[:, 0].round().long()
        return number.clamp(0, len(self.policies) - 1)

    def reset(self, dones: Tensor) -> None:
        """Forget the episodes (N,) that ended."""
        for hidden in self.hidden:
            for state in hidden.values():
                state.masked_fill_(dones.view(-1, 1, 1, 1), 0.0)

    def state(self) -> list[dict[str, Tensor]]:
        """Copies of the memories."""
        return [{name: state.clone() for name, state in hidden.items()} for hidden in self.hidden]

    def load_state(self, state: Sequence[Mapping[str, Tensor]]) -> None:
        """Continue from what `state` returned."""
        for hidden, saved in zip(self.hidden, state, strict=True):
            for name, value in hidden.items():
                value.copy_(saved[name])


def build_teacher(
    class_name: str, given: Mapping[str, Any], path: str | Path | None, student: Policy, device: torch.device
) -> Policy:
    """A frozen policy with the weights and normaliser of a checkpoint or of a run's newest one.

    What `given` leaves open comes from the configuration in the checkpoint, from its weights, and from the student.
    """
    cfg = {name: value for name, value in given.items() if name not in ("class_name", "teacher_ac_path")}
    path = path or given.get("teacher_ac_path")
    state = {} if path is None else import_state(load_checkpoint(teacher_file(path), "cpu"))
    weights = state.get("model_state_dict", {})
    saved = dict((state.get("config") or {}).get("policy") or {})
    name = given.get("class_name") or saved.pop("class_name", None) or class_name
    cfg = {**{key: value for key, value in saved.items() if key != "class_name"}, **cfg}
    for key, value in open_settings(weights, student).items():
        if cfg.get(key) is None:
            cfg[key] = value
    if cfg.get("num_actor_obs") is None:
        raise ValueError("the teacher's num_actor_obs is not known: give it in teacher_policy, or teacher_ac_path")
    with torch.random.fork_rng(devices=[]):  # the student's weights must not depend on the teacher's
        teacher: Policy = build(POLICIES, name, cfg)
    if path is None:
        warnings.warn("the teacher has no teacher_ac_path: its weights are random", stacklevel=4)
    else:
        load_weights(teacher, weights, path)
    return teacher.to(device).requires_grad_(False).eval()


def teacher_file(path: str | Path) -> Path:
    """The checkpoint meant by a file or a run directory."""
    return newest_valid_checkpoint(Path(path)) if Path(path).is_dir() else Path(path)


def open_settings(weights: Mapping[str, Tensor], student: Policy) -> dict[str, Any]:
    """Sizes that a checkpoint's weights tell, and what teacher and student have in common."""
    widths = {}
    for key, first in (("num_actor_obs", "actor"), ("num_critic_obs", "critic")):
        names = (f"memory_{first[0]}.rnn.weight_ih_l0", f"{first}.0.weight")
        widths[key] = next((weights[name].shape[1] for name in names if name in weights), None)
    normalizer = weights.get("obs_normalizer._mean")
    if normalizer is not None:  # encoders come before the first weights, the normaliser before the encoders
        widths["num_actor_obs"] = normalizer.shape[-1]
    return {
        **widths,
        "num_actions": getattr(student, "num_actions", None),
        "action_space": getattr(student, "action_space", None),
    }


def load_weights(teacher: Policy, weights: Mapping[str, Tensor], path: Any) -> None:
    """Install the normalisers that the checkpoint has, then its weights; what does not fit is an error."""
    install_normalizers(teacher, weights)
    try:
        teacher.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"the teacher's checkpoint {path} is of another policy: {error}") from error
