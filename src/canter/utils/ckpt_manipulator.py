"""Changing a checkpoint while it is loaded: functions (loaded, the algorithm's fresh state) -> what to load instead."""

from __future__ import annotations

from typing import Any


def replace_encoder0(loaded: dict[str, Any], fresh: dict[str, Any]) -> dict[str, Any]:
    """Keep the fresh weights of the first encoder, take everything else from the file, drop the optimizer's moments."""
    ours = {name: value for name, value in fresh["model_state_dict"].items() if name.startswith("encoders.0.")}
    weights = {name: value for name, value in loaded["model_state_dict"].items() if not name.startswith("encoders.0.")}
    ordered = {name: ours.get(name, weights.get(name)) for name in fresh["model_state_dict"]}
    return {**loaded, "model_state_dict": ordered, "optimizer_state_dict": fresh["optimizer_state_dict"]}


MANIPULATORS = {"replace_encoder0": replace_encoder0}
