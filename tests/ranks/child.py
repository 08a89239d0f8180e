"""Ranks for tests: for every line `SIZE DIRECTORY CASE` on stdin, SIZE processes are forked that run a case.

Prints their process ids when they start and their exit codes when all have ended. Forking from one process that has
imported everything makes a rank start in milliseconds. What a case returns is in DIRECTORY/rank<number>.pt, and its
standard error in DIRECTORY/stderr<number>.
"""

import os
import signal
import socket
import sys
import traceback
from pathlib import Path

import cases
import torch
import torch._dynamo  # torch.optim imports it in its first step, which takes seconds

from canter.utils.distributed import RANKS

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background ignore it


def run(case, directory, rank, size, port):
    """Run a case as one rank; returns the exit code."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")
    sys.stderr = open(directory / f"stderr{rank}", "a", buffering=1)  # noqa: SIM115
    os.dup2(sys.stderr.fileno(), 2)
    try:
        torch.save(getattr(cases, case)(directory, rank), directory / f"rank{rank}.pt")
    except SystemExit as end:
        return end.code
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        RANKS.stop()
    return 0


def main():
    torch.set_num_threads(1)
    for line in sys.stdin:
        size, directory, case = line.rstrip("\n").split("\t")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pids = []
        for rank in range(int(size)):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    code = run(case, Path(directory), rank, int(size), port)
                finally:
                    os._exit(code)
            pids.append(pid)
        print(*pids, flush=True)
        print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids), flush=True)


if __name__ == "__main__":
    main()
