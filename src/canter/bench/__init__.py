"""How fast canter is on a machine: one PPO iteration without the cost of an environment, and how that grows."""

from canter.bench.iteration import NullEnv, Timing, Workload, null_runner, time_iterations
from canter.bench.scaling import Point, measure_sizes, slope

__all__ = ["NullEnv", "Point", "Timing", "Workload", "measure_sizes", "null_runner", "slope", "time_iterations"]
