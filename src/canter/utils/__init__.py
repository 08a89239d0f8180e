"""Shared utilities: settings, observation layouts, files, checkpoints, logging."""

from canter.compat.arguments import also_here

__getattr__ = also_here(unpad_trajectories="canter.storage.trajectories")
