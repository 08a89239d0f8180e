"""Time and memory of one PPO iteration with an environment that costs nothing, and their growth with its size."""

import contextlib
import dataclasses
import math
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Literal, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor

from canter.envs.vec_env import StepRecord, VecEnv
from canter.runners.on_policy_runner import OnPolicyRunner
from canter.utils.distributed import LAUNCHER, RANKS

EPISODE_LENGTH = 1000
POOL_SIZE = 8
GIB = 2**30


@dataclasses.dataclass
class Workload:
    """The sizes of one iteration; the defaults are those of a walking robot."""

    num_envs: int = 4096  # Environments stepped together.
    num_steps_per_env: int = 24  # Steps of each environment between two updates.
    num_obs: int = 48  # Width of the actor's observation.
    num_critic_obs: int = 235  # Width of the critic's observation.
    num_actions: int = 12  # Width of the action.
    hidden_dims: tuple[int, ...] = (512, 256, 128)  # Widths of the hidden layers of actor and critic.
    num_learning_epochs: int = 5  # Passes over each rollout.
    num_mini_batches: int = 4  # Minibatches per pass.
    rnn_type: Literal["lstm", "gru"] | None = None  # Memory of a recurrent policy; None for a feed-forward policy.
    rnn_hidden_size: int = 256  # Width of the memory.


def with_envs(work: Workload, size: int) -> Workload:
    """The workload with this number of environments."""
    return dataclasses.replace(work, num_envs=size)


