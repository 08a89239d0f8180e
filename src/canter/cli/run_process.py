"""Training runs in child processes: started a few at a time, followed through their metrics, ended with their parent.

`python -m canter.cli.run_process ARGS` is `canter ARGS` that stops, saved, when the process that started it ends.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from canter.utils.logging import METRICS_NAME

STOP_S = 20.0  # for a run to save after SIGTERM
POLL_S = 0.2


class TrainingRun:
    """One run of `canter train` in a process of its own.

    Args:
        path: The run directory that it makes.
        args: The words after `canter`.
    """

    def __init__(self, path: Path, args: Sequence[str]) -> None:
        self.path, self.args = path, list(args)
        self.rows: list[dict[str, Any]] = []
        """Rows of the run's metrics so far."""
        self.process: subprocess.Popen[bytes] | None = None
        self.exit_code: int | None = None
        self.slot = -1
        self.seconds = 0.0
        self._started = 0.0
        self._metrics: BinaryIO | None = None
        self._torn = b""
        self.log = path.with_name(f"{path.name}.log")  # kept if the run fails

    def start(self, slot: int, env: dict[str, str]) -> None:
        """Start the process; `slot` is its place among those that run at the same time."""
        self.slot, self._started = slot, time.monotonic()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "canter.cli.run_process", *self.args]
        with open(self.log, "wb") as log:
            # A session of its own: Ctrl-C reaches the parent, which then stops its runs.
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env, start_new_session=True
            )

    def poll(self) -> bool:
        """Read new metrics; returns whether the process has ended."""
        assert self.process is not None
        code = self.process.poll()
        self._read()
        self.seconds = time.monotonic() - self._started
        if code is not None and self.exit_code is None:
            self._end(code)
        return self.exit_code is not None

    def _read(self) -> None:
        if self._metrics is None:
            with contextlib.suppress(FileNotFoundError):
                self._metrics = open(self.path / METRICS_NAME, "rb")  # noqa: SIM115 (read until the run ends)
        if self._metrics is not None:
            *lines, self._torn = (self._torn + self._metrics.read()).split(b"\n")
            self.rows += map(json.loads, lines)

    def _end(self, code: int) -> None:
        self.exit_code = code
        for file in (self._metrics, self.process and self.process.stdin):
            if file is not None:
                file.close()
        if code == 0:
            self.log.unlink(missing_ok=True)

    def stop(self) -> None:
        """End the process: it saves the run, or is killed after a time limit."""
        if self.process is None or self.exit_code is not None:
            return
        self.process.terminate()
        try:
            code = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._end(code)

    @property
    def step(self) -> int:
        """Environment steps of the newest metrics."""
        return self.rows[-1]["step"] if self.rows else 0

    def values(self, metric: str) -> list[tuple[int, float]]:
        """Steps and values of a metric so far."""
        return [(row["step"], float(row[metric])) for row in self.rows if metric in row]

    def error(self) -> str:
        """The last line that a failed run printed."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n") if self.log.is_file() else []
        text = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
        return f"exit code {self.exit_code}: {text.removeprefix('canter: ')}"


class RunPool(contextlib.AbstractContextManager["RunPool"]):
    """Starts training runs so that `jobs` are active at a time; leaving it stops those that still run.

    With several GPUs the places take turns on them, unless `device` names one.
    """

    def __init__(self, jobs: int, device: str | None = None) -> None:
        import torch

        self.jobs, self.waiting, self.active = jobs, deque[TrainingRun](), list[TrainingRun]()
        count = torch.cuda.device_count() if device is None else 0
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.gpus = visible.split(",") if visible and count else [str(index) for index in range(count)]
        self.env = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))} | dict(os.environ)

    def add(self, *runs: TrainingRun) -> None:
        """Start runs as soon as there is room."""
        self.waiting += runs
        self.poll()

    def has_room(self) -> bool:
        """Whether a run that is added now starts now."""
        return len(self.active) + len(self.waiting) < self.jobs

    def poll(self) -> None:
        """Read the metrics of the active runs and start waiting ones in the place of those that ended."""
        self.active = [run for run in self.active if not run.poll()]
        while self.waiting and len(self.active) < self.jobs:
            run, used = self.waiting.popleft(), {run.slot for run in self.active}
            slot = next(slot for slot in range(self.jobs) if slot not in used)
            gpu = {"CUDA_VISIBLE_DEVICES": self.gpus[slot % len(self.gpus)]} if self.gpus else {}
            run.start(slot, self.env | gpu)
            self.active.append(run)

    def stop(self, *runs: TrainingRun) -> None:
        """Stop these runs, also those that wait."""
        self.waiting = deque(run for run in self.waiting if run not in runs)
        for run in runs:
            if run.process is not None and run.exit_code is None:
                run.process.terminate()  # all of them, so that they save at the same time
        for run in runs:
            run.stop()
        self.active = [run for run in self.active if run not in runs]

    def __exit__(self, *exc: object) -> None:
        self.stop(*self.waiting, *self.active)


def _end_with_parent() -> None:
    while os.read(0, 1):  # the parent never writes: this returns when its end of the pipe is closed
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    from canter.cli.__main__ import main

    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(main(sys.argv[1:]))
