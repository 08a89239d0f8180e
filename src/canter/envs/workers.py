"""Gymnasium environments stepped in worker processes, and waiting for workers that may die or hang."""

import contextlib
import faulthandler
import itertools
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector.utils import create_empty_array
from torch import Tensor

from canter.envs.gymnasium import GymVecEnv
from canter.envs.records import fill_extras, split_groups
from canter.envs.vec_env import Device, StepRecord
from canter.utils.runtime import StopSignal, usable_cores
from canter.utils.tree import Obs, nested, tree_leaves, tree_map

POLL_SECONDS = 0.5
STOP_SECONDS = 5.0  # a requested stop waits so long for the environments
TIMEOUT_SECONDS = 300.0
END_SECONDS = 2.0  # in which a worker that is told to end does so
PARTS = ("obs", "final", "action", "reward", "terminated", "truncated")


class WorkerError(RuntimeError):
    """An environment worker raised an error, died or hangs; `worker` is its index."""

    def __init__(self, text: str, worker: int) -> None:
        super().__init__(text)
        self.worker = worker


def wait_for_answers(pipes: Mapping[int, Any], processes: Sequence[Any], timeout: float) -> None:
    """Wait until every worker has answered, or raise WorkerError for one that died or hangs.

    After `timeout` seconds, or soon after a signal asked the run to stop, a worker without an answer counts as hung.
    """
    begin, waiting = time.monotonic(), dict(pipes)
    while waiting:
        ready = connection.wait(list(waiting.values()), POLL_SECONDS)
        waiting = {number: pipe for number, pipe in waiting.items() if pipe not in ready}
        for number, pipe in waiting.items():
            if processes[number].exitcode is not None and not pipe.poll():
                raise death(number, processes[number])
        now, number = time.monotonic(), next(iter(waiting), None)
        is_stopping = StopSignal.requested_at is not None and now - StopSignal.requested_at > STOP_SECONDS
        if number is not None and (now - begin > timeout or is_stopping):
            raise WorkerError(f"environment worker {number} hangs: no answer for {now - begin:.0f} s", number)


def death(number: int, process: Any) -> WorkerError:
    """The error that names a dead worker and what ended it."""
    process.join(END_SECONDS)
    code = process.exitcode
    cause = "ended" if code is None else f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return WorkerError(f"environment worker {number} (process {process.pid}) {cause}", number)


def find_death(processes: Sequence[Any]) -> WorkerError:
    """The error that names the worker whose pipe was closed; its exit code is known a moment later."""
    end = time.monotonic() + END_SECONDS
    while time.monotonic() < end and all(process.exitcode is None for process in processes):
        time.sleep(0.01)
    number = next((number for number, process in enumerate(processes) if process.exitcode is not None), 0)
    return death(number, processes[number])


