"""Commands in several processes on this machine, started and watched as torchrun does it."""

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence

from canter.utils.distributed import LAUNCHER, RankError


def is_launched() -> bool:
    """Whether torchrun, `launch` or a cluster started this process as one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def launch(num_ranks: int, args: Sequence[str]) -> int:
    """Run `canter ARGS` as this many ranks; returns the exit code of the first that failed."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks report their errors
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[LAUNCHER] = "1"
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=num_ranks, run_id=str(uuid.uuid4()), rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", local_addr="localhost", max_restarts=0,
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)("-m", "canter", *args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        name, way_out = signal.Signals(-failure.exitcode).name, "continue from the last checkpoint with `canter resume`"
        print(f"canter: {name} ended rank {rank}, so all ranks end; {way_out}", file=sys.stderr)
        return RankError.code
    except SignalException as error:
        return 128 + error.sigval
    return 0
