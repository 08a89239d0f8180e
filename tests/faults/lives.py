"""Commands of canter in processes of their own, which say when they reach a phase and wait there to be struck.

The processes are forked from one that has imported everything (`multiprocessing`'s fork server), so that one costs
a tenth of a second of processor time.
"""

import os
import signal
import sys
import tempfile
import time

import onnxruntime  # noqa: F401 (imported here, so that no life imports it)
import onnxscript  # noqa: F401
import optuna  # noqa: F401
import torch
import torch._dynamo  # torch.optim imports it in its first step, which takes seconds

import canter.cli.export
import canter.cli.play
import canter.cli.report
import canter.cli.runs
import canter.cli.sweep
import canter.cli.train
import canter.export.bundle
import canter.runners.checkpoints
import canter.storage.rollout_files.container
import canter.utils.logging.backends as backends
import canter.utils.report
from canter.cli.__main__ import main
from canter.cli.options import parse_train
from canter.cli.run_process import RunPool
from canter.runners import Runner
from canter.utils.distributed import RANKS

TOTAL, EVERY = 48, 8  # environment steps of a run, and between two checkpoints
STRUCK_AT = 24  # environment steps after which a training is struck
FILM = """
import sys, time
from pathlib import Path
import numpy as np
from canter.utils.films import Film
with Film(Path(sys.argv[1]), 10) as made:
    for number in range(int(sys.argv[2])):
        made.add(np.full((16, 16, 3), number, np.uint8))
        time.sleep(0.2)
"""


class Phase:
    """The moment of a command at which it is struck."""

    def __init__(self, place, name, rank):
        self.place, self.name, self.rank, self.is_due = place, name, rank, name is not None
        self.steps = lambda: STRUCK_AT  # of the training, which `learn` sets

    def reach(self, *args, **kwargs):
        """Say so, once, and wait for the blow."""
        if self.is_due and self.steps() >= STRUCK_AT:
            self.is_due = False
            (self.place / f"reached{self.rank}").touch()
            end = time.monotonic() + 60
            while not (self.place / "struck").exists() and time.monotonic() < end:
                time.sleep(0.005)

    def before(self, owner, name, is_here=lambda: True):
        """Reach the phase before a function is called."""
        real = getattr(owner, name)

        def reach_and_call(*args, **kwargs):
            if is_here():
                self.reach()
            return real(*args, **kwargs)

        setattr(owner, name, reach_and_call)

    def install(self):
        """Put the phase where it belongs."""
        learn, phase, saving = Runner.learn, self, []
        script, frames = [sys.executable, "-c", FILM], "225" if self.name == "film" else "3"
        canter.cli.films.film_command = lambda run, film, *rest: [*script, str(film), frames]

        def follow(runner, *args, **kwargs):
            phase.steps = lambda: runner.tot_timesteps
            if phase.name == "rollout":
                phase.before(runner.env, "step")
            elif phase.name == "update":
                runner.add_callback("pre_update", phase.reach)
            elif phase.name == "evaluation" and runner.eval_env is not None:
                phase.before(runner.eval_env, "step")
            return learn(runner, *args, **kwargs)

        Runner.learn = follow
        real_save = canter.runners.checkpoints.save_checkpoint

        def save(*args, **kwargs):
            saving.append(True)
            try:
                return real_save(*args, **kwargs)
            finally:
                saving.clear()

        if self.name == "checkpoint":
            canter.runners.checkpoints.save_checkpoint = save
            self.before(os, "fsync", lambda: bool(saving))
        elif self.name == "log write":
            self.before(backends._JsonlBackend, "log_scalars")
        elif self.name == "film":
            begin = canter.cli.films.Films.begin
            canter.cli.films.Films.begin = lambda *args: (begin(*args), self.reach())
        elif self.name == "start-up":
            self.before(canter.cli.runs, "open_env")
        elif self.name == "resume":
            self.before(Runner, "load")
        elif self.name == "export":
            self.before(canter.export.bundle, "check_bundle")
        elif self.name == "report":
            self.before(canter.utils.report.Page, "write")
        elif self.name == "sweep":
            self.before(RunPool, "poll")
        elif self.name == "dataset write":
            self.before(canter.storage.rollout_files.container, "atomic_write")


def live(place, phase, args, rank=0, size=1, port=0):
    """Run `canter ARGS` as one rank, to be struck in a phase; what it prints is in place/said<rank>."""
    with open(place / f"said{rank}", "a", buffering=1) as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        signal.signal(number, handler)  # tests that run in the background ignore them
    if size > 1:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")
    tempfile.tempdir = str(place)  # where a last state is saved if it cannot be saved elsewhere
    torch.set_num_threads(1)
    canter.cli.train.plot_runs = lambda runs, path, **options: path  # drawing costs more than everything else
    os.chdir(place)
    Phase(place, phase, rank).install()
    code = main(args)
    RANKS.stop()
    sys.stdout.flush()
    raise SystemExit(code)


parse_train(["canter/CartPole"])  # which reads presets and source texts, once for all lives
parse_train(["canter/PointRobot", "--algo", "sac"])
