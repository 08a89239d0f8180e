"""How often an iteration waits for the GPU."""

import warnings

import torch

from canter.execution.executor import Executor


def iterations_without_looks(runner, monkeypatch, most=6):
    """The lines at which each of the next iterations waits for the device, without those that look at a function."""
    looks, original = [], Executor._run_traced
    monkeypatch.setattr(Executor, "_run_traced", lambda self, *args: looks.append(args[0]) or original(self, *args))
    iterations = []
    for _ in range(most):
        looks.clear()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                runner.learn(1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if not looks:
            iterations.append([f"{w.filename}:{w.lineno}" for w in caught if "synchronizing" in str(w.message)])
    assert iterations, "every iteration looks at a function"
    return iterations