class WorkerVecEnv(GymVecEnv):
    """`GymVecEnv` whose environments are stepped in worker processes, with the same results.

    Arrays are exchanged in shared memory. A worker that raises, dies or hangs is a WorkerError that names it; with
    `restart` it is replaced, its environments begin new episodes, and the step it failed in is marked as not valid.

    Args:
        env_fns: Functions that make one environment each; they are sent to the workers, so they must be picklable.
        num_workers: Number of processes, at most one per environment.
        timeout: Seconds after which a step counts as hung.
        restart: Replace a worker that failed.
    """

    contract = "gymnasium.Env in worker processes"
    overlaps = True
    steps_in_process = False

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env]],
        num_workers: int,
        device: Device = "cpu",
        seed: int | None = None,
        clip_actions: bool = True,
        timeout: float = TIMEOUT_SECONDS,
        restart: bool = False,
    ) -> None:
        if not 1 <= num_workers <= len(env_fns):
            raise ValueError(f"num_workers must be from 1 to the {len(env_fns)} environments, got {num_workers}")
        if num_workers > (cores := usable_cores()):
            warnings.warn(f"{num_workers} workers share {cores} cores; {cores} would be as fast", stacklevel=2)
        probe = env_fns[0]()
        super().__init__([probe] * len(env_fns), device, seed, clip_actions)
        self.envs = [probe]  # never stepped; describes the others
        self.timeout, self.restart, self.num_restarts = timeout, restart, 0
        self.has_invalid_steps = restart
        actions = np.zeros(self._to_array.shape, self.action_space.dtype)
        flags = np.zeros(self.num_envs, np.bool_)
        rows = create_empty_array(self._stored, self.num_envs)
        parts = (rows, rows, actions, np.zeros(self.num_envs, np.float32), flags, flags)
        self._memory = [
            (name, RawArray("b", max(1, leaf.nbytes)), leaf.shape, leaf.dtype.str)
            for name, leaf in tree_leaves(dict(zip(PARTS, parts, strict=True)))
        ]
        self._views = shared_arrays(self._memory)
        self._stacks = tempfile.TemporaryDirectory(prefix="canter-workers-")
        bounds = np.linspace(0, self.num_envs, num_workers + 1).astype(int).tolist()
        self.slices = [slice(first, last) for first, last in itertools.pairwise(bounds)]
        self._env_fns = list(env_fns)
        # Not a plain fork, which may hang in threads or CUDA of this process.
        methods = multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            self._context.set_forkserver_preload(["canter.envs.workers"])
        self.processes: list[Any] = [None] * num_workers
        self.pipes: list[Any] = [None] * num_workers
        for number in range(num_workers):
            self._start(number)

    def _start(self, number: int) -> None:
        part, (ours, theirs) = self.slices[number], self._context.Pipe()
        args = (theirs, self._env_fns[part], part.start, self._memory, self._stack_path(number))
        process = self._context.Process(target=run_worker, args=args, daemon=True, name=f"canter-worker-{number}")
        process.start()
        theirs.close()
        self.processes[number], self.pipes[number] = process, ours

    def _stack_path(self, number: int) -> str:
        return str(Path(self._stacks.name) / f"{number}.txt")

    def _tell(self, number: int, command: str, value: Any = None) -> None:
        with contextlib.suppress(OSError):  # a dead worker is found when its answer is missing
            self.pipes[number].send((command, value))

    def _answers(self) -> tuple[list[Any], list[int]]:
        """The answer of every worker, and the numbers of those that were restarted."""
        restarted: list[int] = []
        while True:
            try:
                unknown = {number: pipe for number, pipe in enumerate(self.pipes) if number not in self._known}
                wait_for_answers(unknown, self.processes, self.timeout)
                return [self._read(number) for number in range(len(self.pipes))], restarted
            except WorkerError as error:
                part = self.slices[error.worker]
                which = f"It steps the environments {part.start} to {part.stop - 1}"
                text = f"{error}. {which}{self._end(error.worker)}"
                if not self.restart or error.worker in restarted or StopSignal.requested_at is not None:
                    raise WorkerError(text, error.worker) from None
                print(f"canter: {text}. It is restarted", flush=True)  # noqa: T201 (the run goes on)
                restarted.append(error.worker)
                self.num_restarts += 1
                self._start(error.worker)
                self._tell(error.worker, "reset")

    def _read(self, number: int) -> Any:
        """The answer of one worker; it stays known if another one is restarted."""
        if number not in self._known:
            try:
                is_fine, answer = self.pipes[number].recv()
            except (EOFError, OSError):
                raise death(number, self.processes[number]) from None
            if not is_fine:
                raise WorkerError(f"environment worker {number} raised an error:\n{answer}", number)
            self._known[number] = answer
        return self._known[number]

    def _end(self, number: int) -> str:
        """End a worker; returns the stack of one that was still running."""
        process, stack = self.processes[number], ""
        self._known.pop(number, None)
        if process.exitcode is None and hasattr(signal, "SIGUSR1") and not self.pipes[number].poll():
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(POLL_SECONDS)
            with contextlib.suppress(OSError):
                stack = Path(self._stack_path(number)).read_text(errors="replace").strip()
            stack = f"; it is at:\n{stack}" if stack else ""
        process.kill()
        process.join(END_SECONDS)
        self.pipes[number].close()
        return stack

    def reset(self) -> tuple[Obs, Obs]:
        """Start a new episode in every environment."""
        seed, self._seed, self._known = self._seed, None, {}
        for number in range(len(self.pipes)):
            self._tell(number, "reset", seed)
        self._answers()
        self._current = tree_map(np.copy, self._views["obs"])
        return self.get_observations()

    def step(self, actions: Tensor) -> StepRecord:
        """Step every environment once."""
        self.send(actions)
        return self.recv()

    def send(self, actions: Tensor) -> None:
        """Begin a step."""
        if self._current is None:
            self.reset()
        self._views["action"][...] = self._to_array(actions)
        self._known = {}
        for number in range(len(self.pipes)):
            self._tell(number, "step")

    def recv(self) -> StepRecord:
        """Finish the step that `send` began."""
        answers, restarted = self._answers()
        views = self._views
        self._current = tree_map(np.copy, views["obs"])
        infos: list[Any] = [info for own in answers for info in (own or ())]
        reward, terminated, truncated = (torch.from_numpy(views[name].copy()) for name in PARTS[3:])
        valid = self._valid
        if restarted:
            valid = valid.clone()
            for part in (self.slices[number] for number in restarted):
                valid[part], reward[part], terminated[part], truncated[part] = False, 0.0, False, False
        has_ended = bool((terminated | truncated).any())
        final = split_groups(self._to_obs(tree_map(np.copy, views["final"]))) if has_ended else (None, None)
        reward, terminated, truncated = (part.to(self.device) for part in (reward, terminated, truncated))
        obs = split_groups(self._to_obs(self._current))
        record = StepRecord(*obs, reward, terminated, truncated, *final, valid.to(self.device), {"infos": infos})
        return fill_extras(record)

    def render(self) -> None:
        """Return None: the environments are in other processes."""

    def close(self) -> None:
        """End the workers."""
        for number in range(len(self.pipes)):
            self._tell(number, "close")
        for process in filter(None, self.processes):
            process.join(END_SECONDS)
            process.kill()
        self.envs[0].close()
        self._stacks.cleanup()

    _known: dict[int, Any] = {}


