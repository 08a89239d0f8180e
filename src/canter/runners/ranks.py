"""A run of several processes: comparing what they train, starting them alike, and ending together."""

from typing import Any

import torch

from canter import __version__
from canter.utils.distributed import RANKS
from canter.utils.runtime import StopSignal


def compare(runner: Any) -> None:
    """Raise an error if the ranks have other settings, versions or sizes of networks."""
    RANKS.wait()  # some build their environments faster
    cfg = {f"setting {name}": repr(value) for name, value in vars(runner.cfg).items()}
    cfg = {name: value for name, value in cfg.items() if name not in ("setting device", "setting training_dict")}
    found = {"num_envs": runner.env.num_envs, "torch": torch.__version__, "canter": __version__}
    found |= {**cfg, "algorithm": type(runner.alg).__name__}
    # Tensors of other sizes would abort the process in the first collective, without a word about the cause.
    found |= {f"shape of {name}": list(value.shape) for name, value in runner.checkpoints.shared_tensors().items()}
    RANKS.check_equal(found, "the ranks were started differently", code=2)


def start(runner: Any, stop: StopSignal, trial: Any) -> None:
    """Start every rank from the parameters and statistics of the first."""
    if trial is not None:
        raise ValueError(f"a trial of a search runs in one process, this is one of {RANKS.size} ranks")
    RANKS.is_stopping = lambda: stop.requested is not None
    RANKS.wait()
    RANKS.broadcast(runner.checkpoints.shared_tensors())
    runner.checkpoints.compare()


def are_over(stop: StopSignal, is_done: bool) -> bool:
    """Whether a signal or `StopTraining` ends the run, on this rank or on another."""
    if RANKS.size > 1:
        found = int(RANKS.agree(stop.requested or is_done))
        is_done = found == 1
        stop.requested = found if found > 1 else None  # the others end as the rank that got the signal
    return is_done or stop.requested is not None
