"""`--film-interval` and `--histogram-interval`: films and histograms of a policy while it trains."""

import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from canter.algorithms.off_policy import REPLAY
from canter.runners import Runner
from canter.utils.checkpoint import save_checkpoint
from canter.utils.files import make_folder
from canter.utils.films import read_film
from canter.utils.reading import named_modules

FILM_SECONDS = 25.0  # a machine that renders in software does not reach the end of a long episode


class Films:
    """A callback that films the policy every `interval`, and logs each film when it is ready.

    A film is made by `canter play` in a process of its own, which a graphics library may end, while the training goes
    on. After the first one that fails no more are made.
    """

    def __init__(self, run: Path, interval: int) -> None:
        self.run, self.interval, self.step = run, interval, 0
        self.process: subprocess.Popen[str] | None = None
        self.film: Path = run

    def __call__(self, runner: Runner, stats: dict[str, float]) -> None:
        """Log a film that is ready, and begin one if it is due."""
        if self.process is not None and self.process.poll() is not None:
            self.finish(runner)
        if self.process is None and runner.is_due(self.interval):
            self.begin(runner)

    def begin(self, runner: Runner) -> None:
        """Write the policy and start the process that films it."""
        self.step = runner.tot_timesteps
        self.film = self.run / "films" / f"step_{self.step}.mp4"
        make_folder(self.film.parent, self.run)
        state = {**runner.alg.state_dict(), "iter": runner.iteration, "total_timesteps": self.step, "infos": None}
        state.pop(REPLAY, None)
        save_checkpoint(self.film.with_suffix(".pt"), state, self.run)
        policy = ["--checkpoint", str(self.film.with_suffix(".pt").resolve())]
        command = film_command(self.run, self.film, modules_of(runner), *policy)
        streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=film_environment(), **streams)

    def finish(self, runner: Runner) -> None:
        """Wait for the film that is being made, and log it."""
        if self.process is None:
            return
        try:
            _, errors = self.process.communicate(timeout=10 * FILM_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, errors = self.process.communicate()
        code, self.process = self.process.returncode, None
        self.film.with_suffix(".pt").unlink(missing_ok=True)
        if code or not self.film.is_file():
            self.give_up(errors.strip() or f"exit code {code}")
        elif runner.writer is not None:
            try:
                frames, fps = read_film(self.film)
            except OSError as error:  # of the decoder
                self.give_up(str(error))
                return
            runner.writer.log_video("film", frames, self.step, max(1, round(fps)))

    def cancel(self) -> None:
        """End the process that films without its film."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None
            self.film.with_suffix(".pt").unlink(missing_ok=True)

    def give_up(self, reason: str) -> None:
        """Make no more films, and say why in the last line of the `reason`."""
        self.interval = 0
        problem = f"no films are made, because the one at step {self.step} failed"
        warnings.warn(f"{problem}: {reason.strip().splitlines()[-1]}", stacklevel=3)


def modules_of(runner: Runner) -> list[str]:
    """The modules that the settings of a run name, which another process may then import."""
    return sorted({module for _, module in named_modules(runner.config())})


def film_environment() -> dict[str, str]:
    """The environment of a process that films, which must not take itself for the rank that starts it."""
    return {**os.environ, "WORLD_SIZE": "1", "RANK": "0"}


def film_command(run: Path, film: Path, modules: Sequence[str] = (), *flags: str) -> list[str]:
    """The command that films one episode of a run."""
    limit = ["--video", str(film), "--seconds", f"{FILM_SECONDS:g}"]
    named = ["--modules", *modules] if modules else []
    return [sys.executable, "-m", "canter.cli", "play", str(run), *limit, *flags, *named]
