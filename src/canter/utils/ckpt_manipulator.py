"""Checkpoint manipulators: functions (loaded state, fresh state of the algorithm) -> state to load."""

from typing import Any


def replace_encoder0(loaded: dict[str, Any], fresh: dict[str, Any]) -> dict[str, Any]:
    """Keep the fresh weights of the first encoder and the fresh optimizer state; load everything else."""
    saved, new = loaded["model_state_dict"], fresh["model_state_dict"]
    weights = {name: value if name.startswith("encoders.0.") else saved.get(name) for name, value in new.items()}
    return {**loaded, "model_state_dict": weights, "optimizer_state_dict": fresh["optimizer_state_dict"]}


MANIPULATORS = {"replace_encoder0": replace_encoder0}
