"""Where the documentation imports `DaggerSaver` from."""

from canter.runners.dagger_saver import DaggerSaver

__all__ = ["DaggerSaver"]
