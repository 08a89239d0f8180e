"""canter teaches robots to move: reinforcement learning and imitation in PyTorch."""

__version__ = "0.1.0"
