"""How often an iteration waits for the GPU."""

import warnings

import torch

from canter.execution.executor import Executor


def iterations_without_looks(runner, monkeypatch, wanted=4, most=60):
    """The lines at which each of the next iterations waits for the device, without those that look at a function.

    A recurrent policy meets minibatches of a new size, and looks at its functions, in many of its first iterations.
    """
    looks, original = [], Executor._run_traced
    monkeypatch.setattr(Executor, "_run_traced", lambda self, *args: looks.append(args[0]) or original(self, *args))
    iterations = []
    for _ in range(most):
        looks.clear()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", UserWarning)
                runner.learn(1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if not looks:
            iterations.append([f"{w.filename}:{w.lineno}" for w in caught if "synchronizing" in str(w.message)])
        if len(iterations) == wanted:
            break
    assert iterations, f"each of {most} iterations looks at a function, the last at {looks}"
    return iterations
