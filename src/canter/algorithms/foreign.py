"""Checkpoints of the libraries people come from, in our layout."""

from collections.abc import Mapping
from typing import Any

NORMALIZERS = {"obs_norm_state_dict": "obs_normalizer", "critic_obs_norm_state_dict": "critic_obs_normalizer"}


def import_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint with separate actor, critic and normaliser entries as one `model_state_dict`; ours unchanged."""
    state = dict(state)
    if "model_state_dict" not in state and "actor_state_dict" in state and "critic_state_dict" in state:
        state["model_state_dict"] = {}
        parts = {"actor_state_dict": "actor", "critic_state_dict": "critic", **NORMALIZERS}
    else:
        parts = NORMALIZERS if "model_state_dict" in state else {}
    for foreign in [name for name in parts if name in state]:
        named = {f"{parts[foreign]}.{name}": value for name, value in state.pop(foreign).items()}
        state["model_state_dict"] = {**state["model_state_dict"], **named}
    if "iteration" in state and "iter" not in state:
        state["iter"] = state.pop("iteration")
    return state
