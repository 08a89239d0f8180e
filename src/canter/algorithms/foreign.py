"""Checkpoints of the libraries people come from, in our layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def import_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint with separate actor, critic and normaliser entries as one `model_state_dict`; ours unchanged."""
    state = dict(state)
    if "model_state_dict" not in state and "actor_state_dict" in state and "critic_state_dict" in state:
        state["model_state_dict"] = prefixed(state.pop("actor_state_dict"), "actor") | prefixed(
            state.pop("critic_state_dict"), "critic"
        )
    for foreign, ours in (
        ("obs_norm_state_dict", "obs_normalizer"),
        ("critic_obs_norm_state_dict", "critic_obs_normalizer"),
    ):
        if foreign in state and "model_state_dict" in state:
            state["model_state_dict"] = {**state["model_state_dict"], **prefixed(state.pop(foreign), ours)}
    if "iteration" in state and "iter" not in state:
        state["iter"] = state.pop("iteration")
    return state


def prefixed(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The same entries under `prefix.`."""
    return {f"{prefix}.{name}": value for name, value in state.items()}
