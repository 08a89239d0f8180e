"""Shared utilities: settings, observation layouts, files, checkpoints, logging."""
