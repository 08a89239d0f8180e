"""Processes that run a test's case as ranks."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Timer

import pytest
import torch

import canter

HERE = Path(__file__).parent


class Launcher:
    """Starts ranks, and returns what they returned."""

    def __init__(self):
        environment = {**os.environ, "PYTHONPATH": str(Path(canter.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "child.py")], stdin=pipe, stdout=pipe, text=True, env=environment
        )

    def start(self, size, directory, case):
        """Start ranks; their process ids."""
        directory.mkdir(exist_ok=True, parents=True)
        self.process.stdin.write(f"{size}\t{directory}\t{case}\n")
        self.process.stdin.flush()
        return [int(pid) for pid in self.process.stdout.readline().split()]

    def wait(self, pids, seconds=60.0):
        """Exit codes of the ranks, which are killed if they run longer."""

        def kill():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)

        timer = Timer(seconds, kill)
        timer.start()
        try:
            return [int(code) for code in self.process.stdout.readline().split()]
        finally:
            timer.cancel()

    def run(self, size, directory, case, seconds=60.0):
        """What each rank returned; an assertion fails with their errors if one failed."""
        codes = self.wait(self.start(size, directory, case), seconds)
        errors = "\n".join((directory / f"stderr{rank}").read_text() for rank in range(size))
        assert codes == [0] * size, errors
        return [torch.load(directory / f"rank{rank}.pt", weights_only=False) for rank in range(size)]


@pytest.fixture(scope="session")
def launcher():
    """Starts ranks quickly: they are forked from a process that has imported everything."""
    made = Launcher()
    yield made
    made.process.stdin.close()
    made.process.wait()
