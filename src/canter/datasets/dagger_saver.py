"""Documented import path of `DaggerSaver`."""

from canter.runners.dagger_saver import DaggerSaver

__all__ = ["DaggerSaver"]