def with_width(work: Workload, size: int) -> Workload:
    """The workload with three hidden layers of this width, a half and a quarter of it."""
    return dataclasses.replace(work, hidden_dims=(size, max(1, size // 2), max(1, size // 4)))


class NullEnv(VecEnv):
    """Replays a few random observations; episodes end after 1000 steps, one environment after another."""

    gives_final_obs = False

    def __init__(self, work: Workload, device: torch.device | str) -> None:
        num_envs = self.num_envs = work.num_envs
        self.device, self.max_episode_length = torch.device(device), EPISODE_LENGTH
        self.obs_space, self.critic_obs_space = (spaces.Box(-9, 9, (n,)) for n in (work.num_obs, work.num_critic_obs))
        self.action_space = spaces.Box(-1, 1, (work.num_actions,))
        draw = torch.Generator(self.device).manual_seed(0)
        shapes = ((num_envs, work.num_obs), (num_envs, work.num_critic_obs), (num_envs,))
        self.pool = [[torch.randn(s, generator=draw, device=self.device) for s in shapes] for _ in range(POOL_SIZE)]
        age = torch.arange(num_envs, device=self.device) % EPISODE_LENGTH
        self.truncated = [age == t for t in range(EPISODE_LENGTH)]
        self.no = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
        self.yes = torch.ones_like(self.no)
        self.episode_length_buf, self.t = age, 0

    def seed(self, seed: int) -> None:
        """Do nothing: the steps are always the same."""

    def get_observations(self) -> tuple[Tensor, Tensor]:
        """The current observation and the critic's."""
        obs, critic_obs, _ = self.pool[self.t % POOL_SIZE]
        return obs, critic_obs

    reset = get_observations  # there is no state to reset

    def step(self, actions: Tensor) -> StepRecord:
        """The next of the prepared steps; the actions have no effect."""
        self.t += 1
        obs, critic_obs, reward = self.pool[self.t % POOL_SIZE]
        truncated = self.truncated[self.t % EPISODE_LENGTH]
        return StepRecord(obs, critic_obs, reward, self.no, truncated, None, None, self.yes, {})


def null_runner(env: VecEnv, work: Workload, execution: str = "auto", precision: str = "tf32") -> OnPolicyRunner:
    """A runner of PPO with the settings usual for robots, that writes no files."""
    rnn = {"rnn_type": work.rnn_type, "rnn_hidden_size": work.rnn_hidden_size}
    policy = {"class_name": "ActorCriticRecurrent", **rnn} if work.rnn_type else {"class_name": "ActorCritic"}
    policy |= {"actor_hidden_dims": list(work.hidden_dims), "critic_hidden_dims": list(work.hidden_dims)}
    algorithm = {"num_learning_epochs": work.num_learning_epochs, "num_mini_batches": work.num_mini_batches}
    algorithm |= {"gamma": 0.99, "entropy_coef": 0.01, "schedule": "adaptive", "empirical_normalization": True}
    algorithm |= {"timeout_bootstrap": "current_value", "execution": execution, "precision": precision}
    cfg = {"num_steps_per_env": work.num_steps_per_env, "algorithm": algorithm, "policy": policy}
    return OnPolicyRunner(env, {**cfg, "log_interval": 0, "seed": 1}, None, env.device, show_progress=False)


class Timing(NamedTuple):
    """Milliseconds of collecting and of learning, seconds of the warm-up, steps per iteration and peak GiB.

    `collectives` are the milliseconds that the host waits for other ranks, unknown with NCCL, which works on the GPU.
    """

    collect: float
    learn: float
    ready: float
    num_steps: int
    memory: float = math.nan
    collectives: float = 0.0

    @property
    def iteration(self) -> float:
        """Milliseconds of one iteration."""
        return self.collect + self.learn

    @property
    def rate(self) -> float:
        """Environment steps per second."""
        return self.num_steps / self.iteration * 1e3


def time_iterations(runner: OnPolicyRunner, warm_up: int = 8, iterations: int = 20) -> Timing:
    """Medians over `iterations`, after `warm_up` iterations in which kernels are compiled and captured."""
    runner.alg.executor.compile_from = 0  # a long run is measured; a real one compiles later

    def synchronize(*event: Any) -> None:
        if runner.device.type == "cuda":
            torch.cuda.synchronize(runner.device)

    begin = time.perf_counter()
    runner.learn(warm_up)
    synchronize()
    ready = time.perf_counter() - begin
    for event in ("post_rollout", "post_update"):
        runner.add_callback(event, synchronize)
    runner.log_interval = 1
    history, names = runner.learn(iterations).history, ("time/collection", "time/learning")
    collect, learn = (statistics.median(metrics[name] for metrics in history) * 1e3 for name in names)
    waits = statistics.median(metrics.get("time/collectives", 0.0) for metrics in history) * 1e3
    waits = math.nan if "nccl" in RANKS.backend else waits
    return Timing(collect, learn, ready, runner.steps_per_iteration(), collectives=waits)


class Point(NamedTuple):
    """One size, with its measurement or the reason why there is none."""

    size: int
    timing: Timing | None
    left_out: str = ""


def measure_sizes(
    work: Workload,
    sizes: Iterable[int],
    change: Callable[[Workload, int], Workload] = with_envs,
    max_seconds: float = 60.0,
    **options: Any,
) -> Iterator[Point]:
    """Measure each size, set by `change`, in a new process, smallest first, with the `options` of `measure_one`.

    A size that does not fit, or would take over `max_seconds` judging by the one before, ends the series.
    """
    repeats = options.get("warm_up", 8) + options.get("iterations", 10)
    seconds, has_failed = 0.0, False  # seconds of a measurement per unit of size
    for size in sorted(sizes):
        timing, left_out = None, "larger than one that failed" if has_failed else ""
        if seconds * size > max_seconds:
            left_out = f"would take about {seconds * size:.0f} s"
        if not left_out:
            try:
                timing = in_new_process(measure_one, change(work, size), **options)
                seconds = timing.iteration * repeats / 1e3 / size
            except torch.OutOfMemoryError:
                left_out = "not enough GPU memory"
            except BrokenProcessPool:  # the system ended the process
                left_out = "not enough memory"
            has_failed = timing is None
        yield Point(size, timing, left_out)


def in_new_process(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`fn(...)` in a process without allocated memory or compiled code of earlier measurements."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(fn, *args, **kwargs).result()


def measure_ranks(work: Workload, sizes: Iterable[int], **options: Any) -> Iterator[tuple[int, Timing]]:
    """Measure each number of ranks, which have the workload each, with the `options` of `measure_one`."""
    for size in sorted(sizes):
        yield size, in_ranks(size, measure_one, work, **options)


def in_ranks(size: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`fn(...)` in this many new processes that train together; what the first returned."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    places = [{**common, "RANK": rank, "LOCAL_RANK": rank, LAUNCHER: 1} for rank in range(size)]
    pools = [ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) for _ in places]
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(pool).submit(as_rank, place, fn, *args, **kwargs)
            for pool, place in zip(pools, places, strict=True)
        ]
        results = [done.result() for done in started]
    return results[0]


def as_rank(place: dict[str, Any], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`fn(...)` as the rank that the environment variables `place` describe."""
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)  # of as many processes as there are cores
    try:
        return fn(*args, **kwargs)
    finally:
        RANKS.stop()


def measure_one(work: Workload, device: str = "cpu", warm_up: int = 8, iterations: int = 10, **options: str) -> Timing:
    """Time and peak memory of an iteration without the memory of the environment."""
    env = NullEnv(work, RANKS.start(torch.device(device)))
    is_gpu = env.device.type == "cuda"
    before = torch.cuda.memory_allocated(env.device) / GIB if is_gpu else peak_memory(env.device)
    timing = time_iterations(null_runner(env, work, **options), warm_up, iterations)
    return timing._replace(memory=peak_memory(env.device) - before)


def peak_memory(device: torch.device) -> float:
    """Peak GiB so far, of a GPU including captured graphs, on a CPU of the process; NaN if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / GIB
    try:
        import resource
    except ImportError:  # Windows
        return math.nan
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The exponent p of y ~ x**p, fitted to the larger half of the points; the smaller show fixed costs."""
    used = sorted(points)[-max(2, -(-len(points) // 2)) :]
    try:
        xs, ys = zip(*((math.log(x), math.log(y)) for x, y in used), strict=True)
        return statistics.linear_regression(xs, ys).slope
    except ValueError:  # fewer than two sizes, or a value that is not positive
        return math.nan