def shared_arrays(memory: Sequence[tuple[str, Any, Any, str]]) -> dict[str, Any]:
    """Arrays over shared memory, nested by their dotted names."""
    arrays = {
        name: np.frombuffer(raw, np.dtype(dtype), int(np.prod(shape))).reshape(shape)
        for name, raw, shape, dtype in memory
    }
    return nested(arrays)


def reset_into(views: Mapping[str, Any], env: GymVecEnv, seed: int | None) -> None:
    """Reset environments; the first observations are written to `views`."""
    if seed is not None:
        env.seed(seed)
    env.reset()
    tree_map(np.copyto, views["obs"], env._current)


def step_into(views: Mapping[str, Any], env: GymVecEnv) -> list[Any]:
    """Step environments by the actions in `views`, to which the results are written; returns the infos."""
    record = env.step(torch.from_numpy(views["action"]))
    for name in PARTS[3:]:
        views[name][...] = getattr(record, name).numpy()
    if "final_observation" in record.extras:
        tree_map(np.copyto, views["final"], record.extras["final_observation"])
    tree_map(np.copyto, views["obs"], env._current)
    return record.extras["infos"]


def run_worker(pipe: Any, env_fns: Sequence[Any], first_env: int, memory: Any, stack_path: str) -> None:
    """Step environments as the pipe commands, until it closes or the parent process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal goes to every process; the parent decides
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (connection.wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    torch.set_num_threads(1)
    with open(stack_path, "w") as stacks, contextlib.suppress(EOFError, OSError):
        if hasattr(signal, "SIGUSR1"):
            faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)
        try:
            env = GymVecEnv(env_fns)
            env.first_env = first_env
            own = slice(first_env, first_env + env.num_envs)
            views = tree_map(lambda array: array[own], shared_arrays(memory))
            while True:
                command, seed = pipe.recv()
                if command == "close":
                    env.close()
                    return
                pipe.send((True, reset_into(views, env, seed) if command == "reset" else step_into(views, env)))
        except (EOFError, OSError):
            raise
        except Exception:
            pipe.send((False, traceback.format_exc()))
