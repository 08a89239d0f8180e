"""Commands in several processes on this machine, started and watched as torchrun does it."""

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence

from canter.cli.errors import NUMERIC, STORAGE, USAGE
from canter.utils.distributed import LAUNCHER, RankError

REPORTED = (1, USAGE, NUMERIC, STORAGE, RankError.code)  # exit codes of ranks that have printed their error


def is_launched() -> bool:
    """Whether torchrun, `launch` or a cluster started this process as one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def launch(num_ranks: int, args: Sequence[str]) -> int:
    """Run `canter ARGS` as this many ranks; returns the exit code of the one that failed first."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks report their errors
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[LAUNCHER] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "canter", *args)
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        followers = (RankError.code, -signal.SIGTERM)  # of ranks that end because another one did
        rank, failure = next((item for item in failures if item[1].exitcode not in followers), failures[0])
        code = failure.exitcode
        if code in REPORTED or code > 128:
            return code
        end = f"rank {rank} ended by itself with exit code {code}"
        if code < 0:
            end = f"{signal.Signals(-code).name} ended rank {rank}"
        way_out = "continue from the last checkpoint with `canter resume`"
        print(f"canter: {end}, so all ranks end; {way_out}", file=sys.stderr)
        return RankError.code
    except SignalException as error:
        return 128 + error.sigval
    return 0
