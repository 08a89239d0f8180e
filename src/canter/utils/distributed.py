"""Training with several processes, called ranks: who they are, what they average and agree on, and who was lost.

torchrun, `canter train --ranks` or SLURM starts the processes and sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT. Every rank steps its own environments; gradients and running statistics are averaged over all of them, so
that parameters stay equal bit by bit. With one process nothing here is called.

The two collectives of the hot path are torch operators, `canter::all_reduce_` and `canter::all_gather_`: recordings
replay them and CUDA graphs capture them (NCCL) like any other operation.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

START_SECONDS = 300.0  # for all ranks to start
PATIENCE_SECONDS = 3600.0  # for work whose length differs between ranks: evaluation, files
ANSWER_SECONDS = 3.0  # for the other ranks to say that they are alive, after a collective failed
STOP_SECONDS = 15.0  # to wait for other ranks after SIGTERM; torchrun kills after 30
POLL_SECONDS = 0.01
LAUNCHER = "CANTER_LAUNCHER"  # environment variable of ranks whose parent process reports their end


class RankError(RuntimeError):
    """Another rank was lost or failed, or the ranks disagree."""

    is_reporter = True
    """Whether this rank is the one that reports it."""
    code = 7
    """Exit code of a command."""


class Ranks:
    """The processes of a training run, this one among them; `RANKS` is the only one of its kind."""

    def __init__(self) -> None:
        self.rank, self.size, self.limit = 0, 1, 60.0
        self.backend = ""
        self.group: Any = None
        self.store: Any = None
        self.has_ended = threading.Event()
        self.num_waits = 0
        self.error: RankError | None = None
        """What a collective ended with."""
        self.seconds = 0.0
        """Seconds that the host spent in collectives since `take_seconds`."""
        self.num_reports, self.since = 0, time.perf_counter()
        self.is_stopping: Callable[[], bool] = bool
        """Whether a signal asked this rank to stop."""

    @property
    def is_first(self) -> bool:
        """Whether this rank writes logs and checkpoints, evaluates and prints."""
        return self.rank == 0

    def start(self, device: torch.device, limit: float = 60.0, patience: float = START_SECONDS) -> torch.device:
        """Connect to the other ranks, once, if there are any; returns the device of this rank.

        Args:
            device: Device of the run; "cuda" without an index becomes this rank's own GPU.
            limit: Seconds after which a rank that does not answer ends the run.
            patience: Seconds for all ranks to start.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size <= 1:
            return device
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", local_rank % torch.cuda.device_count())
        if self.size > 1:
            return device
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        if num_local == size and sys.platform in ("linux", "darwin"):  # then no other machine needs to reach them
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        self.backend = "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
            if num_local <= torch.cuda.device_count():
                self.backend = "cpu:gloo,cuda:nccl"
            elif local_rank == 0:
                shared = f"{num_local} ranks share {torch.cuda.device_count()} GPU(s), which NCCL refuses"
                warnings.warn(f"{shared}: gloo is used, and functions run eagerly, slower", stacklevel=2)
        self._connect(size, patience)
        self.limit = limit
        # Collectives of the run have a shorter limit than the start, during which others may still import.
        self.group = dist.new_group(timeout=timedelta(seconds=limit))
        self.size = size
        self.store.set(f"host/{self.rank}", f"process {os.getpid()} on {socket.gethostname()}")
        atexit.register(self.stop)
        has_parent = "TORCHELASTIC_RUN_ID" in os.environ or LAUNCHER in os.environ
        self.has_ended.clear()
        threading.Thread(target=self._watch, args=(os.getppid() if has_parent else None,), daemon=True).start()
        return device

    def _connect(self, size: int, patience: float) -> None:
        # Some builds of torch, for robots' computers among them, have no distributed part.
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        try:
            store, self.rank, size = next(rendezvous("env://", timeout=timedelta(seconds=patience)))
            # After a restart the store of torchrun's agent still has the addresses of the ranks that ended.
            store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
            options: dict[str, Any] = {"store": store, "rank": self.rank, "world_size": size}
            dist.init_process_group(self.backend, timeout=timedelta(seconds=patience), **options)
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            problem = f"rank {os.environ.get('RANK')} of {size} did not find the others at {where} ({reason})"
            way_out = "start all ranks, with torchrun or `canter train --ranks`, and choose a free MASTER_PORT"
            raise RankError(f"{problem}; {way_out}") from error
        self.store = PrefixStore("canter", store)

    def stop(self) -> None:
        """Disconnect; the first rank, in which the store of messages may be, waits a little for the others to read."""
        if self.size == 1:
            return
        try:
            self.store.add("ended", 1)
            deadline = time.monotonic() + ANSWER_SECONDS
            while self.is_first and self.store.add("ended", 0) < self.size and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        except RuntimeError:  # the store is gone
            pass
        self.has_ended.set()
        self.size, self.group = 1, None
        dist.destroy_process_group()

    def _watch(self, parent: int | None) -> None:
        """Show the others that this rank lives; end it, by SIGTERM at first, if the process that began it dies."""
        while parent is None or os.getppid() == parent:
            try:
                self.store.add(f"beat/{self.rank}", 1)
            except RuntimeError:  # the store is gone, which the next collective or wait reports
                if parent is None:
                    return
            if self.has_ended.wait(1.0):
                return
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self.limit)
        os._exit(1)

    def seed(self, seed: int) -> int:
        """A seed for the random streams of this rank; the first rank's is `seed` itself."""
        if self.rank == 0:
            return seed
        return int(np.random.SeedSequence((abs(seed), self.rank)).generate_state(1, np.uint64)[0] >> 2)

    # Tensors: in recorded and captured functions too.
    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their mean over the ranks, in one collective."""
        if len(tensors) == 1:
            torch.ops.canter.all_reduce_(tensors[0])
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        torch.ops.canter.all_reduce_(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def merge(self, count: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Count, mean and population variance of the rows of all ranks together, from those of each."""
        own = torch.cat([part.reshape(-1).double() for part in (count, mean, var)])
        every = own.new_empty(self.size * len(own))
        torch.ops.canter.all_gather_(every, own)
        every = every.view(self.size, -1)
        counts, means, variances = every.split([1, mean.numel(), mean.numel()], 1)  # (W, 1), (W, D), (W, D)
        total = counts.sum(0)
        share = counts / total.clamp(min=1)
        joint = (share * means).sum(0)
        spread = (share * (variances + (means - joint).square())).sum(0)
        return total[0].to(count.dtype), joint.view_as(mean).to(mean.dtype), spread.view_as(var).to(var.dtype)

    def reduce_in_place(self, tensor: Tensor) -> None:
        """The operator `canter::all_reduce_`: replace a tensor by its mean."""
        shared = self._transferable(tensor)
        self._run(lambda: dist.all_reduce(shared, group=self.group))
        shared.div_(self.size)
        if shared is not tensor:
            tensor.copy_(shared)

    def gather_into(self, every: Tensor, own: Tensor) -> None:
        """The operator `canter::all_gather_`: the tensors (D,) of all ranks, one after another, in `every` (W * D,)."""
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        shared = self._transferable(every)
        self._run(lambda: gather(shared, self._transferable(own), group=self.group))
        if shared is not every:
            every.copy_(shared)

    # The host: decisions, metrics, messages.
    def agree(self, flag: float) -> float:
        """The largest of the ranks' numbers: 1 if any rank says 1."""
        if self.size == 1:
            return flag
        value = torch.tensor(float(flag), dtype=torch.float64)
        self._run(lambda: dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group))
        return value.item()

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in plain containers, in the order of the ranks."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        self._run(lambda: dist.all_gather_object(found, value, group=self.group))
        return found

    def on_first(self, work: Callable[[], T]) -> T:
        """The result of `work()` on the first rank, for which the others wait."""
        result: Any = work() if self.is_first else None
        self.wait()
        return self.gather(result)[0]

    def mean_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Metrics averaged over the ranks that have them."""
        every = self.gather(dict(metrics))
        found: dict[str, float] = {}
        for name in dict.fromkeys(name for one in every for name in one):
            values = [one[name] for one in every if name in one]
            found[name] = sum(values) / len(values)
        return found

    @torch.no_grad()
    def broadcast(self, parts: Mapping[str, Tensor]) -> None:
        """Copy tensors of the first rank to the others, in place."""
        for tensor in parts.values():
            shared = self._transferable(tensor.detach().contiguous())
            self._run(lambda shared=shared: dist.broadcast(shared, 0, group=self.group))
            if shared.data_ptr() != tensor.data_ptr():
                tensor.copy_(shared)

    def _transferable(self, tensor: Tensor) -> Tensor:
        """The tensor, or a copy on the host for ranks that share a GPU."""
        return tensor.cpu() if tensor.is_cuda and self.backend == "gloo" else tensor

    def take_seconds(self) -> float:
        """Seconds in collectives since the last call; warns in the third one, after the start, if they are most."""
        now, seconds = time.perf_counter(), self.seconds
        share, self.seconds, self.since = seconds / (now - self.since), 0.0, now
        self.num_reports += 1
        if self.num_reports == 3 and share > 0.5 and self.is_first:
            way_out = "one process may be faster; larger minibatches or more environments of each rank cost less"
            warnings.warn(
                f"the {self.size} ranks spend {share:.0%} of the time in collectives: {way_out}", stacklevel=3
            )
        return seconds

    def check_equal(self, values: Mapping[str, Any], problem: str, code: int = 7) -> None:
        """Raise RankError with the names of the values that differ between ranks, or of tensors whose bits do."""
        first, *others = self.gather({name: checksum(value) for name, value in values.items()})
        for rank, other in enumerate(others, 1):
            names = [name for name in dict.fromkeys((*first, *other)) if first.get(name) != other.get(name)]
            if names:
                more = f" and {len(names) - 4} more" if len(names) > 4 else ""
                found = RankError(f"{problem}: rank {rank} differs from rank 0 in {', '.join(names[:4])}{more}")
                found.is_reporter, found.code = self.is_first, code
                raise found

    def wait(self) -> None:
        """Wait until every rank is here, longer than a collective would: after work that one rank does alone."""
        if self.size == 1:
            return
        self.num_waits += 1
        key, begin = f"wait/{self.num_waits}", time.monotonic()
        beats: dict[int, tuple[int | None, float]] = {}  # of each rank, and since when
        try:
            self.store.add(key, 1)
            while self.store.add(key, 0) < self.size:
                now = time.monotonic()
                for rank in range(self.size):
                    beat = self.store.add(f"beat/{rank}", 0)
                    if beats.get(rank, (None, now))[0] != beat:
                        beats[rank] = (beat, now)
                is_dead = any(now - since > self.limit for _, since in beats.values())
                is_late = now - begin > (STOP_SECONDS if self.is_stopping() else PATIENCE_SECONDS)
                if is_dead or is_late or self._leavers():
                    raise TimeoutError(f"timed out after {now - begin:.0f} s")
                time.sleep(POLL_SECONDS)
        except (RuntimeError, TimeoutError) as error:
            self.error = self._lost(error)
            raise self.error from error

    # Faults.
    @contextmanager
    def telling_errors(self) -> Iterator[None]:
        """Tell the other ranks if an error ends this one."""
        try:
            yield
        except BaseException as error:
            self.leave(error)
            raise

    def leave(self, error: BaseException) -> None:
        """Tell the other ranks why this one leaves, unless they are the cause."""
        if self.size > 1 and not isinstance(error, RankError):
            try:
                text = " ".join(str(error).split())
                self.store.set(f"why/{self.rank}", f"{type(error).__name__}: {text}" if text else repr(error))
                self.store.set(f"left/{self.rank}", "")
            except RuntimeError:  # the store is gone, with the rank or the agent that had it
                pass

    def _leavers(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank and self.store.check([f"left/{rank}"])]

    def _run(self, collective: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        try:
            collective()
        except RuntimeError as error:
            self.error = self._lost(error)
            raise self.error from error
        self.seconds += time.perf_counter() - begin

    def _ask_others(self) -> tuple[dict[int, str], list[int]]:
        """Leave, and wait for the others to leave too: errors of those that failed, and who does not answer."""
        self.store.set(f"left/{self.rank}", "")
        others, deadline = [rank for rank in range(self.size) if rank != self.rank], time.monotonic() + ANSWER_SECONDS
        while True:
            failed = [rank for rank in others if self.store.check([f"why/{rank}"])]
            unanswered = [rank for rank in others if not self.store.check([f"left/{rank}"])]
            if failed or not unanswered or time.monotonic() > deadline:
                return {rank: self.store.get(f"why/{rank}").decode() for rank in failed}, unanswered
            time.sleep(POLL_SECONDS)

    def _lost(self, error: Exception) -> RankError:
        """The error that names the ranks which failed, or which do not answer."""
        try:
            reasons, unanswered = self._ask_others()
            names = {n: f"rank {n} ({self.store.get(f'host/{n}').decode()})" for n in (*reasons, *unanswered)}
        except RuntimeError:  # the store was in a process that died
            lost = RankError(f"the process that started the ranks, or rank 0, does not answer: {first_line(error)}")
            lost.is_reporter = self.rank == min(1, self.size - 1)
            return lost
        way_out = "The last checkpoint is valid: continue with `canter resume`"
        slow = f"slower than rank_timeout={self.limit:g} s"
        if reasons:
            text = "; ".join(f"{names[rank]} failed: {why}" for rank, why in reasons.items())
        elif unanswered:
            text = f"{', '.join(names.values())} does not answer: killed, stopped, or {slow}. {way_out}"
        else:
            cause = f"it was {slow}, or not all ranks called runner.learn or runner.save ({first_line(error)})"
            text = f"rank {self.rank} and the others waited for different things: {cause}. {way_out}"
        lost = RankError(f"all ranks end: {text}")
        is_first_left = self.rank == min(rank for rank in range(self.size) if rank not in unanswered)
        # Of a rank that died its launcher tells.
        has_died = LAUNCHER in os.environ and "timed out" not in str(error).lower()
        lost.is_reporter = not reasons and is_first_left and not has_died
        return lost


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error) or repr(error)).splitlines()[0]


def checksum(value: Any) -> Any:
    """Nested containers with a short digest of its bits in place of every tensor."""
    if isinstance(value, Mapping):
        return {name: checksum(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [checksum(part) for part in value]
    if not isinstance(value, Tensor):
        return value
    plain = value.detach().cpu().contiguous()
    return hashlib.blake2b(plain.view(-1).view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()


RANKS = Ranks()

LIBRARY = torch.library.Library("canter", "FRAGMENT")
LIBRARY.define("all_reduce_(Tensor(a!) tensor) -> ()")
LIBRARY.define("all_gather_(Tensor(a!) every, Tensor own) -> ()")
LIBRARY.impl("all_reduce_", RANKS.reduce_in_place, "CompositeExplicitAutograd")
LIBRARY.impl("all_gather_", RANKS.gather_into, "CompositeExplicitAutograd")
